"""The reports of a fit: at its start the model, the data and the server; at its end the steps, scores and files.

Model     smollm2-135m on embedded (dialect embedded)
Data      64 rows with 5,120 tokens, 2,048 of them trained, 0 dropped, 0 skipped
…
Finished  16 steps in 00:12, 5,120 tokens (426 tok/s)
Best      runs/sft/checkpoints/epoch=0-step=16.ckpt (val_loss 1.204)
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tinker_lightning.errors import TinkerLightningError, Unsupported, printable
from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.checkpoint.loaders import PositionedLoader, TrainedPosition
from tinker_lightning.lightning.progress import StepBar, StepCount, clock
from tinker_lightning.remote.lm import RemoteHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.remote.calls import TokenCount

logger = logging.getLogger("tinker_lightning")

_ROUTES = {
    "builtin": "computed on the server in one pass",
    "server": "computed on the server in one pass",
    "retained": "computed here, from a forward pass that the server keeps for the gradient",
    "two-pass": "computed here, in one pass for the log-probabilities and one for the gradient",
}


_SIGNALS = {KeyboardInterrupt: "Ctrl-C", SIGTERMException: "SIGTERM"}


class ReportingCallback(pl.Callback):
    """A callback that adds lines to the reports of a fit."""

    def start_lines(self, trainer: pl.Trainer, module: RemoteModule) -> dict[str, str]:
        """Returns lines by name for the report at the start of training."""
        del trainer, module
        return {}

    def end_lines(self) -> dict[str, str]:
        """Returns lines by name for the report at the end of a fit."""
        return {}


def start_report(trainer: pl.Trainer, module: RemoteModule, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a fit is about to train, by the settings of its model."""
    rank, parameters = settings.get("lora_rank", "unknown"), settings.get("lora_parameters")
    size = f"{parameters:,} parameters on the server" if parameters else "on the server"
    lines = {
        "Model": f"{settings.get('base_model', 'unknown')} on {settings['server']} (dialect {settings['dialect']})",
        "Adapter": f"LoRA of rank {rank}, {size}",
        "Loss": module.lm.handle.remote.loss_name,
        "Data": _describe_data(trainer),
        "Steps": _describe_steps(trainer),
    }
    if (route := settings.get("route")) is not None:
        lines["Loss"] += f", {_ROUTES[route]} (route {route!r})"
    if local := sum(each.numel() for each in module.parameters() if not isinstance(each, RemoteHandle)):
        lines["Adapter"] += f"; {local:,} parameter{'s' * (local > 1)} trained here"
    for callback in _compat.CALLBACKS.get(trainer):
        if isinstance(callback, ReportingCallback):
            lines |= callback.start_lines(trainer, module)
    return lines


def end_report(
    trainer: pl.Trainer, steps: StepCount, tokens: TokenCount, before: Mapping[str, float], skipped: int
) -> dict[str, str]:
    """Returns what a fit has done, with the files that it has written.

    Args:
        trainer: The trainer.
        steps: The steps of the fit.
        tokens: The tokens of the fit.
        before: The scores of a validation before the fit.
        skipped: The number of steps without a gradient, which sent nothing.
    """
    done = _describe_work(steps, tokens)
    lines = {"Finished": done + (f", {skipped:,} of the steps skipped" if skipped > 0 else "")}
    if values := scores(trainer, "val_", "train_loss", "reward"):
        texts = (
            f"{before[name]:.4g} → {each:.4g}" if name in before else f"{each:.4g}" for name, each in values.items()
        )
        lines["Scores"] = ", ".join(f"{name} {text}" for name, text in zip(values, texts, strict=True))
    for each in trainer.checkpoint_callbacks:
        monitor, score = getattr(each, "monitor", None), getattr(each, "best_model_score", None)
        if best := getattr(each, "best_model_path", ""):
            value = "" if monitor is None or score is None else f" ({monitor} {float(score):.4g})"
            lines["Best" if value else "Last"] = f"{_short(best)}{value}"
        if last := getattr(each, "last_model_path", ""):
            lines["Last"] = _short(last)
    for callback in _compat.CALLBACKS.get(trainer):
        if isinstance(callback, ReportingCallback):
            lines |= callback.end_lines()
    return lines


def failure_report(
    trainer: pl.Trainer, steps: StepCount, tokens: TokenCount, files: Mapping[str, int], error: BaseException
) -> dict[str, str]:
    """Returns what a fit has done before an error ended it, and from where it can resume.

    Args:
        trainer: The trainer.
        steps: The steps of the fit.
        tokens: The tokens of the fit.
        files: The checkpoints that the fit has written and their steps, the newest last.
        error: The error.
    """
    name = next((name for kind, name in _SIGNALS.items() if isinstance(error, kind)), type(error).__name__)
    total = f" of {steps.total:,.0f}" if math.isfinite(steps.total) else ""
    lines = {"Stopped": f"by {name} after step {steps.finished:,}{total}: {_describe_work(steps, tokens)}"}
    lines["Resume"] = describe_resume(trainer, steps.finished, files)
    return lines


