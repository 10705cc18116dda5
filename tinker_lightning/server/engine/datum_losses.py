"""Per-datum losses, built-in and uploaded, bound to a request: they read their inputs from a datum and evaluate it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidLoss
from tinker_lightning.losses import custom
from tinker_lightning.losses.builtin import LOSSES, threshold_fault
from tinker_lightning.losses.custom import check_differentiable, check_finite, check_gradient, check_scalar
from tinker_lightning.lossgraph.graph_loss import (
    Hyperparameter,
    check_settings,
    dense_tensors,
    meta_tensors,
    select_inputs,
)
from tinker_lightning.lossgraph.program import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tinker_lightning.lossgraph.graph_loss import GraphLoss
    from tinker_lightning.types import Datum, TensorData

# Time limit for an uploaded loss over all datums of a request, without the time spent in the model.
REQUEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class DatumLoss:
    """The loss of one datum, and the tensor to call backward on. Metrics are sums, to be added up over datums."""

    value: float
    term: Tensor
    metrics: dict[str, float]


class BoundLoss:
    """A built-in loss with the settings of one request."""

    def __init__(self, name: str, config: Mapping[str, float | str]) -> None:
        if name not in LOSSES:
            raise InvalidInput(f"loss_fn {name!r} is not registered; available losses: {', '.join(sorted(LOSSES))}")
        self.name = name
        self.spec = LOSSES[name]
        declared = {key: Hyperparameter(default) for key, default in self.spec.settings.items()}
        self.config: dict[str, Any] = {**check_settings(name, declared, config)}
        if self.spec.has_thresholds and (fault := threshold_fault(*self.config.values())):
            raise InvalidInput(f"loss_fn_config: {fault}")

    def read(self, datum: Datum, *, dtype: torch.dtype) -> list[Any]:
        """Returns the arguments of the formula that follow the log-probabilities."""
        shape = datum.loss_fn_inputs["target_tokens"].shape
        if self.spec.is_sequence_level and len(shape) != 1:
            raise InvalidDatum(
                f"target_tokens: has the shape {shape}, but {self.name} has one ratio per sequence and takes one "
                "target per position, [T]. Use ppo for alternatives."
            )
        arguments: list[Any] = []
        for name in self.spec.inputs:
            if name in datum.loss_fn_inputs:
                arguments.append(self._tensor(datum, name, shape, dtype))
            elif name == "weights":
                arguments.append(torch.ones(shape, dtype=dtype))
            else:
                raise InvalidDatum(f"{name}: missing; {self.name} needs target_tokens, {', '.join(self.spec.inputs)}")
        for name, value in self.config.items():
            per_token = name in datum.loss_fn_inputs
            arguments.append(self._tensor(datum, name, shape, dtype) if per_token else value)
        if self.spec.has_thresholds and any(name in datum.loss_fn_inputs for name in self.config):
            *_, low, high = arguments
            advantages = arguments[self.spec.inputs.index("advantages")]
            if fault := threshold_fault(low, high, advantages != 0):
                raise InvalidDatum(fault)
        return arguments

    def _tensor(self, datum: Datum, name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
        tensor = datum.loss_fn_inputs[name]
        if tensor.shape != shape:
            raise InvalidDatum(f"{name}: has the shape {tensor.shape}, but target_tokens has {shape}")
        if not np.isfinite(tensor.values).all():
            at = np.argwhere(~np.isfinite(tensor.values))[0].tolist()
            raise InvalidDatum(f"{name}: the entry at {at} is {tensor.values[tuple(at)]}; it must be finite")
        return tensor.to_torch().to(dtype)

    def counted_positions(self, arguments: Any) -> tuple[Tensor, Tensor] | None:
        """Returns a mask of the positions that the loss and its metrics depend on, and values for the others.

        None if they depend on all.
        """
        inputs = dict(zip(self.spec.inputs, arguments, strict=False))
        if not self.spec.masked_by:
            return None
        masks = [inputs[name] != 0 for name in self.spec.masked_by]
        # Policy losses have a ratio of 1 where nothing is known, which cannot overflow.
        fill = inputs.get("logprobs", torch.zeros_like(masks[0], dtype=arguments[0].dtype))
        return torch.stack(masks).any(0), fill

    def evaluate(self, logprobs: Tensor, arguments: list[Any]) -> DatumLoss:
        """Computes the loss of a datum; raises `LossNotFinite` if it is NaN or infinite."""
        value = self.spec.formula(logprobs, *arguments).sum()
        check_finite(value, fix=self.spec.overflow)
        metrics = self.spec.metrics(logprobs.detach(), *arguments)
        return DatumLoss(value.item(), value, {name: float(number) for name, number in metrics.items()})


class BoundGraph:
    """An uploaded per-datum loss, for the datums of one request."""

    def __init__(self, loss: GraphLoss, reserve: Callable[[int], None] | None = None) -> None:
        self.name = loss.name
        self._loss = loss
        self._reserve = reserve  # takes memory for the tensors of the loss
        self._spent = 0.0  # seconds in the loss, not in the model

    def read(self, datum: Datum, *, dtype: torch.dtype) -> dict[str, TensorData]:
        """Returns the inputs that the loss reads, still sparse because dense ones could have any size."""
        selected = select_inputs(self._loss, datum.loss_fn_inputs)
        # Checks the shapes alone, so that invalid inputs raise before the model runs.
        outputs = {"logprobs": torch.empty(datum.loss_fn_inputs["target_tokens"].shape, dtype=dtype, device="meta")}
        with self._clock() as limits:
            self._loss.check(outputs, meta_tensors(selected, dtype), limits=limits)
        return selected

    def counted_positions(self, _: Any) -> None:
        """Returns None: the loss may depend on the log-probabilities of all positions."""

    def evaluate(self, logprobs: Tensor, inputs: dict[str, TensorData]) -> DatumLoss:
        """Computes the loss of a datum and frees its autograd graph; the returned term is linear in the logprobs."""
        leaf = logprobs.detach().requires_grad_(torch.is_grad_enabled())
        with self._clock() as limits:
            output = self._loss({"logprobs": leaf}, dense_tensors(inputs, logprobs.dtype), limits=limits)
            check_scalar(output.loss)
            check_finite(output.loss)
            value, numbers = output.loss.item(), custom.numbers(output.diagnostics)
            if not torch.is_grad_enabled():
                return DatumLoss(value, output.loss, numbers)
            gradient = loss_gradient(output.loss, leaf)
        # A linear loss with the same gradient, as for custom losses that run on the client.
        return DatumLoss(value, (gradient * logprobs).sum(), numbers)

    @contextmanager
    def _clock(self) -> Iterator[Limits]:
        """Measures the time spent in the loss; yields limits with the time that is left."""
        started = time.monotonic()
        if self._spent > REQUEST_SECONDS:
            raise InvalidLoss(
                f"the loss was stopped after {self._spent:.0f} s over the datums of this request; at most "
                f"{REQUEST_SECONDS:g} s are allowed. Send fewer datums at once."
            )
        try:
            yield Limits(deadline=started + REQUEST_SECONDS - self._spent, reserve=self._reserve)
        finally:
            self._spent += time.monotonic() - started


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Prefixes the message of an `InvalidLoss` with the loss that caused it."""
    try:
        yield
    except InvalidLoss as error:
        raise type(error)(f"{what}: {error}") from error


def loss_gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """Returns the gradient with respect to `leaf`; raises `InvalidLoss` if there is none, or it is not finite."""
    check_differentiable(loss, "outputs of the model")
    try:
        gradient: Tensor | None = torch.autograd.grad(loss, leaf, allow_unused=True)[0]
    except RuntimeError as error:  # a Python function may modify tensors in place that backward needs
        raise InvalidLoss(f"the loss has no gradient: {str(error).partition(chr(10))[0][:300]}") from error
    if gradient is None:
        return torch.zeros_like(leaf)
    check_gradient(loss, gradient)
    return gradient
