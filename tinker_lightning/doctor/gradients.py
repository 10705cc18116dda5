"""Checks of the gradients of built-in losses, and of the custom losses that this client sends by them.

A surrogate is a built-in loss whose gradient is linear in its weights or advantages, so that it can carry the gradient
of a custom loss. The checks measure which losses are surrogates, and by what their gradients are divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from tinker_lightning.client.dialects import measure
from tinker_lightning.client.dialects.measure import LENGTHS, Call, differs, ratio
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.doctor.probe import Check, Finding, NotOffered
from tinker_lightning.errors import InvalidInput, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tinker_lightning.client.dialects.measure import Scratch
    from tinker_lightning.doctor.probe import Probe

# The gradient of the custom loss that is checked, by datum and position: of both signs, with a sum of zero in a datum.
_GRADIENT = {(0, 1): 1.0, (0, 3): -1.0, (1, 6): 0.7}
_FAILS = "it fails"
_CORRECTED = "This client sends custom losses by another loss if one is exact here: see the last check. "


Carrier: TypeAlias = Literal["importance_sampling", "cispo"]
"""A loss other than `cross_entropy` that can carry the gradients of custom losses."""


def _plain(fault: Callable[[measure.Scratch], str | None]) -> Callable[[Probe], Finding]:
    def run(probe: Probe) -> Finding:
        return Finding(fault(probe.scratch))

    return run


def _entropy_is_plain(probe: Probe) -> bool | None:
    """Returns whether `cross_entropy` is a plain sum; None if not all checks of that have run."""
    statuses = [probe.statuses.get(check.name) for check in (LINEAR, LENGTH, BATCH, CALLS)]
    if "failed" in statuses:
        return False
    return True if set(statuses) == {"ok"} else None


def _advantages(probe: Probe) -> Finding:
    """Also decides which loss carries the gradients of custom losses, if `cross_entropy` was measured."""
    surrogates: dict[str, Surrogate | str] = {
        "cispo": _surrogate(probe.scratch, "cispo"),
        "importance_sampling": _surrogate(probe.scratch, "importance_sampling"),
    }
    linear = [each for each in surrogates.values() if isinstance(each, Surrogate)]
    dialect: dict[str, Any] = {}
    if (is_plain := _entropy_is_plain(probe)) is not None:
        carrier = Surrogate() if is_plain else next(iter(linear), None)
        dialect = {"surrogate": carrier, "losses": _losses(probe, carrier, surrogates), "sends_other_losses": False}
    surrogate = surrogates["importance_sampling"]
    if isinstance(surrogate, str):
        if surrogate.startswith(_FAILS):
            raise NotOffered(f"importance_sampling: {surrogate}", **dialect)
        return Finding(f"importance_sampling: {surrogate}", dialect=dialect)
    factors = [
        *(["the length of each sequence"] if surrogate.per_length else []),
        *(["the number of sequences of a call"] if surrogate.per_batch == "call" else []),
        *(["the number of sequences since the last step"] if surrogate.per_batch == "window" else []),
    ]
    fault = f"importance_sampling is divided by {' and by '.join(factors)}" if factors else None
    return Finding(fault, dialect=dialect)


def _losses(probe: Probe, carrier: Surrogate | None, surrogates: dict[str, Surrogate | str]) -> frozenset[str] | None:
    """Returns the built-in losses that agree with the protocol up to the factors of the carrier; None for all."""
    if carrier is None:
        return frozenset()
    factors = carrier.per_length, carrier.per_batch
    good = {
        loss
        for loss, each in surrogates.items()
        if isinstance(each, Surrogate) and (each.per_length, each.per_batch) == factors
    }
    if carrier.loss == "cross_entropy":
        good.add("cross_entropy")
    listed = probe.dialect.losses
    if listed is not None:
        return frozenset(good | (listed - {"cross_entropy", *surrogates}))
    return None if {"cross_entropy", "importance_sampling"} <= good else frozenset(good)


def _custom(probe: Probe) -> Finding:
    session, scratch = probe.service.session, probe.scratch
    surrogate = probe.dialect.surrogate
    if surrogate is None:
        return Finding("no built-in loss of this server is known to carry the gradient of a custom loss exactly")
    truth = _truth(scratch)
    raw, session.dialect = session.dialect, probe.dialect
    try:
        for calls in ([[0, 1]], [[0], [1]]):
            change = scratch.change(lambda calls=calls: [_send(scratch, call) for call in calls])  # type: ignore[misc]
            if measure.differs(change, truth):
                cosine = float(change @ truth / max(float(np.linalg.norm(change) * np.linalg.norm(truth)), 1e-30))
                return Finding(
                    f"sent in {len(calls)} call(s) as {surrogate.loss}, a custom loss has the wrong gradient: cosine "
                    f"{cosine:.4f}, norm {measure.ratio(change, truth):.4g} times the right one",
                    dialect={"surrogate": None},
                )
    finally:
        session.dialect = raw
    return Finding(detail=f"sent as {surrogate.loss}")


def _truth(scratch: measure.Scratch) -> NDArray[np.float64]:
    """Returns the response to the gradient of the custom loss, whatever the server divides `cross_entropy` by.

    All parts are measured in one sequence and so have one factor, which is measured at its first token: a sequence of
    only this token does not have it.
    """
    whole, divided = scratch.response([measure.ONE_TOKEN]), scratch.response([measure.at_token(1, 0)])
    total = np.zeros_like(whole)
    for (_, k), gradient in _GRADIENT.items():
        total -= gradient * scratch.response([measure.at_token(1, k)])
    return total * measure.ratio(whole, divided)


def _send(scratch: measure.Scratch, datums: Sequence[int]) -> object:
    def loss(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [g * logprobs[datums.index(i)][k] for (i, k), g in _GRADIENT.items() if i in datums]
        return torch.stack(terms).sum(), {}

    return scratch.backend.forward_backward_custom([scratch.data[i] for i in datums], loss)


def _surrogate(scratch: Scratch, loss: Carrier) -> Surrogate | str:
    """Returns how a loss carries gradients on a server, with its factors, or the reason why it cannot."""
    try:
        return _measure(scratch, loss, 1)
    except (InvalidInput, OperationFailed) as error:
        try:
            return _measure(scratch, loss, 2)  # some servers need an even number of sequences
        except (InvalidInput, OperationFailed):
            return f"{_FAILS}: {error}"


def _measure(scratch: Scratch, loss: Carrier, unit: int) -> Surrogate | str:
    """Measures the factors in calls of at least `unit` sequences, of which one has an advantage: at its first token.

    The first token has the same gradient in both datums, so that only factors make a difference.
    """
    logprobs = scratch.start_logprobs
    config = Surrogate(loss).config

    def inputs(i: int, advantage: float) -> Mapping[str, NDArray[np.float32]]:
        advantages = np.zeros(LENGTHS[i], np.float32)
        advantages[0] = advantage
        return {"advantages": advantages, "logprobs": logprobs[i]}

    def call(datums: Sequence[int], advantage: float) -> Call:
        return Call(datums, [inputs(i, 0.0 if k else advantage) for k, i in enumerate(datums)], loss, config)

    one = [0] * unit
    base = scratch.response([call(one, 1.0)])
    if not base[0] > 0 or differs(scratch.response([call(one, -2.0)]), -2 * base):
        return "its gradient is not linear in the advantages"
    long = scratch.response([call([1, *one[1:]], 1.0)])
    # The other sequences have another length, so that a mean over the tokens is not taken for one over the sequences.
    others = [1] * unit
    wide = scratch.response([call([*one, *others], 1.0)])
    split = scratch.response([call(one, 1.0), call(others, 0.0)])
    per_length = not differs(long, base * LENGTHS[0] / LENGTHS[1])
    if not per_length and differs(long, base):
        return (
            f"a sequence of {LENGTHS[1]} instead of {LENGTHS[0]} tokens has {ratio(long, base):.3g} times the gradient"
        )
    per_call, per_window = (not differs(response, base / 2) for response in (wide, split))
    if (differs(wide, base) and not per_call) or (differs(split, base) and not per_window) or per_window > per_call:
        return (
            f"with twice as many sequences, the gradient is {ratio(wide, base):.3g} times as large in one call, and "
            f"{ratio(split, base):.3g} times in two"
        )
    per_batch: Literal["no", "call", "window"] = "window" if per_window else "call" if per_call else "no"
    return Surrogate(loss, per_length=per_length, per_batch=per_batch, even_batch=unit > 1)


LINEAR = Check(
    "linear",
    "the gradient of cross_entropy is linear in the weights: sign, negative, zero sum",
    _CORRECTED + "The official SDK's custom losses train wrong on this server.",
    _plain(measure.linearity_fault),
)
LENGTH = Check(
    "length",
    "the gradient of a token does not depend on the length of its sequence",
    _CORRECTED + "With other clients, tokens of long sequences count less than those of short ones.",
    _plain(measure.length_fault),
)
BATCH = Check(
    "batch",
    "the gradients of datums in one call add up",
    _CORRECTED + "With other clients, the learning rate depends on the batch.",
    _plain(measure.batch_fault),
)
CALLS = Check(
    "calls",
    "the gradients of several calls add up",
    _CORRECTED + "With other clients, the learning rate depends on the number of calls per step.",
    _plain(measure.calls_fault),
)
ADVANTAGES = Check(
    "advantages",
    "importance_sampling is a plain sum, linear in the advantages",
    "This client multiplies the advantages by known factors. With other clients, scale the learning rate.",
    _advantages,
)
CUSTOM = Check(
    "custom losses",
    "custom losses of this client have their exact gradient",
    "Do not train custom losses on this server. Make its cross_entropy the plain sum of -weights * logprobs.",
    _custom,
)
