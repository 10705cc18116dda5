"""What differs on servers of other kinds, and would otherwise train wrong or return something else (R5.4, R5.8)."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker
import torch

from tinker_lightning import AdamParams, Datum, ModelInput, ServiceClient
from tinker_lightning.client import as_backend
from tinker_lightning.client.dialects.known import known
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.client.sdk.clients import OfficialTrainingClient
from tinker_lightning.errors import AnswerLost, InvalidInput, NotFound, Unsupported
from tinker_lightning.testing import imitate

if TYPE_CHECKING:
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.client.dialects import Dialect
    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.testing import Imitation

STEP = AdamParams(learning_rate=1e-3)


def datum(n: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(range(1, n + 1)), {"target_tokens": np.arange(2, n + 2), **inputs})


BATCH = [datum(6), datum(9), datum(4)]


def total(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {}


def connected(server: Imitation, dialect: Dialect | str = "auto") -> ServiceClient:
    key, policy = server.behaviour.api_key, RetryPolicy(2.0, 0.05)
    return ServiceClient(base_url=server.url, api_key=key, retry_policy=policy, dialect=dialect)


def model_on(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


@pytest.mark.parametrize("per_request", [128, 1])
def test_a_completed_batch_has_the_results_of_its_datums(per_request: int, shared: EmbeddedTrainer) -> None:
    """Twinkle takes even batches only, so the client adds a datum to each odd request."""
    with imitate("twinkle", trainer=shared) as server, connected(server) as service:
        service.session.config = replace(service.session.config, fwdbwd_max_chunk_len=per_request)
        client = model_on(service)
        expected = client.forward(BATCH, "cross_entropy").result().loss_fn_outputs
        found = client.forward_backward_custom(BATCH, total).result().loss_fn_outputs
    assert len(found) == len(BATCH)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=1e-4, atol=1e-5)


def test_several_targets_raise_at_the_call(shared: EmbeddedTrainer) -> None:
    """A pass that is held back must not fail at the step, between others of the same window."""
    ones = np.ones((3, 2), np.float32)
    wrong = datum(3).with_inputs(target_tokens=np.ones((3, 2), np.int64), advantages=ones, logprobs=-ones)
    with imitate("skyrl", trainer=shared) as server, connected(server) as service:
        client = model_on(service)
        client.forward_backward_custom(BATCH, total)
        with pytest.raises(InvalidInput, match="'skyrl' take one target per position"):
            client.forward_backward([wrong], "importance_sampling")
        client.optim_step(STEP).result()
        assert server.ran["forward_backward"] == 1


def test_a_sampler_of_a_model_in_training_stays_in_its_process(shared: EmbeddedTrainer) -> None:
    """A copy on SkyRL would not know that its weights are no longer the present ones, and replace those."""
    with imitate("skyrl", trainer=shared) as server, connected(server) as service:
        client = model_on(service)
        sampler = client.save_weights_and_get_sampling_client()
        for copy in (pickle.dumps, type(sampler).get_sampler_handle):
            with pytest.raises(Unsupported, match=f"because {client.model_id} is trained in this one"):
                copy(sampler)
        pickle.dumps(service.create_sampling_client(base_model="tiny"))  # nobody trains these weights


def test_no_step_follows_a_lost_answer_where_requests_could_be_concurrent(shared: EmbeddedTrainer) -> None:
    dialect = known("together").but(concurrent=True)
    with (
        imitate("together", trainer=shared, drops_answers={"forward_backward": [1]}) as server,
        connected(server, dialect) as service,
    ):
        client = model_on(service)
        saved = client.save_state("before").result().path
        passed = client.forward_backward(BATCH, "cross_entropy")
        step = client.optim_step(STEP)
        with pytest.raises(AnswerLost, match=f"Resume from {saved}"):
            passed.result()
        with pytest.raises(AnswerLost, match="optim_step: not sent, because of an earlier failure") as raised:
            step.result()
        assert (raised.value.operation, raised.value.seq_id) == ("optim_step", 3)
        assert server.ran["optim_step"] == 0


def test_our_server_that_is_replaced_by_another_is_named(shared: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=shared) as server, connected(server, "embedded") as service:
        service.session.extensions = replace(service.session.extensions, submit_and_wait=True)
        with pytest.raises(NotFound, match=rf"Not Found\. Does the server speak .* {server.url} was replaced"):
            model_on(service)


def test_the_key_of_an_official_client_is_used_to_detect_its_server(
    shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with imitate("together", trainer=shared, api_key="tml-given", lacks=frozenset({"delete", "forward"})) as server:
        official = tinker.ServiceClient(base_url=server.url, api_key="tml-given")
        backend = as_backend(official.create_lora_training_client(base_model="tiny", rank=4))
        assert isinstance(backend, OfficialTrainingClient)
        assert backend.dialect.forward == "zero_weights"  # only with the key, it answers that it has no such endpoint
        path = str(backend.save_state("stays").result().path)
        with pytest.raises(Unsupported, match="stays on the server, which cannot delete"):
            backend.delete_checkpoint(path)
        official.holder.close()
