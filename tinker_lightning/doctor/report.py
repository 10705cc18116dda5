"""Checks, their results, and the report of an examination.

A `Check` runs on a `Probe` and returns a `Finding`, or raises `NotOffered`. The examination turns it into a `Result`,
and a `Report` collects the results with the dialect that follows from them.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.doctor.probe import Probe
from tinker_lightning.errors import TinkerLightningError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_STATUS_WIDTH = 13
_GENERATIONS = {
    "protobuf": "protobuf passes (of SDKs from 0.25 on)",
    "json": "JSON passes (of SDKs up to 0.24)",
}

Status: TypeAlias = Literal["ok", "failed", "not offered", "crashed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: A short name.
        shows: The behavior of a server that passes.
        advice: The advice if it fails.
        run: Runs it. Raises `NotOffered` if the server has no such function.
    """

    name: str
    shows: str
    advice: str
    run: Callable[[Probe], Finding]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check that ran.

    Args:
        fault: The fault of the server; None if there is none.
        detail: The measurement.
        dialect: The fields of the dialect that follow from it.
    """

    fault: str | None = None
    detail: str = ""
    dialect: dict[str, Any] = field(default_factory=dict)


class NotOffered(Exception):
    """Ends a check of a function that the server does not offer.

    Args:
        reason: The missing function.
        dialect: The fields of the dialect that follow from it.
    """

    def __init__(self, reason: str, **dialect: Any) -> None:
        super().__init__(reason)
        self.dialect = dialect


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check in the report."""

    name: str
    shows: str
    status: Status
    detail: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks, and the dialect that follows from them.

    Args:
        url: The URL of the server.
        base_model: The base model that was used.
        models: The models that the server announces.
        extensions: The extensions that it announces.
        dialect: The detected dialect, updated by the measurements.
        results: The results of the checks.
        left: The checkpoints that the server could not delete.
    """

    url: str
    base_model: str
    models: Sequence[str]
    extensions: Sequence[str]
    dialect: Dialect
    results: Sequence[Result]
    left: Sequence[str] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether no check has failed or crashed."""
        return all(result.status in ("ok", "not offered") for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data. `connect(dialect=...)` takes a file that contains it as JSON."""
        return {
            "url": self.url,
            "base_model": self.base_model,
            "models": list(self.models),
            "extensions": list(self.extensions),
            "checks": [asdict(result) for result in self.results],
            "left": list(self.left),
            "dialect": self.dialect.to_dict(),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Creates a report from what `to_dict` returned."""
        values = {name: value for name, value in plain.items() if name not in ("checks", "dialect")}
        results = [Result(**check) for check in plain["checks"]]
        return cls(**values, results=results, dialect=Dialect.from_dict(plain["dialect"]))

    def table(self, width: int | None = None) -> str:
        """Returns the report as text, by default as wide as the terminal."""
        width = width or max(shutil.get_terminal_size((110, 24)).columns, 60)
        lines = [
            f"{self.url}: dialect {self.dialect.name}, {_GENERATIONS[self.dialect.encoding]}",
            f"models: {', '.join(self.models) or 'none announced'}; checked with {self.base_model}",
            f"extensions: {', '.join(self.extensions) or 'none'}",
            "",
        ]
        indent = " " * (_STATUS_WIDTH + 2)
        for result in self.results:
            status = result.status.upper() if result.status in ("failed", "crashed") else result.status
            detail = f"→ {result.detail}" if result.detail else ""
            for text in filter(None, (f"{result.name}: {result.shows}", detail, result.advice)):
                lines += textwrap.wrap(
                    text, width, initial_indent=status.ljust(_STATUS_WIDTH), subsequent_indent=indent
                )
                status = ""
        counts = Counter(result.status for result in self.results)
        lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items())]
        if self.left:
            lines.append(f"{len(self.left)} checkpoints stay on the server; their paths are in the saved report")
        return "\n".join(lines)


def reason(error: BaseException) -> str:
    """Returns the message of an error without the ids of the request, which are different each time."""
    while isinstance(error, TinkerLightningError) and error.operation is not None and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
