"""Fine-tuning in Fabric and in Accelerate: short, logged, and to the same bits if it is killed and started again."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
import wandb
from accelerate.state import AcceleratorState

from examples import accelerate_loop, fabric
from tests.helpers.wandb_log import history
from tinker_lightning import Datum, RemoteAdamW, RemoteLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = [{"prompt": f"{i}?", "completion": f"It is {i}."} for i in range(10)]  # 5 batches: windows of 4 and of 1
PROBE = [Datum.from_tokens(list(b"What is it? It is 3."))]
STEPS = 2  # of an epoch


class Killed(BaseException):
    """Ends a run at once."""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its settings, and W&B its run, for the whole process."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield
    wandb.finish()
    AcceleratorState._reset_state(reset_partial_state=True)


def run(example: Any, folder: Path) -> tuple[list[list[float]], int]:
    """Returns what the trained model predicts, and how many steps it has taken in this run."""
    steps = 0
    step = RemoteAdamW.step

    def counted(self: RemoteAdamW, closure: Any = None) -> Any:
        nonlocal steps
        steps += 1
        return step(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteAdamW, "step", counted)
        model: RemoteLM = example.train(folder, rows=ROWS, epochs=2)
    wandb.finish()
    AcceleratorState._reset_state(reset_partial_state=True)
    with torch.no_grad():
        return [p.tolist() for p in model(PROBE)], steps


@pytest.mark.parametrize(
    "example",
    [pytest.param(fabric, id="Fabric"), pytest.param(accelerate_loop, id="Accelerate", marks=pytest.mark.soak)],
)
def test_a_killed_run_that_is_started_again_ends_with_the_same_bits(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.1
    whole, steps = run(example, tmp_path / "whole")
    assert steps == 2 * STEPS
    (file,) = (tmp_path / "whole").glob("wandb/offline-run-*/run-*.wandb")
    rows = [row for row in history(file) if "nll" in row]
    assert [row.get("trainer/global_step", row["_step"]) for row in rows] == [1, 2, 3, 4]
    assert [row["lr"] for row in rows] == sorted({row["lr"] for row in rows}, reverse=True)

    init, left = wandb.init, STEPS + 2  # in the second epoch
    monkeypatch.setattr(wandb, "init", lambda **options: init(**{**options, "mode": "disabled"}))
    step = RemoteAdamW.step

    def killing(self: RemoteAdamW, closure: Any = None) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        return step(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteAdamW, "step", killing)
        with pytest.raises(Killed):
            example.train(tmp_path / "killed", rows=ROWS, epochs=2)
    wandb.finish()
    AcceleratorState._reset_state(reset_partial_state=True)
    resumed, steps = run(example, tmp_path / "killed")
    assert resumed == whole
    assert steps == STEPS  # those of the epoch that was not saved


@pytest.mark.parametrize("example", [fabric, accelerate_loop], ids=["Fabric", "Accelerate"])
def test_it_takes_at_most_30_lines(example: Any) -> None:
    function = ast.parse(inspect.getsource(example.train)).body[0]
    assert isinstance(function, ast.FunctionDef)
    _, first, *_, last = function.body
    assert (last.end_lineno or 0) - first.lineno + 1 <= 30
