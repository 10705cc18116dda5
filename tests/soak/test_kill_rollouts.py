"""`kill -9` at random points of a fit on rollouts: it ends in the same bits, or trains each prompt once."""  # R5.9

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.kills import Fits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    fits = Fits(tmp_path_factory.mktemp("rollouts") / "output.txt", "killed_rollouts")
    yield fits
    fits.close()


def ended(folder: Path) -> tuple[dict[str, Any], dict[int, Any], dict[str, torch.Tensor]]:
    """What a fit has counted, what each batch was trained on where it counted, and weights and Adam's state."""
    done = json.loads((folder / "done.json").read_text())
    trained = {
        int(rollout_id): batch
        for rollout_id, batch in map(json.loads, (folder / "trained.jsonl").read_text().splitlines())
    }
    (saved,) = (folder / "data").rglob(done["state"].rsplit("/", 1)[-1])
    files = saved.glob("*.safetensors")
    return done, trained, {f"{file.name} {name}": one for file in files for name, one in load_file(file).items()}


@pytest.mark.parametrize("kind", ["on-policy", "epochs", "ahead"])
def test_many_kills(fits: Fits, kind: str, tmp_path: Path) -> None:
    assert fits.run(tmp_path / "whole", kind)
    done, trained, tensors = ended(tmp_path / "whole")
    numbers = random.Random(kind)  # noqa: S311
    kills: list[int] = []
    while sum(kills) < 20:
        folder = tmp_path / f"killed-{len(kills)}"
        for count in range(7):
            if fits.run(folder, kind, **({} if count == 6 else {"call": numbers.randint(1, done["calls"])})):
                kills.append(count)
                break
        own, own_trained, own_tensors = ended(folder)
        assert own["steps"] == done["steps"]
        prompts = {rollout_id: batch["prompts"] for rollout_id, batch in trained.items()}
        assert {rollout_id: batch["prompts"] for rollout_id, batch in own_trained.items()} == prompts
        if kind != "ahead":
            assert own_trained == trained
            assert all(torch.equal(own_tensors[name], value) for name, value in tensors.items())
    print(f"{kind}: {kills} kills, {len(tensors)} tensors, {len(trained)} batches")
