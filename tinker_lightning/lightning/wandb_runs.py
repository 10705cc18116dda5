"""W&B runs of a fit: a resumed fit continues the runs of its checkpoint, with its settings and files."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import WandbLogger

from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.checkpoint.format import read_runs, read_section

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import lightning.pytorch as pl


logger = logging.getLogger("tinker_lightning")


def describe(trainer: pl.Trainer) -> list[dict[str, str]]:
    """Returns the project and id of each run, as a checkpoint keeps them."""
    return [{"project": str(each.name), "id": str(each.version)} for each in _loggers(trainer) if each.version]


def adopt(trainer: pl.Trainer, file: Any) -> None:
    """Makes loggers without an id of their own continue the runs that the checkpoint of a fit names."""
    loggers = _loggers(trainer)
    if not loggers:
        return
    try:
        runs = read_runs(read_section(trainer.strategy.checkpoint_io.load_checkpoint(file), file), file)
    except Exception:  # raised again when Lightning loads the file
        return
    for each, run in zip(loggers, runs, strict=False):
        settings = _compat.WANDB_INIT.get(each)
        # Set if a run is under way, or if the user has chosen one, or a row of one.
        has_id = each.version is not None or bool(os.environ.get("WANDB_RUN_ID"))
        has_id = has_id or bool(settings.get("resume_from") or settings.get("fork_from"))
        if not has_id and each.name == run["project"]:
            settings["id"] = run["id"]


def warn_if_other(trainer: pl.Trainer, section: dict[str, Any], file: object, step: int) -> None:
    """Warns if a resumed fit logs to other runs than the one that it resumes."""
    for each, state in zip(_loggers(trainer), read_runs(section, file), strict=False):
        project, run = state["project"], state["id"]
        if (str(each.name), str(each.version)) != (project, run):
            logger.warning(
                "the fit resumes at step %d, but the steps before are in the W&B run %s of project %s, and this one "
                "logs to %s of %s. To continue that run, pass WandbLogger(id=%r, project=%r).",
                step,
                run,
                project,
                each.version,
                each.name,
                run,
                project,
            )


def log_settings(trainer: pl.Trainer, settings: Mapping[str, Any]) -> None:
    """Adds settings that are not arguments of the module, such as the server, to the config of each run."""
    for each in _loggers(trainer):
        each.log_hyperparams(dict(settings))


def log_file(trainer: pl.Trainer, file: object, states: Iterable[str]) -> None:
    """Adds a checkpoint file and the remote states that it names to the summary of each run; removes it without any."""
    for each in _loggers(trainer):
        checkpoints = dict(each.experiment.summary.get("checkpoints") or {})
        checkpoints.pop(str(file), None)
        if paths := sorted(states):
            checkpoints[str(file)] = ", ".join(paths)
        each.experiment.summary["checkpoints"] = checkpoints


def _loggers(trainer: pl.Trainer) -> list[WandbLogger]:
    return [each for each in trainer.loggers if isinstance(each, WandbLogger)]
