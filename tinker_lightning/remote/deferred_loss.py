"""The value of a server-side loss, which is not known yet, so that only affine functions of it are defined."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses.scaling import LINEAR_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LARGE = 3e4  # beyond most bounds that a value is clamped to, within float16


def _far(i: int) -> float:
    return _LARGE * (1 if i % 2 else -1) * (1 - 0.37 / i)


def _near(i: int) -> float:
    return 0.7 / i


# The numbers that replace the i-th NaN of a call: the second is the middle of the first and the third.
_PROBES: tuple[Callable[[int], float], ...] = (_far, _near, lambda i: 2 * _near(i) - _far(i), lambda _: 0.0)


class DeferredLoss(Tensor):
    """NaN, connected to the autograd graph.

    A `relu`, a `where` or an `if` of NaN would silently train one of its branches. So every function is also called
    with a few numbers in place of NaN: its result must be affine in them, and its branch the same for all of them.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function; raises `InvalidLoss` if it is not affine."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            probes = [_replaced((args, kwargs or {}), values) for values in _PROBES]
            result = func(*args, **(kwargs or {}))
            if any(map(_matters, tree_leaves(result))) and not _is_affine(func, probes, result):
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


def _is_affine(func: Any, probes: list[tuple[Any, Any]], result: Any) -> bool:
    try:
        far, near, mirrored, zero = ([_number(one) for one in tree_leaves(func(*a, **k))] for a, k in probes)
    except RuntimeError:  # the function only accepts tensors of the graph
        return False
    for a, b, c, d, given in zip(far, near, mirrored, zero, tree_leaves(result), strict=True):
        if not isinstance(a, Tensor):
            if a != c or a != d:
                return False
        elif not a.is_floating_point():
            if not (torch.equal(a, c) and torch.equal(a, d)):
                return False
        else:
            # The values at three equidistant points must lie on a line, and the result must be NaN where they differ.
            bend = (a + c - 2 * b).abs()
            depends = (a - c).abs() > 0
            straight = bend.isfinite() & (bend <= 1e-3 * (a - c).abs() + 1e-6 * a.abs())
            if not straight.all() or not given.isnan()[depends].all():
                return False
    return True


def _number(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _replaced(arguments: tuple[Any, Any], values: Any) -> tuple[Any, Any]:
    """Returns copies of the arguments in which each NaN is replaced by a different number."""
    count = itertools.count(1)

    def copied(tensor: Tensor) -> Tensor:
        plain = tensor.detach().clone().as_subclass(Tensor)
        if isinstance(tensor, DeferredLoss):
            for index in plain.isnan().nonzero().tolist():
                plain[tuple(index)] = values(next(count))
        return plain

    replaced: tuple[Any, Any] = tree_map_only(Tensor, copied, arguments)
    return replaced
