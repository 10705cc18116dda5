"""The official SDK, a client nobody here wrote, trains on the embedded trainer unchanged."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tinker import types
from tinker.cli.__main__ import main_cli

from tests.helpers.reference import autograd, gathered
from tinker_lightning.errors import NotFound
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.trainer.scheduler import POLLED_GAP_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from starlette.applications import Starlette

KEY = "tml-any"
TEXTS = ("hello world, this is a text", "a short one", "and another, of a middling length")


@pytest.fixture(autouse=True)
def _no_warning(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Whatever a test does, the SDK must have nothing to complain about."""
    yield
    complaints = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.WARNING]
    assert complaints == []
    printed = capfd.readouterr()
    assert "warn" not in (printed.out + printed.err).lower()


@pytest.fixture(scope="module")
def service(served: Any) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=served.url, api_key=KEY) as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()


def datum(text: str, **inputs: Any) -> types.Datum:
    ids = list(text.encode())
    named: dict[str, Any] = {"target_tokens": ids[1:], **(inputs or {"weights": [1.0] * (len(ids) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=named)


def policy_datum(text: str, seed: int, **inputs: Any) -> types.Datum:
    length, random = len(text) - 1, np.random.default_rng(seed)
    logprobs = random.normal(-5.5, 0.2, length).astype(np.float32)
    advantages = random.normal(0, 1, length).astype(np.float32)
    return datum(text, logprobs=logprobs, advantages=advantages, **inputs)


DATA = [datum(text) for text in TEXTS]
POLICY = [policy_datum(text, seed) for seed, text in enumerate(TEXTS)]
MASKED = [
    policy_datum(text, seed, sequence_ratio_mask=np.ones(len(text) - 1, np.float32)) for seed, text in enumerate(TEXTS)
]
THRESHOLDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES: dict[str, tuple[list[types.Datum], dict[str, float] | None]] = {
    "cross_entropy": (DATA, None),
    "importance_sampling": (POLICY, None),
    "ppo": (POLICY, THRESHOLDS),
    "cispo": (POLICY, THRESHOLDS),
    "dro": (POLICY, {"beta": 0.05}),
    "gspo": (MASKED, THRESHOLDS),
}


def mean_nll(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    nll = -torch.cat(logprobs).mean()
    return nll, {"nll": nll.item()}


def logprobs_of(client: tinker.TrainingClient) -> list[list[float]]:
    outputs = client.forward(DATA, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].tolist() for output in outputs]


def steps(client: tinker.TrainingClient, count: int) -> None:
    for _ in range(count):
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def test_the_server_says_what_it_has(served: Any) -> None:  # R5.5
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    model, by_folder = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == ("tiny", 2048, True)
    assert Path(str(by_folder.model_name)).is_dir()


def test_a_model_says_what_it_is_and_leads_to_its_tokenizer(training: tinker.TrainingClient) -> None:
    info = training.get_info()
    assert (info.model_name, info.lora_rank) == ("tiny", 8)
    assert info.optimizer_config == types.AdamOptimizerConfig()
    assert training.get_tokenizer().encode("hé") == list("hé".encode())


def test_every_client_leads_to_its_tokenizer(
    service: tinker.ServiceClient, training: tinker.TrainingClient, served: Any
) -> None:  # R5.17
    """Except that of a bare name, which the SDK looks for on the hub."""
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    _, folder = (str(model.model_name) for model in rest.get_server_capabilities().result().supported_models)
    path = training.save_weights_for_sampler("tokenizer").result().path
    clients: list[Any] = [
        training.save_weights_and_get_sampling_client().result(),
        training.create_sampling_client(path).result(),
        service.create_sampling_client(model_path=path).result(),
        service.create_sampling_client(base_model=folder).result(),
        service.create_lora_training_client(base_model=folder, rank=4).result(),
    ]
    assert all(client.get_tokenizer().encode("hé") == list("hé".encode()) for client in clients)
    assert {client.get_base_model() for client in clients[:3]} == {folder}
    with pytest.raises(OSError, match="huggingface"):
        service.create_sampling_client(base_model="tiny").result().get_tokenizer()


def test_an_in_flight_sampler_is_refused_and_training_continues(training: tinker.TrainingClient) -> None:  # R5.17
    with pytest.raises(tinker.BadRequestError, match="kind: only 'snapshot' is supported, not 'inflight'"):
        training.save_weights_and_get_sampling_client(kind="inflight").result()
    steps(training, 1)


def test_a_custom_loss_that_fails_holds_nothing_up(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:  # R5.17
    """The SDK reserves the number of the backward, never sends it, and rejects later calls of this client itself."""
    path = training.save_state("before").result().path

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("of the user")

    started = time.monotonic()
    failed = training.forward_backward_custom(DATA, failing)
    rejected: list[tinker.APIFuture[Any]] = [
        training.optim_step(types.AdamParams()),
        training.forward(DATA, "cross_entropy"),
    ]
    with pytest.raises(ZeroDivisionError):
        failed.result()
    for future in rejected:
        with pytest.raises(RuntimeError, match="A previous request failed"):
            future.result()
    steps(service.create_training_client_from_state(path).result(), 1)
    assert time.monotonic() - started < POLLED_GAP_TIMEOUT  # no gap was waited for


def test_forward_gives_one_logprob_for_each_target(training: tinker.TrainingClient) -> None:
    result = training.forward(DATA, "cross_entropy").result()
    assert [len(output["logprobs"].data) for output in result.loss_fn_outputs] == [len(t) - 1 for t in TEXTS]
    total = sum(sum(output["logprobs"].data) for output in result.loss_fn_outputs)
    assert result.metrics["loss:sum"] == pytest.approx(-total, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(training: tinker.TrainingClient, loss: Any) -> None:  # R3.3
    data, config = LOSSES[loss]
    before = training.forward_backward(data, loss, config)
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    after = training.forward(data, loss, config)
    assert (step.result().metrics or {})["grad_norm"] > 0
    assert "loss:sum" in before.result().metrics
    assert reward(data, after.result()) > reward(data, before.result())


def reward(data: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """What every built-in loss raises: the log-probabilities of tokens that are good, by how good they are."""
    total = 0.0
    for one, result in zip(data, output.loss_fn_outputs, strict=True):
        goodness = one.loss_fn_inputs.get("advantages") or one.loss_fn_inputs["weights"]
        total += float(np.dot(goodness.to_numpy(), result["logprobs"].to_numpy()))
    return total


def test_a_custom_loss_lowers_nll(training: tinker.TrainingClient) -> None:  # R1.5, R1.6, R1.7
    history = []
    for _ in range(10):
        result = training.forward_backward_custom(DATA, mean_nll).result()
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        history.append(result.metrics["nll"])
        assert result.metrics["loss:sum"] == pytest.approx(result.metrics["nll"])
    assert history[-1] < history[0] - 1  # less than half of what it learns in ten steps


def test_top_k_targets_train(training: tinker.TrainingClient) -> None:
    ids = list(TEXTS[0].encode())
    targets = torch.tensor([[i, (i + 1) % 256, 0, 0] for i in ids[1:]])
    weights = torch.tensor([[0.75, 0.25, 0.0, 0.0]]).repeat(len(targets), 1)
    inputs: dict[str, Any] = {"target_tokens": targets, "weights": weights}
    dense_and_sparse = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    assert dense_and_sparse.loss_fn_inputs["weights"].shape == [len(targets), 4]
    first = training.forward_backward([dense_and_sparse], "cross_entropy").result()
    assert np.shape(first.loss_fn_outputs[0]["logprobs"].tolist()) == (len(targets), 4)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    second = training.forward([dense_and_sparse], "cross_entropy").result()
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]


def test_resume_with_the_optimizer_is_bit_equal_to_not_stopping(
    service: tinker.ServiceClient, training: tinker.TrainingClient, served: Any
) -> None:
    steps(training, 2)
    saved = training.save_state("middle").result().path
    steps(training, 3)
    with_optimizer = service.create_training_client_from_state_with_optimizer(saved).result()
    without = service.create_training_client_from_state(saved).result()
    for client in (with_optimizer, without):
        steps(client, 3)
    expected, resumed, other = (
        _saved_tensors(served.data_dir, client.save_state("end").result().path)
        for client in (training, with_optimizer, without)
    )
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not all(torch.equal(expected[name], other[name]) for name in expected)


def _saved_tensors(data_dir: Path, tinker_path: str) -> dict[str, torch.Tensor]:
    (summary,) = (
        file for file in data_dir.rglob("checkpoint.json") if f'"tinker_path": "{tinker_path}"' in file.read_text()
    )
    folder = summary.parent
    return {
        f"{file}/{name}": tensor
        for file in ("adapter_model.safetensors", "optimizer.safetensors")
        for name, tensor in load_file(folder / file).items()
    }


def test_a_seed_reproduces_a_model(service: tinker.ServiceClient) -> None:
    first, same, other = (
        service.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result() for seed in (7, 7, 8)
    )
    for client in (first, same, other):
        steps(client, 1)
    assert logprobs_of(first) == logprobs_of(same)
    assert logprobs_of(first) != logprobs_of(other)


def test_a_sampler_keeps_its_weights_while_training_continues(training: tinker.TrainingClient) -> None:
    prompt = types.ModelInput.from_ints(list(b"hello world"))
    params = types.SamplingParams(max_tokens=12, temperature=0.7, seed=3)
    steps(training, 5)
    sampler = training.save_weights_and_get_sampling_client().result()
    before = sampler.sample(prompt, num_samples=3, sampling_params=params).result()
    scores = sampler.compute_logprobs(prompt).result()
    steps(training, 5)
    after = sampler.sample(prompt, num_samples=3, sampling_params=params).result()
    assert [s.tokens for s in before.sequences] == [s.tokens for s in after.sequences]
    assert all(len(s.logprobs or []) == len(s.tokens) for s in before.sequences)
    assert sampler.compute_logprobs(prompt).result() == scores
    assert training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result() != scores


def test_compute_logprobs_agrees_with_forward(training: tinker.TrainingClient) -> None:
    steps(training, 3)
    sampler = training.save_weights_and_get_sampling_client().result()
    (first, *scores) = sampler.compute_logprobs(types.ModelInput.from_ints(list(TEXTS[0].encode()))).result()
    assert first is None
    assert scores == pytest.approx(logprobs_of(training)[0], abs=1e-5)


def test_sampling_from_saved_weights_and_from_the_base(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    prompt = types.ModelInput.from_ints(list(b"hello"))
    greedy = types.SamplingParams(max_tokens=6, temperature=0)
    steps(training, 8)
    path = training.save_weights_for_sampler("sampler").result().path
    saved = service.create_sampling_client(model_path=path).result()
    base = service.create_sampling_client(base_model="tiny").result()
    texts = [client.sample(prompt, 1, greedy).result().sequences[0].tokens for client in (saved, base)]
    assert texts[0] != texts[1]


def test_a_mistake_is_the_users_and_loses_nothing(training: tinker.TrainingClient) -> None:
    before = logprobs_of(training)
    inputs: dict[str, Any] = {"target_tokens": [2, 999], "weights": [1.0, 1.0]}
    bad = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    with pytest.raises(tinker.RequestFailedError, match=r"datum 1: target_tokens.*\[1\] is 999") as caught:
        training.forward_backward([DATA[0], bad], "cross_entropy").result()
    assert caught.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="'no_such_loss' is not registered"):
        training.forward(DATA, "no_such_loss").result()  # type: ignore[arg-type]
    assert logprobs_of(training) == before
    steps(training, 1)


def test_calls_in_flight_together_run_in_order(service: tinker.ServiceClient) -> None:  # R1.8
    together, waiting = (
        service.create_lora_training_client(base_model="tiny", rank=8, seed=4).result() for _ in range(2)
    )
    futures = []
    for _ in range(10):
        futures.append(together.forward_backward(DATA, "cross_entropy"))
        together.optim_step(types.AdamParams(learning_rate=1e-2))
    expected = []
    for _ in range(10):
        expected.append(waiting.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        waiting.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert [future.result().metrics["loss:sum"] for future in futures] == expected


def test_checkpoints_are_listed_expire_and_are_deleted(training: tinker.TrainingClient, served: Any) -> None:
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    path = training.save_state("listed", ttl_seconds=3600).result().path
    training.save_weights_for_sampler("listed").result()
    run = rest.get_training_run_by_tinker_path(path).result()
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert {c.checkpoint_id for c in listed} == {"weights/listed", "sampler_weights/listed"}
    assert next(c for c in listed if c.tinker_path == path).expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert path in {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints if c.expires_at is None}
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [c.checkpoint_id for c in rest.list_checkpoints(run.training_run_id).result().checkpoints] == [
        "sampler_weights/listed"
    ]


def test_closing_a_client_finishes_its_session_and_frees_its_models(
    trainer: EmbeddedTrainer, running: Callable[[Starlette], AbstractContextManager[str]]
) -> None:
    with running(create_app(trainer)) as url:
        with tinker.ServiceClient(base_url=url, api_key=KEY) as client:
            model = client.create_lora_training_client(base_model="tiny", rank=4).result()
            steps(model, 1)
            assert [session.finished for session in trainer.registry.sessions()] == [False]
        assert [session.finished for session in trainer.registry.sessions()] == [True]
        (session,) = trainer.registry.sessions()
        trainer.scheduler.find(f"{session.session_id}:finish").future.result(30)
        with pytest.raises(NotFound):
            trainer.registry.model(str(model.model_id))
        trainer.closing.announce()


@pytest.fixture(scope="module")
def double(
    tmp_path_factory: pytest.TempPathFactory, running: Callable[[Starlette], AbstractContextManager[str]]
) -> Iterator[tuple[EmbeddedTrainer, tinker.ServiceClient]]:
    """A float64 trainer whose gradients can be looked at, behind TCP."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("double"), dtype=torch.float64)
    with running(create_app(trainer)) as url, tinker.ServiceClient(base_url=url, api_key=KEY) as client:
        yield trainer, client
        trainer.closing.announce()
    trainer.close()


def entropic(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """A loss of no particular meaning: nonlinear, across datums, with weights of both signs."""
    means = torch.stack([logprob.mean() for logprob in logprobs])
    return (means[0] - means[1]).sigmoid() * means.logsumexp(0) + torch.cat(logprobs).sin().mean()


def test_the_gradient_of_a_custom_loss_is_exact_over_the_wire(
    double: tuple[EmbeddedTrainer, tinker.ServiceClient],
) -> None:  # R1.3, R1.4, R1.5
    trainer, client = double
    training = client.create_lora_training_client(base_model="tiny", rank=8, seed=2).result()
    steps(training, 2)
    training.forward_backward_custom(DATA, lambda _, logprobs: (entropic(logprobs), {})).result()
    expected = autograd(trainer, training.model_id, TEXTS, entropic)
    assert (gathered(trainer, training.model_id) - expected).norm() <= 1e-6 * expected.norm()


def test_custom_and_built_in_losses_give_the_same_gradient(
    double: tuple[EmbeddedTrainer, tinker.ServiceClient],
) -> None:  # R1.11
    trainer, client = double
    built_in, custom = (
        client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result() for _ in range(2)
    )
    built_in.forward_backward(DATA, "cross_entropy").result()
    custom.forward_backward_custom(DATA, lambda _, logprobs: (-torch.cat(logprobs).sum(), {})).result()
    expected, got = (gathered(trainer, model.model_id) for model in (built_in, custom))
    assert (got - expected).norm() <= 1e-6 * expected.norm()


def test_its_command_downloads_an_adapter(training: tinker.TrainingClient, served: Any, tmp_path: Path) -> None:
    steps(training, 2)
    state, external = training.save_state("state"), training.save_weights_external("external")
    environment = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    paths = [external.result().path, state.result().path]
    run = served.data_dir / "checkpoints" / str(training.model_id).replace(":", "+")
    saved = load_file(run / "weights" / "state" / "adapter_model.safetensors")
    for path in paths:
        command = ["checkpoint", "download", path, "--output", str(tmp_path / "got")]
        done = CliRunner().invoke(main_cli, command, env=environment)
        assert done.exit_code == 0, done.output
        (folder,) = (tmp_path / "got").iterdir()
        assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        tensors = load_file(folder / "adapter_model.safetensors")
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensors[name], saved[name]) for name in saved)
        shutil.rmtree(tmp_path / "got")
