"""Runs on a server that loads states only into new models are those on a server that loads into any (R5.3, R5.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner.tuning import Tuner

from tests.helpers.checkpoints import state_in
from tests.helpers.imitations.load_first import LOADINGS, loading
from tests.helpers.resuming import Bench, Everywhere, assert_same, state_of
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule, SamplingParams
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.imitations.load_first import Loading

pytestmark = [*SMALL, pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")]


class Greedy(RemoteModule):
    """A module whose predictions are not random."""

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=4, temperature=0.0)


def whole_life(how: Loading, folder: Path) -> dict[str, Any]:
    """Fits, tests the best weights, continues from the last ones, and searches a learning rate."""
    pl.seed_everything(1, verbose=False)
    server = EmbeddedTrainer(["tiny"], data_dir=folder / "data")
    best = ModelCheckpoint(folder / "files", "{step}", monitor="val_loss")
    last = ModelCheckpoint(folder / "files", "{step}", save_last=True, save_top_k=0)
    try:
        with loading(how, server) as service:
            module = new(service, Greedy)
            trainer = quiet(max_epochs=2, callbacks=[best, last], enable_checkpointing=True)
            trainer.fit(module, loader(), loader(count=2))
            fitted = logprobs_of(module)
            early = named(folder)
            found: dict[str, Any] = {"test": trainer.test(module, loader(), ckpt_path="best", verbose=False)}
            found["best"] = logprobs_of(module)
            assert not torch.equal(found["best"], fitted)
            found["predictions"] = [each["tokens"] for each in trainer.predict(module, loader(count=2))[0]]  # type: ignore[index]
            trainer.fit_loop.max_epochs = 3
            trainer.fit(module, loader(), loader(count=2), ckpt_path="last")
            found["continued"] = state_of(server, module)
            trainer.save_checkpoint(folder / "files" / "mine.ckpt")
            search = Tuner(trainer).lr_find(module, loader(), min_lr=1e-4, num_training=15, early_stop_threshold=None)
            assert search is not None
            found["search"] = search.results
            found["state"] = state_of(server, module)
            kept = {each.tinker_path for each in server.store.listing() if each.path.kind == "weights"}
            assert named(folder) == kept, "states of removed files are deleted, those of the earlier model too"
            found["runs"] = len({path.split("/")[2] for path in early | kept})
    finally:
        server.close()
    return found


def named(folder: Path) -> set[str]:
    """The states that the checkpoint files name."""
    return {state_in(file) for file in (folder / "files").glob("*.ckpt")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return whole_life("in place", tmp_path_factory.mktemp("in place"))


@pytest.mark.filterwarnings("ignore:.*configured with multiple `ModelCheckpoint` callbacks")
@pytest.mark.parametrize("how", LOADINGS[1:])
def test_fit_test_fit_and_search_are_the_same(how: Loading, expected: dict[str, Any], tmp_path: Path) -> None:
    found = whole_life(how, tmp_path)
    assert (expected["runs"], found["runs"]) == (1, 2)  # states are named after the model that saved them
    assert torch.equal(found["best"], expected["best"])
    for name in ("test", "predictions", "continued", "search", "state"):
        assert found[name] == expected[name], name


@pytest.mark.parametrize("how", LOADINGS[1:])
def test_a_window_and_a_loader_resume(how: Loading, tmp_path: Path) -> None:
    """The other places and settings are tried by `tox -e soak`, in the suites of resumed runs."""
    server = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    with loading(how, server) as service:
        bench = Bench(server, service)
        saver = Everywhere(tmp_path, "batch end 0.3")
        whole = bench.run("shuffled", saver)
        (file,) = saver.files
        assert_same(whole, bench.run("shuffled", resume=file.path), file)
    server.close()
