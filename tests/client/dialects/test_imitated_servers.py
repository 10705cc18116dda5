"""One client on servers of every kind: detected by itself, with the gradient of the custom loss (R3.3, R5.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.imitated_clients import BATCH, KINDS, STEP, connected, logprobs_of, model_on, preference
from tests.helpers.imitations import imitate
from tests.helpers.soaking import first_only
from tinker_lightning import AdamParams, Datum, SamplingParams, ServiceClient
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.errors import Unsupported
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from tests.helpers.imitations.serving import Kind
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer


def trained(service: ServiceClient, calls: list[list[Datum]]) -> np.ndarray[Any, Any]:
    client = model_on(service)
    before = logprobs_of(client)
    for call in calls:
        client.forward_backward_custom(call, preference)
    client.optim_step(STEP).result()
    changed: np.ndarray[Any, Any] = logprobs_of(client) - before
    return changed


@pytest.mark.parametrize("calls", first_only([[BATCH[:2], BATCH[1:]], [BATCH]]), ids=["two calls", "one call"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_custom_loss_has_its_gradient(kind: Kind, calls: list[list[Datum]], trainer: EmbeddedTrainer) -> None:
    with embedded_service(trainer) as service:
        expected = trained(service, calls)
    with (
        imitate(kind, trainer=trainer, seed_ignored=False, ignores_lora_flags=False) as server,
        connected(server) as service,
    ):
        found = trained(service, calls)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "name"), [(kind, {"together": "json"}.get(kind, kind)) for kind in KINDS])
def test_the_dialect_is_detected(kind: Kind, name: str, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        assert service.session.dialect.name == name


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo"])
def test_built_in_losses_are_plain_sums_on_skyrl(loss: str, trainer: EmbeddedTrainer) -> None:
    rng = np.random.default_rng(0)

    def run(service: ServiceClient) -> tuple[np.ndarray[Any, Any], float]:
        client = model_on(service)
        before = logprobs_of(client)
        data = [
            datum.with_inputs(
                weights=np.abs(rng.normal(size=n)).astype(np.float32),
                advantages=rng.normal(size=n).astype(np.float32),
                logprobs=-np.ones(n, np.float32),
            )
            for datum in BATCH
            for n in [datum.model_input.length]
        ]
        names = {"cross_entropy": ("weights",)}.get(loss, ("advantages", "logprobs"))
        data = [
            datum.with_only_inputs({k: datum.loss_fn_inputs[k] for k in ("target_tokens", *names)}) for datum in data
        ]
        first = client.forward_backward(data[:1], loss)
        client.forward_backward(data[1:], loss).result()  # waiting before the step is possible too
        client.optim_step(STEP).result()
        return logprobs_of(client) - before, first.result().metrics["loss:sum"]

    with embedded_service(trainer) as service:
        expected, value = run(service)
    rng = np.random.default_rng(0)
    with imitate("skyrl", trainer=trainer, ignores_lora_flags=False) as server, connected(server) as service:
        found, found_value = run(service)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    assert found_value == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_a_forward_is_that_of_the_callers_weights(kind: Kind, trainer: EmbeddedTrainer) -> None:
    weighted = [each.with_inputs(weights=np.arange(each.model_input.length, dtype=np.float32)) for each in BATCH]
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        output = model_on(service).forward(weighted, "cross_entropy").result()
    logprobs = [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]
    expected = -sum((np.arange(len(each)) * each).sum() for each in logprobs)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["skyrl", "tuft", "together"])
def test_a_backward_without_logprobs_trains_and_has_no_sum(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with (
        imitate(kind, trainer=trainer, lacks_backward_logprobs=True, metrics=()) as server,
        connected(server, dialect_named(kind)) as service,
    ):
        client = model_on(service)
        before = logprobs_of(client)
        weighted = [each.with_inputs(weights=np.ones(each.model_input.length, np.float32)) for each in BATCH]
        passed = client.forward_backward(weighted, "cross_entropy")
        custom = client.forward_backward_custom(BATCH, preference)
        client.optim_step(STEP).result()
        assert np.abs(logprobs_of(client) - before).max() > 1e-3
        assert "loss:sum" not in passed.result().metrics
        assert np.concatenate([each["logprobs"].to_numpy() for each in custom.result().loss_fn_outputs]).size == 19


@pytest.mark.parametrize("kind", ["skyrl", "open-rl"])
def test_a_step_reports_the_norm_of_its_gradient_under_one_name(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        client.forward_backward_custom(BATCH, preference)
        metrics = client.optim_step(STEP).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] > 0


def stepped(client: TrainingClient) -> np.ndarray[Any, Any]:
    """Trains a step on two calls, and returns the log-probabilities after it."""
    client.forward_backward_custom(BATCH[:2], preference)
    client.forward_backward_custom(BATCH[1:], preference)
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    return logprobs_of(client)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_path(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server, dialect_named(kind)) as service:
        client = model_on(service)
        before = logprobs_of(client)
        first = stepped(client)
        assert np.abs(first - before).max() > 1e-3
        saved = client.save_state("state").result().path
        second = stepped(client)
        client.load_state_with_optimizer(saved).result()
        np.testing.assert_allclose(logprobs_of(client), first, rtol=1e-6)
        if server.behavior.saves_optimizer:
            np.testing.assert_allclose(stepped(client), second, rtol=1e-5)
        current = logprobs_of(client)
        sampler = client.save_weights_and_get_sampling_client()
        scores = sampler.compute_logprobs(BATCH[0].model_input).result()
        assert scores[0] is None
        np.testing.assert_allclose(np.array(scores[1:], float), current[: len(scores) - 1], rtol=1e-3, atol=1e-4)
        drawn = sampler.sample(BATCH[0].model_input, 2, SamplingParams(max_tokens=3, seed=1)).result()
        assert len(drawn.sequences) == 2
        named = client.save_weights_and_get_sampling_client("named")
        assert named.compute_logprobs(BATCH[0].model_input).result() == scores
        try:
            client.delete_checkpoint(saved)
        except Unsupported:
            assert "delete" in server.behavior.lacks
        else:
            assert not service.checkpoint_exists(saved)
