"""The examination of a server: runs the checks in their order, and reports what they found.

A `Check` runs on a `Probe` and returns a `Finding`, or raises `NotOffered`. The examination turns it into a `Result`,
and a `Report` collects the results with the dialect that follows from them.
"""

from __future__ import annotations

import json
import logging
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.doctor import gradients, numbering, optimizer, sampler_checks
from tinker_lightning.doctor.probe import Check, NotOffered, Probe, reason
from tinker_lightning.errors import InvalidInput, NotAnApi, NotFound, TinkerLightningError, Unsupported, printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from tinker_lightning.client.service import ServiceClient

logger = logging.getLogger("tinker_lightning.doctor")

_STATUS_WIDTH = 13
_GENERATIONS = {
    "protobuf": "protobuf passes (of SDKs from 0.25 on)",
    "json": "JSON passes (of SDKs up to 0.24)",
}

Status: TypeAlias = Literal["ok", "failed", "not offered", "crashed"]


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
        return printable("\n".join(lines))


CHECKS: tuple[Check, ...] = (
    gradients.LINEAR,
    gradients.LENGTH,
    gradients.BATCH,
    gradients.CALLS,
    gradients.ADVANTAGES,
    numbering.ORDER,
    numbering.REPEATS,
    numbering.REFUSED,
    optimizer.ZERO_RATE,
    optimizer.CLIPPING,
    optimizer.RESTORED,
    optimizer.SEED,
    optimizer.FLAGS,
    sampler_checks.AGREEMENT,
    sampler_checks.LIVE,
    sampler_checks.DELETION,
    gradients.CUSTOM,  # the last one, because it uses what the others have measured
)
# The maximum number of tokens that all checks together pass to a server.
TOKENS = 3_000


def examine(service: ServiceClient, base_model: str | None = None, checks: Sequence[Check] = CHECKS) -> Report:
    """Checks a server on scratch models, which are removed afterwards.

    Args:
        service: A client of the server.
        base_model: The base model to use; by default, `tiny` or the first one that the server announces.
        checks: The checks to run.

    Raises:
        InvalidInput: If there is no base model.
    """
    capabilities = service.get_server_capabilities()
    models = [each.model_name for each in capabilities.supported_models if each.model_name]
    base_model = base_model or ("tiny" if "tiny" in models else next(iter(models), None))
    if base_model is None:
        raise InvalidInput(f"{service.url} announces no models; name one with base_model= (--model)")
    probe = Probe(service, base_model)
    results = []
    try:
        for number, check in enumerate(checks, 1):
            logger.info("check %d of %d: %s", number, len(checks), check.name)
            results.append(_run(check, probe))
            probe.statuses[check.name] = results[-1].status
            probe.end_check()
    finally:
        probe.close()
    return Report(service.url, base_model, models, capabilities.extensions, probe.dialect, results, probe.left)


def _run(check: Check, probe: Probe) -> Result:
    try:
        finding = check.run(probe)
        probe.dialect = probe.dialect.but(**finding.dialect)
    except NotOffered as error:
        probe.dialect = probe.dialect.but(**error.dialect)
        return Result(check.name, check.shows, "not offered", str(error))
    except TinkerLightningError as error:
        status: Status = "not offered" if _is_missing_endpoint(error) else "crashed"
        return Result(check.name, check.shows, status, f"{type(error).__name__}: {reason(error)}")
    except Exception as error:  # a defect of one check does not end the others
        logger.debug("the check %s crashed", check.name, exc_info=True)
        return Result(check.name, check.shows, "crashed", f"{type(error).__name__}: {error}")
    if finding.fault is not None:
        return Result(check.name, check.shows, "failed", finding.fault, check.advice)
    return Result(check.name, check.shows, "ok", finding.detail)


def _is_missing_endpoint(error: TinkerLightningError) -> bool:
    """Returns whether an error is a web framework's response to a path that the server does not have."""
    text = str(error)
    if isinstance(error, Unsupported):
        return True
    if isinstance(error, NotFound):
        return text.endswith(": Not Found")
    return (isinstance(error, NotAnApi) and "HTTP 404" in text) or "Method Not Allowed" in text
