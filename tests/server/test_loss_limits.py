"""What one session's losses can take from a server, and from other sessions: bounded time and memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.losses.test_graph import graph, node, ref

if TYPE_CHECKING:
    from tests.conftest import Api

EXT = "http://embedded/ext/v1"
SUM = node("loss", "sum", ref("logprobs"), op="call_method")


def upload(api: Api, session: str, *calls: dict[str, Any], number: int = 0, **metrics: str) -> str:
    """The id of a loss whose value is the node `loss`; metrics name nodes."""
    named = {f"custom/{name}:sum": ref(value) for name, value in metrics.items()}
    body = {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": "crafted",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": graph(*calls, SUM, output={"tuple": [ref("loss"), {"dict": named}]}),
        "type": "create_custom_loss",
    }
    return str(api.run("create_custom_loss", body)["loss_id"])


def trained(api: Api, model: str, loss_id: str, seq: int = 1, datums: int = 1) -> Any:
    """What a pass with an uploaded loss gives."""
    body = api.train(model, seq)
    body["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    body["forward_backward_input"]["data"] *= datums
    return api.run("forward_backward", body)


def crafted(api: Api, *calls: dict[str, Any], **metrics: str) -> Any:
    """What a pass with such a loss gives, in a session of its own."""
    session = api.session()
    return trained(api, api.model(session), upload(api, session, *calls, **metrics))


def doubling(first: Any, times: int) -> list[dict[str, Any]]:
    """Tuples that hold the one before twice."""
    nodes = [node("t0", "operator.add", {"tuple": [first]}, {"tuple": []})]
    for i in range(1, times):
        nodes.append(node(f"t{i}", "operator.add", {"tuple": [ref(f"t{i - 1}")] * 2}, {"tuple": []}))
    return nodes


WIDE = {"tuple": [1] * 64}
SEQUENCES: dict[str, list[dict[str, Any]]] = {
    "numbers, doubled": doubling(1, 60),
    "tensors, doubled": doubling(ref("logprobs"), 60),
    "very deep": [
        node("t0", "operator.add", WIDE, {"tuple": []}),
        *(node(f"t{i}", "operator.add", {"tuple": [ref(f"t{i - 1}")]}, {"tuple": []}) for i in range(1, 1500)),
    ],
    "wide, cut out of an argument": [
        node("t0", "operator.add", WIDE, {"tuple": []}),
        node("t1", "operator.getitem", {"tuple": [{"tuple": [ref("t0")] * 10_000}]}, 0),
        node("t2", "operator.getitem", {"tuple": [{"tuple": [ref("t1")] * 10_000}]}, 0),
    ],
    "a sequence of sequences": [
        node("t0", "operator.add", {"tuple": [1]}, {"tuple": []}),
        node("t1", "operator.getitem", {"tuple": [ref("t0"), ref("t0")]}, {"slice": [None, None, None]}),
    ],
    "more values than are looked at": [
        node("t0", "torch.broadcast_tensors", *[ref("logprobs")] * 5_000),
    ],
    "the same values again and again": [
        node("t0", "torch.broadcast_tensors", *[ref("logprobs")] * 1_000),
        *(node(f"t{i}", "torch.stack", ref("t0")) for i in range(1, 4_000)),
    ],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_cannot_grow(api: Api, name: str) -> None:  # R3.7
    """A few kilobytes never keep the thread that all sessions share."""
    started = time.perf_counter()
    result = crafted(api, *SEQUENCES[name])
    assert result["category"] == "user"
    assert "node 't" in result["error"]
    assert time.perf_counter() - started < 12


def test_shapes_can_still_be_joined(api: Api) -> None:
    shape = node("shape", "getattr", ref("logprobs"), "shape")
    joined = node("joined", "operator.add", ref("shape"), {"tuple": [2]})
    zeros = node("zeros", "new_ones", ref("logprobs"), ref("joined"), op="call_method")
    total = node("total", "sum", ref("zeros"), op="call_method")
    assert crafted(api, shape, joined, zeros, total, ones="total")["metrics"]["custom/ones:sum"] == 20
