"""Contents of checkpoint files, runs that resume from them, and files that are rejected with nothing changed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.helpers.checkpoints import records_in, state_in
from tests.helpers.imitations.load_first import LOADINGS_IN_SOAK, loading
from tests.helpers.resuming import DATA, Bench, Everywhere, Mean, Rows, assert_same, loaders, state_of
from tests.helpers.soaking import first_only
from tinker_lightning import collate
from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.remote.lm import delete_state
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]


@pytest.fixture(scope="module", params=LOADINGS_IN_SOAK)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    server = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    with loading(request.param, server) as service:
        yield Bench(server, service)
    server.close()


def quiet(**options: Any) -> pl.Trainer:
    defaults = {"strategy": "tinker", "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(**{**defaults, "enable_progress_bar": False, **options})


def test_a_file_has_the_unfinished_window_and_no_finished_one(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.1", "batch end 0.2", "batch start 0.4", "batch end 0.5")
    bench.run("shuffled", saver)
    contents = [torch.load(file.path, weights_only=True) for file in saver.files]
    assert [len(content["tinker"]["windows"]["lm.handle"]) for content in contents] == [1, 0, 1, 0]
    assert [records_in(content)["lm"]["steps"] for content in contents] == [0, 1, 1, 3]
    (call,) = contents[0]["tinker"]["windows"]["lm.handle"]
    lengths = [len(datum["inputs"]["target_tokens"]) for datum in call["datums"]]
    assert [len(gradient) for gradient in call["gradients"]] == lengths


def test_files_of_model_checkpoint_resume_and_load_with_weights_only(bench: Bench, tmp_path: Path) -> None:
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    whole = bench.run("shuffled", every)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert [file.name for file in files] == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for file in files:
        content = torch.load(file, weights_only=True)
        assert records_in(content)["lm"]["path"].startswith("tinker://")
        resumed = bench.run(resume=file)
        assert resumed.state == whole.state
        assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :]
        assert resumed.rows.items() <= whole.rows.items()


def loaded(bench: Bench) -> int:
    """The number of models in the memory of the server."""
    return sum(model.adapter is not None for model in bench.server.registry.models())


def test_a_trainer_that_resumes_from_its_own_file_keeps_its_remote_model(bench: Bench, tmp_path: Path) -> None:
    pl.seed_everything(1, verbose=False)
    module, loader = bench.module(), loaders("generator")
    models = loaded(bench)
    saver = Everywhere(tmp_path, "batch end 0.3")
    options = {"logger": Rows(), "callbacks": [saver], "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, **options)
    trainer.fit(module, loader)
    whole, seen = state_of(bench.server, module), module.seen[3:]
    module.seen.clear()
    trainer.fit(module, loader, ckpt_path=str(saver.files[0].path))
    assert module.seen == seen
    assert state_of(bench.server, module) == whole
    assert loaded(bench) == models


def test_an_epoch_cut_by_a_limit_resumes_under_a_higher_limit(bench: Bench, tmp_path: Path) -> None:
    """No datum is trained twice or never, whether the file is of the step, of the epoch's end or of the fit's."""
    whole = bench.run(max_steps=6, max_epochs=-1)
    saver = Everywhere(tmp_path, "batch end 1.2", "epoch end 1.2", "end 2.2")
    bench.run("shuffled", saver, max_steps=4, max_epochs=-1)
    assert len(saver.files) == 3
    for file in saver.files:
        resumed = bench.run(resume=file.path, max_steps=6, max_epochs=-1)
        assert [texts for _, _, texts in resumed.seen] == [texts for _, _, texts in whole.seen[file.seen :]]
        assert resumed.epoch == whole.epoch


def test_an_epoch_that_was_cut_is_finished_first(bench: Bench, tmp_path: Path) -> None:
    whole = bench.run(max_epochs=2)
    saver = Everywhere(tmp_path, "end 2.2")
    bench.run("shuffled", saver, max_steps=4, max_epochs=-1)
    (file,) = saver.files
    resumed = bench.run(resume=file.path, max_epochs=2)
    assert [texts for _, _, texts in resumed.seen] == [texts for _, _, texts in whole.seen[file.seen :]]


def test_another_accumulation_applies_from_the_resume_on(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.1")
    bench.run("shuffled", saver, accumulate_grad_batches=1, max_epochs=1)
    (file,) = saver.files
    resumed = bench.run(resume=file.path, accumulate_grad_batches=5, max_epochs=3)
    assert [step for _, step, _ in resumed.seen] == [1] * 4 + [2] * 5 + [3] * 5


def test_a_finished_run_resumes_for_more_epochs(bench: Bench, tmp_path: Path) -> None:
    whole = bench.run(max_epochs=3)
    saver = Everywhere(tmp_path, "end 2.5")
    bench.run("shuffled", saver)
    assert_same(whole, bench.run(resume=saver.files[0].path, max_epochs=3), saver.files[0])


def test_a_module_is_loaded_with_its_weights(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with Mean("tiny", rank=2, seed=1, base_url="embedded") as module:
        trainer = quiet(max_steps=2)
        trainer.fit(module, loaders("shuffled"))
        trainer.save_checkpoint(tmp_path / "file.ckpt")
        with torch.no_grad():
            expected = torch.cat(module.lm(DATA))
    with Mean.load_from_checkpoint(tmp_path / "file.ckpt") as loaded, torch.no_grad():
        assert torch.equal(torch.cat(loaded.lm(DATA)), expected)
        assert loaded.hparams["rank"] == 2


class Local(pl.LightningModule):
    """A module of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_files_of_other_models_are_rejected_before_a_model_is_created(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.3")
    bench.run("shuffled", saver, max_epochs=1)
    other = tmp_path / "other.ckpt"
    local = quiet(max_steps=1, accelerator="cpu", strategy="auto")
    local.fit(Local(), DataLoader(torch.zeros(2, 1)))  # type: ignore[arg-type]
    local.save_checkpoint(other)
    file = saver.files[0].path
    for module, path, message in (
        (
            Mean("smollm2-135m", rank=2, base_url="embedded"),
            file,
            "has base model tiny, but this module has base model smoll",
        ),
        (Mean("tiny", rank=4, base_url="embedded"), file, "has rank 2, but this module has rank 4"),
        (Mean("tiny", rank=2, base_url="embedded"), other, "it was not written by a RemoteModule"),
    ):
        with pytest.raises(InvalidInput, match=message):
            quiet(max_epochs=1).fit(module, loaders("shuffled"), ckpt_path=str(path))
        assert not module.lm.handle.remote.is_created


def without(content: Any, *keys: str | int) -> None:
    """Removes an entry of nested dicts and lists."""
    for key in keys[:-1]:
        content = content[key]
    del content[keys[-1]]


def assert_rejected(bench: Bench, content: Any, file: Path, message: str) -> None:
    torch.save(content, file)
    module = bench.module(seed=3)
    before = state_of(bench.server, module)
    with pytest.raises(InvalidInput, match=message):
        quiet(max_epochs=1).fit(module, loaders("shuffled"), ckpt_path=str(file))
    assert state_of(bench.server, module) == before


def test_a_file_of_another_format_is_rejected_by_name(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.3")
    bench.run("shuffled", saver, max_epochs=1)
    whole = torch.load(saver.files[0].path, weights_only=True)
    (state,) = whole["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    file = tmp_path / "changed.ckpt"
    assert_rejected(bench, {**whole, "tinker": {**whole["tinker"], "version": 2}}, file, f"{file} has format version 2")
    for keys in [
        ("tinker",),
        *(("tinker", key) for key in whole["tinker"] if key not in ("wandb", "rows")),  # which loggers need
        *(("tinker", "strategy", key) for key in whole["tinker"]["strategy"]),
        *(("tinker", "strategy", "rng", key) for key in whole["tinker"]["strategy"]["rng"]),
        *(("tinker", "strategy", "loop_position", key) for key in whole["tinker"]["strategy"]["loop_position"]),
        ("optimizer_states",),
        ("loops",),
        ("loops", "fit_loop"),
        ("loops", "fit_loop", "epoch_progress"),
        ("loops", "fit_loop", "epoch_progress", "current"),
        ("loops", "fit_loop", "state_dict"),
        ("loops", "fit_loop", "state_dict", "combined_loader"),
        *(("loops", "fit_loop", "state_dict", "combined_loader", 0, key) for key in state),
        *(("loops", "fit_loop", "state_dict", "combined_loader", 0, "start", key) for key in state["start"]),
        ("global_step",),
        ("state_dict", "lm._extra_state"),
        ("state_dict",),
    ]:
        content = copy.deepcopy(whole)
        without(content, *keys)
        missing = "lm._extra_state" if keys == ("state_dict",) else keys[-1]
        assert_rejected(bench, content, file, f"(lacks|has no format version) .*'{missing}'")
    content = copy.deepcopy(whole)
    for key in ("windows", "local_gradients", "window_metrics"):
        del content["tinker"][key]
    assert_rejected(bench, content, file, f"the 'tinker' section of {file} lacks 'windows', 'local_gradients', 'window")


def test_a_full_checkpoint_without_its_section_is_rejected_by_every_strategy(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.3")
    bench.run("shuffled", saver, max_epochs=1)
    content = torch.load(saver.files[0].path, weights_only=True)
    del content["tinker"]
    file = tmp_path / "changed.ckpt"
    torch.save(content, file)
    message = f"{file} lacks 'tinker': it was not written by a RemoteModule, or was changed since"
    for strategy in ("tinker", "auto"):
        trainer = quiet(max_epochs=1, strategy=strategy, accelerator="cpu")
        with pytest.raises(InvalidInput, match=message):
            trainer.fit(bench.module(), loaders("shuffled"), ckpt_path=str(file))
    with pytest.raises(InvalidInput, match="the checkpoint lacks 'tinker'"):
        Mean.load_from_checkpoint(file, model="tiny")


def test_a_file_of_weights_loads_but_has_no_position_to_resume_from(bench: Bench, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    bench.run("shuffled", saves, max_epochs=1)
    file = tmp_path / "weights.ckpt"
    module = bench.module(seed=3)
    with pytest.raises(
        InvalidInput, match=f"{file} lacks 'optimizer_states'.*save_weights_only=True.*load_from_checkpoint"
    ):
        quiet(max_epochs=1).fit(module, loaders("shuffled"), ckpt_path=str(file))
    client = bench.service.create_lora_training_client("tiny", rank=2, seed=3)
    loaded = Mean.load_from_checkpoint(file, model=client)
    in_order: Any = DataLoader(DATA, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    quiet().validate(module, in_order, ckpt_path=str(file), verbose=False)
    with torch.no_grad():
        assert torch.equal(torch.cat(loaded.lm(DATA)), torch.cat(module.lm(DATA)))


@pytest.mark.parametrize("part", first_only([0.5, 0.0, 0.99]))
def test_a_truncated_file_is_named(bench: Bench, part: float, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.3")
    bench.run("shuffled", saver, max_epochs=1)
    content = saver.files[0].path.read_bytes()
    file = tmp_path / "half.ckpt"
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(InvalidInput, match=f"{file} cannot be read as a checkpoint.*load another checkpoint"):
        quiet(max_epochs=1).fit(bench.module(), loaders("shuffled"), ckpt_path=str(file))
    with pytest.raises(FileNotFoundError, match="none"):
        quiet(max_epochs=1).fit(bench.module(), loaders("shuffled"), ckpt_path=str(tmp_path / "none.ckpt"))


@pytest.mark.parametrize("version", first_only([2, None]))
def test_load_from_checkpoint_rejects_another_format(bench: Bench, version: int | None, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.3")
    bench.run("shuffled", saver, max_epochs=1)
    content = torch.load(saver.files[0].path, weights_only=True)
    content["tinker"]["version"] = version
    torch.save(content, tmp_path / "changed.ckpt")
    with pytest.raises(InvalidInput, match=r"has (no format version|format version 2)"):
        Mean.load_from_checkpoint(tmp_path / "changed.ckpt", model="tiny")


def test_a_missing_state_is_reported_and_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.3")
    bench.run("shuffled", saver, max_epochs=1)
    file = saver.files[0].path
    content = file.read_bytes()
    module = bench.module(seed=3)
    (-torch.cat(module.lm(DATA[:2])).mean()).backward()
    before, window = state_of(bench.server, module), list(module.lm.handle.remote.window)
    path = state_in(file)
    delete_state(module, path)
    trainer = quiet(max_epochs=1)
    with pytest.raises(NotFound, match=f"{path} that the checkpoint names is not on the server.*another checkpoint"):
        trainer.fit(module, loaders("shuffled"), ckpt_path=str(file))
    assert state_of(bench.server, module) == before
    assert module.lm.handle.remote.window == window
    assert file.read_bytes() == content
    trainer.fit(module, loaders("shuffled"))


def test_data_that_shrank_is_rejected(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 0.4")
    bench.run("shuffled", saver, max_epochs=1)
    short: Any = DataLoader(DATA[:4], batch_size=2, collate_fn=collate, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"saved after 4 batches of an epoch, but the training loader has only 2\."):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(bench.module(), short, ckpt_path=str(saver.files[0].path))


def test_a_fit_that_cannot_start_keeps_the_limit_of_steps(bench: Bench, tmp_path: Path) -> None:
    saver = Everywhere(tmp_path, "batch end 1.2")
    bench.run("shuffled", saver, max_steps=4, max_epochs=-1)
    file = saver.files[0].path
    module = bench.module()
    delete_state(module, state_in(file))
    trainer = quiet(max_steps=4)
    with pytest.raises(NotFound):
        trainer.fit(module, loaders("shuffled"), ckpt_path=str(file))
    assert trainer.max_steps == 4
