"""The official SDK's client in our wrapper, on servers of other kinds (R3.3, R5.4)."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker

from tests.helpers.imitated_clients import BATCH, STEP, logprobs_of, model_on, pair, preference
from tests.helpers.imitations import imitate
from tinker_lightning import AdamParams
from tinker_lightning.client import as_backend
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import Unsupported
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helpers.imitations import Imitation
    from tests.helpers.imitations.serving import Kind

LARGE = [*BATCH, pair(5, 4), pair(7, 5)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("servers"))
    yield trainer
    trainer.close()


@contextlib.contextmanager
def official(kind: Kind, trainer: EmbeddedTrainer, **changes: Any) -> Iterator[tuple[Any, Imitation]]:
    """A model of the SDK on an imitated server, with the encoding and the fields that this version of the SDK sends."""
    needed = {"encoding": "protobuf", "newest_fields": None, "seed_ignored": False, "ignores_lora_flags": False}
    with imitate(kind, trainer=trainer, hold=1.0, **needed, **changes) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        try:
            yield as_backend(service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()), server
        finally:
            service.holder.close()


def wrapped(client: Any) -> Any:
    """An object with the methods that training needs, around the SDK's client."""
    names = "forward", "forward_backward", "forward_backward_custom", "optim_step", "save_state"
    return SimpleNamespace(inner=client, **{name: getattr(client, name) for name in names})


def changed(client: Any) -> np.ndarray[Any, Any]:
    before = logprobs_of(client)
    client.forward_backward_custom(LARGE, preference)
    client.optim_step(STEP).result()
    change: np.ndarray[Any, Any] = logprobs_of(client) - before
    return change


@pytest.mark.parametrize("limit", [{"fwdbwd_max_chunk_len": 3}, {"fwdbwd_max_chunk_bytes_count": 500}], ids="".join)
def test_a_batch_that_the_sdk_would_split_has_its_gradient(limit: dict[str, int], trainer: EmbeddedTrainer) -> None:
    with embedded_service(trainer) as service:
        expected = changed(model_on(service))
    config = {"pjwt_auth_enabled": False, **limit}
    with official("twinkle", trainer, lacks={"samplers", "finish"}, client_config=config) as (client, server):
        assert client.dialect.name == "twinkle"
        found = changed(client)
        assert server.ran["forward_backward"] > 1
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_a_wrapper_of_the_sdks_client_has_the_gradient_too(trainer: EmbeddedTrainer) -> None:
    with embedded_service(trainer) as service:
        expected = changed(model_on(service))
    with official("skyrl", trainer) as (client, _):
        found = changed(as_backend(wrapped(client.client)))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_a_sequence_that_the_sdk_would_send_alone_raises(trainer: EmbeddedTrainer) -> None:
    config = {"pjwt_auth_enabled": False, "fwdbwd_max_chunk_bytes_count": 200}
    with official("twinkle", trainer, lacks={"samplers", "finish"}, client_config=config) as (client, _):
        with pytest.raises(Unsupported, match="need an even number of sequences"):
            changed(client)
        client.unread.take_failures()


def test_a_state_is_loaded_in_place_where_one_request_cannot_create_a_model_from_it(trainer: EmbeddedTrainer) -> None:
    """The one use of what the SDK has deprecated: there, its other way would fail."""
    with official("skyrl", trainer) as (client, _):
        model_id, before = client.model_id, logprobs_of(client)
        path = client.save_state("state").result().path
        changed(client)
        client.load_state_with_optimizer(path)
        np.testing.assert_allclose(logprobs_of(client), before, atol=1e-6)
        assert client.model_id == client.client.model_id == model_id


@pytest.mark.parametrize("kind", ["together", "open-rl"])
def test_a_forward_has_the_weights_that_the_server_needs(kind: Kind, trainer: EmbeddedTrainer) -> None:
    data = [each.with_inputs(weights=np.zeros(each.model_input.length, np.float32)) for each in BATCH]
    with official(kind, trainer) as (client, server):
        output = client.forward(data, "cross_entropy").result()
        assert output.metrics["loss:sum"] == 0
        assert all((each["logprobs"].to_numpy() < 0).all() for each in output.loss_fn_outputs)
        assert server.ran["forward"] == (1 if kind == "together" else 0)  # open-rl has no such pass


def test_no_sample_begins_between_the_preparation_of_a_step_and_the_step(
    trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of `RemoteAdamW` holds Ctrl-C while it is sent, so it must not wait for a sample then."""
    with official("skyrl", trainer) as (client, _):
        version = client._sender.live.version(client.model_id)
        sampled: Future[int] = Future()

        def sample() -> Any:
            return client._sender.live.sample_version("sampler", version, lambda: TinkerFuture(sampled, "sample"))

        def wait(self: TinkerFuture[Any], timeout: float | None = None) -> None:
            """Another thread's attempt to sample, while the step waits."""
            with pytest.raises(Unsupported, match="would replace the weights"):
                sample()
            sampled.set_result(1)

        sample()
        with monkeypatch.context() as patch:
            patch.setattr(TinkerFuture, "wait", wait)
            client.prepare_step(AdamParams())
        assert sampled.done()
        with client._sender.live.changing(client.model_id) as samples:
            assert samples == []
