"""Unexpected responses in the middle of a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA
from tinker_lightning import ModelInput, SamplingParams
from tinker_lightning.client import ServiceClient
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

if TYPE_CHECKING:
    from collections.abc import Callable

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
            "the result is malformed",
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
    assert f"forward 1 of {model.model_id}, request {error.request_id}: " in str(error)


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
        with pytest.raises(OperationFailed, match="returned no request_id"):
            model.forward(DATA, "cross_entropy").result()


def test_an_unreachable_server_does_not_delay_close(shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_lightning.client.session._FINISH_SECONDS", 0.2)
    meddler = Meddler(httpx.ASGITransport(create_app(shared)))

    def gone() -> httpx.Response:
        raise httpx.ConnectError("gone")

    with ServiceClient(base_url="http://embedded", transport=meddler, retry_policy=QUICK) as service:
        service.create_sampling_client(base_model="tiny")
        meddler.answers["finish"] = gone
        started = time.monotonic()
    assert time.monotonic() - started < 10
