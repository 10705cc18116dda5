"""`LightningCLI` that takes the recipes, data modules and callbacks of this library by their short names."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import json
import logging
import re
import sys
import textwrap
import warnings
from datetime import timedelta  # noqa: TC003 read by jsonargparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, set_parsing_settings
from jsonargparse.typing import ClosedUnitInterval  # noqa: TC002 read by jsonargparse
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from typing_extensions import override

import tinker_lightning.data
import tinker_lightning.recipes  # noqa: F401
from tinker_lightning import callbacks
from tinker_lightning.cli import wording
from tinker_lightning.data import RolloutData
from tinker_lightning.data.sources import columns_of
from tinker_lightning.errors import TinkerLightningError, did_you_mean
from tinker_lightning.lightning.hyperparameters import PredictOptions
from tinker_lightning.lightning.module import RemoteModule

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Writes predictions with their rows as JSON Lines: to a file, or to the terminal after the progress bar."""

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
    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        """Keeps the text of each prediction, and the columns of its row."""
        del trainer, pl_module, args
        outputs = outputs if isinstance(outputs, list) else [outputs]
        is_aligned = isinstance(batch, list | tuple) and len(batch) == len(outputs)
        for output, item in zip(outputs, batch if is_aligned else itertools.repeat(None), strict=is_aligned):
            row = output
            if isinstance(output, dict) and "tokens" in output:
                row = {name: output[name] for name in ("text", "stop_reason") if name in output}
                if "samples" in output:
                    row["samples"] = [sample.get("text", sample["tokens"]) for sample in output["samples"]]
                columns = columns_of(item).items()
                row = {f"input_{name}" if name in row else name: value for name, value in columns} | row
            self._lines.append(json.dumps(row, default=str, ensure_ascii=False))

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes all predictions."""
        del trainer, pl_module
        if self._file is None:
            print(*self._lines, sep="\n")
        else:
            Path(self._file).write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")


class Parser(LightningArgumentParser):
    """A parser that leaves files with prompts alone, which it would take for configurations or lists of lines."""

    @override
    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(theclass, RolloutData):
            kwargs["sub_configs"] = False
        return super().add_class_arguments(theclass, *args, **kwargs)


class _CommandLine(LightningCLI):
    def __init__(self, stack: contextlib.ExitStack, **options: Any) -> None:
        self._stack = stack
        super().__init__(pl.LightningModule, pl.LightningDataModule, **options)

    @override
    def init_parser(self, **options: Any) -> LightningArgumentParser:
        parser = super().init_parser(**options)
        parser.__class__ = Parser  # Lightning 2.5 does not take a class of parsers
        return parser

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--output", type=str | None, help="predict: the file for the predictions")
        for name, kind in _PREDICT.items():
            parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"--model.predict.{name}")

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
            options = self.config[self.subcommand]
            if self.subcommand == "predict":
                self.model.set_predict_options({name: options[name] for name in _PREDICT if name in options})
            self._stack.enter_context(self.model)  # ends its session with the command


# Lines and warnings of other packages that are about this machine, or advertise.
_ADVICE = re.compile(r"💡 Tip|[GTHI]PU available: ")
_WARNED = (".*does not have many workers", ".*smaller than the logging interval")


class LineHandler(logging.Handler):
    """Writes lines above a progress bar, which would be torn by them otherwise."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, unless it is advice that does not concern remote models."""
        text = self.format(record)
        if not _ADVICE.match(text):
            Tqdm.write(text, file=sys.stderr)


