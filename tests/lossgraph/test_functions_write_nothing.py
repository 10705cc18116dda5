"""No function that a graph may call changes a tensor that it is given."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.functions import FUNCTIONS, METHODS
from tinker_lightning.lossgraph.graph import Graph, Node, Ref
from tinker_lightning.lossgraph.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("name", ["add_", "fill_", "zero_", "copy_", "masked_fill_", "resize_", "set_"])
@pytest.mark.parametrize(("op", "prefix"), [("call_method", ""), ("call_function", "torch.Tensor.")])
def test_methods_in_place_are_not_listed(op: str, prefix: str, name: str) -> None:  # R3.7
    """Tracing replaces them."""
    assert not [each for each in METHODS if each.endswith("_")]
    with pytest.raises(InvalidLoss, match=f"the .* '{name}' is not among those"):
        Program(Graph(["x"], [Node(op, "a", f"{prefix}{name}", (Ref(0), 1.0))], Ref(1)))


def test_the_functions_that_can_be_told_to_write_are_found() -> None:
    told = {"torch.nn.functional.relu": 0, "torch.nn.functional.normalize": 3, "torch.nn.functional.threshold": 2}
    assert {name: len(before) for name, _, before in TOLD_TO_WRITE if name in told} == told


def told_to_write() -> Iterator[tuple[str, str, list[Any]]]:
    """Functions that write to an argument if another one is set: its name, and the arguments before it."""
    for name, function in {**METHODS, **FUNCTIONS}.items():
        try:
            parameters = inspect.signature(function.call).parameters
        except ValueError:  # one of torch's C++ functions, which take it by name only
            continue
        for place, each in enumerate(parameters):
            if each in ("inplace", "out"):
                before = list(parameters.values())[1:place]
                yield name, each, [0.5 if p.default is p.empty else p.default for p in before]


TOLD_TO_WRITE = list(told_to_write())


@pytest.mark.parametrize("how", ["by name", "by place"])
@pytest.mark.parametrize(("name", "argument", "before"), TOLD_TO_WRITE)
def test_no_function_can_be_told_to_write(name: str, argument: str, before: list[Any], how: str) -> None:  # R3.7
    x, y = torch.linspace(-1, 1, 4).reshape(2, 2), torch.zeros(2, 2)
    told: Any = Ref(1) if argument == "out" else True
    arguments, named = ([*before, told], {}) if how == "by place" else ([], {argument: told})
    needed = before if name.endswith("threshold") and named else []
    calls = [Node("call_function", "writes", name, (Ref(0), *needed, *arguments), named)]
    with pytest.raises(InvalidLoss, match=rf"node 'writes': .*{argument}.* is not supported|argument '?{argument}'?"):
        Program(Graph.decode(Graph(["x", "y"], calls, Ref(2)).encode()))([x, y])
    assert (x._version, y._version) == (0, 0)
    off: Any = None if argument == "out" else False
    plain = [Node("call_function", "plain", name, (Ref(0), *before, off))]
    assert Program(Graph(["x", "y"], plain, Ref(2)))([x, y]).shape == x.shape
