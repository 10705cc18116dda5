"""A remote model as a node of the local autograd graph.

`RemoteLM(backend)(data)` gives one tensor of log-probabilities per datum. Whatever is computed from them, their
gradient gathers in a *window* here, and nothing is sent before the optimizer steps: the protocol has no `zero_grad`, so
that a gradient which has reached the server can no longer be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tinker_lightning import custom_loss
from tinker_lightning.client.backend import TrainingBackend, as_backend
from tinker_lightning.client.futures import TinkerFuture, Unread
from tinker_lightning.client.official import to_datums
from tinker_lightning.errors import InvalidInput, LossNotFinite
from tinker_lightning.types import Datum, ForwardBackwardOutput, OptimStepResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinker_lightning.types import AdamParams


@dataclass(eq=False, slots=True)
class Call:
    """One call of the model, and the gradient that has come back to its log-probabilities so far."""

    datums: list[Datum]
    gradients: list[Tensor] | None = None

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds a gradient, as torch does: several losses on one call, and several backwards, add up."""
        if self.gradients is None:
            self.gradients = [gradient.clone() for gradient in gradients]
        else:
            self.gradients = [old + new for old, new in zip(self.gradients, gradients, strict=True)]


@dataclass(frozen=True, slots=True)
class Step:
    """What a step has sent: the window's backwards, and the step itself."""

    backwards: list[TinkerFuture[ForwardBackwardOutput]]
    optim: TinkerFuture[OptimStepResponse]


class Remote:
    """Where a handle leads: a backend, and the window of gradients that waits for the next step.

    Args:
        backend: A training client, ours or the official SDK's, or a function that makes one at the first use.
    """

    def __init__(self, backend: Any) -> None:
        self.window: list[Call] = []
        self.unread = Unread()
        self.steps = 0
        self.on_step: Callable[[Step], None] | None = None  # told of every step that was sent
        self._given = backend
        self._backend: TrainingBackend | None = None

    @property
    def backend(self) -> TrainingBackend:
        """What is trained, made at the first use."""
        if self._backend is None:
            is_maker = callable(self._given) and not hasattr(self._given, "forward_backward")
            self._backend = as_backend(self._given() if is_maker else self._given)
        return self._backend

    @property
    def is_made(self) -> bool:
        """Whether there is a backend already."""
        return self._backend is not None

    def point_to(self, backend: Any) -> None:
        """Leads elsewhere from now on; what waits for the old backend is dropped."""
        self.drop()
        self._given, self._backend = backend, None

    def receive(self, call: Call, gradients: Sequence[Tensor]) -> None:
        """A gradient has come back to a call.

        Raises:
            LossNotFinite: If it is NaN or infinite; the window is dropped, for it could not be stepped on.
        """
        for i, gradient in enumerate(gradients):
            if not torch.isfinite(gradient).all():
                self.drop()
                raise LossNotFinite(
                    f"datum {i}: the gradient of the loss has NaN or infinite entries. Nothing was sent, and the "
                    "gradients that waited for the next step were dropped; the model is as it was."
                )
        if call.gradients is None:
            self.window.append(call)
        call.add(gradients)

    def drop(self) -> None:
        """Forgets the window; nothing of it has left this machine."""
        for call in self.window:
            call.gradients = None
        self.window = []

    def step(self, params: AdamParams) -> Step | None:
        """Sends the window and a step on it; waits for nothing. Without a gradient nothing is sent.

        Raises:
            TinkerLightningError: If something that was sent before has failed and nobody has read it.
        """
        self.unread.raise_first()
        if not self.window:
            return None
        batches = [custom_loss.linear_datums(call.datums, call.gradients or []) for call in self.window]
        backwards = [self.backend.forward_backward(batch, custom_loss.SURROGATE) for batch in batches]
        step = Step(backwards, self.backend.optim_step(params))
        self.drop()
        self.steps += 1
        for backward in step.backwards:
            self.unread.add(backward)
        self.unread.add(step.optim)
        if self.on_step is not None:
            self.on_step(step)
        return step


