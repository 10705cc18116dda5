"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tinker_lightning.doctor.probe import Probe
from tinker_lightning.errors import TinkerLightningError

Status: TypeAlias = Literal["ok", "failed", "not offered", "crashed"]


class NotOffered(Exception):
    """Ends a check of something that the server does not offer.

    Args:
        reason: What is missing.
        dialect: The fields of the dialect that follow from it.
    """

    def __init__(self, reason: str, **dialect: Any) -> None:
        super().__init__(reason)
        self.dialect = dialect


def reason(error: BaseException) -> str:
    """Returns the message of an error without the ids of the request, which are different each time."""
    while isinstance(error, TinkerLightningError) and error.operation is not None and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found.

    Args:
        fault: What is wrong; None if nothing is.
        detail: What was measured.
        dialect: The fields of the dialect that follow from it.
    """

    fault: str | None = None
    detail: str = ""
    dialect: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: A short name.
        shows: What the server does if the check passes.
        advice: What to do if it fails.
        run: Runs it. Raises `NotOffered` if the server has no such function.
    """

    name: str
    shows: str
    advice: str
    run: Callable[[Probe], Finding]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a check."""

    name: str
    shows: str
    status: Status
    detail: str = ""
    advice: str = ""
