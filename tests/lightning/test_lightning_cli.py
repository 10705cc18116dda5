"""LightningCLI: a module from the command line, and files without the API key."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, loader, new, quiet
from tinker_lightning import RemoteModule

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


class Typed(RemoteModule):
    """As a user would give it to a command line."""

    def __init__(self, model: str, temperature: float = 1.0, rank: int = 8, **kwargs: Any) -> None:
        super().__init__(model, rank=rank, **kwargs)
        self.temperature = temperature

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> torch.Tensor:
        return -torch.cat(logprobs).mean() / self.temperature

    def train_dataloader(self) -> Any:
        return loader()


# jsonargparse's advice to Lightning, and Lightning's that nobody chose a seed.
@pytest.mark.filterwarnings(r"ignore:[\s\S]*(in v5\.0\.0|JsonargparseDeprecationWarning)")
def test_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # R5.3
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program"])
    model = ["--model.model=tiny", "--model.rank=4", "--model.temperature=2", "--model.base_url=embedded"]
    trainer = ["--trainer.strategy=tinker", "--trainer.max_steps=2", "--trainer.logger=false", "--seed_everything=1"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    cli = LightningCLI(Typed, run=False, args=[*model, *trainer, *quiet], save_config_callback=None)
    cli.trainer.fit(cli.model)
    assert cli.model.lm.handle.remote.steps == 2
    assert cli.model.lm.backend.get_info().lora_rank == 4
    cli.model.close()
    file = cli.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    with Typed.load_from_checkpoint(file) as loaded:
        assert loaded.temperature == 2
    again = LightningCLI(Typed, args=["fit", *model, *trainer, *quiet, "--trainer.max_steps=3", f"--ckpt_path={file}"])
    assert again.trainer.global_step == again.model.lm.handle.remote.steps == 3
    again.model.close()


class DeclaresKey(Typed):
    """Declares keys as plain strings, and takes one a second time in a dict and in a list."""

    def __init__(
        self, api_key: str, judge_api_key: str, headers: dict[str, str], keys: list[str], **kwargs: Any
    ) -> None:
        super().__init__(api_key=headers["X-API-Key"], **kwargs)
        assert (api_key, judge_api_key) == (keys[0], "judge-very-secret")
        self.save_hyperparameters()


@pytest.mark.filterwarnings(r"ignore:[\s\S]*(in v5\.0\.0|JsonargparseDeprecationWarning)")
@pytest.mark.parametrize(
    ("kind", "by_class"),
    mostly_soak(itertools.product([Typed, DeclaresKey], [False, True]), but=[(Typed, False), (DeclaresKey, True)]),
)
def test_no_file_of_a_command_line_has_the_api_key(
    kind: type[RemoteModule], by_class: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program"])
    prefix = "--model.init_args" if by_class else "--model"
    key = "tml-very-secret"
    settings: dict[str, Any] = {"model": "tiny", "rank": 4, "base_url": "embedded", "api_key": key}
    if kind is DeclaresKey:
        settings |= {"judge_api_key": "judge-very-secret"}
        settings |= {"headers": json.dumps({"X-API-Key": key}), "keys": json.dumps([key])}
    args = [f"--model={__name__}.{kind.__name__}"] if by_class else []
    args += [f"{prefix}.{name}={value}" for name, value in settings.items()]
    args += ["--trainer.strategy=tinker", "--trainer.max_steps=1", "--trainer.logger=CSVLogger", "--seed_everything=1"]
    args += [f"--trainer.logger.save_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    cli = LightningCLI(RemoteModule if by_class else kind, subclass_mode_model=by_class, args=["fit", *args])
    assert cli.model._session._api_key == "tml-very-secret"
    cli.model.close()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} >= {".yaml", ".ckpt"}
    assert [file for file in files if b"very-secret" in file.read_bytes()] == []
    (config,) = tmp_path.rglob("config.yaml")
    assert "rank: 4" in config.read_text()
    (hparams,) = tmp_path.rglob("hparams.yaml")
    yaml.safe_load(hparams.read_text())


def test_hyperparameters_are_read_by_a_safe_loader(service: ServiceClient, tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, logger=CSVLogger(tmp_path))
    trainer.fit(new(service, RemoteModule, betas=(0.8, 0.9)), loader())
    (file,) = tmp_path.rglob("hparams.yaml")
    assert yaml.safe_load(file.read_text())["betas"] == [0.8, 0.9]
