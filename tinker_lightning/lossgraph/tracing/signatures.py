"""Inspects a loss function: its parameters, its globals, its line and what it returns."""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx, nn

from tinker_lightning.errors import InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph.tracing.lines import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Returns the parameters of a function; for a module those of its `forward`, as its `__call__` takes anything."""
    return inspect.signature(_called(fn))


def globals_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the globals of a function, or of the one inside a partial, a method, a module or a callable object."""
    function = _function(fn)
    return function.__globals__ if function else {}


def place_of_function(fn: Callable[..., Any]) -> Place:
    """Returns the line where a function starts, if it is known."""
    function = _function(fn)
    if function is None:
        return Place("")
    filename, line = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = linecache.getlines(filename)
    start = next((i for i in range(line - 1, len(lines)) if "def " in lines[i] or "lambda" in lines[i]), line - 1)
    source = lines[start].strip() if start < len(lines) else ""
    return Place(f"{filename}:{start + 1}: {source}\n    " if source else f"{filename}:{line}: ")


def loss_and_metrics(fn: Callable[..., Any], returned: Any) -> tuple[fx.Proxy, dict[Any, Any]]:
    """Converts the result of a traced function to `(loss, metrics)`; raises `LossNotTraceable` if it is neither."""
    if isinstance(returned, fx.Proxy):
        returned = returned, {}
    if not (isinstance(returned, tuple) and len(returned) == 2):
        wrong_output(fn, "(loss, metrics)", returned)
    loss, metrics = returned
    if not isinstance(loss, fx.Proxy):
        wrong_output(fn, "its loss as a tensor computed from what it is given", loss)
    if not isinstance(metrics, Mapping):
        wrong_output(fn, "its metrics as a dict", metrics)
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        with error_at_function(fn):
            raise InvalidLoss(f"invalid metric name {unnamed[0]!r:.100}; use a string")
    return loss, dict(metrics)


@contextmanager
def error_at_function(fn: Callable[..., Any]) -> Iterator[None]:
    """Adds the line of a function to an error about it."""
    try:
        yield
    except InvalidLoss as error:
        raise LossNotTraceable(f"{place_of_function(fn)}{error}") from None


def wrong_output(fn: Callable[..., Any], wanted: str, got: Any) -> NoReturn:
    """Raises `LossNotTraceable` with what a function must return."""
    name = getattr(fn, "__name__", type(fn).__name__)
    with error_at_function(fn):
        raise InvalidLoss(f"{name} must return {wanted}, but returned {type(got).__name__}")


def _called(fn: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(fn, functools.partial):
        return functools.partial(_called(fn.func), *fn.args, **fn.keywords)
    return fn.forward if isinstance(fn, nn.Module) else fn


def _function(fn: Any) -> types.FunctionType | None:
    fn = _called(fn)
    for _ in range(8):
        if isinstance(fn, types.FunctionType):
            return fn
        fn = getattr(fn, "func", None) or getattr(fn, "__func__", None) or type(fn).__call__
    return None
