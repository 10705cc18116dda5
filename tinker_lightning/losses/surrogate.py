"""Custom losses as pure functions: leaves, checks, and the datums that carry a loss's gradient.

The server's `cross_entropy` is `-sum(w * logp)`. Sending `w = -dC/dlogp` therefore makes it accumulate the gradient of
any loss `C` that was computed here from the log-probabilities.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinker_lightning.errors import (
    InvalidDatum,
    InvalidLoss,
    LossNotFinite,
    LossNotScalar,
    LossNotTensor,
    LossWithoutGradient,
    OperationFailed,
)
from tinker_lightning.types import Datum, ForwardBackwardOutput, TensorData

# Takes the datums as the caller gave them and one tensor of log-probabilities for each.
LossFn: TypeAlias = Callable[[list[Any], list[Tensor]], "tuple[Tensor, Mapping[Any, Any]] | Tensor"]

SURROGATE = "cross_entropy"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A loss that was evaluated: its value, its metrics, and its gradient by the log-probabilities of each datum.

    Metrics are numbers; those of a loss with regularizers are nested (`losses.composition`).
    """

    value: float
    metrics: dict[str, Any]
    gradients: list[Tensor]


def forward_datums(data: Sequence[Datum]) -> list[Datum]:
    """What the forward pass needs of each datum: the input, the targets, and weights, which it does not use.

    Raises:
        InvalidDatum: If a datum has no targets; names it.
    """
    reduced = []
    for i, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise InvalidDatum(f"datum {i}: target_tokens: missing; the log-probabilities of a custom loss are theirs")
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            weights = TensorData.from_torch(torch.zeros(targets.shape))
        reduced.append(_with_inputs(datum, {"target_tokens": targets, "weights": weights}))
    return reduced


def leaves(output: ForwardBackwardOutput, data: Sequence[Datum]) -> list[Tensor]:
    """The log-probabilities of a forward pass, one tensor per datum, shaped like its targets, asking for gradients.

    Raises:
        OperationFailed: If the server answered with other lengths than were asked for.
    """
    if len(output.loss_fn_outputs) != len(data):
        raise OperationFailed(
            f"the server answered for {len(output.loss_fn_outputs)} datums, but {len(data)} were sent"
        )
    tensors = []
    with torch.inference_mode(False):  # a tensor made in inference mode can never ask for gradients
        for i, (result, datum) in enumerate(zip(output.loss_fn_outputs, data, strict=True)):
            targets = datum.loss_fn_inputs["target_tokens"]
            if "logprobs" not in result:
                raise OperationFailed(f"datum {i}: the server sent no logprobs, only {', '.join(result) or 'nothing'}")
            logprobs = result["logprobs"]
            if math.prod(logprobs.shape) != math.prod(targets.shape):
                raise OperationFailed(
                    f"datum {i}: the server sent logprobs of shape {logprobs.shape} for targets of {targets.shape}"
                )
            tensors.append(logprobs.to_torch().reshape(targets.shape).requires_grad_())
    return tensors


def evaluate(loss_fn: LossFn, data: list[Any], logprobs: list[Tensor]) -> Evaluation:
    """Runs a loss and its backward on the calling thread.

    Local parameters that the loss uses get their gradients as in any torch code. A datum that it does not use gets a
    gradient of zero.

    Raises:
        InvalidLoss: If the loss is not a finite scalar tensor that depends on the log-probabilities.
    """
    return differentiate(lambda: loss_and_metrics(loss_fn(data, logprobs), logprobs), logprobs)


def differentiate(loss_fn: Callable[[], tuple[Tensor, dict[str, Any]]], logprobs: list[Tensor]) -> Evaluation:
    """As `evaluate`, for a loss and metrics that were checked where they were made."""
    with torch.inference_mode(False), torch.enable_grad():
        loss, metrics = loss_fn()
        loss.backward()
    if all(leaf.grad is None for leaf in logprobs):
        raise LossWithoutGradient(WITHOUT_GRADIENT)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in logprobs]
    if not torch.isfinite(torch.cat([gradient.flatten() for gradient in gradients])).all():
        i = next(i for i, gradient in enumerate(gradients) if not torch.isfinite(gradient).all())
        raise LossNotFinite(
            f"datum {i}: the loss is {loss.item()}, but its gradient has NaN or infinite entries. Look for a "
            "square root or a norm of zero, or 0 * inf behind a torch.where; nothing was sent."
        )
    return Evaluation(loss.item(), metrics, gradients)


