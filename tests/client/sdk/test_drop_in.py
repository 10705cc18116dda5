"""Code that was written for the official SDK runs with our client in its place."""

from __future__ import annotations

import asyncio
import base64
import gc
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tinker import types as sdk

import tinker_lightning.client as ours
from tests.helpers.client_data import DATA
from tinker_lightning.errors import InvalidInput, NotFound, ResultTimeout, Unauthorized, Unsupported
from tinker_lightning.server import create_app
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from tests.helpers.backends import Running
    from tinker_lightning.client import ServiceClient, TrainingClient
    from tinker_lightning.server import EmbeddedTrainer


def datum(text: bytes = b"Hello, world") -> sdk.Datum:
    ids = list(text)
    inputs: Any = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def nll(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -torch.cat(logprobs).sum()
    return loss, {"nll": loss.item()}


@pytest.fixture
def model(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", 4, 1)


def test_a_training_loop_written_for_the_sdk(service: ServiceClient) -> None:  # R5.4
    """Every `_async` name, awaited as the SDK's users do, gives what the synchronous calls give."""
    data = [datum()]

    async def loop() -> tuple[Any, ...]:
        assert (await service.get_server_capabilities_async()).supported_models
        client = await service.create_lora_training_client_async(base_model="tiny", rank=4, seed=1)
        assert (await client.get_info_async()).lora_rank == 4
        passed = await client.forward_backward_async(data, loss_fn="cross_entropy")
        stepped = await client.optim_step_async(sdk.AdamParams(learning_rate=1e-2))
        first, step = await passed.result_async(), await stepped.result_async(timeout=60)
        custom = await client.forward_backward_custom_async(data, nll, loss_type_input="logprobs")
        await client.optim_step_async(adam_params=sdk.AdamParams(learning_rate=1e-2))
        forward = await client.forward_async(data, "cross_entropy")
        state = await (await client.save_state_async("state", overwrite=True)).result_async()
        weights = await (await client.save_weights_for_sampler_async("weights")).result_async()
        sampler = await client.save_weights_and_get_sampling_client_async()
        named = await service.create_sampling_client_async(model_path=weights.path)
        prompt = sdk.ModelInput.from_ints([72, 101])
        params = sdk.SamplingParams(max_tokens=3, seed=2)
        sampled = await sampler.sample_async(prompt=prompt, num_samples=2, sampling_params=params)
        assert await named.sample_async(prompt, 2, params) == sampled
        assert [len(one.tokens) for one in sampled.sequences] == [3, 3]
        assert all(len(one.logprobs or []) == 3 and one.stop_reason == "length" for one in sampled.sequences)
        scores = await named.compute_logprobs_async(prompt)
        assert scores[0] is None
        assert isinstance(scores[1], float)
        resumed = await service.create_training_client_from_state_with_optimizer_async(state.path, None, {"a": "b"})
        again = await (await resumed.forward_async(data, "cross_entropy")).result_async()
        last = await forward.result_async()
        assert again.metrics == last.metrics
        return first.metrics, step.metrics, (await custom).metrics, last.metrics

    client = service.create_lora_training_client("tiny", 4, 1)
    passed = client.forward_backward(data, "cross_entropy").result()
    assert isinstance(passed.loss_fn_outputs[0]["logprobs"].data, list)
    assert passed.loss_fn_outputs[0]["logprobs"].to_torch().shape == (11,)
    step = client.optim_step(sdk.AdamParams(learning_rate=1e-2)).result()
    custom = client.forward_backward_custom(data, nll).result()
    client.optim_step(sdk.AdamParams(learning_rate=1e-2))
    last = client.forward(data, "cross_entropy").result()
    assert asyncio.run(loop()) == (passed.metrics, step.metrics, custom.metrics, last.metrics)


def test_the_rest_client(service: ServiceClient, model: TrainingClient) -> None:  # R5.4
    rest = service.create_rest_client()
    first = model.save_state("first", user_metadata={"a": "b"}).result().path
    sampler = model.save_weights_and_get_sampling_client()
    run, checkpoint = model.model_id, "weights/first"
    assert rest.get_training_run(run).result().last_checkpoint == rest.list_checkpoints(run).result().checkpoints[0]
    assert rest.list_training_runs(limit=1, offset=0).result().training_runs[0].training_run_id == run
    assert rest.get_weights_info_by_tinker_path(first).result().lora_rank == 4
    assert rest.list_user_checkpoints(limit=1).result().checkpoints[0].user_metadata == {"a": "b"}
    assert rest.get_sampler(sampler.sampler_id).result().model_name == "tiny"
    session = service.session.session_id
    assert session in rest.list_sessions().result().sessions
    assert run in rest.get_session(session).result().training_run_ids
    external = model.save_weights_external("files").result().path
    assert "adapter_config.json" in rest.get_external_weights_urls(external).result().urls

    async def use() -> None:
        assert (await rest.get_training_run_by_tinker_path_async(first)).lora_rank == 4
        for seconds in (3600, None):
            await rest.set_checkpoint_ttl_from_tinker_path_async(first, seconds)
            (saved, *_) = (await rest.list_checkpoints_async(run)).checkpoints
            assert (saved.expires_at is None) == (seconds is None)
        await rest.delete_checkpoint_async(run, checkpoint)
        with pytest.raises(NotFound, match="there is no such checkpoint"):
            await rest.delete_checkpoint_from_tinker_path_async(first)

    asyncio.run(use())


def test_a_rest_client_needs_no_session(shared: EmbeddedTrainer, running: Running) -> None:  # R5.17
    with running(create_app(shared, api_key="tml-k")) as url:
        before = set(shared.registry._sessions)
        rest = ours.RestClient(base_url=url, api_key="tml-k")
        assert rest.get_server_capabilities().result().supported_models[0].model_name == "tiny"
        assert set(rest.list_sessions(limit=100).result().sessions) <= before
        with pytest.raises(NotFound, match="no such checkpoint"):
            rest.delete_checkpoint("no-such-run", "weights/no-such-name").result()
        assert set(shared.registry._sessions) == before
        with pytest.raises(Unauthorized):
            ours.RestClient(base_url=url, api_key="tml-other").list_sessions()
        with pytest.raises(InvalidInput, match=r"by name: RestClient\(base_url='http"):
            ours.RestClient(url)  # type: ignore[arg-type]


def test_answers_have_what_the_sdk_gives(service: ServiceClient, model: TrainingClient) -> None:  # R5.17
    info = model.get_info()
    assert info.optimizer_config is None or info.optimizer_config["type"] == "adamw"
    sampler = model.save_weights_and_get_sampling_client()
    prompt, params = sdk.ModelInput.from_ints([72, 101, 108]), sdk.SamplingParams(max_tokens=3)
    answers = [sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result() for _ in range(2)]
    for answer in answers:
        assert answer.prompt_cache_hit_tokens == 0
        assert answer.prompt_logprobs_np is not None
        assert np.isnan(answer.prompt_logprobs_np[0])
        assert answer.prompt_logprobs_np[1:].tolist() == (answer.prompt_logprobs or [])[1:]
        for sequence in answer.sequences:
            assert sequence.tokens_np.dtype == np.int32
            assert sequence.tokens_np.tolist() == sequence.tokens
            assert sequence.logprobs_np is not None
            assert sequence.logprobs_np.dtype == np.float32
            assert sequence.logprobs_np.tolist() == sequence.logprobs
    ids = {sequence.sequence_id for answer in answers for sequence in answer.sequences}
    assert len(ids) == 4
    assert all(each.startswith(sampler.sampler_id) and each.endswith((":0", ":1")) for each in ids), ids
    assert sampler.sample(prompt, 1, params).result().prompt_logprobs_np is None


def test_a_custom_loss_that_fails_leaves_the_client_usable(model: TrainingClient) -> None:  # R5.17
    """With the SDK 0.38, the client is poisoned: it rejects every later call."""
    data = [datum()]

    def failing(_: list[Any], logprobs: list[torch.Tensor]) -> Any:
        raise ZeroDivisionError("in the loss")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the loss"):
            model.forward_backward_custom(data, failing).result()
    model.forward_backward_custom(data, failing)
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        model.optim_step(sdk.AdamParams(learning_rate=1e-2))
    first = model.forward_backward_custom(data, nll)
    assert model.optim_step(sdk.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] > 0  # type: ignore[index]
    assert model.forward_backward_custom(data, nll).result().metrics["nll"] < first.result().metrics["nll"]
    assert model.save_state("after-the-failure").result().path


def test_the_event_loop_goes_on_while_a_step_waits_for_a_pending_loss(model: TrainingClient) -> None:
    async def loop() -> list[str]:
        ran: list[str] = []

        async def other() -> None:
            ran.append("other")

        def loss(data: list[Any], logprobs: list[torch.Tensor]) -> Any:
            ran.append("loss")
            return nll(data, logprobs)

        future = model.forward_backward_custom(DATA * 100, loss)  # enough that the forward takes a while
        task = asyncio.create_task(other())
        await (await model.optim_step_async()).result_async()
        await task
        await future
        return ran

    assert asyncio.run(loop()) == ["other", "loss"]


def test_result_async_has_a_timeout(model: TrainingClient) -> None:
    async def loop() -> None:
        future = await model.forward_async(DATA * 50, "cross_entropy")
        with pytest.raises(ResultTimeout, match=r"no result within 0\.0 s"):
            await future.result_async(timeout=0.0)
        assert (await future.result_async()).metrics

    asyncio.run(loop())


def test_another_loss_type_raises(model: TrainingClient) -> None:
    with pytest.raises(InvalidInput, match=r"loss_type_input must be 'logprobs', .*, got 'logits'"):
        model.forward_backward_custom(DATA, nll, "logits")  # type: ignore[arg-type]


def test_what_the_client_does_not_do_raises(service: ServiceClient, model: TrainingClient) -> None:
    with pytest.raises(InvalidInput, match=r"ServiceClient\(base_url='http://a'\)"):
        ours.ServiceClient("http://a")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="this client trains with adamw, dimuon, got 'lion'"):
        service.create_lora_training_client("tiny", optimizer={"type": "lion"})
    with pytest.raises(Unsupported, match="stable_reinforce"):
        model.save_weights_and_get_sampling_client(record_stability_info=True)
    assert service.create_lora_training_client("tiny", 2, optimizer=sdk.AdamOptimizerConfig())


def test_close_returns_a_future_that_is_done() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", "embedded")
        assert ours.ServiceClient(user_metadata={"a": "b"}, display_name="x").close("success").result() is None


def test_a_sampling_client_can_be_pickled(shared: EmbeddedTrainer, running: Running) -> None:  # R5.4
    """A copy samples from the same weights under numbers of its own, and does not end the session."""
    params = sdk.SamplingParams(max_tokens=4, seed=3)
    prompt = sdk.ModelInput.from_ints([72, 101])
    app = create_app(shared, api_key="tml-k")
    with running(app) as url, ours.ServiceClient(base_url=url, api_key="tml-k") as service:
        sampler = service.create_sampling_client(base_model="tiny")
        expected = sampler.sample(prompt, 2, params).result()
        copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]  # noqa: S301
        copies.append(ours.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-k"))
        assert "tml-k" not in base64.b64decode(sampler.get_sampler_handle(), altchars="-_").decode()
        assert all(copy.sample(prompt, 2, params).result() == expected for copy in copies)
        assert copies[0]._channel is copies[1]._channel
        assert len({copy._next_number for copy in copies}) == 3
        del copies
        gc.collect()
        assert sampler.sample(prompt, 2, params).result() == expected


def test_a_sampling_client_of_a_trainer_in_this_process_cannot_be_pickled() -> None:
    with embedded_service() as service, pytest.raises(InvalidInput, match="its trainer runs in this one"):
        pickle.dumps(service.create_sampling_client(base_model="tiny"))
    with pytest.raises(InvalidInput, match="handle: not what get_sampler_handle"):
        ours.SamplingClient.from_sampler_handle("e30=")
