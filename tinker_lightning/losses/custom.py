"""Custom losses as pure functions: the leaves they are computed from, their checks and their gradients.

The protocol's `cross_entropy` is `-sum(w * logp)`. Sending `w = -dC/dlogp` therefore makes the server accumulate the
gradient of any loss `C` that was computed locally from the log-probabilities.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
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
_WARNED_OF_ZERO: set[str] = set()
# The metrics that every pass has in the protocol.
PASS_METRICS = frozenset({"loss:sum", "tokens:sum"})
_CAUSES = "Look for a division by zero, the log of zero, or an exp that overflows"
_GRADIENT_CAUSES = (
    "Look for a square root or a norm of zero, or 0 * inf behind a torch.where; no gradient was accumulated."
)
_ASYNC = (
    "the loss must be a plain function, but {}: it runs on the thread that needs its value. Write it with def, and "
    "make the part that waits an async regularizer."
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The value of a loss, its metrics, and its gradient with respect to the log-probabilities of each datum.

    Metrics are numbers. With regularizers, they are nested (see `losses.regularizers.composition`).
    """

    value: float
    metrics: dict[str, Any]
    gradients: list[Tensor]


def forward_datums(data: Sequence[Datum], *, with_weights: bool = True) -> list[Datum]:
    """Reduces datums to what a forward pass needs: the input, the targets, and weights, which do not affect it."""
    reduced = []
    for i, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise InvalidDatum(
                f"datum {i}: target_tokens: missing; a custom loss needs the tokens whose log-probabilities it reads"
            )
        inputs = {"target_tokens": targets}
        if with_weights:
            weights = datum.loss_fn_inputs.get("weights")
            inputs["weights"] = TensorData(torch.zeros(targets.shape), copy=False) if weights is None else weights
        reduced.append(datum.with_only_inputs(inputs))
    return reduced


def logprob_leaves(output: ForwardBackwardOutput, data: Sequence[Datum]) -> list[Tensor]:
    """Returns the log-probabilities of a forward pass as leaf tensors, one per datum, shaped like its targets."""
    shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in data]
    with torch.inference_mode(False):  # a tensor created in inference mode can never require a gradient
        return [
            logprobs.to_torch().reshape(shape).requires_grad_()
            for logprobs, shape in zip(read_logprobs(output, data), shapes, strict=True)
        ]


def has_logprobs(output: ForwardBackwardOutput) -> bool:
    """Returns whether a pass returned log-probabilities, which some servers leave out of a backward."""
    return bool(output.loss_fn_outputs) and all("logprobs" in tensors for tensors in output.loss_fn_outputs)


def read_logprobs(output: ForwardBackwardOutput, data: Sequence[Datum]) -> list[TensorData]:
    """Returns the log-probabilities of a pass, one tensor per datum; raises `OperationFailed` if one is missing."""
    if len(output.loss_fn_outputs) != len(data):
        raise OperationFailed(
            f"the server answered for {len(output.loss_fn_outputs)} datums, but {len(data)} were sent"
        )
    tensors = []
    for i, (result, datum) in enumerate(zip(output.loss_fn_outputs, data, strict=True)):
        targets = datum.loss_fn_inputs["target_tokens"]
        if "logprobs" not in result:
            raise OperationFailed(f"datum {i}: the server sent no logprobs, only {', '.join(result) or 'nothing'}")
        logprobs = result["logprobs"]
        if math.prod(logprobs.shape) != math.prod(targets.shape):
            raise OperationFailed(
                f"datum {i}: the server sent logprobs of shape {logprobs.shape} for targets of {targets.shape}"
            )
        tensors.append(logprobs)
    return tensors


def differentiate(
    loss_fn: Callable[[], tuple[Tensor, dict[str, Any]]], logprobs: list[Tensor], *, name: str
) -> Evaluation:
    """Runs a loss whose result is already checked, and its backward, on the calling thread.

    Local parameters that the loss uses receive gradients as in any torch code. A datum that it does not use gets a
    zero gradient. `name` is what warnings call the loss.
    """
    with torch.inference_mode(False), torch.enable_grad():
        loss, metrics = loss_fn()
        loss.backward()
    if all(leaf.grad is None for leaf in logprobs):
        raise LossWithoutGradient(no_gradient_message())
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in logprobs]
    if not torch.isfinite(torch.cat([gradient.flatten() for gradient in gradients])).all():
        for i, gradient in enumerate(gradients):
            check_gradient(loss, gradient, f"datum {i}: ")
    warn_if_zero(gradients, name)
    return Evaluation(loss.item(), metrics, gradients)


def add_loss_metrics(output: ForwardBackwardOutput, evaluation: Evaluation) -> ForwardBackwardOutput:
    """Adds the value and metrics of a custom loss to the result of its backward, replacing the server's.

    Metrics named `loss:sum` and `tokens:sum`, which every pass has, become `loss/<name>`.
    """
    metrics: dict[str, Any] = dict(output.metrics)
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
    own = prefix_clashes(evaluation.metrics, PASS_METRICS, "loss")
    metrics |= {"loss:sum": evaluation.value, **own}
    return ForwardBackwardOutput(output.loss_fn_outputs, metrics, output.loss_fn_output_type)


def prefix_clashes(metrics: Mapping[str, Any], taken: Container[str], under: str) -> dict[str, Any]:
    """Prefixes metrics whose names are `taken`, so that no two metrics share a name.

    >>> prefix_clashes({"nll": 2.0, "value": 1.0, "custom/value": 3.0}, {"value"}, "custom")
    {'nll': 2.0, 'custom/value': 1.0, 'custom/custom/value': 3.0}
    """
    prefix = f"{under}/"
    bare = {name: re.sub(f"^({re.escape(prefix)})+", "", name) for name in metrics}
    return {prefix + name if bare[name] in taken else name: value for name, value in metrics.items()}


