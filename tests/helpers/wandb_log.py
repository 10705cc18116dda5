"""Reads the file that an offline W&B run leaves, by W&B's own protobuf classes."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from wandb.proto import wandb_internal_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def history(file: Path) -> list[dict[str, Any]]:
    """The rows of a finished run, in the order in which they were written."""
    rows = (record.history.item for record in finished_records(file) if record.HasField("history"))
    return [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]


def finished_records(file: Path) -> list[Any]:
    """What stands in a finished run's file; W&B writes it in a process of its own, which `finish` does not wait for."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        records: list[Any] = []
        with contextlib.suppress(DecodeError):  # a record that is only half written
            for data in wandb_records(file.read_bytes()):
                records.append(wandb_internal_pb2.Record())  # type: ignore[attr-defined]  # made when it is imported
                records[-1].ParseFromString(data)
            if records and records[-1].HasField("exit"):
                return records
        time.sleep(0.01)
    raise AssertionError(f"{file} has no end")


def wandb_records(log: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file, a LevelDB log: blocks of 32 KiB, and records in parts across them."""
    position, record, last = 7, b"", (1, 4)  # behind the file's header; a part that is whole or the end of a record
    while position + 7 <= len(log):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15  # no room for a part's header
            continue
        _, size, kind = struct.unpack_from("<IHB", log, position)
        record += log[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in last:
            yield record
            record = b""
