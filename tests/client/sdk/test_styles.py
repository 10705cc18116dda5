"""A script in the style of each release of the official SDK, with our client in its place."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tinker import types

import tinker_lightning.client
from tinker_lightning.client import RestClient, ServiceClient
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tests.helpers.backends import Running
    from tinker_lightning.server import EmbeddedTrainer

CLIENT = str(Path(tinker_lightning.client.__file__).parent)
IDS = list(b"All happy families are alike")
INPUTS: Any = {"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)}
DATA = [types.Datum(model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=INPUTS)]
ADAM = types.AdamParams(learning_rate=1e-2)
PROMPT = types.ModelInput.from_ints(IDS[:5])
PARAMS = types.SamplingParams(max_tokens=3, seed=2)


def squares(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = sum(((each**2).sum() for each in logprobs), torch.zeros(()))
    return loss, {"squares": loss.item()}


@contextmanager
def counted() -> Iterator[list[FrameType]]:
    """Collects the calls that this file makes to public names of the client; an `await` alone is none."""
    frames: list[FrameType] = []

    def observe(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        is_ours = code.co_filename.startswith(CLIENT) and not code.co_name.startswith("_")
        is_call = event == "call" and caller is not None and caller.f_code.co_filename == __file__
        # A coroutine is entered again after each of its awaits.
        if is_ours and is_call and not any(frame is each for each in frames):
            frames.append(frame)

    sys.setprofile(observe)
    try:
        yield frames
    finally:
        sys.setprofile(None)


async def plain(url: str) -> list[Any]:
    """The style of 0.36: `_async` names in async code, and clients that are plain objects."""
    service = ServiceClient(user_metadata={"style": "0.36"}, base_url=url, api_key="tml-any")
    names = [model.model_name for model in (await service.get_server_capabilities_async()).supported_models]
    assert "tiny" in names
    client = await service.create_lora_training_client_async("tiny", 4, 1, True, True, False)
    info = await client.get_info_async()
    assert (info.model_id, info.lora_rank) == (client.model_id, 4)
    assert client.get_tokenizer().encode("Al") == IDS[:2]
    losses = []
    for _ in range(3):
        passed = await client.forward_backward_async(DATA, "cross_entropy")
        stepped = await client.optim_step_async(ADAM)
        losses.append((await passed.result_async()).metrics["loss:sum"])
        assert (await stepped).metrics
    assert losses[2] < losses[1] < losses[0]
    policy: Any = {"target_tokens": [3, 4], "logprobs": [-1.0, -2.0], "advantages": [1.0, -0.5]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=policy)
    ppo = await client.forward_backward_async([datum], "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3})
    assert (await ppo.result_async(timeout=60)).loss_fn_outputs[0]["logprobs"].shape == [2]
    custom = await client.forward_backward_custom_async(DATA, squares)
    assert (await custom.result_async()).metrics["squares"] > 0
    await (await client.optim_step_async(adam_params=ADAM)).result_async()
    scored = await (await client.forward_async(DATA, "cross_entropy")).result_async()
    state = (await (await client.save_state_async("a", 3600, True, {"k": "v"})).result_async()).path
    weights = (await (await client.save_weights_for_sampler_async("b", ttl_seconds=3600)).result_async()).path
    named = await service.create_sampling_client_async(model_path=weights)
    live = await client.save_weights_and_get_sampling_client_async()
    base = await service.create_sampling_client_async(base_model="tiny")
    samples = [await sampler.sample_async(PROMPT, 2, PARAMS) for sampler in (named, live, base)]
    assert samples[0] == samples[1]
    assert samples[0].sequences[0].tokens_np.shape == (3,)
    logprobs = await live.compute_logprobs_async(PROMPT)
    assert logprobs[0] is None
    assert await live.get_base_model_async() == named.get_base_model() == "tiny"
    again = await service.create_training_client_from_state_with_optimizer_async(state)
    assert (await (await again.forward_async(DATA, "cross_entropy"))).metrics == scored.metrics
    fresh = await service.create_training_client_from_state_async(state, user_metadata={"k": "v"})
    assert (await (await fresh.forward_async(DATA, "cross_entropy"))).metrics == scored.metrics
    await (await fresh.load_state_async(state)).result_async()
    rest = service.create_rest_client()
    assert (await rest.get_training_run_async(client.model_id)).lora_rank == 4
    assert (await rest.get_training_run_by_tinker_path_async(state)).base_model == "tiny"
    assert (await rest.list_training_runs_async(limit=100)).training_runs
    assert len((await rest.list_checkpoints_async(client.model_id)).checkpoints) == 2
    assert (await rest.list_user_checkpoints_async(limit=1)).checkpoints
    assert (await rest.get_weights_info_by_tinker_path(state)).train_unembed is False
    assert (await rest.list_sessions_async(limit=100)).sessions
    await rest.set_checkpoint_ttl_from_tinker_path_async(str(weights), None)
    await rest.delete_checkpoint_from_tinker_path_async(str(weights))
    # As in a script without an event loop; there, creating a client waits until it exists.
    assert client.optim_step(ADAM).result().metrics
    done, _ = concurrent.futures.wait([base.sample(PROMPT, 1, PARAMS).future()], 60)
    assert [each.result().sequences[0].tokens for each in done]
    other = service.create_lora_training_client(base_model="tiny", rank=4, seed=1, train_unembed=False)
    first = other.forward_backward(DATA, "cross_entropy").result(timeout=60)
    assert first.metrics["loss:sum"] == losses[0]
    sampled = other.save_weights_and_get_sampling_client("c").sample(PROMPT, 2, PARAMS).result()
    assert sampled.sequences == samples[2].sequences
    service.close("success").result()
    return [*losses, scored.metrics, [each.tokens for each in samples[1].sequences], logprobs]


async def futures(url: str) -> list[Any]:
    """The style of 0.38: no `_async` names, and every call returns a future, of a client as well."""
    rest = RestClient(base_url=url, api_key="tml-any")
    names = [model.model_name for model in (await rest.get_server_capabilities()).supported_models]
    assert "tiny" in names
    service = ServiceClient(user_metadata={"style": "0.38"}, base_url=url, api_key="tml-any")
    client, base = await asyncio.gather(
        service.create_lora_training_client("tiny", 4, 1, True, True, False),
        service.create_sampling_client(base_model="tiny"),
    )
    info = client.get_info()
    assert (info.model_id, info.lora_rank) == (client.model_id, 4)
    assert client.get_tokenizer().encode("Al") == base.get_tokenizer().encode("Al") == IDS[:2]
    losses = []
    for _ in range(3):
        passed, stepped = client.forward_backward(DATA, "cross_entropy"), client.optim_step(ADAM)
        losses.append((await passed).metrics["loss:sum"])
        assert (await stepped).metrics
    assert losses[2] < losses[1] < losses[0]
    policy: Any = {"target_tokens": [3, 4], "logprobs": [-1.0, -2.0], "advantages": [1.0, -0.5]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=policy)
    ppo = client.forward_backward([datum], "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3})
    assert (await asyncio.create_task(ppo.coroutine())).loss_fn_outputs[0]["logprobs"].shape == [2]
    assert (await client.forward_backward_custom(DATA, squares)).metrics["squares"] > 0
    await client.optim_step(ADAM)
    scored = await client.forward(DATA, "cross_entropy")
    state, weights = await asyncio.gather(
        client.save_state("a", 3600, True, {"k": "v"}), client.save_weights_for_sampler("b", ttl_seconds=3600)
    )
    named = await service.create_sampling_client(model_path=weights.path)
    live = await client.save_weights_and_get_sampling_client(kind="snapshot")
    tasks = [asyncio.create_task(each.sample(PROMPT, 2, PARAMS).coroutine()) for each in (named, live, base)]
    samples = await asyncio.gather(*tasks)
    assert samples[0] == samples[1]
    assert samples[0].sequences[0].tokens_np.shape == (3,)
    assert len({sequence.sequence_id for each in samples for sequence in each.sequences}) == 6
    logprobs = await live.compute_logprobs(PROMPT)
    assert logprobs[0] is None
    assert live.get_base_model() == named.get_base_model() == "tiny"
    again, fresh = await asyncio.gather(
        service.create_training_client_from_state_with_optimizer(state.path),
        service.create_training_client_from_state(state.path, user_metadata={"k": "v"}).coroutine(),
    )
    assert (await again.forward(DATA, "cross_entropy")).metrics == scored.metrics
    assert (await fresh.forward(DATA, "cross_entropy")).metrics == scored.metrics
    assert (await rest.get_training_run(client.model_id)).lora_rank == 4
    assert (await rest.get_training_run_by_tinker_path(state.path)).base_model == "tiny"
    assert (await rest.list_training_runs(limit=100)).training_runs
    assert len((await rest.list_checkpoints(client.model_id)).checkpoints) == 2
    assert (await rest.list_user_checkpoints(limit=1)).checkpoints
    assert (await rest.get_weights_info_by_tinker_path(state.path)).train_unembed is False
    assert (await rest.list_sessions(limit=100)).sessions
    await rest.set_checkpoint_ttl_from_tinker_path(str(weights.path), None)
    await rest.delete_checkpoint_from_tinker_path(str(weights.path))
    # As in a script without an event loop.
    other = service.create_lora_training_client("tiny", rank=4, seed=1, train_unembed=False).result()
    first = other.forward_backward(DATA, "cross_entropy").result(timeout=60)
    assert first.metrics["loss:sum"] == losses[0]
    sampler = other.save_weights_and_get_sampling_client("c").result(timeout=60)
    assert sampler.sample(PROMPT, 2, PARAMS).result().sequences == samples[2].sequences
    created = service.create_sampling_client(base_model="tiny").future()
    pending = [created.result(60).sample(PROMPT, 1, PARAMS).future() for _ in range(3)]
    done, _ = concurrent.futures.wait(pending, 60)
    assert len({tuple(each.result().sequences[0].tokens) for each in done}) == 1
    assert client.optim_step(ADAM).future().result(60).metrics
    service.close("success").result()
    return [*losses, scored.metrics, [each.tokens for each in samples[1].sequences], logprobs]


def test_scripts_in_either_style_run_on_our_client(shared: EmbeddedTrainer, running: Running) -> None:  # R5.4, R5.17
    with running(create_app(shared)) as url:
        with counted() as of_plain:
            first = asyncio.run(plain(url))
        with counted() as of_futures:
            second = asyncio.run(futures(url))
    assert first == second
    assert min(len(of_plain), len(of_futures)) >= 60, (len(of_plain), len(of_futures))
