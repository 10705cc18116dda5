"""Accumulation windows on servers of other kinds: what belongs to a step, and what does not any more (R5.4, R5.8)."""

from __future__ import annotations

import gc
import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker

from tests.helpers.imitated_clients import BATCH, STEP, connected, logprobs_of, model_on, preference
from tests.helpers.imitations import imitate
from tinker_lightning import AdamParams, Datum, RemoteAdamW, RemoteLM
from tinker_lightning.client import as_backend
from tinker_lightning.client.dialects import Dialect, dialect_named
from tinker_lightning.client.passes.request import ServerPass
from tinker_lightning.errors import InvalidInput, OperationFailed, TinkerLightningError, Unsupported
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import requests

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.imitations.serving import Kind
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer

EXACT: dict[str, Any] = {"seed_ignored": False, "ignores_lora_flags": False}


def change(client: TrainingClient, submit: Callable[[TrainingClient], None]) -> np.ndarray[Any, Any]:
    """Returns what a step on the submitted passes does to the log-probabilities."""
    before = logprobs_of(client)
    submit(client)
    client.optim_step(STEP).result()
    changed: np.ndarray[Any, Any] = logprobs_of(client) - before
    return changed


def test_a_future_keeps_no_pass_after_its_step(trainer: EmbeddedTrainer) -> None:
    """A long fit may keep the future of every pass for its metrics, but not the datums (R5.4)."""

    def passes() -> int:
        gc.collect()
        return sum(isinstance(each, ServerPass) for each in gc.get_objects())

    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        before = passes()
        futures = [client.forward_backward_custom(BATCH, preference), client.forward_backward(BATCH, "cross_entropy")]
        futures[0].result()
        assert passes() > before
        client.optim_step(STEP).result()
        assert [future.result().metrics["loss:sum"] for future in futures]
        assert passes() == before


