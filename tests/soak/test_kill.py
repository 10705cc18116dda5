"""`kill -9` at random points of a fit, in the middle of windows and of saves too: it ends in the same bits.

The trainer is killed with it, or is a server that goes on.
"""

from __future__ import annotations

import contextlib
import csv
import json
import random
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import state_in
from tests.helpers.kills import Fits
from tests.helpers.limited_server import limited_server
from tests.helpers.soaking import size
from tinker_lightning.server.trainer.checkpoint_store import CheckpointStore
from tinker_lightning.server.trainer.checkpoint_summary import TinkerPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KILLS = size("KILLS", 150)
KINDS = ["plain", "stateful", "workers", "served"]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    fits = Fits(tmp_path_factory.mktemp("fits") / "output.txt")
    yield fits
    fits.close()


class Ended:
    """All that two fits must have in common, and that they counted."""

    def __init__(self, folder: Path) -> None:
        done = json.loads((folder / "done.json").read_text())
        self.calls, self.in_saves = done["calls"], done["in_saves"]
        self.rate, self.steps = done["rate"], done["steps"]
        self.tensors = _tensors(folder, done["state"])
        # What each batch was trained on, where it counted.
        self.trained = dict(map(json.loads, (folder / "trained.jsonl").read_text().splitlines()))
        self.rows = _rows(folder)
        self.files = {file.name: state_in(file) for file in (folder / "files").glob("*.ckpt")}  # raises for half a file
        self.store = CheckpointStore(folder / "data" / "tinker_lightning" / "checkpoints")
        self.kept = {each.tinker_path for each in self.store.listing() if each.expires_at is None} - {done["state"]}
        self.expiring = {each.tinker_path for each in self.store.listing()} - self.kept - {done["state"]}
        self.hidden = [path for place in ("files", "data") for path in (folder / place).rglob(".*")]


def _tensors(folder: Path, state: str) -> dict[str, torch.Tensor]:
    """Weights and Adam's state."""
    (saved,) = (folder / "data").rglob(state.rsplit("/", 1)[-1])
    return {
        f"{file.name} {name}": value for file in saved.glob("*.safetensors") for name, value in load_file(file).items()
    }


def _rows(folder: Path) -> dict[tuple[int, str], str]:
    """The last row of each step and metric, over all files in the order in which they were begun."""
    rows: dict[tuple[int, str], str] = {}
    for file in sorted(folder.glob("logs/version_*/metrics.csv"), key=lambda file: int(file.parent.name[8:])):
        with file.open() as lines:
            for row in csv.DictReader(lines):
                if None not in row.values():  # a complete row
                    rows |= {(int(row["step"]), name): value for name, value in row.items() if value and name != "step"}
    return rows


def assert_same(fit: Ended, whole: Ended) -> None:
    assert fit.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(fit.tensors[name], value) for name, value in whole.tensors.items())
    assert (fit.rate, fit.steps) == (whole.rate, whole.steps)
    assert fit.trained == whole.trained
    assert fit.rows == whole.rows
    assert fit.kept == set(fit.files.values())  # without an expiry, neither more nor less
    assert fit.hidden == []
    for path in fit.kept | fit.expiring:
        fit.store.load(TinkerPath.parse(path), training_state=True)  # raises for half a checkpoint


@contextlib.contextmanager
def server_for(folder: Path, kind: str) -> Iterator[None]:
    """A server for the fits of a folder, if their kind has one."""
    if kind != "served":
        yield
        return
    store = folder / "data" / "tinker_lightning"
    store.mkdir(parents=True)
    with limited_server(store) as server:
        (folder / "url").write_text(server.url)
        yield


def kill_often(fits: Fits, folder: Path, kind: str, whole: Ended, numbers: random.Random, most: int) -> int:
    """Starts a fit until it comes to its end; how often it was killed."""
    for kills in range(most):
        save = numbers.randint(1, len(whole.in_saves)) if kills % 2 else None
        calls = whole.calls if save is None else whole.in_saves[save - 1]
        kill = {"call": numbers.randint(1, calls)} | ({} if save is None else {"save": save})
        if fits.run(folder, kind, **kill):
            return kills
    assert fits.run(folder, kind)
    return most


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_fit_ends_in_the_bits_of_one_that_was_not(fits: Fits, kind: str, tmp_path: Path) -> None:
    """Once somewhere, and once within the next save."""
    with server_for(tmp_path / "whole", kind):
        fits.run(tmp_path / "whole", kind)
    whole = Ended(tmp_path / "whole")
    folder = tmp_path / "killed"
    with server_for(folder, kind):
        assert not fits.run(folder, kind, call=whole.calls // 2)
        assert not fits.run(folder, kind, save=1, call=whole.in_saves[0] // 2)
        assert fits.run(folder, kind)
    assert_same(Ended(folder), whole)


@pytest.mark.soak
@pytest.mark.parametrize("function", ["set_checkpoint_ttl", "delete_checkpoint"])
def test_kills_before_a_state_is_kept_or_deleted(fits: Fits, function: str, tmp_path: Path) -> None:
    """A file has been written whose state still expires, or one has been replaced whose state is still kept."""
    fits.run(tmp_path / "whole", "plain")
    whole = Ended(tmp_path / "whole")
    folder = tmp_path / "killed"
    for call in (2, 1, 3):
        assert not fits.run(folder, "plain", call=call, function=function)
    assert fits.run(folder, "plain")
    assert_same(Ended(folder), whole)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(fits: Fits, kind: str, tmp_path: Path) -> None:
    with server_for(tmp_path / "whole", kind):
        fits.run(tmp_path / "whole", kind)
    whole = Ended(tmp_path / "whole")
    numbers = random.Random(kind)  # noqa: S311
    kills: list[int] = []
    left = 0
    while sum(kills) < KILLS / len(KINDS):
        folder = tmp_path / f"killed-{len(kills)}"
        with server_for(folder, kind):
            kills.append(kill_often(fits, folder, kind, whole, numbers, most=6))
        assert_same(Ended(folder), whole)
        left += len(Ended(folder).expiring)
    print(
        f"{kind}: {kills} kills, {len(whole.tensors)} tensors, {len(whole.rows)} values of rows, {left} states expire"
    )
