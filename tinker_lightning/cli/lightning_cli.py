"""`LightningCLI` that takes the recipes, data modules and callbacks of this library by their short names."""

from __future__ import annotations

import json
from datetime import timedelta  # noqa: TC003 read by jsonargparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from jsonargparse import set_parsing_settings
from jsonargparse.typing import ClosedUnitInterval  # noqa: TC002 read by jsonargparse
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

import tinker_lightning.data
import tinker_lightning.recipes  # noqa: F401
from tinker_lightning import callbacks
from tinker_lightning.lightning.module import RemoteModule

if TYPE_CHECKING:
    import contextlib


# A mistake in a class of a dataset, whose rows may be anything else, is reported by the parser.
set_parsing_settings(validate_subclass_spec_in_any=True)

# Importing a class makes its short name known to the parser.
for _name in callbacks.__all__:
    getattr(callbacks, _name)


class LimitedTrainer(pl.Trainer):
    """Takes limits on the command line as in Python: 1 is one batch, 1.0 is all of them.

    The parser tries the types of a union in their order, but Python may hand out `float | int` where Lightning has
    written `int | float`, because it caches unions and the two are equal. No other code uses the unions here.
    """

    def __init__(
        self,
        *,
        limit_train_batches: int | ClosedUnitInterval | None = None,
        limit_val_batches: int | ClosedUnitInterval | None = None,
        limit_test_batches: int | ClosedUnitInterval | None = None,
        limit_predict_batches: int | ClosedUnitInterval | None = None,
        overfit_batches: int | ClosedUnitInterval = 0.0,
        val_check_interval: int | ClosedUnitInterval | str | timedelta | dict[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            overfit_batches=overfit_batches,
            val_check_interval=val_check_interval,
            **kwargs,
        )


class SaveConfig(SaveConfigCallback):
    """Saves the configuration next to the logs of a run, but never over a file that is there."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Writes `config.yaml` without API keys, unless there is no logger: it would go to the working directory."""
        folder = trainer.log_dir
        if trainer.logger is not None and folder is not None and not Path(folder, self.config_filename).exists():
            super().setup(trainer, pl_module, stage)


class PredictionWriter(pl.Callback):
    """Writes predictions as JSON Lines: to a file, or to the terminal after the progress bar."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._lines: list[str] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Creates the folder of the file, so that no sample is lost because it is missing."""
        del trainer, pl_module, stage
        if self._file is not None:
            Path(self._file).parent.mkdir(parents=True, exist_ok=True)

    @override
    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Keeps the text of each prediction."""
        del trainer, pl_module, args
        for output in outputs if isinstance(outputs, list) else [outputs]:
            row = output
            if isinstance(output, dict) and "tokens" in output:
                row = {name: output[name] for name in ("text", "stop_reason") if name in output}
                if "samples" in output:
                    row["samples"] = [sample.get("text", sample["tokens"]) for sample in output["samples"]]
            self._lines.append(json.dumps(row, default=str, ensure_ascii=False))

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes all predictions."""
        del trainer, pl_module
        if self._file is None:
            print(*self._lines, sep="\n")
        else:
            Path(self._file).write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")


class _CommandLine(LightningCLI):
    def __init__(self, stack: contextlib.ExitStack, **options: Any) -> None:
        self._stack = stack
        super().__init__(pl.LightningModule, pl.LightningDataModule, **options)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--output", type=str | None, help="predict: the file for the predictions")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # without Lightning's warning that there is a command line, too

    @override
    def _parse_ckpt_path(self) -> None:
        """Keeps the options of the command line: Lightning would read the model's from the checkpoint file."""

    @override
    def instantiate_trainer(self, **options: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**options)
        if self.subcommand == "predict":
            trainer.callbacks.append(PredictionWriter(self.config[self.subcommand].output))  # type: ignore[attr-defined]
        return trainer

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if isinstance(self.model, RemoteModule):
            self._stack.enter_context(self.model)  # ends its session with the command


def run_stage(stage: str, arguments: list[str], stack: contextlib.ExitStack) -> None:
    """Runs a stage; the session of its module ends with the stack."""
    _CommandLine(
        stack,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=SaveConfig,
        trainer_class=LimitedTrainer,
        trainer_defaults={"strategy": "tinker"},
        parser_kwargs={"exit_on_error": False, "prog": "tinker-lightning"},
        args=[stage, *arguments],
    )
