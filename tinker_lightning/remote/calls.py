"""The contents of an accumulation window: model calls, their gradients, and the requests created from them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.passes.request import ServerPass
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.builtin import check_factor
from tinker_lightning.types import Datum, ForwardBackwardOutput, ModelInput, OptimStepResponse, TensorData

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tinker_lightning.client.backend import TrainingBackend


@dataclass(eq=False, slots=True)
class Call:
    """One call of the model, and the accumulated gradient with respect to its log-probabilities."""

    datums: list[Datum]
    gradients: list[Tensor] | None = None
    version: int | None = None  # of the weights that computed the log-probabilities
    logprobs: list[Tensor] | None = None  # unknown for a call that was restored from a checkpoint
    retained: tuple[tuple[int, int], ...] | None = None  # how the server keeps the forward, see its output

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Accumulates a gradient as torch does, over several losses and several backward passes."""
        if self.gradients is None:
            self.gradients = [gradient.clone() for gradient in gradients]
        else:
            self.gradients = [old + new for old, new in zip(self.gradients, gradients, strict=True)]

    def prepare(self, backend: TrainingBackend) -> PendingBackward:
        """Validates the call and converts it to a request."""
        request = backend.prepare_gradient(self.datums, self.gradients or [], self.logprobs, self.retained)
        return PendingBackward(self.datums, surrogate.SURROGATE, request=request)


@dataclass(eq=False, slots=True)
class ServerCall:
    """One server-side loss, and the accumulated gradient with respect to its value."""

    datums: list[Datum]
    loss: Any
    config: Mapping[str, float | str]
    gradients: list[Tensor] | None = None
    added: float | None = None  # the value of local terms that are added to the loss and scaled with it
    inputs: Mapping[str, TensorData] = field(default_factory=dict)  # given once for the batch
    about: Any = None  # what the caller computes further metrics from

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Accumulates a gradient."""
        (new,) = gradients
        self.gradients = [new.clone() if self.gradients is None else self.gradients[0] + new]

    @property
    def name(self) -> str:
        """The name of the loss."""
        return str(self.loss if isinstance(self.loss, str) else self.loss.name)

    def prepare(self, backend: TrainingBackend) -> PendingBackward:
        """Validates the call and converts it to a request; raises if the gradient of the loss is 0."""
        scale = float(self.gradients[0]) if self.gradients else 0.0
        check_factor(self.name, scale)
        config = self.config or None
        request = backend.prepare(self.datums, self.loss, config, loss_fn_inputs=self.inputs, scale=scale)
        if isinstance(request, ServerPass):  # only metrics are read, which ignore the same positions as the loss
            request = replace(request, counted_only=True)
        return PendingBackward(self.datums, self.loss, config, scale, True, self.name, self.added, request, self.about)


@dataclass(frozen=True, slots=True)
class PendingBackward:
    """A backward pass that is ready to be sent: the request, and the data that its metrics are computed from."""

    datums: list[Datum]
    loss: Any
    config: Mapping[str, float | str] | None = None
    scale: float = 1.0
    by_server: bool = False
    name: str = surrogate.SURROGATE
    added: float | None = None
    request: Any = None
    about: Any = None


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass in flight."""

    given: Sequence[Any]
    datums: list[Datum]
    future: TinkerFuture[ForwardBackwardOutput]
    version: int = 0  # of the weights that compute it

    def __iter__(self) -> Iterator[Datum]:
        return iter(self.datums)

    def is_of(self, data: Sequence[Any]) -> bool:
        """Returns whether the pass was sent for exactly these datum objects."""
        return len(data) == len(self.given) and all(a is b for a, b in zip(data, self.given, strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one step: the backward passes of the window and the optimizer step."""

    backwards: list[TinkerFuture[ForwardBackwardOutput]]
    optim: TinkerFuture[OptimStepResponse]
    # The results of server-side losses and their requests.
    losses: list[tuple[TinkerFuture[ForwardBackwardOutput], PendingBackward]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Clip:
    """A clip of the gradient of one window, which the server carries out."""

    received: int  # how many gradients the model had received
    limit: float | None = None  # the norm to clip to, None before it is known
    step: Step | None = None  # the step of the window, once it is sent

    def value(self) -> float:
        """Returns the norm before clipping, and waits for the step; raises `InvalidInput` before the step."""
        if self.step is None:
            raise InvalidInput(
                "the norm of the gradient of a remote model is known after the step that the server takes. Call "
                "optimizer.step() first, then read it."
            )
        metrics = self.step.optim.result().metrics or {}
        if "grad_norm" not in metrics:
            raise InvalidInput("this server does not report the norm of the gradient")
        return float(metrics["grad_norm"])


@dataclass(slots=True)
class TokenCount:
    """Tokens by what servers charge for: passes with a gradient, passes without one and prompts, and samples."""

    trained: int = 0
    prefilled: int = 0
    sampled: int = 0

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TokenCount) -> TokenCount:
        return TokenCount(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def tokens_of(data: Iterable[Datum | ModelInput]) -> int:
    """Returns the number of tokens of datums or prompts, without those that have an image of unknown length."""
    total = 0
    for each in data:
        with contextlib.suppress(InvalidInput):
            total += (each if isinstance(each, ModelInput) else each.model_input).length
    return total
