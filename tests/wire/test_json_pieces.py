"""A large result is encoded in pieces, to the same bytes, and a parsed body takes no more than estimated."""  # R5.11

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest

from tinker_lightning.types import ForwardBackwardOutput, SampledSequence, SampleResponse, TensorData
from tinker_lightning.types.responses import PromptAltTokens
from tinker_lightning.wire import json as wire_json

LONG = TensorData(np.linspace(-3, 0, 10_000, dtype=np.float32).reshape(100, 100))
MESSAGES: list[Any] = [
    ForwardBackwardOutput([{"logprobs": LONG}, {}, {"logprobs": TensorData([1, 2])}], {"loss:sum": 0.1}),
    ForwardBackwardOutput([]),
    SampleResponse(
        [SampledSequence([1] * 9000, [-0.1] * 9000, "stop", [None, *([[(1, -0.5), (2, -1.5)]] * 5000)])],
        [None, *([-1.0] * 5000)],
        None,
        LONG,
        PromptAltTokens(LONG, LONG),
    ),
    SampleResponse([SampledSequence([], None, "length")]),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_pieces_are_the_bytes_of_the_whole(message: Any) -> None:
    pieces = list(wire_json.pieces(message))
    assert b"".join(pieces) == wire_json.dumps(message)
    assert max(map(len, pieces)) < 200_000


@pytest.mark.parametrize(
    "content", [b"{},", b"[],", b"1.5,", b"123456,", b'"",', b'{"":0},', b'"\xc3\xa9\xe2\x82\xac",']
)
def test_a_parsed_body_takes_no_more_than_estimated(content: bytes) -> None:
    body = b"[" + content * 100_000 + b"0]"
    tracemalloc.start()
    parsed = orjson.loads(body)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parsed
    assert taken < 1.1 * wire_json.estimate_parsed_bytes(body)
