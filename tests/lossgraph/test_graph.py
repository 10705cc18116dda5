"""Graphs are plain data: anything else raises, and reading a graph runs nothing."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import tracemalloc
from typing import Any

import pytest
import torch

from tests.helpers.graph_messages import graph, node, placeholder, ref
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph import functions
from tinker_lightning.lossgraph.graph import MAX_NODES, MAX_VALUES, Graph, Node, Ref
from tinker_lightning.lossgraph.program import Program


def assert_invalid(message: Any, because: str) -> None:
    """Asserts that a message raises, quickly and without taking memory."""
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(InvalidLoss, match=because):
            Graph.decode(message)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 2


def test_what_is_written_is_read_back() -> None:
    arguments = (
        None,
        True,
        -3,
        0.5,
        math.inf,
        -math.inf,
        "text",
        [1, (2, [Ref(0)])],
        slice(None, Ref(1), -1),
        Ellipsis,
        torch.float32,
        torch.strided,
        torch.contiguous_format,
        {"key": Ref(1)},
    )
    calls = [
        Node("call_function", "first", "torch.stack", ([Ref(0), Ref(1)],)),
        Node(
            "call_method", "second", "view", (Ref(2), *arguments), {"dtype": torch.bool, "device": torch.device("cpu")}
        ),
    ]
    built = Graph(("logprobs", "advantages"), tuple(calls), (Ref(3), {"custom/x:sum": Ref(2)}))
    read = Graph.decode(json.loads(json.dumps(built.encode())))
    assert read == built
    assert read.encode() == built.encode()
    nan = Graph.decode(graph(node("a", "torch.exp", {"float": "nan"})))
    assert math.isnan(nan.calls[0].args[0])


def test_the_official_sdks_own_example_is_read() -> None:
    """As PROTOCOL.md §12.2 has it."""
    output = {"tuple": [ref("neg"), {"dict": {"custom/x:sum": ref("neg"), "custom/y:mean": ref("mean")}}]}
    message = graph(
        node("mul", "operator.mul", ref("logprobs"), ref("advantages")),
        node("sum_1", "sum", ref("mul"), op="call_method"),
        node("neg", "operator.neg", ref("sum_1")),
        node("mean", "mean", ref("logprobs"), op="call_method"),
        output=output,
        inputs=("logprobs", "advantages"),
    )
    assert Graph.decode(message).output == (Ref(4), {"custom/x:sum": Ref(4), "custom/y:mean": Ref(5)})


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "eval",
        "subprocess.run",
        "pickle.loads",
        "torch.load",
        "torch.save",
        "torch.hub.load",
        "torch.ops.aten.exp",
        "torch.utils.cpp_extension.load",
        "torch.Tensor.__class__",
        "torch.Tensor.__reduce_ex__",
        "torch.__class__",
        "torch.exp.__call__",
        "torch.empty",
        "torch.rand",
        "torch.as_strided",
        "torch.nn.functional.dropout",
        "operator.attrgetter",
        "operator.methodcaller",
        "operator.call",
        "operator.concat",
        "math.factorial",
        "_operator.mul",
        "torch.exp ",
        "TORCH.EXP",
        "",
    ],
)
def test_functions_that_are_not_on_the_list(target: str) -> None:  # R3.7
    assert_invalid(graph(node("a", target, ref("logprobs"))), "is not among those that a server-side loss may call")


@pytest.mark.parametrize(
    "method",
    [
        "__class__",
        "__dict__",
        "__reduce__",
        "__getattribute__",
        "__init_subclass__",
        "__setstate__",
        "apply_",
        "as_strided",
        "backward",
        "data_ptr",
        "item",
        "map_",
        "numpy",
        "register_hook",
        "requires_grad_",
        "resize_",
        "set_",
        "storage",
        "tolist",
        "untyped_storage",
        "format",
    ],
)
def test_methods_that_are_not_on_the_list(method: str) -> None:  # R3.7
    assert_invalid(graph(node("a", method, ref("logprobs"), op="call_method")), "is not among those")


def test_the_lists_hold_torchs_own_functions_and_ours_and_no_others() -> None:  # R3.7
    for table in (functions.FUNCTIONS, functions.METHODS):
        for name, function in table.items():
            module = getattr(function.call, "__module__", None) or "torch"
            assert module.split(".")[0] in ("torch", "tinker_lightning"), name
            assert "__" not in name


@pytest.mark.parametrize(
    ("message", "because"),
    [
        (None, "object with a list of nodes"),
        ([], "object with a list of nodes"),
        ({"nodes": "x"}, "object with a list of nodes"),
        ({"format": 2, "nodes": []}, "the graph has format 2; only 1 is supported"),
        ({"nodes": []}, "last node of a graph must be its output"),
        (graph(node("a", op="get_attr")), "op 'get_attr' is not supported"),
        (graph(node("a", op="call_module")), "op 'call_module' is not supported"),
        (graph(node("a", op="__import__")), "is not supported"),
        ({"nodes": [{"op": ["x"], "name": "a", "target": "b"}]}, "is not supported"),
        ({"nodes": [7]}, "node 0: a node is an object"),
        (graph(node("a b")), "a name is a letter"),
        (graph(node("__class__.x")), "a name is a letter"),
        (graph(node("x" * 200)), "a name is a letter"),
        (graph({**node("a"), "name": None}), "a name is a letter"),
        (graph({**node("a"), "target": None}), "the target must be a string"),
        (graph({**node("a"), "target": "t" * 1000}), "the target must be a string"),
        (graph({**node("a"), "args": {}}), "args must be a list"),
        (graph({**node("a"), "kwargs": []}), "args must be a list and kwargs an object"),
        (graph(node("a"), node("a")), "another node has this name"),
        (graph(node("logprobs")), "another node has this name"),
        (
            graph(node("a", "torch.exp", ref("b")), node("b", "torch.exp", ref("a"))),
            "'b', but no earlier node",
        ),
        (graph(node("a", "torch.exp", ref("a"))), "'a', but no earlier node has this name"),
        (graph(node("a", "torch.exp", ref("output"))), "but no earlier node has this name"),
        (graph(node("a", "torch.exp", {"ref": ["a"]})), "but no earlier node has this name"),
        (graph(node("a", "torch.exp", {"ref": "logprobs", "x": 1})), "object with one key"),
        (graph(node("a", "torch.exp", {"code": "import os"})), "is invalid"),
        (graph(node("a", "torch.exp", {"dtype": "__class__"})), "is invalid"),
        (graph(node("a", "torch.exp", {"dtype": "complex64"})), "is invalid"),
        (graph(node("a", "torch.exp", {"device": "../../etc"})), "is invalid"),
        (graph(node("a", "torch.exp", {"layout": "sparse_csr"})), "is invalid"),
        (graph(node("a", "torch.exp", {"memory_format": "x"})), "is invalid"),
        (graph(node("a", "torch.exp", {"float": "1e400"})), "is invalid"),
        (graph(node("a", "torch.exp", {"slice": [1, 2]})), "is invalid"),
        (graph(node("a", "torch.exp", {"ellipsis": False})), "is invalid"),
        (graph(node("a", "torch.exp", {"tuple": {}})), "is invalid"),
        (graph(node("a", "torch.exp", 10**30)), "too large for a tensor"),
        (graph(node("a", "torch.exp", "x" * 1000)), "a string has more than 256"),
        (graph(node("a", "torch.add", ref("logprobs"), 1, out=ref("logprobs"))), "'out' is not supported"),
        (graph(node("a", "torch.ones", 1, requires_grad=True)), "'requires_grad' is not supported"),
        (graph({**node("a"), "kwargs": {"__class__.x": 1}}), "is not supported"),
        (graph(node("a"), placeholder("late")), "placeholders must precede all other nodes"),
        ({"nodes": [{**placeholder("a"), "args": [1]}]}, "a placeholder cannot have a default"),
        ({"nodes": [placeholder("a"), {**placeholder("a"), "name": "b"}]}, "another placeholder for 'a'"),
        ({"nodes": [node("o", "output", op="output")]}, "an output has one argument"),
        ({"nodes": [*graph(node("a"))["nodes"], node("b")]}, "a node follows the output"),
        ({"nodes": graph(node("a"))["nodes"][:-1]}, "last node of a graph must be its output"),
    ],
)
def test_what_is_no_graph(message: Any, because: str) -> None:
    assert_invalid(message, because)


def test_a_million_nodes() -> None:
    nodes = graph(*(node(f"n{i}", "torch.exp", ref("logprobs")) for i in range(3)))
    million = {"nodes": nodes["nodes"][:1] + nodes["nodes"][1:2] * 10**6}
    assert_invalid(million, f"the graph has 1000001 nodes; at most {MAX_NODES} are supported")


def test_arguments_without_end() -> None:
    assert_invalid(graph(node("a", "torch.tensor", [0.0] * (MAX_VALUES + 1))), f"may have {MAX_VALUES} of them")
    shared = [0.0] * 1000
    assert_invalid(
        graph(*(node(f"n{i}", "torch.tensor", shared) for i in range(100))), f"may have {MAX_VALUES} of them"
    )
    deep: Any = 0
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    assert_invalid(graph(node("a", "torch.tensor", deep)), "nested 8 deep")
    for kind in ("tuple", "slice", "dict"):
        deep = 0
        for _ in range(2000):
            deep = {kind: {"k": deep} if kind == "dict" else [deep, None, None]}
        assert_invalid(graph(node("a", "torch.tensor", deep)), "nested 8 deep|is invalid")


def test_reading_does_not_change_what_is_read() -> None:
    message = graph(node("a", "torch.exp", ref("logprobs")))
    kept = copy.deepcopy(message)
    Graph.decode(message)
    assert message == kept


def test_what_is_rejected_is_named() -> None:
    with pytest.raises(InvalidLoss, match=r"node 'mine': the function 'torch\.rand' is not among"):
        Graph.decode(graph(node("mine", "torch.rand")))
    with pytest.raises(InvalidLoss, match=r"the function 'torch\.rand' is not among"):
        Program(Graph([], [Node("call_function", "mine", "torch.rand")], ()))
    with pytest.raises(InvalidLoss, match="a graph cannot contain set"):
        Graph([], [Node("call_function", "mine", "torch.exp", ({1},))], ()).encode()
