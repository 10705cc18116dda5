"""Splitting of batches, combination of results, and the order in which requests are posted."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA, csr, nll
from tests.helpers.reference import bits
from tinker_lightning import AdamParams, Datum, ModelInput, TensorData
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.passes.request import combine_outputs, split
from tinker_lightning.server import create_app
from tinker_lightning.server.endpoints import handshake
from tinker_lightning.testing import RecordingTransport
from tinker_lightning.types import DmelChunk, ForwardBackwardOutput, ImageChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.server import EmbeddedTrainer

FAST = AdamParams(learning_rate=1e-2)


def datum(length: int) -> Datum:
    """A datum of 16 bytes a token: 4 of the input, 8 of the target, 4 of the weight."""
    return Datum(
        ModelInput.from_ints(np.zeros(length, int)),
        {"target_tokens": np.zeros(length, int), "weights": np.ones(length)},
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 600))
def test_chunks_are_consecutive_and_within_the_limits(lengths: list[int], most: int, size: int) -> None:
    data = [datum(length) for length in lengths]
    chunks = split(data, most, size)
    assert [each for chunk in chunks for each in chunk] == data
    sizes = [[16 * each.model_input.length for each in chunk] for chunk in chunks]
    assert all(len(chunk) <= most and (sum(chunk) <= size or len(chunk) == 1) for chunk in sizes)
    for earlier, later in itertools.pairwise(sizes):  # no chunk ends before it must
        assert len(earlier) == most or sum(earlier) + later[0] > size


def test_the_size_is_that_of_the_bytes() -> None:
    picture = Datum(ModelInput([ImageChunk(b"x" * 70, "png"), DmelChunk(b"y" * 30)]), {})
    sparse = csr(np.eye(4, 100, dtype=np.float32))  # 4 values of 4 bytes, 5 + 4 indices of 8
    wide = Datum(ModelInput.from_ints([1, 2, 3, 4]), {"weights": sparse})
    assert len(split([picture, picture], 9, 200)) == 1
    assert len(split([picture, picture], 9, 199)) == 2
    assert len(split([wide, wide], 9, 2 * (16 + 16 + 72))) == 1
    assert len(split([wide, wide], 9, 2 * (16 + 16 + 72) - 1)) == 2


def test_metrics_are_reduced_as_their_names_say() -> None:
    names = ["a:sum", "b:mean", "c:min", "d:max", "e:slack", "f:hash2", "g:unique", "h:other", "i", "j:sum"]
    values = [
        [1.0, 2.0, 3.0, 4.0, 5.0, 2.0**63, 7.0, 8.0, 9.0, 1.0],
        [10.0, 5.0, -1.0, 6.0, 2.0, 2.0**63 + 4096, 8.0, 8.0, 9.0],
    ]
    outputs = [
        ForwardBackwardOutput([{}] * count, dict(zip(names, each, strict=False)), f"kind {count}")
        for count, each in zip((1, 3), values, strict=True)
    ]
    combined = combine_outputs(outputs)
    assert combined.metrics == {
        "a:sum": 11.0,
        "b:mean": (2.0 + 3 * 5.0) / 4,
        "c:min": -1.0,
        "d:max": 6.0,
        "e:slack": 5.0 - (5.0 + 3 * 2.0) / 4,
        "f:hash2": 4096.0,
        "g:unique": 7.0,
        "g:unique_1": 8.0,
    }
    assert combined.loss_fn_output_type == "kind 1"
    assert len(combined.loss_fn_outputs) == 4
    assert combine_outputs(outputs[:1]) is outputs[0]


def test_outputs_stay_in_order() -> None:
    outputs = [ForwardBackwardOutput([{"logprobs": TensorData([float(i)])}]) for i in range(3)]
    assert [each["logprobs"].tolist() for each in combine_outputs(outputs).loss_fn_outputs] == [
        [0.0],
        [1.0],
        [2.0],
    ]


class Jitter(httpx.AsyncBaseTransport):
    """Delays requests at random, the first ones until `together` are there, and counts how many are at a time."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.most = 0
        self.together = 1
        self._there = asyncio.Event()
        self._now = 0
        self._inner = inner
        self._random = random.Random(1)  # noqa: S311

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        passes = ("forward_backward", "retained_forward", "retained_backward")
        numbered = request.url.path.endswith((*passes, "optim_step", "save_weights"))
        self._now += numbered
        self.most = max(self.most, self._now)
        if self.most >= self.together:
            self._there.set()
        if numbered:
            await asyncio.wait_for(self._there.wait(), 30)
        await asyncio.sleep(self._random.random() * 0.01)
        try:
            return await self._inner.handle_async_request(request)
        finally:
            self._now -= numbered


class Chunked:
    def __init__(
        self, trainer: EmbeddedTrainer, service: ServiceClient, record: RecordingTransport, jitter: Jitter
    ) -> None:
        self.trainer, self.service, self.record, self.jitter = trainer, service, record, jitter

    def numbers(self) -> list[int]:
        """The numbers in the order in which they arrived."""
        found = []
        for request in self.record.requests:
            if request.is_pass or request.path.endswith(("optim_step", "save_weights")):
                message = request.message
                found.append(message["seq_id"] if isinstance(message, dict) else message.seq_id)
        return found