@contextlib.contextmanager
def own_terminal() -> Iterator[None]:
    """Writes the logs and warnings of a command above its bar; afterwards all loggers are as they were."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "tinker_lightning")]
    handlers, line_handler = [each.handlers for each in loggers], LineHandler()
    with warnings.catch_warnings():
        for pattern in _WARNED:
            warnings.filterwarnings("ignore", pattern)
        # Of a function's type, as which the parser would save a list or dict; after an error it tries the next type.
        warnings.filterwarnings("error", r"\s*Unable to serialize instance [\[{]")
        warnings.showwarning = lambda message, *_: Tqdm.write(f"warning: {message}", file=sys.stderr)
        for each in loggers:
            each.handlers = [line_handler]
        try:
            yield
        finally:
            for each, own in zip(loggers, handlers, strict=True):
                each.handlers = own


def run_stage(stage: str, arguments: list[str], stack: contextlib.ExitStack) -> None:
    """Runs a stage; the session of its module ends with the stack."""
    stack.enter_context(own_terminal())
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


_NO_ARGUMENT = re.compile(r"Option '(\w+)' is not accepted.*?class_path='?([\w.]+)", re.DOTALL)  # of a function
_NO_CALL = re.compile(r"Invalid subclass spec given as value for type Any: (.*)")
# An option of a class that has a wrong value, with the lines about it, which are indented.
_IN_CLASS = re.compile(r"^( *)- Problem with given class_path '[\w.]+':\n( +Parser key .*?)(?=\n\1- |\Z)", re.S | re.M)
_BASES = {"model": pl.LightningModule, "data": pl.LightningDataModule, "callbacks": pl.Callback, "logger": Logger}
_BASE_NAMES = {base.__name__ for base in _BASES.values()}
_PREDICT = get_type_hints(PredictOptions)


def explain(text: str) -> str:
    """Returns an error of jsonargparse as one message: the option, the fault and the nearest name."""
    located = re.search(r'Parser key "([^"]+)"', text) or re.search(r"^--([\w.]+)\.help:", text)
    key = located[1] if located else ""
    where = f"{key}: " if located else ""
    if match := _IN_CLASS.search(text):
        return f"{key}.{explain(textwrap.dedent(match[2]))}"
    if match := re.search(r"Expected a dot import path string: (\S+)", text):
        base = _BASES.get(key.rpartition(".")[2])
        if base is None:
            return f"{where}{match[1]!r} is not an import path. Write package.module.name."
        return where + wording.no_class(match[1], sorted({cls.__name__ for cls in _subclasses(base)}))
    if match := re.search(r"File does not exist: '(.*)'", text):
        return f"--{key}: there is no file {match[1]}"
    if match := re.search(r"Problems parsing config: (.*)\Z", text, re.DOTALL):
        return wording.not_yaml(match[1])
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
        names = [name for name in vars(importlib.import_module(match[1])) if not name.startswith("_")]
        return f"{where}the module {match[1]} has no {match[2]!r}. {did_you_mean(match[2], names)}".rstrip()
    if match := re.search(r"No module named '[\w.]+'", text):
        return f"{where}{match[0]}. Write package.module.name, and start the command in the folder of the package."
    if match := re.search(r"class_path '([\w.]+)':\s+the following arguments are required: (\w+)", text):
        return f"{where}{_short(match[1])} is missing a required argument: {match[2]!r}"
    if match := re.search(r"Expected an instantiatable class, but ([\w.]+) is abstract", text):
        return f"{where}the class {_short(match[1])} has no method {', '.join(_imported(match[1]).__abstractmethods__)}"
    match = re.search(r"class_path '([\w.]+)':\s+(?:.*\n\s*)?(?:Option|Key|No action for key) '([\w.]+)' is not", text)
    # The parser takes a mapping with other keys than class_path and init_args for options of the base class.
    if _short(match[1]) in _BASE_NAMES if match else "Subclass types expect" in text:
        return f"{where}{wording.NO_CLASS}"
    if match:
        return where + wording.no_option_of(match[1], match[2], _options(match[1]), key)
    if match := re.search(r"Unexpected keys: \{'(\w+)'", text) if key.endswith("predict") else None:
        return f"{where}there is no option {match[1]!r}. {did_you_mean(match[1], _PREDICT)}".rstrip()
    if match := _NO_ARGUMENT.search(text):
        near = did_you_mean(match[1], inspect.signature(_imported(match[2])).parameters)
        return f"{where}{_short(match[2])} has no argument {match[1]!r}. {near}".rstrip()
    if match := re.search(r"(?:(?:option|key|nested key) '([\w.]+)'|unrecognized arguments: --([\w.]+))", text):
        name = match[1] or match[2]
        if name.startswith("trainer."):
            names = [f"trainer.{each}" for each in _options("lightning.pytorch.Trainer")]
        else:
            name, names = name.partition(".")[0], [*wording.SECTIONS]
        return wording.no_option(name, names)
    if match := re.search(r"the following arguments are required: \w+\.(\w+)", text):
        return f"{match[1]} is missing. Pass --{match[1]} NAME, or --config FILE with a section {match[1]!r}."
    if not located and (match := _NO_CALL.search(text)):  # raised by the class or function itself
        return _plain(match[1])
    if match := re.search(r"Errors:\n\s+- (.*?)(?=\n    - |\n  Given value|\Z)", text, re.DOTALL):
        reason = _plain(match[1])
        value = re.search(r"Given value: (.*)\Z", text, re.DOTALL)
        has_value = value is None or "Got value" in reason or "class_path" in reason
        return f"{where}{reason}" + ("" if has_value else f", got {value[1].strip()}")  # type: ignore[index]
    return f"{where}{_plain(text.partition(':')[2])}" if text.startswith("Parser key") else _plain(text)


def library_error(error: BaseException | None) -> TinkerLightningError | None:
    """Returns the error of this library that caused another error, as in a class from a YAML file."""
    while error is not None and not isinstance(error, TinkerLightningError):
        error = error.__cause__ or error.__context__
    return error


def is_lightning_error(error: BaseException) -> bool:
    """Returns whether Lightning or the parser has raised an error, rather than the user's code or torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("lightning", "jsonargparse")


def _options(class_path: str) -> list[str]:
    """Returns the names of the constructor arguments of a class, including the arguments behind `**kwargs`."""
    added = ArgumentParser().add_class_arguments(_imported(class_path), fail_untyped=False)
    return [str(option) for option in added]


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _short(path: str) -> str:
    return path.rpartition(".")[2]


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _plain(text: str) -> str:
    """Returns a message on one line, with types as they are written in code."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"(?:typing\.)?Literal\[([^]]*)\]", r"one of \1", text).replace("Expected a ", "expected ")
    return re.sub(r"\s+", " ", text.replace("Parser key ", "").replace(' in "<unicode string>",', " at")).strip()
