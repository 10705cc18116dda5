"""A run that was resumed is the run that was not interrupted, bit for bit, wherever its checkpoint was written."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_utilities.core.apply_func import apply_to_collection

from tests.helpers.imitations.load_first import LOADINGS_IN_SOAK, loading
from tests.helpers.resuming import KINDS, Bench, Everywhere, assert_same
from tests.helpers.soaking import mostly_soak
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]


@pytest.fixture(scope="module", params=LOADINGS_IN_SOAK)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    server = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    with loading(request.param, server) as service:
        yield Bench(server, service)
    server.close()


@pytest.mark.parametrize("kind", mostly_soak(KINDS, but=["shuffled", "workers"]))
def test_every_kind_of_loader_resumes(bench: Bench, kind: str, tmp_path: Path) -> None:
    """From the middle of a window; from every place in `test_every_place`."""
    places = ("batch end 0.5", "batch start 1.4") if kind == "shuffled" else ("batch end 0.3",)
    saver = Everywhere(tmp_path, *places)
    whole = bench.run(kind, saver)
    assert len(saver.files) == len(places)
    for file in saver.files:
        assert_same(whole, bench.run(kind, resume=file.path), file)
    assert multiprocessing.active_children() == [], "workers end with the fit"


# Settings of a trainer, and a place where they matter; `test_every_place` resumes from all.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a schedule of epochs": ({"scheduler": "epoch"}, "batch end 0.5"),
    "a schedule by scores": ({"scheduler": "plateau"}, "validation end 0.5"),
    "a schedule by losses": ({"scheduler": "plateau of steps"}, "validation end 0.5"),
    "validation within epochs": ({"val_check_interval": 2}, "validation end 0.4"),
    "validation of some epochs": ({"check_val_every_n_epoch": 2}, "batch end 0.5"),
    "no validation": ({"validate": False}, "epoch end 0.5"),
    "a limit of steps": ({"max_steps": 4, "max_epochs": -1}, "batch end 1.2"),
    "a limit of batches": ({"limit_train_batches": 3}, "batch end 0.3"),
    "accumulation by epoch": ({"accumulate": {0: 1, 1: 3}}, "batch end 1.1"),
    "no accumulation": ({"accumulate_grad_batches": 1}, "batch start 1.2"),
    "seldom logged": ({"log_every_n_steps": 2}, "batch end 0.4"),
    "the end": ({}, "epoch end 1.5"),
}


@pytest.mark.parametrize("name", mostly_soak(SETTINGS, but=["a schedule by scores", "accumulation by epoch"]))
def test_every_setting_resumes(bench: Bench, name: str, tmp_path: Path) -> None:
    options, place = SETTINGS[name]
    saver = Everywhere(tmp_path, place)
    whole = bench.run("shuffled", saver, **options)
    (file,) = saver.files
    assert_same(whole, bench.run("shuffled", resume=file.path, **options), file)


# Each setting with two kinds of loaders.
_PAIRS = [(kind, name) for i, name in enumerate(SETTINGS) for kind in (list(KINDS) * 3)[i : i + 6 : 3]]


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "name"), _PAIRS)
def test_every_place(bench: Bench, kind: str, name: str, tmp_path: Path) -> None:
    options, _ = SETTINGS[name]
    if kind == "unsized" and "val_check_interval" in options:
        options = {**options, "check_val_every_n_epoch": None}
    saver = Everywhere(tmp_path)
    whole = bench.run(kind, saver, **options)
    for file in saver.files:
        assert_same(whole, bench.run(kind, resume=file.path, **options), file)


def contents(file: Path) -> Any:
    """What a file says of the run, to compare; without the path of its state, and what Lightning counts for itself."""
    content = torch.load(file, weights_only=True)
    section = content["tinker"]
    loaders = content["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    kept = [content[key] for key in ("global_step", "epoch", "optimizer_states", "lr_schedulers")]
    return apply_to_collection([section, loaders, *kept], torch.Tensor, torch.Tensor.tolist)


@pytest.fixture(scope="module")
def whole(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Everywhere:
    """The files of a run, saved at every place."""
    saver = Everywhere(tmp_path_factory.mktemp("whole"))
    bench.run("shuffled", saver, val_check_interval=2)
    return saver


@pytest.mark.parametrize(
    "place",
    mostly_soak(
        ["batch end 0.2", "batch end 0.5", "validation end 0.4", "epoch end 0.5"],
        but=["batch end 0.5"],
    ),
)
def test_a_resumed_run_writes_the_files_of_the_whole_one(
    bench: Bench, whole: Everywhere, place: str, tmp_path: Path
) -> None:
    """So that it can be resumed again, as often as it must."""
    resumed = Everywhere(tmp_path)
    (file,) = [file for file in whole.files if file.place == place]
    bench.run("shuffled", resumed, resume=file.path, val_check_interval=2)
    assert len(resumed.files) >= 15
    for mine, other in zip(reversed(resumed.files), reversed(whole.files), strict=False):
        assert mine.place == other.place
        assert contents(mine.path) == contents(other.path), mine.place


class Breaks(pl.Callback):
    """Fails once, at a hook of some batch."""

    def __init__(self, hook: str, batch: int) -> None:
        self.left = batch
        setattr(self, hook, self._break)

    def _break(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the cable was pulled")


@pytest.mark.filterwarnings("ignore:.*called without a model", "ignore:.*no last checkpoint available")
@pytest.mark.parametrize(
    "hook",
    mostly_soak(
        ["on_before_backward", "on_after_backward", "on_before_zero_grad", "on_validation_batch_start"],
        but=["on_after_backward"],
    ),
)
def test_a_checkpoint_of_an_exception_repeats_the_batch(bench: Bench, hook: str, tmp_path: Path) -> None:
    """Neither its gradient nor its random numbers count twice."""
    whole = bench.run(num_sanity_val_steps=0)
    with pytest.raises(ConnectionError):
        bench.run("shuffled", OnExceptionCheckpoint(tmp_path), Breaks(hook, 2), num_sanity_val_steps=0)
    resumed = bench.run(resume=tmp_path / "on_exception.ckpt")
    count = len(resumed.seen)
    assert resumed.seen == whole.seen[-count:]
    assert resumed.rows.items() <= whole.rows.items()
    assert resumed.state == whole.state