def loss_and_metrics(
    returned: Any, logprobs: Sequence[Tensor], *, needs_gradient: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """What a loss function has returned of these log-probabilities, checked before anything gets a gradient.

    Raises:
        InvalidLoss: If the loss is not a finite scalar tensor with a gradient, or a metric is no number.
    """
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    check_kind(loss, needs_gradient=needs_gradient)
    check_finite(loss, logprobs)
    return loss, numbers(metrics)


def linear_datums(data: Sequence[Datum], gradients: Sequence[Tensor]) -> list[Datum]:
    """The datums whose cross-entropy has this gradient: the same inputs and targets, weighted by minus the gradient."""
    return [
        _with_inputs(
            datum,
            {
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": TensorData.from_torch(-gradient),
            },
        )
        for datum, gradient in zip(data, gradients, strict=True)
    ]


def with_metrics(output: ForwardBackwardOutput, evaluation: Evaluation) -> ForwardBackwardOutput:
    """The backward's result with the loss's own value and metrics; the linear stand-in keeps a name of its own."""
    metrics: dict[str, Any] = dict(output.metrics)
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
    metrics |= evaluation.metrics
    metrics["loss:sum"] = evaluation.value
    return ForwardBackwardOutput(output.loss_fn_outputs, metrics, output.loss_fn_output_type)


def numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Metrics as the protocol has them: names are strings, values are floats.

    Raises:
        InvalidLoss: If a value is no single number; names it.
    """
    if not isinstance(metrics, Mapping):
        raise InvalidLoss(f"the loss function returned {type(metrics).__name__} as its metrics, not a dict")
    converted = {}
    for name, value in metrics.items():
        try:
            # A string would pass for a number if it looks like one.
            converted[str(name)] = float(value) if isinstance(value, int | float) else float(value.item())
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise InvalidLoss(
                f"metric {str(name)!r} is no single number, but {type(value).__name__}. Reduce it with .mean() or "
                ".sum(), or leave it out."
            ) from error
    return converted


def check_arguments(loss: Any) -> None:
    """Refuses what cannot be called with datums and log-probabilities, before these are asked for.

    Raises:
        InvalidLoss: Says what it takes.
    """
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # some of what is written in C says nothing of its arguments
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InvalidLoss(f"the loss must be a function of (data, logprobs), but takes {signature}: {error}") from None


def check_kind(loss: Any, *, needs_gradient: bool = True) -> None:
    """Refuses what no gradient can be taken of.

    Raises:
        InvalidLoss: If the loss is no scalar tensor, or has no gradient where it needs one.
    """
    if not isinstance(loss, Tensor):
        raise LossNotTensor(
            f"the loss function returned {type(loss).__name__} as its loss, not a torch tensor. Return (loss, metrics) "
            "and do not call .item() on the loss."
        )
    if loss.numel() != 1 or loss.is_complex():
        raise LossNotScalar(
            f"the loss has the shape {list(loss.shape)} and dtype {loss.dtype}; reduce it to one real value "
            "with .sum() or .mean()"
        )
    if needs_gradient and not loss.requires_grad:
        raise LossWithoutGradient(WITHOUT_GRADIENT)


def check_finite(loss: Tensor, logprobs: Sequence[Tensor] = ()) -> None:
    """Refuses a loss that is NaN or infinite.

    Raises:
        LossNotFinite: Names the datums that make it so, as far as can be seen from their log-probabilities.
    """
    if not torch.isfinite(loss).all():
        raise LossNotFinite(
            f"the loss is {loss.item()}{_culprits(loss, logprobs)}. Look for a division by zero, the log of zero, or "
            "an exp that overflows; nothing was sent."
        )


def _culprits(loss: Tensor, logprobs: Sequence[Tensor]) -> str:
    """The datums whose log-probabilities are not finite, or else those by which the loss has no finite gradient."""
    found = [i for i, each in enumerate(logprobs) if not torch.isfinite(each).all()]
    what = "log-probabilities that are not finite"
    inputs = [each for each in logprobs if each.requires_grad]
    if not found and inputs and loss.requires_grad:
        what = "a gradient that is not finite"
        with contextlib.suppress(RuntimeError):  # of anomaly mode, or of a backward that cannot be run at all
            gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
            found = [i for i, each in enumerate(gradients) if each is not None and not torch.isfinite(each).all()]
    if not found:
        return ""
    named = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
    return f"; {'datum' if len(found) == 1 else 'datums'} {named} of {len(logprobs)}: {what}"


WITHOUT_GRADIENT = (
    "the loss does not depend on the log-probabilities, so there is nothing to train. Compute it from the tensors in "
    "the second argument, without .detach(), .item(), .tolist(), numpy or torch.no_grad() in between."
)


def _with_inputs(datum: Datum, inputs: Mapping[str, TensorData]) -> Datum:
    return Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)
