"""The one parameter of a remote model, and the stand-in for its gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.calls import Clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.remote.window import RemoteModel

# Operations that work on a gradient on the server: reading its metadata, and zeroing it.
_KINDS = ("device", "dtype", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
_ZEROED = ("zero_", "_foreach_zero_")
_UNCHANGED = ("detach_", "requires_grad_")


class RemoteGradient(Tensor):
    """A placeholder in a handle's `.grad` while the window holds a gradient."""

    remote: RemoteModel

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets the server clip in `clip_grad_norm_`; raises on other reads and writes, which would have no effect."""
        del types
        name = name_of(func)
        if name in ("linalg_vector_norm", "vector_norm"):
            return norm_of(args[0].remote, *args[1:])
        if name == "_foreach_norm" and all(isinstance(each, RemoteGradient) for each in args[0]):
            return [norm_of(each.remote, *args[1:]) for each in args[0]]
        if name in ("mul_", "_foreach_mul_"):
            gradients = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            if all(isinstance(each, RemoteGradient) and multiply(each.remote, args[1]) for each in gradients):
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

    remote: RemoteModel

    def __new__(cls, remote: RemoteModel) -> Self:
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


_EPSILON = 1e-6  # which torch adds to the norm, as does the server


class RemoteNorm(Tensor):
    """The result of `clip_grad_norm_` for a remote model: a number once the step was taken."""

    remote: RemoteModel
    request: Clip
    numerator: float | None = None  # of max_norm / norm
    is_clamped = False

    @classmethod
    def create(cls, remote: RemoteModel, clip: Clip) -> Self:
        """Creates the norm of a gradient that is on the server."""
        norm = torch.tensor(math.nan).as_subclass(cls)
        norm.remote, norm.request = remote, clip
        return norm

    def term(self, numerator: float | None, *, is_clamped: bool = False) -> RemoteNorm:
        """Returns what `clip_grad_norm_` computes from the norm."""
        term = RemoteNorm.create(self.remote, self.request)
        term.numerator, term.is_clamped = numerator, is_clamped
        return term

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows the formula of `clip_grad_norm_`; computes with the number once it is known, else raises."""
        del types
        kwargs = kwargs or {}
        name = name_of(func)
        norm = next(_norms((*args, *kwargs.values())))
        if norm.request.step is None:
            if name == "stack" and len(args[0]) > 1:
                raise InvalidInput(
                    "clip_grad_norm_: a norm over several models, or over a remote model and local parameters, is not "
                    "supported, because the gradient of a remote model is on the server. Clip each of them: "
                    "clip_grad_norm_(remote.parameters(), ...), clip_grad_norm_(local.parameters(), ...)."
                )
            follow = _FORMULA.get(name)
            result = follow(norm, args, kwargs) if follow else None
            if result is not None:
                return result
            if name in ("device", "dtype", "shape", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim"):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_numbers(args), **_numbers(kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return (
            "RemoteNorm(known after the step)" if self.request.step is None else f"RemoteNorm({self.request.value()})"
        )


def name_of(func: Any) -> str:
    """Returns the name of a function, or of the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def norm_of(remote: RemoteModel, order: Any) -> RemoteNorm:
    """Returns the norm of a gradient that is on the server; raises for norms other than the Euclidean one."""
    if float(order) != 2.0:
        raise InvalidInput(
            f"clip_grad_norm_: the server clips by the Euclidean norm, so norm_type must be 2, got {order}"
        )
    return RemoteNorm.create(remote, Clip(remote.received))


def multiply(remote: RemoteModel, factor: Any) -> bool:
    """Requests the clip that a factor stands for; returns whether it is one."""
    if not isinstance(factor, RemoteNorm) or not factor.is_clamped or factor.remote is not remote:
        return False
    remote.request_clip(factor.request, factor.numerator or 0.0)
    return True


def _divided(norm: RemoteNorm, args: Any, _: Any) -> RemoteNorm | None:
    is_fraction = norm.numerator is None and isinstance(args[1], int | float)
    return norm.term(float(args[1])) if is_fraction else None


def _clamped(norm: RemoteNorm, args: Any, kwargs: Any) -> RemoteNorm | None:
    is_formula = norm.numerator is not None and len(args) == 1 and kwargs == {"max": 1.0}
    return norm.term(norm.numerator, is_clamped=True) if is_formula else None


def _plus(norm: RemoteNorm, args: Any, _: Any) -> RemoteNorm | None:
    return norm if norm.numerator is None and args[1] == _EPSILON else None


def _same(norm: RemoteNorm, _: Any, __: Any) -> RemoteNorm:
    return norm


def _is_finite(*_: Any) -> Tensor:
    """Lets `error_if_nonfinite` pass: gradients with such entries raise before they are sent."""
    return torch.tensor(False)


_FORMULA: dict[str, Callable[[RemoteNorm, Any, Any], Tensor | None]] = {
    "stack": _same,
    "linalg_vector_norm": _same,
    "vector_norm": _same,
    "to": _same,
    "isnan": _is_finite,
    "isinf": _is_finite,
    "add": _plus,
    "__add__": _plus,
    "__rdiv__": _divided,
    "__rtruediv__": _divided,
    "clamp": _clamped,
}


def _norms(value: Any) -> Iterator[RemoteNorm]:
    if isinstance(value, RemoteNorm):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _norms(each)


def _numbers(value: Any) -> Any:
    if isinstance(value, RemoteNorm):
        return torch.tensor(value.request.value())
    if isinstance(value, list | tuple):
        return type(value)(_numbers(each) for each in value)
    return {key: _numbers(each) for key, each in value.items()} if isinstance(value, dict) else value
