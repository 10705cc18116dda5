"""Unexpected responses in the middle of a run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA
from tinker_lightning import ModelInput, SamplingParams
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.dialects import Surrogate, dialect_named
from tinker_lightning.doctor import examine
from tinker_lightning.errors import (
    InvalidDatum,
    InvalidInput,
    LossNotFinite,
    NotAnApi,
    NotATinkerServer,
    OperationFailed,
    ResultExpired,
    TinkerLightningError,
)
from tinker_lightning.server import create_app
from tinker_lightning.wire import tinker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from tinker_lightning.server import EmbeddedTrainer


USERS = {"error": "no", "category": "user"}


class Meddler(httpx.AsyncBaseTransport):
    """Passes requests on, except where it has another answer for an endpoint."""

    def __init__(self, inner: httpx.AsyncBaseTransport, **answers: Callable[[], httpx.Response]) -> None:
        self._inner, self.answers = inner, answers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        make = self.answers.get(request.url.path.rsplit("/", 1)[1])
        return await self._inner.handle_async_request(request) if make is None else make()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            lambda: httpx.Response(410, json={"detail": "gone"}),
            ResultExpired,
            "no longer keeps its result. Resume from the last",
        ),
        (
            lambda: httpx.Response(404, json={"detail": "unknown"}),
            ResultExpired,
            "does not have its result, or no longer",
        ),
        (lambda: httpx.Response(422, json={"detail": "failed"}), InvalidInput, "failed"),
        (lambda: httpx.Response(400, json={"detail": "bad"}), InvalidInput, "bad"),
        (lambda: httpx.Response(200, json=USERS), InvalidInput, "no"),
        (lambda: httpx.Response(200, json=USERS | {"error_class": "LossNotFinite"}), LossNotFinite, "no"),
        (lambda: httpx.Response(200, json=USERS | {"error_class": "ClientForked"}), InvalidInput, "no"),
        (lambda: httpx.Response(200, json=USERS | {"error_class": ["InvalidDatum"]}), InvalidInput, "no"),
        (lambda: httpx.Response(400, json={"detail": "no", "error_class": "InvalidDatum"}), InvalidDatum, "no"),
        (lambda: httpx.Response(200, json={"error": "no", "category": "server"}), OperationFailed, "no"),
        (lambda: httpx.Response(200, json={"error": "no"}), OperationFailed, "no"),
        (lambda: httpx.Response(200, html="<html>login</html>"), NotAnApi, "Correct the URL"),
        (lambda: httpx.Response(200, json={"metrics": 3}), NotATinkerServer, "retrieve_future: "),
        (
            lambda: httpx.Response(200, content=b"\xff\xff", headers={"content-type": "application/x-protobuf"}),
            NotATinkerServer,
            "the result of forward is malformed",
        ),
    ],
)
def test_malformed_results_raise(
    shared: EmbeddedTrainer, answer: Callable[[], httpx.Response], kind: type[TinkerLightningError], message: str
) -> None:
    meddler = Meddler(httpx.ASGITransport(create_app(shared, extended=False)))
    with ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=QUICK) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        meddler.answers["retrieve_future"] = answer
        with pytest.raises(TinkerLightningError, match=message) as caught:
            model.forward(DATA, "cross_entropy").result()
        del meddler.answers["retrieve_future"]
        assert model.forward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0
    error = caught.value
    assert type(error) is kind
    assert (error.operation, error.model_id, error.seq_id) == ("forward", model.model_id, 1)
    assert error.request_id == f"{model.model_id}:1"
    assert str(error).startswith("forward: ")
    assert str(error).endswith(f" (forward 1 of {model.model_id}, request {error.request_id})")


def test_a_sample_whose_result_is_gone_is_requested_again(shared: EmbeddedTrainer) -> None:
    meddler = Meddler(httpx.ASGITransport(create_app(shared, extended=False)))
    with ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=QUICK) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        lost = iter(range(2))

        def gone() -> httpx.Response:
            if next(lost) == 1:
                del meddler.answers["retrieve_future"]
            return httpx.Response(410, json={"detail": "gone"})

        meddler.answers["retrieve_future"] = gone
        prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=2)
        assert sampler.sample(prompt, 1, params).result().sequences[0].tokens
        meddler.answers["retrieve_future"] = lambda: httpx.Response(410, json={"detail": "gone"})
        with pytest.raises(ResultExpired):
            sampler.sample(prompt, 1, params).result()


def test_a_submission_without_a_receipt(shared: EmbeddedTrainer) -> None:
    meddler = Meddler(httpx.ASGITransport(create_app(shared, extended=False)))
    with ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=QUICK) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        meddler.answers["forward_backward"] = lambda: httpx.Response(200, json={})
        with pytest.raises(NotATinkerServer, match=r"http\S+ answers, .* /api/v1/forward\w*: request_id: missing"):
            model.forward(DATA, "cross_entropy").result()


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b1m\r"


def test_escape_sequences_of_a_server_reach_no_terminal(  # R5.18
    shared: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    meddler = Meddler(httpx.ASGITransport(create_app(shared)))
    session = {"session_id": "a", "info_message": f"news{ESCAPES}", "warning_message": None, "error_message": None}
    models = {"supported_models": [{"model_name": f"tiny{ESCAPES}"}]}
    caplog.set_level("INFO", "tinker_lightning")
    dialect = dialect_named("protobuf").but(surrogate=Surrogate())
    policy = replace(QUICK, seconds=0.5)
    with ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=policy, dialect=dialect) as service:
        meddler.answers["create_session"] = lambda: httpx.Response(200, json=session)
        meddler.answers["get_server_capabilities"] = lambda: httpx.Response(200, json=models)
        meddler.answers["create_sampling_session"] = lambda: httpx.Response(400, json={"detail": f"no{ESCAPES}"})
        report = examine(service, checks=[])
        with pytest.raises(InvalidInput) as error:
            service.create_sampling_client(base_model="tiny")
        meddler.answers["create_sampling_session"] = lambda: httpx.Response(429, json={"detail": f"busy{ESCAPES}"})
        with pytest.raises(OperationFailed) as refused:
            service.create_sampling_client(base_model="tiny")
    escaped = r"\x1b]0;owned\x07\x1b[2J\x9b1m\x0d"
    assert f"no{escaped}" in str(error.value)
    assert f"news{escaped}" in caplog.text
    assert f"busy{escaped}" in str(refused.value)
    assert f"tiny{escaped}" in report.table(500)
    for text in (str(error.value), caplog.text, report.table()):
        assert not set(text) & set(ESCAPES) - set("];0owned[2J1m")


def test_an_unreachable_server_does_not_delay_close(shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_lightning.client.transport.session._FINISH_SECONDS", 0.2)
    meddler = Meddler(httpx.ASGITransport(create_app(shared)))

    def gone() -> httpx.Response:
        raise httpx.ConnectError("gone")

    with ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=QUICK) as service:
        service.create_sampling_client(base_model="tiny")
        meddler.answers["finish"] = gone
        started = time.monotonic()
    assert time.monotonic() - started < 10


def _json(text: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(200, content=text.encode(), headers={"content-type": "application/json"})


def _output(logprobs: str, metrics: str = "{}", name: str = "logprobs") -> Callable[[], httpx.Response]:
    outputs = ", ".join([f'{{"{name}": {logprobs}}}'] * len(DATA))
    return _json(f'{{"loss_fn_output_type": "x", "loss_fn_outputs": [{outputs}], "metrics": {metrics}}}')


def _protobuf(message: Message) -> Callable[[], httpx.Response]:
    content, kind = message.SerializeToString(), {"content-type": "application/x-protobuf"}
    return lambda: httpx.Response(200, content=content, headers=kind)


def _bare(metrics: str) -> Callable[[], httpx.Response]:
    return _json(f'{{"loss_fn_output_type": "x", "loss_fn_outputs": [], "metrics": {metrics}}}')


FIELD = pb.BatchedTensor(data=bytes(4), offsets=bytes(8) + b"\x04" + bytes(7))  # without a dtype
RECORD = pb.ArrayRecord(num_datums=1, fields={"logprobs": FIELD})
SAMPLE = pb.SampleResponse(sequences=[pb.SampledSequence(tokens=bytes(4))])
NUMBERS = '{"data": [-1.0], "dtype": "float32"}'


def _stranger(meddler: Meddler) -> ServiceClient:
    """Connects to a server of an unknown project."""
    dialect = dialect_named("protobuf").but(surrogate=Surrogate())
    return ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=QUICK, dialect=dialect)


@pytest.mark.parametrize(
    ("endpoint", "answer", "field"),
    [
        ("retrieve_future", _output('{"data": [NaN], "dtype": "float32"}'), "a result with NaN"),
        (
            "retrieve_future",
            _output('{"data": [null], "dtype": "float32"}'),
            r"loss_fn_outputs\[0\].logprobs: not an array",
        ),
        ("retrieve_future", _output('{"data": [1], "dtype": "bf16"}'), r"loss_fn_outputs\[0\].logprobs: dtype 'bf16'"),
        ("retrieve_future", _output(NUMBERS), r"loss_fn_outputs\[0\].logprobs: has 1 values for 26 targets"),
        ("retrieve_future", _output(NUMBERS, '{"loss": 1.0}'), "metrics: 'loss' has no colon"),
        ("retrieve_future", _output(NUMBERS, '{"loss:sum": null}'), "metrics.loss:sum: must be a number"),
        ("retrieve_future", _protobuf(pb.ForwardBackwardOutput(loss_fn_outputs=[RECORD])), "logprobs: dtype 0"),
        ("retrieve_future", _protobuf(SAMPLE), "loss_fn_outputs has 0 entries for 3 datums"),
        ("retrieve_future", _bare("{}"), "loss_fn_outputs has 0 entries for 3 datums"),
        (
            "forward_backward",
            lambda: httpx.Response(415, json={"detail": "no"}),
            "speak the dialect 'protobuf'",
        ),
        (
            "forward_backward",
            lambda: httpx.Response(422, json={"detail": [{"loc": ["body", "seq_id"], "msg": "too high"}]}),
            "seq_id: too high",
        ),
        ("forward_backward", lambda: httpx.Response(404, json={"detail": "Not Found"}), "servers of several versions"),
        ("forward_backward", lambda: httpx.Response(200, html="<html>login</html>"), "returned HTTP 200 and text/html"),
    ],
)
@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_an_answer_of_a_stranger_is_one_error_that_names_server_endpoint_and_field(
    shared: EmbeddedTrainer, call: str, endpoint: str, answer: Callable[[], httpx.Response], field: str
) -> None:
    meddler = Meddler(httpx.ASGITransport(create_app(shared, extended=False)))
    with _stranger(meddler) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        meddler.answers[endpoint] = answer
        started = time.monotonic()
        with pytest.raises(TinkerLightningError, match=field) as caught:
            getattr(model, call)(DATA, "cross_entropy").result()
        assert time.monotonic() - started < 10
        assert "http://embedded" in str(caught.value)
        assert f"/api/v1/{endpoint}" in str(caught.value)
        assert ("Correct the URL" in str(caught.value)) == (type(caught.value) is NotAnApi)
        meddler.answers.clear()


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (_output(NUMBERS, '{"x:sum": 1.0}', name="losses"), r"loss_fn_outputs\[0\].logprobs: missing; .* only losses"),
        (_bare('{"x:sum": 1.0}'), "loss_fn_outputs has 0 entries for 3 datums"),
    ],
)
def test_only_a_backward_may_come_without_log_probabilities(
    shared: EmbeddedTrainer, answer: Callable[[], httpx.Response], field: str
) -> None:
    meddler = Meddler(httpx.ASGITransport(create_app(shared, extended=False)))
    with _stranger(meddler) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        meddler.answers["retrieve_future"] = answer
        with pytest.raises(NotATinkerServer, match=field):
            model.forward(DATA, "cross_entropy").result()
        assert model.forward_backward(DATA, "cross_entropy").result().metrics == {"x:sum": 1.0}
        meddler.answers.clear()
