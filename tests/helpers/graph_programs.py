"""Programs of a few calls, and what they return."""

from __future__ import annotations

from typing import Any

import torch

from tinker_lightning.lossgraph.graph import Graph, Node, Ref
from tinker_lightning.lossgraph.program import Program

X = Ref(0)


def call(target: str, *args: Any, **kwargs: Any) -> Node:
    return Node("call_function", "bomb", target, args, kwargs)


def method(target: str, *args: Any, **kwargs: Any) -> Node:
    return Node("call_method", "bomb", target, args, kwargs)


def program(*calls: Node, inputs: int = 1) -> Program:
    """A program that returns the value of its last call; a Ref counts the inputs, then the calls."""
    named = [Node(each.op, f"{each.name}_{i}", each.target, each.args, each.kwargs) for i, each in enumerate(calls)]
    names = [f"x{i}" for i in range(inputs)]
    return Program(Graph.decode(Graph(names, named, Ref(inputs + len(calls) - 1)).encode()))


def run(*calls: Node, x: Any = None) -> Any:
    values = [torch.linspace(-2, 2, 12).reshape(3, 4)] if x is None else x if isinstance(x, list) else [x]
    return program(*calls, inputs=len(values))(values)