class RemoteGradient(Tensor):
    """What stands in a handle's `.grad` while its window holds a gradient. The numbers are on the server."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses every use: a norm or a clip of this would silently be one of nothing."""
        del types, args, kwargs
        raise InvalidInput(
            f"{getattr(func, '__name__', func)} on the gradient of a remote model: that gradient is on the server and "
            "cannot be read or changed here. Clip it with RemoteAdamW(..., grad_clip_norm=...), which the server does."
        )


class RemoteHandle(nn.Parameter):
    """The one parameter of a remote model: it holds no weights, but leads an optimizer to them.

    Its `.grad` is there while a gradient waits; setting it to None, as every `zero_grad` does, drops the window.
    """

    remote: Remote

    def __new__(cls, remote: Remote) -> Self:
        """A scalar that autograd takes for a parameter."""
        handle = torch.Tensor._make_subclass(cls, torch.zeros(()), True)
        handle.remote = remote
        return handle

    @property
    def grad(self) -> Tensor | None:
        """A stand-in while a gradient waits for the next step, else None."""
        return torch.Tensor._make_subclass(RemoteGradient, torch.zeros(())) if self.remote.window else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise InvalidInput("the gradient of a remote model cannot be set; it comes from a loss's backward")
        self.remote.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteHandle:
        raise InvalidInput(
            "a remote model cannot be copied: a copy would lead to the same weights on the server. Averaging and "
            "EMA callbacks copy the module and do not work with it."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput("a remote model cannot be pickled; save its state with save_state and its path")


class RemoteLM(nn.Module):
    """A remote language model, as a module: `model(data)` gives one tensor of log-probabilities per datum.

    Under `torch.no_grad()` it is a plain forward pass. Otherwise the tensors take part in autograd, and
    `RemoteAdamW(model.parameters())` trains the model.

    Args:
        backend: A training client, ours or the official SDK's, or a function that makes one at the first use.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.handle = RemoteHandle(Remote(backend))

    @property
    def backend(self) -> TrainingBackend:
        """What is trained. Setting it points this model, and optimizers that hold its parameter, elsewhere."""
        return self.handle.remote.backend

    @backend.setter
    def backend(self, backend: Any) -> None:
        self.handle.remote.point_to(backend)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moving to a device or another dtype does not concern weights that are elsewhere."""
        del fn, recurse
        return self

    def send(self, data: Sequence[Any]) -> Pass:
        """Sends a forward pass without waiting for it; `model(that)` waits. For several passes at once."""
        datums = to_datums(data)
        return Pass(datums, self.backend.forward(custom_loss.forward_datums(datums), custom_loss.SURROGATE))

    def forward(self, data: Sequence[Any] | Pass) -> list[Tensor]:
        """One tensor of log-probabilities per datum, shaped like its targets."""
        sent = data if isinstance(data, Pass) else self.send(data)
        logprobs = [leaf.detach() for leaf in custom_loss.leaves(sent.future.result(), sent.datums)]
        if not torch.is_grad_enabled():
            return logprobs
        return list(_Join.apply(self.handle, Call(sent.datums), *logprobs))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that is under way."""

    datums: list[Datum]
    future: TinkerFuture[ForwardBackwardOutput]

    def __iter__(self) -> Iterator[Datum]:
        return iter(self.datums)


class _Join(torch.autograd.Function):
    """Joins log-probabilities to the graph: what flows back to them goes into the window."""

    @staticmethod
    def forward(ctx: Any, handle: RemoteHandle, call: Call, *logprobs: Tensor) -> tuple[Tensor, ...]:
        ctx.remote, ctx.call = handle.remote, call
        return tuple(tensor.view_as(tensor) for tensor in logprobs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.remote.receive(ctx.call, gradients)
        return (None, None, *(None for _ in gradients))
