"""What a training backend does, the same on every one: our client on its three ways, and the official SDK's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tinker import types as sdk

from tests.helpers.client_data import DATA, TEXTS, nll, policy, top_k
from tinker_lightning import AdamParams, Datum, ModelInput, SamplingParams
from tinker_lightning.client import TrainingBackend
from tinker_lightning.errors import InvalidInput, ResultTimeout

if TYPE_CHECKING:
    import threading

    from torch import Tensor

    from tests.helpers.backends import Backend

POLICY = [policy(text, seed) for seed, text in enumerate(TEXTS)]
MASKED = [policy(text, seed, sequence_ratio_mask=np.ones(len(text) - 1)) for seed, text in enumerate(TEXTS)]
THRESHOLDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES: dict[str, tuple[list[Datum], dict[str, float | str] | None]] = {
    "cross_entropy": (DATA, None),
    "importance_sampling": (POLICY, None),
    "ppo": (POLICY, {**THRESHOLDS}),
    "cispo": (POLICY, {**THRESHOLDS}),
    "dro": (POLICY, {"beta": 0.05}),
    "gspo": (MASKED, {**THRESHOLDS}),
}
FAST = AdamParams(learning_rate=1e-2)


def test_it_is_a_training_backend(backend: Backend) -> None:
    assert isinstance(backend.model(), TrainingBackend)


def test_forward_gives_one_tensor_per_datum(backend: Backend) -> None:  # R1.1
    output = backend.model().forward(DATA, "cross_entropy").result()
    logprobs = [each["logprobs"] for each in output.loss_fn_outputs]
    assert [each.shape for each in logprobs] == [[len(text) - 1] for text in TEXTS]
    assert {each.dtype for each in logprobs} == {"float32"}
    assert output.metrics["loss:sum"] == pytest.approx(-sum(each.to_numpy().sum() for each in logprobs), rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_built_in_loss_trains(backend: Backend, loss: str) -> None:
    data, config = LOSSES[loss]
    model = backend.model()
    before = model.forward_backward(data, loss, config)
    step = model.optim_step(AdamParams(learning_rate=1e-3))
    after = model.forward(data, loss, config)
    assert step.result().metrics["grad_norm"] > 0
    assert "loss:sum" in before.result().metrics
    assert _goodness(data, after.result()) > _goodness(data, before.result())


def _goodness(data: list[Datum], output: Any) -> float:
    """What every built-in loss raises: the log-probabilities of good tokens, by how good they are."""
    wanted = [each.loss_fn_inputs.get("advantages") or each.loss_fn_inputs["weights"] for each in data]
    got = [each["logprobs"] for each in output.loss_fn_outputs]
    return sum(float(w.to_numpy() @ g.to_numpy()) for w, g in zip(wanted, got, strict=True))


def test_a_custom_loss_sees_the_callers_datums_and_one_leaf_for_each(backend: Backend) -> None:  # R1.1, R1.2
    seen: list[Any] = []

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[Any, Any]]:
        seen.extend([*data, *logprobs])
        return torch.cat(logprobs).mean(), {}

    model = backend.model()
    model.forward_backward_custom(DATA, loss).result()
    assert all(given is got for given, got in zip(DATA, seen[:3], strict=True))
    assert [leaf.shape for leaf in seen[3:]] == [(len(text) - 1,) for text in TEXTS]
    assert all(leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float32 for leaf in seen[3:])
    expected = [each["logprobs"].tolist() for each in model.forward(DATA, "cross_entropy").result().loss_fn_outputs]
    assert [leaf.tolist() for leaf in seen[3:]] == expected


def test_metrics_of_a_custom_loss_are_merged_as_strings_and_floats(backend: Backend) -> None:  # R1.6, R1.7
    def loss(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[Any, Any]]:
        value = logprobs[0].mean() * 3
        return value, {"t": value, 7: 2, "n": np.float32(0.5), "flag": True}

    output = backend.model().forward_backward_custom(DATA, loss).result()
    metrics = output.metrics
    assert [len(each["logprobs"]) for each in output.loss_fn_outputs] == [len(text) - 1 for text in TEXTS]
    assert (metrics["7"], metrics["n"], metrics["flag"]) == (2.0, 0.5, 1.0)
    assert all(type(name) is str and type(value) is float for name, value in metrics.items())
    assert (
        metrics["loss:sum"]
        == metrics["t"]
        == pytest.approx(3 * output.loss_fn_outputs[0]["logprobs"].to_numpy().mean())
    )
    assert metrics["surrogate_loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)  # the loss is linear


@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_per_position_keep_their_shape(backend: Backend, sparse: bool) -> None:  # R1.1, R1.4
    data = [top_k(text, sparse=sparse) for text in TEXTS]
    del data[1].loss_fn_inputs["weights"]  # a custom loss needs none
    shapes: list[Any] = []

    def distill(given: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        shapes.extend(list(each.shape) for each in logprobs)
        wanted = torch.tensor([0.75, 0.25, 0.0, 0.0])
        return -sum((wanted * each).sum() for each in logprobs), {}  # type: ignore[return-value]

    model, built_in = backend.model(), backend.model()
    output = model.forward_backward_custom(data, distill).result()
    assert shapes == [[len(text) - 1, 4] for text in TEXTS]
    assert [each["logprobs"].shape for each in output.loss_fn_outputs] == shapes
    built_in.forward_backward([top_k(text, sparse=not sparse) for text in TEXTS], "cross_entropy").result()
    assert backend.bits(model) == backend.bits(built_in)


def test_custom_and_built_in_losses_with_the_same_mathematics_give_the_same_update(backend: Backend) -> None:  # R1.11
    custom, built_in = backend.model(), backend.model()
    start = backend.bits(custom)
    for _ in range(3):
        custom.forward_backward_custom(DATA, nll)
        built_in.forward_backward(DATA, "cross_entropy")
        custom.optim_step(FAST).result()
        built_in.optim_step(FAST).result()
    assert backend.bits(custom) == backend.bits(built_in) != start


def test_custom_calls_accumulate_until_the_step(backend: Backend) -> None:  # R0.4, R4.4
    together, apart = backend.model(), backend.model()
    together.forward_backward_custom(DATA, nll)
    futures = [apart.forward_backward_custom([each], nll) for each in DATA]
    norms = [model.optim_step(FAST).result().metrics["grad_norm"] for model in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    values = [future.result().metrics["nll"] for future in futures]
    assert sum(values) == pytest.approx(
        -_goodness(DATA, backend.model().forward(DATA, "cross_entropy").result()), rel=1e-5
    )
    assert backend.kinds(apart) == ["forward"] * 3 + ["forward_backward"] * 3 + ["optim_step"]


def test_a_step_clears_the_gradient_and_reports(backend: Backend) -> None:
    model = backend.model()
    model.forward_backward(DATA, "cross_entropy")
    first, second = (model.optim_step(AdamParams(learning_rate=0.25)).result().metrics for _ in range(2))
    assert first["grad_norm"] > 0
    assert second["grad_norm"] == 0
    assert first["learning_rate"] == 0.25


def test_numbers_advance_with_every_request_and_none_is_reused(backend: Backend) -> None:  # R1.8
    model = backend.model()
    model.forward(DATA, "cross_entropy")
    model.forward_backward_custom(DATA, nll)
    model.optim_step(FAST)
    model.get_info()
    model.save_state("numbers")
    model.forward_backward(DATA, "cross_entropy").result()
    expected = ["forward", "forward", "forward_backward", "optim_step", "save_weights", "forward_backward"]
    assert backend.kinds(model) == expected


def test_resuming_with_the_optimizer_is_bit_equal_to_not_stopping(backend: Backend) -> None:
    def train(model: Any) -> None:
        for _ in range(2):
            model.forward_backward(DATA, "cross_entropy")
            model.optim_step(FAST)

    going_on, loading = backend.model(), backend.model(seed=2)
    train(going_on)
    saved = going_on.save_state("middle", ttl_seconds=3600, user_metadata={"by": "us"}).result().path
    train(going_on)
    resumed, fresh = backend.resumed(saved, optimizer=True), backend.resumed(saved, optimizer=False)
    loading.load_state_with_optimizer(saved)
    for model in (resumed, fresh, loading):
        train(model)
        model.get_info()
    for model in (going_on, resumed, fresh, loading):
        model.optim_step(AdamParams(learning_rate=0.0)).result()
    assert backend.bits(resumed) == backend.bits(going_on) == backend.bits(loading)
    assert backend.bits(fresh) != backend.bits(going_on)
    assert loading.load_state(saved).result().path == saved
    assert (
        loading.forward(DATA, "cross_entropy").result()
        == backend.resumed(saved, optimizer=False).forward(DATA, "cross_entropy").result()
    )


def test_samplers_keep_the_weights_they_were_made_of(backend: Backend) -> None:
    model = backend.model()
    prompt, greedy = ModelInput.from_ints(list(b"hello")), SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    base = backend.sampler(base_model="tiny")
    for _ in range(5):
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step(FAST)
    named = backend.sampler(model_path=model.save_weights_for_sampler("kept").result().path)
    also_named = model.save_weights_and_get_sampling_client("also-kept")
    unnamed = model.save_weights_and_get_sampling_client()
    scores = unnamed.compute_logprobs(prompt).result()
    model.forward_backward(DATA, "cross_entropy")
    model.optim_step(FAST).result()
    assert scores[0] is None
    assert all(type(score) is float for score in scores[1:])
    for same in (named, also_named, unnamed):
        assert same.compute_logprobs(prompt).result() == scores
    assert base.compute_logprobs(prompt).result() != scores
    response = unnamed.sample(prompt, 2, greedy, include_prompt_logprobs=True).result()
    assert response.prompt_logprobs == scores
    assert [len(each.tokens) for each in response.sequences] == [4, 4]
    assert [len(each.logprobs or []) for each in response.sequences] == [4, 4]
    assert {each.stop_reason for each in response.sequences} == {"length"}
    assert named.sample(prompt, 1, greedy).result().sequences[0].tokens == response.sequences[0].tokens


def test_a_model_says_what_it_is_and_leads_to_its_tokenizer(backend: Backend) -> None:
    model = backend.model(rank=5)
    info = model.get_info()
    assert (info.model_id, info.model_data.model_name, info.lora_rank) == (model.model_id, "tiny", 5)
    assert model.get_tokenizer().encode("hé") == list("hé".encode())
    folder = info.model_data.tokenizer_id  # the SDK would look for "tiny" on the hub
    for sampler in (
        backend.sampler(base_model=folder),
        model.create_base_sampling_client(),
        model.save_weights_and_get_sampling_client(),
    ):
        assert sampler.get_tokenizer().encode("hi") == [104, 105]


def test_objects_of_the_official_sdk_are_accepted_wherever_ours_are(backend: Backend) -> None:  # R5.4
    def theirs(ours: Datum) -> sdk.Datum:
        inputs: Any = {name: torch.from_numpy(tensor.to_numpy()) for name, tensor in ours.loss_fn_inputs.items()}
        tokens = [int(token) for token in ours.model_input.to_ints()]
        return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)

    seen: list[Any] = []

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        seen.extend(data)
        return nll(data, logprobs)

    ours, sdks = backend.model(), backend.model()
    # One of several targets per position, which the SDK makes sparse by itself.
    batch = [*DATA, top_k(TEXTS[1], sparse=False)]
    params: dict[str, Any] = {"learning_rate": 0.01, "beta1": 0.8, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    ours_out = ours.forward_backward(batch, "cross_entropy").result()
    sdks_out = sdks.forward_backward([theirs(each) for each in batch], "cross_entropy").result()
    given = [theirs(each) for each in DATA]
    ours.forward_backward_custom(DATA, nll)
    sdks.forward_backward_custom(given, loss)
    ours.optim_step(AdamParams(**params)).result()
    sdks.optim_step(sdk.AdamParams(**params)).result()
    assert all(got is datum for got, datum in zip(seen, given, strict=True))
    assert ours_out == sdks_out
    assert backend.bits(ours) == backend.bits(sdks)
    sampler = ours.save_weights_and_get_sampling_client()
    settings: dict[str, Any] = {"max_tokens": 3, "seed": 5, "temperature": 0.7, "stop": [0]}
    ids = list(b"hello")
    first = sampler.sample(ModelInput.from_ints(ids), 2, SamplingParams(**settings)).result()
    second = sampler.sample(sdk.ModelInput.from_ints(ids), 2, sdk.SamplingParams(**settings)).result()
    assert first == second
    assert (
        sampler.compute_logprobs(sdk.ModelInput.from_ints(ids)).result()
        == sampler.compute_logprobs(ModelInput.from_ints(ids)).result()
    )


def test_futures_are_awaited_from_any_event_loop(backend: Backend) -> None:
    model = backend.model()
    plain, custom = model.forward(DATA, "cross_entropy"), model.forward_backward_custom(DATA, nll)

    async def both() -> tuple[Any, Any]:
        first, second = await asyncio.gather(_awaited(custom), _awaited(plain))
        return first, second

    once, again = asyncio.run(both()), asyncio.run(both())
    assert once == again == (custom.result(), plain.result())
    assert plain.done()
    assert plain.exception() is None
    step = asyncio.run(_awaited(model.optim_step(FAST)))
    assert step.metrics["grad_norm"] > 0
    assert backend.kinds(model) == ["forward", "forward", "forward_backward", "optim_step"]


async def _awaited(future: Any) -> Any:
    return await future


def test_a_timeout_loses_nothing(backend: Backend, held: threading.Event) -> None:
    future = backend.model().forward(DATA, "cross_entropy")
    with pytest.raises(ResultTimeout, match=r"call \.result\(\) again"):
        future.result(timeout=0.01)
    held.set()
    assert len(future.result(timeout=60).loss_fn_outputs) == 3


def test_a_failure_that_nobody_reads_is_raised_at_the_next_call(backend: Backend) -> None:  # R4.5
    model = backend.model()
    future = model.forward(DATA, "no_such_loss")
    future.wait()
    with pytest.raises(InvalidInput, match=f"'no_such_loss' is not reg.*forward.* of {model.model_id}") as caught:
        model.optim_step(FAST)
    assert (caught.value.operation, caught.value.model_id) == ("forward", model.model_id)
    assert backend.kinds(model) == ["forward"]
    model.optim_step(FAST).result()