@pytest.fixture
def chunked(
    shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Chunked]:
    """A server that takes two datums at a time, in the mode that the test asks for."""
    parallel, extended = request.param
    limits = {"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": parallel}
    monkeypatch.setattr(handshake, "CLIENT_CONFIG", {**handshake.CLIENT_CONFIG, **limits})
    jitter = Jitter(httpx.ASGITransport(create_app(shared, extended=extended)))
    record = RecordingTransport(jitter)
    with ServiceClient(base_url="http://embedded", transport=record, retry_policy=QUICK) as service:
        yield Chunked(shared, service, record, jitter)


MODES = pytest.mark.parametrize(
    "chunked", [(parallel, extended) for parallel in (True, False) for extended in (True, False)], indirect=True
)


def run(model: Any) -> list[Any]:
    """A step over five datums, which are three chunks."""
    data = [*DATA, *DATA[:2]]
    futures = [
        model.forward(data, "cross_entropy"),
        model.forward_backward(data, "cross_entropy"),
        model.forward_backward_custom(data, nll),
        model.optim_step(FAST),
    ]
    return [future.result() for future in futures]


@MODES
def test_chunking_changes_nothing(chunked: Chunked) -> None:
    model = chunked.service.create_lora_training_client("tiny", rank=4, seed=1)
    with ServiceClient(base_url="http://embedded", transport=_whole(chunked.trainer)) as service:
        whole = service.create_lora_training_client("tiny", rank=4, seed=1)
        expected = run(whole)
        weights = bits(chunked.trainer, whole.model_id)
    got = run(model)
    assert sorted(chunked.numbers()) == list(range(1, 14))  # four passes of three chunks, and the step
    for ours, theirs in zip(got[:3], expected[:3], strict=True):
        assert ours.loss_fn_output_type == theirs.loss_fn_output_type
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
        pairs = zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=1e-5)
    assert got[3].metrics["grad_norm"] == pytest.approx(expected[3].metrics["grad_norm"], rel=1e-5)
    assert bits(chunked.trainer, model.model_id).keys() == weights.keys()


def _whole(trainer: EmbeddedTrainer) -> httpx.AsyncBaseTransport:
    """A client of the trainer that never splits a batch."""

    class Whole(httpx.AsyncBaseTransport):
        def __init__(self) -> None:
            self._inner = httpx.ASGITransport(create_app(trainer))

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("client/config"):
                return httpx.Response(200, json={"parallel_fwdbwd_chunks": True})
            return await self._inner.handle_async_request(request)

    return Whole()


@pytest.mark.parametrize("chunked", [(False, True), (False, False)], indirect=True)
def test_without_numbers_requests_are_posted_one_after_another(chunked: Chunked) -> None:
    model = chunked.service.create_lora_training_client("tiny", rank=4, seed=1)
    run(model)
    model.save_state("serial").result()
    assert chunked.numbers() == list(range(1, 15))
    assert chunked.jitter.most == 1


@pytest.mark.parametrize("chunked", [(True, True), (True, False)], indirect=True)
def test_with_numbers_requests_are_posted_together(chunked: Chunked) -> None:
    model = chunked.service.create_lora_training_client("tiny", rank=4, seed=1)
    chunked.jitter.together = 9  # the chunks of three passes, before any of them is answered
    run(model)
    assert chunked.jitter.most >= 9


@pytest.mark.parametrize("chunked", [(False, False)], indirect=True)
def test_two_models_do_not_wait_for_each_other(chunked: Chunked) -> None:
    models = [chunked.service.create_lora_training_client("tiny", rank=4) for _ in range(3)]
    chunked.jitter.together = 3
    futures = [model.forward(DATA, "cross_entropy") for model in models for _ in range(2)]
    for future in futures:
        future.result()
    assert chunked.jitter.most == 3


@pytest.mark.parametrize("chunked", [(False, False)], indirect=True)
def test_a_rejected_request_does_not_block_the_next(chunked: Chunked) -> None:
    model = chunked.service.create_lora_training_client("tiny", rank=4)
    bad = model.save_state("no/name")
    good = model.forward_backward(DATA, "cross_entropy")
    assert good.result().metrics["loss:sum"] > 0
    assert bad.exception() is not None
    assert chunked.numbers() == [1, 2, 3]


@pytest.mark.parametrize("compressed", [True, False])
def test_bodies_are_compressed_where_the_server_asks_for_it(
    shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    config = {**handshake.CLIENT_CONFIG, "proto_compress_fwdbwd": compressed}
    monkeypatch.setattr(handshake, "CLIENT_CONFIG", config)
    record = RecordingTransport(httpx.ASGITransport(create_app(shared)))
    with ServiceClient(base_url="http://embedded", transport=record) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        model.forward(DATA * 10, "cross_entropy").result()
        model.optim_step().result()
    encodings = {each.path.rsplit("/", 1)[1]: each.headers.get("content-encoding") for each in record.requests}
    assert encodings["forward_backward"] == ("zstd" if compressed else None)
    assert encodings["optim_step"] is None
    (request,) = (each for each in record.requests if each.path.endswith("forward_backward"))
    assert len(request.message.data) == 30
