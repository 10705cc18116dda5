"""The loss `stable_reinforce` goes to servers that offer it as it is, and fails on others before anything is sent."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tinker

from tests.helpers.backends import QUICK, SDK_KEY
from tinker_lightning import Datum, ModelInput, SamplingParams
from tinker_lightning.client import ServiceClient, as_backend
from tinker_lightning.errors import InvalidInput, OperationFailed, Unsupported
from tinker_lightning.server import create_app
from tinker_lightning.testing import RecordingTransport
from tinker_lightning.types import ProvenanceSpan
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from tests.helpers.backends import Running
    from tinker_lightning.server import EmbeddedTrainer

LOSS = "stable_reinforce"
ADVICE = r'formula is not published.*AsyncConfig\(loss_fn="ppo"\)'
SPANS = [ProvenanceSpan("prompt", "a", 0, 1), ProvenanceSpan("sampled", "a", 0, 1)]
PROMPT = ModelInput.from_ints([1, 2])
INPUTS: dict[str, Any] = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [0.0, 0.5]}
DATUM = Datum(PROMPT, INPUTS, SPANS, SPANS)


def test_a_server_that_offers_it_gets_spans_and_the_wish_to_record(shared: EmbeddedTrainer) -> None:  # R5.17
    """The trainer does not offer it; what matters is what reached it."""
    record = RecordingTransport(httpx.ASGITransport(create_app(shared, extended=False)))
    with ServiceClient(
        base_url="http://embedded", transport=record, retry_policy=QUICK, dialect="hosted", api_key=SDK_KEY
    ) as service:
        model = service.create_lora_training_client("tiny", rank=2)
        with pytest.raises((InvalidInput, OperationFailed), match=ADVICE):
            model.forward_backward([DATUM], LOSS).result()
        path = model.save_weights_for_sampler("recorded").result().path or ""
        for sampler in (
            model.save_weights_and_get_sampling_client(record_stability_info=True),
            model.create_sampling_client(path, record_stability_info=True),
            service.create_sampling_client(path, record_stability_info=True),
        ):
            with pytest.raises(InvalidInput, match=ADVICE):
                sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
        service.create_sampling_client(path).sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
    (sent,) = (each for each in record.requests if each.path.endswith("/forward_backward"))
    request = protobuf.decode_forward_backward(sent.body)
    assert (request.loss_fn, request.data) == (LOSS, [DATUM])
    samples = [json.loads(each.body) for each in record.requests if each.path.endswith("/asample")]
    assert [each.get("record_stability_info") for each in samples] == [True, True, True, None]


def test_a_copy_of_a_sampling_client_records_too(shared: EmbeddedTrainer, running: Running) -> None:
    with (
        running(create_app(shared, extended=False)) as url,
        ServiceClient(base_url=url, api_key=SDK_KEY, dialect="hosted") as service,
    ):
        sampler = service.create_sampling_client(base_model="tiny", record_stability_info=True)
        copy = pickle.loads(pickle.dumps(sampler))  # noqa: S301
        with pytest.raises(InvalidInput, match=ADVICE):
            copy.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()


@pytest.mark.parametrize("dialect", ["embedded", "skyrl", "tuft", "twinkle", "open-rl", "json", "protobuf"])
def test_elsewhere_nothing_is_sent(shared: EmbeddedTrainer, dialect: str) -> None:  # R5.17
    record = RecordingTransport(httpx.ASGITransport(create_app(shared, extended=dialect == "embedded")))
    with ServiceClient(base_url="http://embedded", transport=record, retry_policy=QUICK, dialect=dialect) as service:
        model = service.create_lora_training_client("tiny", rank=2)
        count = len(record.requests)
        calls: list[Any] = [
            lambda: model.forward_backward([DATUM], LOSS),
            lambda: model.forward([DATUM], LOSS),
            lambda: model.save_weights_and_get_sampling_client(record_stability_info=True).result(),
            lambda: service.create_sampling_client(base_model="tiny", record_stability_info=True).result(),
        ]
        for call in calls:
            with pytest.raises(Unsupported, match=f"dialect '{dialect}' do not have this loss: .*{ADVICE}"):
                call()
        assert len(record.requests) == count


def test_the_clients_of_the_sdk_raise_too(served: Any) -> None:  # R5.17
    with tinker.ServiceClient(base_url=served.url, api_key=SDK_KEY) as service:
        client = service.create_lora_training_client(base_model="tiny", rank=2).result()
        with pytest.raises(Unsupported, match=ADVICE):
            as_backend(client).forward_backward([DATUM], LOSS)
        recording = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        with pytest.raises(tinker.BadRequestError, match=ADVICE.replace('"', r'.?"')):
            recording.sample(tinker.ModelInput.from_ints([1, 2]), 1, tinker.SamplingParams(max_tokens=1)).result()
