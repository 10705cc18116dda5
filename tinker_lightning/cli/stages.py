"""`tinker-lightning fit`, `validate`, `test` and `predict`: a stage of the Lightning trainer from a YAML file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import sys
from datetime import timedelta  # noqa: TC003 read by jsonargparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse.typing import ClosedUnitInterval  # noqa: TC002 read by jsonargparse
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import tinker_lightning.data
import tinker_lightning.recipes  # noqa: F401
from tinker_lightning import callbacks
from tinker_lightning.cli import wording
from tinker_lightning.errors import InvalidInput, TinkerLightningError
from tinker_lightning.lightning.module import RemoteModule

_STAGES = {
    "fit": ("train a model", "Trains a model, and validates it if there is validation data."),
    "validate": ("score a model on validation data", "Scores a model on the validation data."),
    "test": ("score a model on test data", "Scores a model on the test data."),
    "predict": ("sample answers to prompts", "Samples an answer to each prompt, and prints it as a line of JSON."),
}

_HELP = """\
options, in the YAML file or as arguments, which take precedence:
  --config FILE         read options from a YAML file; may be given several times
  --model NAME          the recipe, SFT, DPO, GRPO or Distill, or the import path of a LightningModule
  --model.OPTION VALUE  an option of the recipe, for example --model.model smollm2-135m
  --data NAME           ChatData, PreferenceData, PromptData or RolloutData, or the import path of a
                        LightningDataModule
  --data.OPTION VALUE   an option of the data module, for example --data.train chats.jsonl
  --trainer.OPTION VALUE
                        an option of Lightning's Trainer, for example --trainer.max_epochs 3
  --trainer.callbacks+ NAME
                        add a callback, for example ModelCheckpoint, or the import path of one
  --output FILE         predict: write the answers to a file
  --ckpt_path FILE      start from a checkpoint file: fit resumes, the others load its weights
  --seed_everything N   the seed of the run
  --print_config        print all options with their values as YAML, and exit
  --model.help NAME, --data.help NAME, --trainer.callbacks.help NAME
                        show the options of a class, and exit
  --debug               show the stack trace of an error

The API key is read from TINKER_API_KEY, and no file contains it.
"""


def add_to(commands: Any) -> None:
    """Adds the four sub-commands to the parser."""
    for name, (short, description) in _STAGES.items():
        parser = commands.add_parser(
            name,
            usage=f"tinker-lightning {name} --config FILE [--OPTION VALUE ...]",
            help=short,
            description=description,
            epilog=_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=run, stage=name, takes_rest=True, advice=wording.STAGES)


def run(options: argparse.Namespace) -> int:
    """Runs a stage with `LightningCLI`; returns the exit code."""
    if options.stage != "predict" and any(each.partition("=")[0] == "--output" for each in options.rest):
        raise InvalidInput(
            f"--output is for the answers of predict, and {options.stage} writes none. Set where logs and checkpoints "
            "go with --trainer.default_root_dir FOLDER."
        )
    try:
        import jsonargparse
        import lightning.pytorch.cli  # noqa: F401 which raises if an extra of jsonargparse is missing
    except ImportError as error:
        raise InvalidInput(
            f"tinker-lightning {options.stage} needs jsonargparse. Install it with: python -m pip install "
            "'tinker-lightning[cli]'"
        ) from error
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from tinker_lightning.cli import wording

    if (folder := os.getcwd()) not in sys.path:  # classes and rewards of the user, as with `python -m`
        sys.path.append(folder)
    with contextlib.ExitStack() as stack:
        try:
            run_stage(options.stage, options.rest, stack)
        except jsonargparse.ArgumentError as error:
            raise InvalidInput(wording.explain(str(error))) from error
        except TinkerLightningError:
            raise
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise InvalidInput(f"ckpt_path is not a checkpoint file of Lightning: {reason}") from error
        except (ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
            if own := wording.of_library(error):
                raise own from error
            if isinstance(error, MisconfigurationException) or wording.is_of_lightning(error):
                raise InvalidInput(wording.explain(str(error))) from error
            raise
    return 0


# Classes that are imported can be given by their names alone.
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

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Creates the folder of the file, so that no sample is lost because it is missing."""
        del trainer, pl_module, stage
        if self._file is not None:
            Path(self._file).parent.mkdir(parents=True, exist_ok=True)

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

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--output", type=str | None, help="predict: the file for the predictions")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # without Lightning's warning that there is a command line, too

    def _parse_ckpt_path(self) -> None:
        """Leaves the options as they are given: Lightning would take those of the model from the checkpoint file."""

    def instantiate_trainer(self, **options: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**options)
        if self.subcommand == "predict":
            trainer.callbacks.append(PredictionWriter(self.config[self.subcommand].output))  # type: ignore[attr-defined]
        return trainer

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
