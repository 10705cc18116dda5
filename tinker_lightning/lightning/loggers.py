"""Loggers in a fit that resumes: the rows that they wrote after the checkpoint, and the W&B runs that it continues.

A checkpoint names the W&B runs of its fit, and has the number of rows that were written before it. A fit that resumes
from it drops later rows, and keeps a copy:

    metrics.csv                           rows of the steps 0 … 49 | 50 … 57, at which the run was killed

    metrics.csv                           rows of the steps 0 … 49, to which the resumed fit adds 50, 51, …
    metrics.csv.before-resume-at-50       the whole file as it was
"""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import struct
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.checkpoint.format import read_rows, read_runs, read_section

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import lightning.pytorch as pl
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

logger = logging.getLogger("tinker_lightning")

# The format of W&B's files, a LevelDB log: a header, and blocks in which records are stored in parts.
_HEADER, _BLOCK, _PART = 7, 2**15, struct.Struct("<IHB")
_ENDS = (1, 4)  # the kinds of a part that is a whole record, and of the last part of one


def describe_rows(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns how many rows were logged, as a checkpoint keeps it: to CSV files by name, to W&B runs by id.

    W&B writes a file in each process, so its number comes with the folder of the file. A run that has ended has none.
    """
    files, runs = {}, {}
    for each in _loggers(trainer, CSVLogger):
        each.save()  # what it has not written yet
        fs, path = url_to_fs(_csv_file(each))
        files[_csv_name(each)] = _read(fs, path).count(b"\n") - 1 if fs.isfile(path) else 0
    for each in _loggers(trainer, WandbLogger):
        import wandb  # takes a second

        with contextlib.suppress(wandb.Error):
            if each.version:
                runs[str(each.version)] = [Path(each.experiment.dir).parent.name, each.experiment.step]
    return {"csv": files, "wandb": runs}


def flush_csv(trainer: pl.Trainer) -> None:
    """Writes what each `CSVLogger` has logged, so that its file can be read during the fit; only to local disks."""
    for each in _loggers(trainer, CSVLogger):
        if isinstance(url_to_fs(_csv_file(each))[0], LocalFileSystem):
            each.save()


def reopen_csv(trainer: pl.Trainer) -> None:
    """Makes each `CSVLogger` append to the file of its version, which Lightning would delete."""
    for each in _loggers(trainer, CSVLogger):
        fs, path = url_to_fs(_csv_file(each))
        kept = f"{path}.kept"
        if fs.isfile(kept) and not fs.isfile(path):  # a process was killed in here
            fs.mv(kept, path)
        if not fs.isfile(path):
            continue
        fs.copy(path, kept)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*exists and is not empty")
            writer: Any = each.experiment
        if fs.isfile(path):  # the logger was in use before
            fs.rm(kept)
        else:
            fs.mv(kept, path)
        header = _read(fs, path).decode("utf-8").splitlines()[:1]
        writer.metrics_keys = next(csv.reader(header), [])


def drop_later_rows(trainer: pl.Trainer, section: dict[str, Any], file: object, step: int, *, logs_again: bool) -> None:
    """Drops the rows that were logged after a checkpoint; files of other CSV runs are set aside as a whole.

    Args:
        trainer: The trainer, whose fit resumes.
        section: The section of the checkpoint.
        file: The file of the checkpoint, for errors.
        step: The step of the checkpoint.
        logs_again: Whether the fit also logs the rows of the checkpoint's own step, which follow the checkpoint.
    """
    saved = read_rows(section, file)
    for each in _loggers(trainer, CSVLogger):
        rows = saved["csv"].get(_csv_name(each))
        _cut_csv(_csv_file(each), Cut(rows or 0, step, -1 if logs_again or rows is None else step))
    for each in _loggers(trainer, WandbLogger):
        if str(each.version) in saved["wandb"]:
            folder, rows = saved["wandb"][str(each.version)]
            _drop_wandb(each.experiment, folder, Cut(rows, step, -1 if logs_again else step))


@dataclass(frozen=True, slots=True)
class Cut:
    """The place at which a file is cut off.

    Args:
        rows: The number of rows before the checkpoint, which stay.
        step: The step of the checkpoint.
        first: The first step that is logged again; rows of steps before it stay, too.
    """

    rows: int
    step: int
    first: int

    def is_before(self, index: int, step: Any) -> bool:
        """Returns whether the cut is before a row, given with its step as text."""
        return index >= self.rows and (self.first < 0 or not str(step).isdigit() or int(step) >= self.first)


def _cut_csv(file: str, cut: Cut) -> None:
    fs, path = url_to_fs(file)
    if not fs.isfile(path):
        return
    content = _read(fs, path)
    header, *lines = content.splitlines(keepends=True) or [b""]  # a process was killed before it wrote the header
    steps = [row.get("step") for row in csv.DictReader(content.decode("utf-8").splitlines())]
    count = next((i for i, step in enumerate(steps) if cut.is_before(i, step)), len(lines))
    if count < len(lines):
        keep_copy(file, cut.step)
        with fs.open(path, "wb") as stream:
            stream.write(b"".join([header, *lines[:count]]))


def _drop_wandb(run: Any, folder: str, cut: Cut) -> None:
    own = Path(run.dir).parent
    for file in own.parent.glob(f"offline-run-*/run-{run.id}.wandb"):
        name = file.parent.name  # which starts with a time
        if name != own.name and name >= folder:
            _cut_wandb(file, cut if name == folder else replace(cut, rows=0))
    is_same_process = own.name == folder
    if (is_same_process or not run.offline) and run.step > cut.rows:
        logger.warning(
            "the W&B run %s has %d rows after the checkpoint, which stay. Accounts with W&B's preview of rewinding can "
            "drop them when the run has ended: resume with WandbLogger(resume=None, resume_from='%s?_step=%d').",
            run.id,
            run.step - cut.rows,
            run.id,
            cut.rows - 1,
        )


def _cut_wandb(file: Path, cut: Cut) -> None:
    """Cuts off the file of an offline run, as if the run had been killed there."""
    from wandb.proto import wandb_internal_pb2

    count, log = 0, file.read_bytes()
    try:
        for start, record in wandb_records(log):
            message = wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined]  # created at import
            if message.HasField("history"):
                items = {(item.key or ".".join(item.nested_key)): item.value_json for item in message.history.item}
                if cut.is_before(count, items.get("trainer/global_step")):
                    part = file.with_suffix(".part")
                    part.write_bytes(log[:start])
                    # Not a copy: W&B's own process may still be writing the end of the file.
                    file.rename(_name_of_copy(str(file), cut.step))
                    part.rename(file)
                    return
                count += 1
    except DecodeError as error:
        logger.warning("rows after the checkpoint stay in %s, which cannot be read: %s", file, error)


def wandb_records(log: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the records of a `.wandb` file, each with its position; not the last one if it is incomplete."""
    position = start = _HEADER
    record = b""
    while position + _PART.size <= len(log):
        if _BLOCK - position % _BLOCK < _PART.size:
            position += _BLOCK - position % _BLOCK  # the rest of a block is too short for a part
            continue
        _, size, kind = _PART.unpack_from(log, position)
        position += _PART.size + size
        if position > len(log):
            return
        record += log[position - size : position]
        if kind in _ENDS:
            yield start, record
            start, record = position, b""


def keep_copy(file: str, step: int) -> None:
    """Copies a file from which a resumed run drops rows."""
    fs, path = url_to_fs(file)
    fs.copy(path, _name_of_copy(file, step))


def _name_of_copy(file: str, step: int) -> str:
    fs, path = url_to_fs(file)
    name = copy = f"{path}.before-resume-at-{step}"
    number = 1
    while fs.exists(copy):
        number += 1
        copy = f"{name}-{number}"
    rank_zero_info(f"Rows after step {step} are dropped from {path}, because they are logged again; {copy} has them.")
    return copy


def _csv_name(each: CSVLogger) -> str:
    return f"{each.name}/{each.version}"


def _csv_file(each: CSVLogger) -> str:
    return f"{each.log_dir}/metrics.csv"


def _read(fs: AbstractFileSystem, path: str) -> bytes:
    content: bytes = fs.cat_file(path)
    return content


def describe_runs(trainer: pl.Trainer) -> list[dict[str, str]]:
    """Returns the project and id of each run, as a checkpoint keeps them."""
    return [
        {"project": str(each.name), "id": str(each.version)} for each in _loggers(trainer, WandbLogger) if each.version
    ]


def adopt_runs(trainer: pl.Trainer, file: Any) -> None:
    """Makes loggers without an id of their own continue the runs that the checkpoint of a fit names."""
    loggers = _loggers(trainer, WandbLogger)
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


def warn_of_other_runs(trainer: pl.Trainer, section: dict[str, Any], file: object, step: int) -> None:
    """Warns if a resumed fit logs to other runs than the one that it resumes."""
    for each, state in zip(_loggers(trainer, WandbLogger), read_runs(section, file), strict=False):
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
    for each in _loggers(trainer, WandbLogger):
        each.log_hyperparams(dict(settings))


def log_file(trainer: pl.Trainer, file: object, states: Iterable[str]) -> None:
    """Adds a checkpoint file and the remote states that it names to the summary of each run; removes it without any."""
    for each in _loggers(trainer, WandbLogger):
        checkpoints = dict(each.experiment.summary.get("checkpoints") or {})
        checkpoints.pop(str(file), None)
        if paths := sorted(states):
            checkpoints[str(file)] = ", ".join(paths)
        each.experiment.summary["checkpoints"] = checkpoints


def _loggers(trainer: pl.Trainer, kind: type[Any]) -> list[Any]:
    return [each for each in trainer.loggers if isinstance(each, kind)]
