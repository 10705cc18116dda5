"""Reads the file that an offline W&B run leaves, by W&B's own protobuf classes."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from wandb.proto import wandb_internal_pb2

from tinker_lightning.lightning.loggers import wandb_records

if TYPE_CHECKING:
    from pathlib import Path


def history(file: Path) -> list[dict[str, Any]]:
    """The rows of a finished run, in the order in which they were written."""
    rows = (record.history.item for record in finished_records(file) if record.HasField("history"))
    return [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]


def finished_records(file: Path) -> list[Any]:
    """What stands in a finished run's file; W&B writes it in a process of its own, which `finish` does not wait for.

    A file from which a resumed run has dropped rows is cut off, and has no end.
    """
    is_cut = any(file.parent.glob(f"{file.name}.before-resume-at-*"))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        records: list[Any] = []
        with contextlib.suppress(DecodeError):  # a record that is only half written
            for _, data in wandb_records(file.read_bytes()):
                records.append(wandb_internal_pb2.Record())  # type: ignore[attr-defined]  # made when it is imported
                records[-1].ParseFromString(data)
            if records and (is_cut or records[-1].HasField("exit")):
                return records
        time.sleep(0.01)
    raise AssertionError(f"{file} has no end")
