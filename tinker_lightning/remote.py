"""A remote model as a node of the local autograd graph.

`RemoteLM(backend)(data)` gives one tensor of log-probabilities per datum. Whatever is computed from them, their
gradient gathers in a *window* here, and nothing is sent before the optimizer steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tinker_lightning import surrogate
from tinker_lightning.calls import Call, Pass, ServerCall
from tinker_lightning.client.official import to_datums
from tinker_lightning.errors import InvalidInput
from tinker_lightning.late_loss import LateLoss
from tinker_lightning.window import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.client.backend import TrainingBackend


# What may be asked of a gradient that is not here: what kind of tensor it is, and to be zero.
_KINDS = ("device", "dtype", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
_ZEROED = ("zero_", "_foreach_zero_")
_UNCHANGED = ("detach_", "requires_grad_")


# In place of a path, in the state dict of a file that names the state elsewhere.
NAMED_BY_FILE = "\0"


def named(path: str) -> Tensor:
    """A path as a state dict names it."""
    return torch.tensor(list(path.encode()), dtype=torch.uint8)


def name_in(entry: Tensor) -> str:
    """The path that an entry of a state dict names."""
    return bytes(entry.tolist()).decode()


class RemoteGradient(Tensor):
    """What stands in a handle's `.grad` while its window holds a gradient. The numbers are on the server."""

    remote: Remote

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to be read or changed: a norm or a clip of this would silently be one of nothing."""
        del types
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = str(getattr(func.__self__, "__name__", name))
        if name in _ZEROED:
            for gradient in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                with torch._C.DisableTorchFunctionSubclass():
                    gradient.remote.drop() if isinstance(gradient, RemoteGradient) else gradient.zero_()
            return args[0]
        if name in _UNCHANGED:
            return args[0]
        if name in _KINDS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise InvalidInput(
            f"{name} on the gradient of a remote model: that gradient is on the server and cannot be read or changed "
            "here. Step with RemoteAdamW, and clip with its grad_clip_norm=..., which the server does."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return "RemoteGradient(on the server)"


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
        if not self.remote.window:
            return None
        gradient = torch.Tensor._make_subclass(RemoteGradient, torch.zeros(()))
        gradient.remote = self.remote
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise InvalidInput("the gradient of a remote model cannot be set; it comes from a loss's backward")
        self.remote.drop()

    def register_hook(self, hook: Any) -> Any:
        """Refuses it: no gradient would ever reach the hook."""
        del hook
        raise InvalidInput(
            "a hook on the gradient of a remote model would see nothing: that gradient is on the server, which sends "
            "its norm, logged as grad_norm. To watch local layers with W&B, pass these: logger.watch(module.head)."
        )

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

    def save(self) -> str:
        """Saves weights and optimizer on the server, unless nothing was trained since the last time; their path."""
        return self.handle.remote.save()

    def get_extra_state(self) -> Tensor:
        """What a `state_dict` has of the weights: the path of a state on the server, saved now, as its bytes.

        A tensor, for files of safetensors hold nothing else; empty where there is no model yet.
        """
        return named(self.save() if self.handle.remote.has_weights else "")

    def set_extra_state(self, state: Tensor | None) -> None:
        """Goes on from the state that a `state_dict` names; None where that was done already.

        Raises:
            InvalidInput: If it names none.
        """
        if state is None:
            return
        path = name_in(state)
        if path == NAMED_BY_FILE:
            raise InvalidInput(
                "this is the state dict of a Lightning checkpoint: the file names the state on the server, beside it. "
                "Load the file with load_from_checkpoint or ckpt_path=...; or, for the local parameters alone, leave "
                "out the keys of the remote model and pass strict=False."
            )
        if path:
            self.handle.remote.load(path)
        elif self.handle.remote.has_weights:
            raise InvalidInput(
                "this state dict names no state on the server: it was taken before its model was first used. Make a "
                "new RemoteLM to start anew."
            )

    def send(self, data: Sequence[Any]) -> Pass:
        """Sends a forward pass without waiting for it; `model(that)` waits. For several passes at once."""
        datums = to_datums(data)
        forward = self.backend.forward(surrogate.forward_datums(datums), surrogate.SURROGATE)
        return Pass(data, datums, forward, self.handle.remote.version)

    def forward(self, data: Sequence[Any] | Pass) -> list[Tensor]:
        """One tensor of log-probabilities per datum, shaped like its targets."""
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
        added: float | None = None,
    ) -> Tensor:
        """One of the server's losses, computed there in the one pass that also gives its gradient.

        It is sent at the step, and nothing is waited for. So its value is not known here: it is NaN, and can be scaled
        and added to other losses; everything else is refused.

        Args:
            data: The datums.
            loss: Its name, or what `custom_loss` or `create_custom_loss` gave.
            config: Its settings.
            added: The value of what is added to it here, so that a `RemoteModule` can log the total when it is known.
        """
        call = ServerCall(to_datums(data), loss, dict(config or {}), added=added)
        (value,) = _Join.apply(self.handle, call, torch.tensor(torch.nan))  # type: ignore[no-untyped-call]
        assert isinstance(value, Tensor)  # noqa: S101 for the type checker
        return value.as_subclass(LateLoss)


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
    """Joins log-probabilities to the graph: what flows back to them goes into the window."""

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
    """Refuses `torch.autograd.grad`, which adds to no gradient: the window would hold what nobody asked it to.

    Args:
        handle: The node of the graph that adds to the handle's gradient.

    Raises:
        InvalidInput: If a gradient is to be returned, and not to be gathered.
    """
    try:
        torch._C._will_engine_execute_node(handle)  # raises where a leaf's gradient is to be returned
    except RuntimeError as error:
        raise InvalidInput(
            "torch.autograd.grad by the parameter of a remote model: that gradient is on the server and cannot be "
            "returned. Ask for it by the log-probabilities, leave the model's parameters out (those of local layers "
            "may stay), or call backward()."
        ) from error
