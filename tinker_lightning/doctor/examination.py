"""The examination of a server: runs the checks in their order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinker_lightning.doctor import gradients, numbering, optimizer, sampler_checks
from tinker_lightning.doctor.probe import Probe
from tinker_lightning.doctor.report import Check, NotOffered, Report, Result, Status, reason
from tinker_lightning.errors import InvalidInput, NotAnApi, NotFound, TinkerLightningError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.client.service import ServiceClient

logger = logging.getLogger("tinker_lightning.doctor")

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