def loss_and_metrics(
    returned: Any, logprobs: Sequence[Tensor], *, needs_gradient: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """Splits what a loss function returned into loss and metrics; raises `InvalidLoss` if it cannot be trained on."""
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # it will never be awaited
        raise InvalidLoss(_ASYNC.format("returned an awaitable"))
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    check_scalar(loss)
    if needs_gradient:
        check_differentiable(loss)
    check_finite(loss, logprobs)
    return loss, numbers(metrics)


def check_arguments(loss: Any) -> None:
    """Raises `InvalidLoss` if a loss is async or does not take `(data, logprobs)`, before these are requested."""
    if inspect.iscoroutinefunction(loss) or inspect.iscoroutinefunction(loss.__call__):
        raise InvalidLoss(_ASYNC.format(f"{function_name(loss)} is an async function"))
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InvalidLoss(f"the loss must be a function of (data, logprobs), but takes {signature}: {error}") from None


def check_scalar(loss: Any) -> None:
    """Raises `LossNotTensor` or `LossNotScalar` unless a loss is a tensor with a single real value."""
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


def check_differentiable(loss: Tensor, inputs: str = "log-probabilities") -> None:
    """Raises `LossWithoutGradient` if a loss has no gradient; the message names the `inputs` it must depend on."""
    if not loss.requires_grad:
        raise LossWithoutGradient(no_gradient_message(inputs))


def check_finite(
    loss: Tensor, logprobs: Sequence[Tensor] = (), *, what: str = "the loss", fix: str = _CAUSES, hint: str = ""
) -> None:
    """Raises `LossNotFinite`, naming the responsible datums, if a loss is NaN or infinite.

    Args:
        loss: The loss.
        logprobs: What it was computed from.
        what: The subject of the message.
        fix: What the user can do.
        hint: A further cause.
    """
    if not torch.isfinite(loss).all():
        culprits = _culprits(loss, logprobs)
        raise LossNotFinite(f"{what} is {loss.item()}{culprits}. {fix}{hint}; no gradient was accumulated.")


def check_gradient(loss: Tensor | None, gradient: Tensor, where: str = "", fix: str = _GRADIENT_CAUSES) -> None:
    """Raises `LossNotFinite` if a gradient has NaN or infinite entries.

    Args:
        loss: The loss, if its value is known.
        gradient: The gradient.
        where: The start of the message.
        fix: What the user can do.
    """
    if not torch.isfinite(gradient).all():
        subject = "the gradient of the loss" if loss is None else f"the loss is {loss.item()}, but its gradient"
        raise LossNotFinite(f"{where}{subject} has NaN or infinite entries. {fix}")


def warn_if_zero(gradients: Sequence[Tensor], name: str) -> None:
    """Warns, once for each loss, if its gradient is zero for every token of a batch."""
    if not any(gradient.any() for gradient in gradients):
        warn_of_zero(name)


def warn_of_zero(name: str) -> None:
    """Warns, once for each loss, that its gradient is zero."""
    if name not in _WARNED_OF_ZERO:
        _WARNED_OF_ZERO.add(name)
        warnings.warn(
            f"the gradient of the loss {name} is zero for every token of a batch, which therefore trains nothing. "
            "Rounding, comparisons and argmax have no gradient; a batch in which every advantage or weight is 0 has "
            "none either, and is harmless.",
            stacklevel=2,
        )


def numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Converts metrics to the protocol's form, a dict of floats; raises `InvalidLoss` if that is not possible."""
    if not isinstance(metrics, Mapping):
        raise InvalidLoss(f"the loss function returned {type(metrics).__name__} as its metrics, not a dict")
    return {str(name): number(str(name), value) for name, value in metrics.items()}


def number(name: str, value: Any) -> float:
    """Converts the value of a metric to a float; raises `InvalidLoss` if it is not a single number."""
    try:
        # float() would also accept a string that looks like a number.
        return float(value) if isinstance(value, int | float) else float(value.item())
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InvalidLoss(
            f"metric {name!r} is not a single number, but {type(value).__name__}. Reduce it with .mean() or .sum(), or "
            "leave it out."
        ) from error


def no_gradient_message(inputs: str = "log-probabilities") -> str:
    """Returns the error message for a loss that does not depend on its inputs."""
    return (
        f"the loss does not depend on the {inputs}, so there is nothing to train. Compute it from the tensors that it "
        "is given, without .detach(), .item(), .tolist(), numpy or torch.no_grad() in between."
    )


def function_name(function: Any) -> str:
    """Returns the name of a function, also inside a partial, or the class name of any other callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _culprits(loss: Tensor, logprobs: Sequence[Tensor]) -> str:
    """Names the datums whose log-probabilities, or else whose gradients, are not finite."""
    culprits = [i for i, each in enumerate(logprobs) if not torch.isfinite(each).all()]
    what = "log-probabilities that are not finite"
    inputs = [each for each in logprobs if each.requires_grad]
    if not culprits and inputs and loss.requires_grad:
        what = "a gradient that is not finite"
        with contextlib.suppress(RuntimeError):  # raised by anomaly mode, or by a backward that cannot run at all
            gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
            culprits = [i for i, each in enumerate(gradients) if each is not None and not torch.isfinite(each).all()]
    if not culprits:
        return ""
    indices = ", ".join(map(str, culprits[:8])) + (", …" if len(culprits) > 8 else "")
    return f"; {'datum' if len(culprits) == 1 else 'datums'} {indices} of {len(logprobs)}: {what}"
