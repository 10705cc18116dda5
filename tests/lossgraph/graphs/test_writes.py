"""Of what a graph calls it is known whether it writes: that is copied before it is given the model's own numbers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graphs.functions import FUNCTIONS, METHODS
from tinker_lightning.lossgraph.graphs.graph import Graph, Node, Ref
from tinker_lightning.lossgraph.graphs.run import _WRITING, Program

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_every_method_that_writes_is_known_to() -> None:
    assert {"operator.setitem", "add_", "copy_", "div_", "scatter_"} < _WRITING
    told = {"torch.nn.functional.relu": 0, "torch.nn.functional.normalize": 3, "torch.nn.functional.threshold": 2}
    assert {name: len(before) for name, _, before in TOLD_TO_WRITE if name in told} == told


def told_to_write() -> Iterator[tuple[str, str, list[Any]]]:
    """Functions that write to an argument if another one says so: by which, and what stands before it."""
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
    with pytest.raises(InvalidLoss, match=rf"node 'writes': .*{argument}.* is not taken|argument '?{argument}'?"):
        Program(Graph.decode(Graph.build(["x", "y"], calls, Ref(2)).encode()))([x, y])
    assert (x._version, y._version) == (0, 0)
    off: Any = None if argument == "out" else False
    plain = [Node("call_function", "plain", name, (Ref(0), *before, off))]
    assert Program(Graph.build(["x", "y"], plain, Ref(2)))([x, y]).shape == x.shape
