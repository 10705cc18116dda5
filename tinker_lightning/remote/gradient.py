"""The stand-ins for a gradient on the server and for its norm, by which `clip_grad_norm_` makes the server clip."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.calls import Step

if TYPE_CHECKING:
    from tinker_lightning.remote.window import RemoteModel

# Functions that read the metadata of a tensor, and functions that zero gradients or leave them unchanged.
_METADATA = ("device", "dtype", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
_ZEROING = ("zero_", "_foreach_zero_")
_UNCHANGED = ("detach_", "requires_grad_")
_EPSILON = 1e-6  # which torch adds to the norm, as does the server


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


class RemoteGradient(Tensor):
    """A placeholder in a handle's `.grad` while the window holds a gradient."""

    remote: RemoteModel

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets the server clip in `clip_grad_norm_`; raises on other reads and writes, which would have no effect."""
        name = _name(func)
        gradients = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        are_remote = all(isinstance(each, RemoteGradient) for each in gradients)
        if name in ("linalg_vector_norm", "vector_norm"):
            return args[0]._norm(*args[1:])
        if name == "_foreach_norm" and are_remote:
            return [each._norm(*args[1:]) for each in gradients]
        if name in ("mul_", "_foreach_mul_") and are_remote and all(each._clip(args[1]) for each in gradients):
            return args[0]
        if name in _ZEROING:
            for gradient in gradients:
                with torch._C.DisableTorchFunctionSubclass():
                    gradient.remote.drop() if isinstance(gradient, RemoteGradient) else gradient.zero_()
            return args[0]
        if name in _UNCHANGED:
            return args[0]
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise InvalidInput(
            f"{name} on the gradient of a remote model: that gradient is on the server and cannot be read or changed "
            "here. Step with RemoteAdamW, and let the server clip: clip_grad_norm_, or RemoteAdamW(..., "
            "grad_clip_norm=...)."
        )

    def _norm(self, order: Any) -> RemoteNorm:
        """Returns the norm of the gradient; raises `InvalidInput` for norms other than the Euclidean one."""
        if float(order) != 2.0:
            raise InvalidInput(
                f"clip_grad_norm_: the server clips by the Euclidean norm, so norm_type must be 2, got {order}"
            )
        return RemoteNorm.create(self.remote, Clip(self.remote.received))

    def _clip(self, factor: Any) -> bool:
        """Requests the clip that a factor stands for; returns whether it is one."""
        if not isinstance(factor, RemoteNorm) or not factor.is_clamped or factor.remote is not self.remote:
            return False
        self.remote.request_clip(factor.request, factor.numerator or 0.0)
        return True

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return "RemoteGradient(on the server)"


class RemoteNorm(Tensor):
    """The result of `clip_grad_norm_` for a remote model: a number once the step was taken."""

    remote: RemoteModel
    request: Clip
    numerator: float | None = None  # of max_norm / norm
    is_clamped = False

    @classmethod
    def create(
        cls, remote: RemoteModel, clip: Clip, numerator: float | None = None, *, is_clamped: bool = False
    ) -> Self:
        """Creates the norm of a gradient that is on the server, or what `clip_grad_norm_` computes from it."""
        norm = torch.tensor(math.nan).as_subclass(cls)
        norm.remote, norm.request = remote, clip
        norm.numerator, norm.is_clamped = numerator, is_clamped
        return norm

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows the formula of `clip_grad_norm_`; computes with the number once it is known, else raises."""
        kwargs = kwargs or {}
        name = _name(func)
        norm = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RemoteNorm))
        if norm.request.step is None:
            if name == "stack" and len(args[0]) > 1:
                raise InvalidInput(
                    "clip_grad_norm_: a norm over several models, or over a remote model and local parameters, is not "
                    "supported, because the gradient of a remote model is on the server. Clip each of them: "
                    "clip_grad_norm_(remote.parameters(), ...), clip_grad_norm_(local.parameters(), ...)."
                )
            if (result := norm._follow(name, args[1:], kwargs)) is not None:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            if norm.request.step is None and name in _METADATA:
                return func(*args, **kwargs)
            known = tree_map_only(RemoteNorm, lambda each: torch.tensor(each.request.value()), (args, kwargs))
            return func(*known[0], **known[1])

    def _follow(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Returns the next term of `min(max_norm / (norm + epsilon), 1)`; None for any other function."""
        match name, args, kwargs:
            case (("stack" | "linalg_vector_norm" | "vector_norm" | "to"), _, _):
                return self
            case (("isnan" | "isinf"), _, _):  # of `error_if_nonfinite`: such gradients raise before they are sent
                return torch.tensor(False)
            case (("add" | "__add__"), [epsilon], _) if self.numerator is None and epsilon == _EPSILON:
                return self
            case (("__rdiv__" | "__rtruediv__"), [int() | float() as limit], _) if self.numerator is None:
                return RemoteNorm.create(self.remote, self.request, float(limit))
            case "clamp", [], {"max": 1.0} if self.numerator is not None and len(kwargs) == 1:
                return RemoteNorm.create(self.remote, self.request, self.numerator, is_clamped=True)
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return (
            "RemoteNorm(known after the step)" if self.request.step is None else f"RemoteNorm({self.request.value()})"
        )


def _name(func: Any) -> str:
    """Returns the name of a function, or of the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name
