"""The contents of an accumulation window: model calls, their gradients, and the requests created from them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.passes.request import ServerPass
from tinker_lightning.errors import InvalidInput
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

    def prepare(self, backend: TrainingBackend) -> Any:
        """Validates the call and returns it as a request."""
        return backend.prepare_gradient(self.datums, self.gradients or [], self.logprobs, self.retained)


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

    @property
    def scale(self) -> float:
        """The factor of the loss in what is trained: the gradient with respect to its value."""
        return float(self.gradients[0]) if self.gradients else 0.0

    def prepare(self, backend: TrainingBackend) -> Any:
        """Validates the call and returns it as a request; raises if the gradient of the loss is 0."""
        check_factor(self.name, self.scale)
        config = self.config or None
        request = backend.prepare(self.datums, self.loss, config, loss_fn_inputs=self.inputs, scale=self.scale)
        # Only metrics are read, which ignore the same positions as the loss.
        return replace(request, counted_only=True) if isinstance(request, ServerPass) else request


PreparedCall: TypeAlias = tuple[Call | ServerCall, Any]
"""A copy of a call in the window, and its request."""


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
    # The results of server-side losses and their calls.
    losses: list[tuple[TinkerFuture[ForwardBackwardOutput], ServerCall]] = field(default_factory=list)


@dataclass(slots=True)
class TokenCount:
    """Tokens by what servers charge for.

    Attributes:
        trained: Tokens of passes with a gradient.
        prefilled: Tokens of passes without one, and of prompts.
        sampled: Tokens that were generated.
        cached: The part of `prefilled` that the server still had in its cache.
        discarded: The part of `sampled` that was sampled for training, and is not trained.
    """

    trained: int = 0
    prefilled: int = 0
    sampled: int = 0
    cached: int = 0
    discarded: int = 0

    @property
    def uncached(self) -> int:
        """The part of `prefilled` that the server has computed."""
        return self.prefilled - self.cached

    def add_samples(self, prompt: int, response: Any) -> None:
        """Adds the samples of a request, and the tokens of its prompt."""
        self.prefilled += prompt
        # Samples of older releases of the official SDK lack the field.
        self.cached += min(prompt, getattr(response, "prompt_cache_hit_tokens", None) or 0)
        self.sampled += sum(len(one.tokens) for one in response.sequences)

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
