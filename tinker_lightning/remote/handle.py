"""The one parameter of a remote model, and the stand-in for its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote import clipping

if TYPE_CHECKING:
    from tinker_lightning.remote.window import Remote


# Operations that work on a gradient on the server: reading its metadata, and zeroing it.
_KINDS = ("device", "dtype", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
_ZEROED = ("zero_", "_foreach_zero_")
_UNCHANGED = ("detach_", "requires_grad_")


class RemoteGradient(Tensor):
    """A placeholder in a handle's `.grad` while the window holds a gradient."""

    remote: Remote

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets the server clip in `clip_grad_norm_`; raises on other reads and writes, which would have no effect."""
        del types
        name = clipping.name_of(func)
        if name in ("linalg_vector_norm", "vector_norm"):
            return clipping.norm_of(args[0].remote, *args[1:])
        if name == "_foreach_norm" and all(isinstance(each, RemoteGradient) for each in args[0]):
            return [clipping.norm_of(each.remote, *args[1:]) for each in args[0]]
        if name in ("mul_", "_foreach_mul_"):
            gradients = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            if all(isinstance(each, RemoteGradient) and clipping.multiply(each.remote, args[1]) for each in gradients):
                return args[0]
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
            "here. Step with RemoteAdamW, and let the server clip: clip_grad_norm_, or RemoteAdamW(..., "
            "grad_clip_norm=...)."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return "RemoteGradient(on the server)"


class RemoteHandle(nn.Parameter):
    """The only parameter of a remote model: it holds no weights, but connects an optimizer to them.

    Its `.grad` is set while the window holds a gradient; setting it to None, as every `zero_grad` does, drops the
    window.
    """

    remote: Remote

    def __new__(cls, remote: Remote) -> Self:
        """Creates a scalar that autograd treats as a parameter."""
        handle = super().__new__(cls, torch.zeros(()), True)
        handle.remote = remote
        return handle

    @property
    def grad(self) -> Tensor | None:
        """A placeholder while the window holds a gradient, else None."""
        if not self.remote.window:
            return None
        gradient = torch.zeros(()).as_subclass(RemoteGradient)
        gradient.remote = self.remote
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise InvalidInput("the gradient of a remote model cannot be set; call backward() on a loss")
        self.remote.drop()

    def register_hook(self, hook: Any) -> Any:
        """Raises an error, because no gradient would ever reach the hook."""
        del hook
        raise InvalidInput(
            "a hook on the gradient of a remote model would never be called: that gradient is on the server. Its norm "
            "is logged as grad_norm. To watch local layers with W&B, pass only those: logger.watch(module.head)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteHandle:
        raise InvalidInput(
            "a remote model cannot be copied: a copy would share the weights on the server. Averaging and EMA "
            "callbacks copy the module, so they are not supported."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "a remote model cannot be pickled; save its state on the server and keep the path: RemoteLM.save()"
        )
