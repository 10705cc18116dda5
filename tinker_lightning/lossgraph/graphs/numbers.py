"""Python's operators and `math` for the values of a graph, with a limit for the size of numbers.

Without it, a few bytes could exhaust the memory: `10 ** 10 ** 9`, `"a" * 10 ** 9`, `"%1000000000d" % 1`.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tinker_lightning.errors import InvalidLoss

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_INT = 2**63
MAX_TUPLE = 64


def _operator(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(operator, name)

    def guarded(*operands: Any) -> Any:
        if any(isinstance(operand, Tensor) for operand in operands):
            if all(isinstance(operand, Tensor | int | float) for operand in operands):
                return function(*operands)
        elif all(isinstance(operand, int | float) for operand in operands):
            if name in ("pow", "lshift"):
                _check_growth(name, *operands)
            return number(function(*operands))
        elif name == "add" and all(isinstance(operand, tuple) for operand in operands):
            return _joined(operands)
        kinds = ", ".join(type(operand).__name__ for operand in operands)
        raise InvalidLoss(f"operator.{name} works on tensors and numbers, not on {kinds}")

    return guarded


def _joined(tuples: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """Joins tuples of numbers, such as shapes; tuples of tuples could double with every node."""
    if sum(len(each) for each in tuples) > MAX_TUPLE:
        raise InvalidLoss(f"a tuple may have at most {MAX_TUPLE} values")
    parts = tuple(part for each in tuples for part in each)
    if not all(isinstance(part, int | float) for part in parts):
        raise InvalidLoss("operator.add joins tuples of numbers only; join tensors with torch.cat or torch.stack")
    return parts


def _check_growth(name: str, base: float, exponent: float) -> None:
    """Raises if an integer would be larger than any that tensors hold."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        bits = exponent if name == "lshift" else exponent * math.log2(max(2, abs(base)))
        if bits > 63:
            raise InvalidLoss(f"operator.{name}({base}, {exponent}) is larger than any integer of a tensor")


def number(value: Any) -> Any:
    """Returns a number; raises `InvalidLoss` if it is not a number, or too large for a tensor."""
    if isinstance(value, int | float) and not (isinstance(value, int) and not -MAX_INT <= value < MAX_INT):
        return value
    raise InvalidLoss(f"{type(value).__name__} is not a number, or is too large for a tensor")


def _math(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(math, name)

    def guarded(*operands: Any) -> Any:
        if not all(isinstance(operand, int | float) for operand in operands):
            raise InvalidLoss(f"math.{name} works on numbers; use torch.{name} for tensors")
        return number(function(*(float(operand) for operand in operands)))

    return guarded


_OPERATORS = (
    "abs add and_ eq floordiv ge gt inv invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor"
)
# Without functions whose results are unbounded (factorial, comb, perm) and those that take sequences.
_MATH = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod gamma "
    "isfinite isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc"
)

# The allow-list has its own forms of `matmul`, `getitem`, `setitem`, `floordiv` and `mod`.
OPERATORS: dict[str, Callable[..., Any]] = {f"operator.{name}": _operator(name) for name in _OPERATORS.split()}
MATH: dict[str, Callable[..., Any]] = {f"math.{name}": _math(name) for name in _MATH.split()}