@pytest.mark.parametrize("kind", ["skyrl", "tuft"])
def test_loading_a_state_drops_what_was_not_stepped_on(
    kind: Kind, trainer: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Our trainer clears its gradient; other servers keep it, so it is not sent to them where that can be avoided."""

    def loaded(client: TrainingClient) -> None:
        path = client.save_state("state").result().path
        client.forward_backward_custom(BATCH[1:], preference)  # evaluated, but its gradient is not sent
        client.load_state(path).result()
        client.load_state(path).result()
        client.forward_backward_custom(BATCH, preference)

    with embedded_service(trainer) as service:
        expected = change(model_on(service), loaded)
    assert "accumulation window" not in caplog.text
    with imitate(kind, trainer=trainer, **EXACT) as server, connected(server) as service:
        client = model_on(service)
        np.testing.assert_allclose(change(client, loaded), expected, rtol=1e-3, atol=1e-6)
        dropped = "load_state in the middle of .* gradient of 2 sequences was computed .* not sent to http://imitated"
        assert len(re.findall(dropped, caplog.text)) == 1
        if kind == "skyrl":
            held = client.forward_backward(BATCH, "cross_entropy")
            client.load_state(client.save_state("again").result().path).result()
            with pytest.raises(OperationFailed, match="dropped by load_state, before which no optim_step was called"):
                held.result()


def test_a_gradient_that_stays_on_the_server_is_reported(
    trainer: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with imitate("tuft", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        path = client.save_state("state").result().path
        client.forward_backward(BATCH, "cross_entropy").result()
        client.load_state_with_optimizer(path).result()
    assert "the gradient of 3 sequences may stay on http://imitated" in caplog.text
    assert "Call optim_step first" in caplog.text


def test_a_failed_pass_is_not_part_of_the_window(trainer: EmbeddedTrainer) -> None:
    """SkyRL divides by the sequences of the window, so that a wrong count is a wrong gradient."""
    wrong = Datum.from_tokens([1, 2, 10_000])  # not a token of the model

    def submit(client: TrainingClient) -> None:
        if client.dialect.name == "skyrl":
            for batch, loss in ((BATCH, "unknown_loss"), ([wrong, wrong], "cross_entropy")):
                with pytest.raises(TinkerLightningError):
                    client.forward_backward(batch, loss).result()
        client.forward_backward_custom(BATCH, preference)

    with embedded_service(trainer) as service:
        expected = change(model_on(service), submit)
    with imitate("skyrl", trainer=trainer, out_of_range="fails", **EXACT) as server, connected(server) as service:
        client = model_on(service)
        np.testing.assert_allclose(change(client, submit), expected, rtol=1e-3, atol=1e-6)


def failing_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose nth call fails."""
    calls = itertools.count(1)

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise InvalidInput("cannot be encoded")
        return function(*args, **options)

    return failing


@pytest.mark.parametrize("call", [1, 2])
def test_a_window_that_cannot_be_sent_leaves_nothing_to_the_next(
    call: int, trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        held = [client.forward_backward(BATCH, "cross_entropy") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(Dialect, "encode_pass", failing_at(call, Dialect.encode_pass))
            with pytest.raises(InvalidInput, match="cannot be encoded"):
                client.optim_step(STEP)
        for future in held:
            with pytest.raises(OperationFailed, match="not sent, because another pass"):
                future.result()
        client.optim_step(AdamParams()).result()
        assert server.ran["forward_backward"] == 0


def test_no_step_follows_a_window_without_its_own(trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL divides by all sequences since the last step; those that were sent are scaled for the step that failed."""
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        model = RemoteLM(model_on(service))
        optimizer = RemoteAdamW(model.parameters())
        model.server_loss(BATCH, "cross_entropy").backward()
        with monkeypatch.context() as patch:
            patch.setattr(requests, "OptimStepRequest", failing_at(1, requests.OptimStepRequest))
            with pytest.raises(InvalidInput, match="cannot be encoded") as raised:
                optimizer.step()
        assert "The gradient of 3 sequences was sent before this error" in raised.value.__notes__[0]
        model.server_loss(BATCH, "cross_entropy").backward()
        with pytest.raises(OperationFailed, match=r"an earlier step failed .* call save_state, and continue"):
            optimizer.step()
        model.backend.save_state("kept").result()
        assert (server.ran["forward_backward"], server.ran["optim_step"]) == (1, 0)


def test_a_load_that_clears_the_gradient_begins_a_window(
    trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = dialect_named("skyrl").but(clears_gradient=True)
    with imitate("skyrl", trainer=trainer) as server, connected(server, dialect) as service:
        client = model_on(service)
        path = client.save_state("state").result().path
        client.forward_backward(BATCH, "cross_entropy")
        with monkeypatch.context() as patch:
            patch.setattr(requests, "OptimStepRequest", failing_at(1, requests.OptimStepRequest))
            with pytest.raises(InvalidInput, match="cannot be encoded"):
                client.optim_step(STEP)
        held = client.forward_backward(BATCH, "cross_entropy")  # with the weights before the load
        client.load_state(path).result()
        client.optim_step(STEP).result()
        with pytest.raises(OperationFailed, match="dropped by load_state"):
            held.result()
        assert (server.ran["forward_backward"], server.ran["optim_step"]) == (1, 1)


def test_no_step_follows_a_part_of_a_window(trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official SDK sends pass by pass."""
    with imitate("skyrl", trainer=trainer, hold=1.0, encoding="protobuf") as server:
        official = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        wrapped: Any = as_backend(official.create_lora_training_client(base_model="tiny", rank=4).result())
        held = [wrapped.forward_backward(BATCH, "cross_entropy") for _ in range(3)]
        call = wrapped.client.forward_backward
        monkeypatch.setattr(wrapped.client, "forward_backward", failing_at(2, call))
        with pytest.raises(InvalidInput, match="cannot be encoded"):
            wrapped.optim_step(STEP)
        held[0].exception()  # this SDK may not read the results of such servers
        for future in held[1:]:
            with pytest.raises(OperationFailed, match="not sent, because another pass"):
                future.result()
        with pytest.raises(OperationFailed, match="an earlier step failed"):
            wrapped.optim_step(STEP)
        assert (server.ran["forward_backward"], server.ran["optim_step"]) == (1, 0)
        official.holder.close()


@pytest.mark.parametrize("kind", ["skyrl", "together"])
def test_a_step_whose_settings_are_not_supported_leaves_nothing_behind(kind: Kind, trainer: EmbeddedTrainer) -> None:
    dialect = dialect_named(kind).but(clips_gradients=False)
    with imitate(kind, trainer=trainer) as server, connected(server, dialect) as service:
        model = RemoteLM(model_on(service))
        optimizer = RemoteAdamW(model.parameters(), grad_clip_norm=1.0)
        for supported in (False, True):
            optimizer.zero_grad()
            preference(BATCH, model(BATCH))[0].backward()
            if supported:
                optimizer.param_groups[0]["grad_clip_norm"] = 0.0
                optimizer.step()
                optimizer.sent[0].optim.result()
            else:
                with pytest.raises(Unsupported, match="grad_clip_norm=1") as raised:
                    optimizer.step()
                assert not hasattr(raised.value, "__notes__")
        assert (server.ran["forward_backward"], server.ran["optim_step"]) == (1, 1)


def test_close_drops_passes_without_a_step_and_evaluates_custom_losses(
    trainer: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated = []

    def loss(data: list[Any], logprobs: list[Any]) -> Any:
        evaluated.append(len(data))
        return preference(data, logprobs)

    with imitate("skyrl", trainer=trainer) as server:
        with connected(server) as service:
            client = model_on(service)
            client.forward_backward(BATCH, "cross_entropy").result()  # known by a forward, but the gradient is not sent
            held = client.forward_backward(BATCH, "cross_entropy")
            custom = client.forward_backward_custom(BATCH, loss)
        assert evaluated == [3]
        assert (server.ran["forward"], server.ran["forward_backward"]) == (2, 0)  # that of the custom loss, too
    assert custom.result().metrics["margin"]
    assert [record.message for record in caplog.records if "dropped" in record.message] == [
        "3 backward passes were dropped by close(), because no optim_step was called after them"
    ]
    with pytest.raises(OperationFailed, match="dropped by close"):
        held.result()


@pytest.mark.parametrize("official", [False, True], ids=["our datums", "the SDK's datums"])
@pytest.mark.parametrize("kind", ["skyrl", "tuft"])
def test_a_buffer_may_be_filled_again_after_the_call(kind: Kind, official: bool, trainer: EmbeddedTrainer) -> None:
    """A custom loss's gradient, and a pass that is held back, are sent long after the call."""
    values = {name: np.array(kept) for name, kept in (("tokens", [5, 6, 7]), ("weights", [1.0, 0.5, 2.0]))}

    def submit(client: TrainingClient, *, again: bool) -> None:
        tokens, weights = values["tokens"].copy(), values["weights"].astype(np.float32)
        inputs: dict[str, Any] = {"target_tokens": tokens, "weights": weights}
        if official:
            tensors = {name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()}
            datum: Any = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=tensors)
        else:
            datum = Datum.from_targets([1, 2, 3], **inputs)
        client.forward_backward_custom([datum, datum], preference)
        client.forward_backward([datum], "cross_entropy")
        if again:
            tokens[:], weights[:] = 9, -1.0

    def run(again: bool) -> np.ndarray[Any, Any]:
        with imitate(kind, trainer=trainer, **EXACT) as server, connected(server) as service:
            return change(model_on(service), lambda client: submit(client, again=again))

    np.testing.assert_array_equal(run(True), run(False))