def describe_resume(trainer: pl.Trainer, finished: int, files: Mapping[str, int]) -> str:
    """Returns from which checkpoint a fit can resume, and how many of the finished steps are lost."""
    if files:
        path, step = list(files.items())[-1]
        lost = finished - step
        text = f"with ckpt_path {_short(path)}, from step {step:,}"
        return text + (f"; {lost:,} later step{'s' * (lost != 1)} will be repeated" if lost > 0 else "")
    if trainer.ckpt_path:
        return f"with ckpt_path {_short(str(trainer.ckpt_path))} again: no checkpoint was written since"
    return (
        "not possible: no checkpoint was written that has more than weights. ModelCheckpoint(every_n_train_steps=100), "
        "without save_weights_only=True, writes one every 100 steps, and OnExceptionCheckpoint(folder) when a fit fails"
    )


def _describe_work(steps: StepCount, tokens: TokenCount) -> str:
    text = f"{steps.taken:,} step{'s' * (steps.taken != 1)} in {clock(steps.elapsed)}"
    text += f", {tokens.trained:,} tokens ({tokens.trained / max(steps.elapsed, 1e-9):,.0f} tok/s)"
    return text + (f", {tokens.sampled:,} sampled" if tokens.sampled else "")


def scores(trainer: pl.Trainer, *prefixes: str) -> dict[str, float]:
    """Returns the last values of the metrics whose names start with a prefix; no counts, and no parts of a metric."""
    values = trainer.callback_metrics
    names = [name for name in values if name.startswith(prefixes) and "/" not in name]
    return {name: float(values[name]) for name in names if not name.endswith("tokens")}


def show_report(trainer: pl.Trainer, lines: Mapping[str, str]) -> None:
    """Prints a report; a trainer without bar and summary gets it in the log."""
    bar = trainer.progress_bar_callback
    if getattr(bar, "is_disabled", False):
        return  # the fit is part of a search
    if bar is None and not _summaries(trainer):
        logger.info("%s", _aligned(lines, None))
        return
    text = printable(_aligned(lines, shutil.get_terminal_size((120, 0)).columns))
    if isinstance(bar, StepBar):
        bar.print(text)
    else:
        print(text)


def _aligned(lines: Mapping[str, str], columns: int | None) -> str:
    """Returns lines under each other, with their texts wrapped to the columns of a terminal."""
    indent = max(map(len, lines)) + 2
    texts = [f"{name:<{indent}}{line}" for name, line in lines.items()]
    if columns is not None:
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        wrapper = textwrap.TextWrapper(max(columns, 2 * indent), subsequent_indent=" " * indent, **options)
        texts = [wrapper.fill(text) for text in texts]
    return "\n".join(texts)


def _describe_data(trainer: pl.Trainer) -> str:
    reports = getattr(trainer.datamodule, "report", None) or {}  # type: ignore[attr-defined]
    loader: Any = trainer.train_dataloader
    if isinstance(loader, PositionedLoader):
        loader = loader.loader
    if isinstance(loader, TrainedPosition):
        text = loader.describe()
    elif counts := reports.get("train"):
        text = f"{counts['rows']:,} rows with {counts['tokens']:,} tokens, {counts['trained_tokens']:,} of them trained"
        names = ("truncated", "dropped", "skipped")
        text += "".join(f", {counts[name]:,} {name}" for name in names if counts[name] or name != "truncated")
    else:
        try:
            text = f"{len(loader.dataset):,} rows"
        except (AttributeError, TypeError):
            text = "a stream, or several loaders"
    validation = reports.get("validation")
    return f"{text}; {validation['rows']:,} to validate" if validation else text


def _describe_steps(trainer: pl.Trainer) -> str:
    count = StepCount(trainer, 0)
    total, size, epochs = count.total, trainer.accumulate_grad_batches, trainer.max_epochs
    text = f"{total:,.0f}" if math.isfinite(total) else "until it is stopped"
    comma = "," if trainer.global_step else ""
    text += f", from step {trainer.global_step:,} on" if comma else ""
    batches = trainer.num_training_batches
    if epochs is not None and epochs > 0 and math.isfinite(batches):
        text += f"{comma} in {epochs:,} epoch{'s' * (epochs > 1)} of {batches:,} batches"
    return text + (f", {size} batches per step" if size > 1 else "")


def _short(path: str) -> str:
    """Returns a path relative to the working directory if that is shorter."""
    return min(path, os.path.relpath(path), key=len) if os.path.isabs(path) else path


def model_settings(module: RemoteModule) -> dict[str, Any]:
    """Returns the settings of a module's model on the server, and the route of its loss."""
    backend = module.lm.backend
    settings: dict[str, Any] = {"server": backend.server, "dialect": backend.dialect.name}
    with contextlib.suppress(Unsupported):  # by clients of some vendors
        info = backend.get_info()
        settings["base_model"] = info.model_data.model_name
        settings["lora_rank"] = info.lora_rank
        settings["lora_parameters"] = info.lora_parameters
    with contextlib.suppress(TinkerLightningError):  # raised by the step, if it uses the loss
        settings["route"] = module.chosen_route().route
    return {name: value for name, value in settings.items() if value is not None}


def hide_summary(trainer: pl.Trainer) -> None:
    """Drops Lightning's summary, which would count the handle as the one parameter of the remote model."""
    for each in _summaries(trainer):
        if _compat.SUMMARY_DEPTH.get(each) == 1:  # the trainer's own, not one that the user wants
            _compat.SUMMARY_DEPTH.set(each, 0)


def _summaries(trainer: pl.Trainer) -> list[ModelSummary]:
    return [each for each in _compat.CALLBACKS.get(trainer) if isinstance(each, ModelSummary)]
