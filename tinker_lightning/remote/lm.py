"""A remote model as a node of the local autograd graph.

`RemoteLM(backend)(data)` returns one tensor of log-probabilities per datum. Gradients with respect to them accumulate
in a local *window*; nothing is sent before the optimizer steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tinker_lightning.client.sdk.inputs import to_datums
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import surrogate
from tinker_lightning.remote.calls import Call, Pass, ServerCall
from tinker_lightning.remote.deferred_loss import DeferredLoss
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.remote.saved_state import SavedState
from tinker_lightning.remote.window import Remote
from tinker_lightning.types import TensorData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.client.backend import TrainingBackend


class RemoteLM(nn.Module):
    """A remote language model as a module: `model(data)` returns one tensor of log-probabilities per datum.

    Under `torch.no_grad()` it is a plain forward pass. Otherwise the tensors take part in autograd, and
    `RemoteAdamW(model.parameters())` trains the model.

    Args:
        backend: A training client, ours or the official SDK's, or a function that creates one at the first use.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.handle = RemoteHandle(Remote(backend))

    @property
    def backend(self) -> TrainingBackend:
        """The training backend. Setting it also redirects optimizers that hold this model's parameter."""
        return self.handle.remote.backend

    @backend.setter
    def backend(self, backend: Any) -> None:
        self.handle.remote.point_to(backend)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Does nothing: device and dtype do not apply to weights on a server."""
        del fn, recurse
        return self

    def save(self) -> str:
        """Saves weights and optimizer state on the server, unless nothing was trained since; returns the path."""
        return self.handle.remote.save().path

    def get_extra_state(self) -> Tensor:
        """Saves the state on the server and returns its record, which is what a `state_dict` holds.

        The record is empty if there is no model yet.
        """
        remote = self.handle.remote
        return remote.save().to_tensor() if remote.has_weights else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Loads the weights that a `state_dict` names; None if they were loaded already.

        Raises:
            InvalidInput: If it names none, or has another format.
        """
        if state is None:
            return
        if state.numel():
            self.handle.remote.load(SavedState.from_tensor(state))
        elif self.handle.remote.has_weights:
            raise InvalidInput(
                "this state dict names no state on the server: it was taken before its model was first used. Create a "
                "new RemoteLM to start from the beginning."
            )

    def send(self, data: Sequence[Any]) -> Pass:
        """Sends a forward pass; `model(result)` waits for it. Use it to have several passes in flight."""
        datums = to_datums(data)
        request = self.backend.prepare(surrogate.forward_datums(datums), surrogate.SURROGATE)
        return Pass(data, datums, self.backend.send(request, forward_only=True), self.handle.remote.version)

    def forward(self, data: Sequence[Any] | Pass) -> list[Tensor]:
        """Returns one tensor of log-probabilities per datum, shaped like its targets."""
        remote = self.handle.remote
        sent = data if isinstance(data, Pass) else remote.take(data) or self.send(data)
        if torch.is_grad_enabled():
            remote.check_version(sent.version)
        output = remote.wait(sent.future)
        logprobs = [leaf.detach() for leaf in surrogate.leaves(output, sent.datums)]
        if not torch.is_grad_enabled():
            return logprobs
        call = Call(sent.datums, version=sent.version)
        return list(_Join.apply(self.handle, call, *logprobs))  # type: ignore[no-untyped-call]

    def server_loss(
        self,
        data: Sequence[Any],
        loss: Any,
        config: Mapping[str, float | str] | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        added: float | None = None,
    ) -> Tensor:
        """One of the server's losses, computed there in the one pass that also gives its gradient.

        It is sent at the step, and nothing is waited for. So its value is not known here: it is NaN, and can be scaled
        and added to other losses; everything else is refused.

        Args:
            data: The datums.
            loss: Its name, or what `custom_loss` or `create_custom_loss` gave.
            config: Its settings.
            inputs: Inputs of the loss that are given once for the batch instead of with each datum.
            added: The value of what is added to it here, so that a `RemoteModule` can log the total when it is known.
        """
        given = {name: TensorData.of(value) for name, value in (inputs or {}).items()}
        call = ServerCall(to_datums(data), loss, dict(config or {}), added=added, inputs=given)
        (value,) = _Join.apply(self.handle, call, torch.tensor(torch.nan))  # type: ignore[no-untyped-call]
        assert isinstance(value, Tensor)  # noqa: S101 for the type checker
        return value.as_subclass(DeferredLoss)


def holds_server_loss(loss: Tensor) -> bool:
    """Whether a loss of the server's is part of it, so that its value is not known here."""
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "call", None), ServerCall):
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


class _Join(torch.autograd.Function):
    """Connects log-probabilities to the graph; their gradients go into the window."""

    @staticmethod
    def forward(ctx: Any, handle: RemoteHandle, call: Call | ServerCall, *logprobs: Tensor) -> tuple[Tensor, ...]:
        ctx.remote, ctx.call = handle.remote, call
        return tuple(tensor.view_as(tensor) for tensor in logprobs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        _check_that_it_gathers(ctx.next_functions[0][0])
        ctx.remote.receive(ctx.call, gradients)
        return (None, None, *(None for _ in gradients))


def _check_that_it_gathers(handle: Any) -> None:
    """Rejects `torch.autograd.grad` by the handle, which returns gradients instead of accumulating them.

    Args:
        handle: The graph node that accumulates the handle's gradient.

    Raises:
        InvalidInput: If the gradient is to be returned.
    """
    try:
        torch._C._will_engine_execute_node(handle)  # raises if a leaf's gradient is to be returned
    except AttributeError as error:  # nothing public tells; register_multi_grad_hook uses it too
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._C._will_engine_execute_node, by which RemoteLM recognizes "
            "torch.autograd.grad. Install a torch version that tinker-lightning supports."
        ) from error
    except RuntimeError as error:
        raise InvalidInput(
            "torch.autograd.grad by the parameter of a remote model: that gradient is on the server and cannot be "
            "returned. Ask for it by the log-probabilities, leave the model's parameters out (those of local layers "
            "may stay), or call backward()."
        ) from error
