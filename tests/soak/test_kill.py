"""`kill -9` at random points of a fit, in the midst of windows and of saves too: it ends in the same bits."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

FIT = Path(__file__).with_name("killed_fit.py")
KILLS = 10  # of each kind of loader


def run(folder: Path, kind: str, kill_after: float | None = None) -> bool:
    """Starts the fit; whether it has come to its end."""
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data")}
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, str(FIT), str(folder), kind],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(kill_after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
    assert code == 0, (folder / "output.txt").read_text()[-3000:]
    return True


def logged(folder: Path) -> dict[tuple[int, str], str]:
    """The last row of each step and metric, over all files in the order in which they were begun."""
    rows: dict[tuple[int, str], str] = {}
    for file in sorted(folder.glob("logs/version_*/metrics.csv"), key=lambda file: int(file.parent.name[8:])):
        with file.open() as lines:
            for row in csv.DictReader(lines):
                rows |= {(int(row["step"]), name): value for name, value in row.items() if value and name != "step"}
    return rows


def trained(folder: Path) -> dict[int, Any]:
    """What each batch was trained on, where it counted."""
    return dict(map(json.loads, (folder / "trained.jsonl").read_text().splitlines()))


def ended(folder: Path) -> tuple[dict[str, torch.Tensor], float, int]:
    """Weights and Adam's state, the learning rate, and the number of steps."""
    done = json.loads((folder / "done.json").read_text())
    (state,) = (folder / "data").rglob(done["state"].rsplit("/", 1)[-1])
    tensors = {
        f"{file.name} {name}": value for file in state.glob("*.safetensors") for name, value in load_file(file).items()
    }
    return tensors, done["rate"], done["steps"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["plain", "stateful", "workers"])
def test_a_killed_fit_ends_in_the_bits_of_one_that_was_not(kind: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    started = time.monotonic()
    assert run(whole, kind)
    length = time.monotonic() - started
    tensors, rate, steps = ended(whole)
    numbers, kills = random.Random(kind), 0  # noqa: S311 not for secrets
    while kills < KILLS:
        folder = tmp_path / f"killed-{kills}"
        folder.mkdir()
        of_this = 0
        # After some kills it is left alone: each costs what was trained since the last file.
        while not run(folder, kind, numbers.uniform(0.35, 0.95) * length if of_this < 5 else None):
            of_this += 1
        kills += of_this
        again, rate_again, steps_again = ended(folder)
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name], tensors[name]) for name in tensors)
        assert (rate_again, steps_again) == (rate, steps)
        assert trained(folder) == trained(whole)
        assert logged(folder) == logged(whole)
    print(f"{kind}: {kills} kills, {len(tensors)} tensors, {len(logged(whole))} values of rows")
