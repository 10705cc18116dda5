"""The value of a loss that the server computes: not known here, so that only linear functions of it have a meaning."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.remote.calls import LINEAR_ONLY

# All by the names of functions and methods, without the underscores around them.
_DIVISIONS = {"div", "divide", "idiv", "itruediv", "true_divide", "truediv"}
_PRODUCTS = {"imul", "mul", "multiply", "rmul"}
_SUMS = {"add", "iadd", "isub", "mean", "neg", "negative", "radd", "rsub", "sub", "subtract", "sum"}
_PARTS = {"cat", "concat", "getitem", "iter", "select", "stack", "unbind"}
_SHAPES = {"expand", "flatten", "ravel", "reshape", "squeeze", "unsqueeze", "view", "view_as"}
_KINDS = {"bfloat16", "clone", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as"}
_GRAPH = {"get", "requires_grad", "set"}
_LINEAR = _DIVISIONS | _PRODUCTS | _SUMS | _PARTS | _SHAPES | _KINDS | _GRAPH
_DECISIONS = {"bool", "eq", "equal", "ge", "greater", "greater_equal", "gt", "is_nonzero", "le", "less", "less_equal"}
_DECISIONS |= {"argmax", "argmin", "argsort", "lt", "ne", "not_equal"}


class DeferredLoss(Tensor):
    """NaN, joined to the graph. As it is not a number yet, nothing can be decided by it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs what is linear, and what gives no gradient and decides nothing: its value may be shown.

        Raises:
            InvalidLoss: For all else. NaN would take one branch of a `relu` or an `if`, and train as if it were right.
        """
        del types
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        plain = name.strip("_")
        divides = plain in _DIVISIONS and any(isinstance(each, cls) for each in (*args[1:], *kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            marked = _marked(result)
        if plain in _DECISIONS or divides or (plain not in _LINEAR and marked is not result):
            raise InvalidLoss(f"{name} is no linear function of a loss that the server computes. {LINEAR_ONLY}")
        return marked

    def __format__(self, spec: str) -> str:
        """As a number, where torch does that for its own class only."""
        return format(self.detach(), spec)


def _marked(result: Any) -> Any:
    """Itself, if it has no gradient."""
    if isinstance(result, tuple | list):
        marked = [_marked(each) for each in result]
        return result if all(map(operator.is_, marked, result)) else type(result)(marked)
    return result.as_subclass(DeferredLoss) if isinstance(result, Tensor) and result.requires_grad else result
