"""The value of a server-side loss, which is not known yet, so that only affine functions of it are defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses.builtin import LINEAR_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# The names of functions and methods, without the underscores of operators and in-place variants.
_SUMS = "add iadd isub mean neg negative pos positive radd rsub sub subtract sum"
_COPIES = """
bfloat16 broadcast_to cat clone concat contiguous cpu cuda detach double expand expand_as flatten float getitem half
hstack index_select movedim narrow permute ravel repeat requires_grad reshape select split squeeze stack t to transpose
type type_as unbind unsqueeze view view_as vstack where
"""
# Attributes and the properties that a tensor has before its value is known.
_PROPERTIES = "get is_complex is_contiguous is_floating_point is_inference is_same_size isfinite isinf isnan"
_AFFINE = frozenset(f"{_SUMS} {_COPIES} {_PROPERTIES}".split())
_PRODUCTS = frozenset(["dot", "imul", "inner", "matmul", "mul", "multiply", "rmul"])
_QUOTIENTS = frozenset(["div", "divide", "idiv", "itruediv", "true_divide", "truediv"])


class DeferredLoss(Tensor):
    """NaN, connected to the autograd graph.

    A `relu`, a `where` or an `if` of NaN would silently train one of its branches. So only the functions listed in this
    module, which are affine, may return a tensor with a gradient, a bool or integers.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function; raises `InvalidLoss` if it is not affine."""
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if any(map(_matters, tree_leaves(result))) and not _is_affine(func, args, kwargs):
                name = getattr(func, "__name__", str(func))
                raise InvalidLoss(f"{name} is not a linear function of a loss that runs on the server. {LINEAR_ONLY}")
            return tree_map_only(Tensor, lambda one: one.as_subclass(cls) if one.requires_grad else one, result)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def __format__(self, spec: str) -> str:
        """Formats the value as a number, which torch does only for `Tensor` itself."""
        return format(self.detach(), spec)


def _matters(result: Any) -> bool:
    """Returns whether a result takes part in training or is a decision, such as a bool."""
    if isinstance(result, Tensor):
        return result.requires_grad or not (result.is_floating_point() or result.is_complex())
    return isinstance(result, bool)


def _is_affine(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "").strip("_")
    if name in _PRODUCTS:
        return _count([args, kwargs]) == 1
    if name in _QUOTIENTS:
        return "rounding_mode" not in kwargs and not _count([args[1:], kwargs.get("other")])
    return name in _AFFINE


def _count(arguments: Any) -> int:
    """Returns how many arguments are deferred."""
    return sum(isinstance(leaf, DeferredLoss) for leaf in tree_leaves(arguments))
