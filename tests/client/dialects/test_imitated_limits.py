"""What differs on servers of other kinds, and would otherwise train wrong or return something else (R5.4, R5.8)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tinker

from tests.helpers.imitated_clients import BATCH, STEP, connected, model_on, pair, preference
from tests.helpers.imitations import imitate
from tinker_lightning import AdamParams
from tinker_lightning.client import as_backend
from tinker_lightning.client.sdk.clients import OfficialTrainingClient
from tinker_lightning.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from tests.helpers.imitations.serving import Kind
    from tinker_lightning.server import EmbeddedTrainer


@pytest.mark.parametrize("per_request", [128, 1])
def test_a_completed_batch_has_the_results_of_its_datums(per_request: int, trainer: EmbeddedTrainer) -> None:
    """Twinkle takes even batches only, so the client adds a datum to each odd request."""
    with imitate("twinkle", trainer=trainer) as server, connected(server) as service:
        service.session.config = replace(service.session.config, fwdbwd_max_chunk_len=per_request)
        client = model_on(service)
        expected = client.forward(BATCH, "cross_entropy").result().loss_fn_outputs
        found = client.forward_backward_custom(BATCH, preference).result().loss_fn_outputs
    assert len(found) == len(BATCH)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=1e-4, atol=1e-5)


def test_several_targets_raise_at_the_call(trainer: EmbeddedTrainer) -> None:
    """A pass that is held back must not fail at the step, between others of the same window."""
    ones = np.ones((3, 2), np.float32)
    wrong = pair(3, 1).with_inputs(target_tokens=np.ones((3, 2), np.int64), advantages=ones, logprobs=-ones)
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        client.forward_backward_custom(BATCH, preference)
        with pytest.raises(InvalidInput, match="'skyrl' take one target per position"):
            client.forward_backward([wrong], "importance_sampling")
        client.optim_step(STEP).result()
        assert server.ran["forward_backward"] == 1


def test_the_key_of_an_official_client_is_used_to_detect_its_server(
    trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with imitate("together", trainer=trainer, api_key="tml-given", lacks=frozenset({"delete", "forward"})) as server:
        official = tinker.ServiceClient(base_url=server.url, api_key="tml-given")
        backend = as_backend(official.create_lora_training_client(base_model="tiny", rank=4).result())
        assert isinstance(backend, OfficialTrainingClient)
        assert backend.dialect.forward == "zero_weights"  # only with the key, it answers that it has no such endpoint
        path = str(backend.save_state("stays").result().path)
        with pytest.raises(Unsupported, match="stays on the server, which cannot delete"):
            backend.delete_checkpoint(path)
        official.holder.close()


def test_what_a_server_ignores_raises(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(Unsupported, match=r"grad_clip_norm=1\.0: servers of the dialect 'skyrl' ignore it"):
            client.optim_step(AdamParams(grad_clip_norm=1.0))
        with pytest.raises(Unsupported, match="ttl_seconds: servers of the dialect 'skyrl' do not support it"):
            client.save_state("short-lived", ttl_seconds=60)


def test_losses_of_an_unknown_server_are_sent_by_name_only(trainer: EmbeddedTrainer) -> None:
    """Nothing is known about them, so they are not relied on; known differences raise."""
    zeros = {"logprobs": np.zeros(4, np.float32), "advantages": np.ones(4, np.float32)}
    with imitate("together", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        assert not client.computes("importance_sampling")
        assert client.forward_backward([pair(4, 1).with_inputs(zeros)], "importance_sampling").result().metrics
        service.session.dialect = service.session.dialect.but(sends_other_losses=False)
        with pytest.raises(
            Unsupported, match=r"dialect 'json' are not known to .* Use a custom loss: tinker_lightning"
        ):
            client.forward_backward([pair(4, 1).with_inputs(zeros)], "importance_sampling")


def test_states_that_cannot_be_deleted_are_reported(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        path = client.save_state("kept").result().path
        with pytest.raises(Unsupported, match="stays on the server"):
            client.delete_checkpoint(path)


@pytest.mark.parametrize(("kind", "warnings"), [("skyrl", 1), ("together", 0)])
def test_an_optimizer_that_load_state_does_not_reset_is_reported_once(
    kind: Kind, warnings: int, trainer: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        path = client.save_state("moments").result().path
        for _ in range(2):
            client.load_state(path).result()
    assert sum("also restore the optimizer" in record.getMessage() for record in caplog.records) == warnings
