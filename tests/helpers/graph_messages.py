"""Graphs as they are sent, written by hand."""

from __future__ import annotations

from typing import Any


def node(name: str, target: str = "torch.exp", *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def placeholder(name: str) -> dict[str, Any]:
    return node(name, name, op="placeholder")


def graph(*calls: dict[str, Any], output: Any = None, inputs: tuple[str, ...] = ("logprobs",)) -> dict[str, Any]:
    returned = output if output is not None else {"tuple": [ref(calls[-1]["name"]), {"dict": {}}]}
    end = node("output", "output", returned, op="output")
    return {"format": 1, "nodes": [*map(placeholder, inputs), *calls, end]}
