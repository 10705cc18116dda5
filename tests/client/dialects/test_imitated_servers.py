"""One client on servers of every kind: detected by itself, with the gradient of the custom loss (R3.3, R5.4)."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, get_args

import httpx
import numpy as np
import pytest
import torch

from tinker_lightning import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinker_lightning.client.dialects.known import known
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.errors import AnswerLost, NotFound, OperationFailed, TinkerLightningError, Unsupported
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service, imitate
from tinker_lightning.testing.imitations.serving import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client import TrainingClient
    from tinker_lightning.client.dialects import Dialect
    from tinker_lightning.testing import Imitation

KINDS: tuple[Kind, ...] = get_args(Kind)
# The changes of the weights are linear in the gradient, so that a wrong factor shows.
STEP = AdamParams(learning_rate=2e5, beta1=0.0, beta2=0.0, eps=1e9)


def pair(n: int, seed: int) -> Datum:
    tokens = np.random.default_rng(seed).integers(1, 200, n + 1)
    return Datum(ModelInput.from_ints(tokens[:-1].tolist()), {"target_tokens": tokens[1:]})


BATCH = [pair(6, 1), pair(9, 2), pair(4, 3)]


def preference(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradients of both signs, and of a zero sum within a sequence."""
    margin = logprobs[0].sum() - logprobs[-1].sum()
    within = (logprobs[0] * torch.linspace(-1, 1, len(logprobs[0]))).sum()
    return -torch.nn.functional.logsigmoid(margin) + 0.3 * within, {"margin": margin.item()}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("dialects"), dtype=torch.float64)
    yield trainer
    trainer.close()


def connected(server: Imitation, dialect: Dialect | None = None) -> ServiceClient:
    key, policy = server.behaviour.api_key, RetryPolicy(2.0, 0.05)
    return ServiceClient(
        base_url="http://imitated", api_key=key, transport=server.transport, retry_policy=policy, dialect=dialect
    )


def model_on(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def logprobs_of(client: TrainingClient) -> np.ndarray[Any, Any]:
    output = client.forward(BATCH, "cross_entropy").result()
    return np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs])


def trained(service: ServiceClient, calls: list[list[Datum]]) -> np.ndarray[Any, Any]:
    client = model_on(service)
    before = logprobs_of(client)
    for call in calls:
        client.forward_backward_custom(call, preference)
    client.optim_step(STEP).result()
    changed: np.ndarray[Any, Any] = logprobs_of(client) - before
    return changed


@pytest.mark.parametrize("calls", [[BATCH], [BATCH[:2], BATCH[1:]]], ids=["one call", "two calls"])
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


@pytest.mark.parametrize(("kind", "name"), [("skyrl", "skyrl"), ("tuft", "tuft"), ("twinkle", "twinkle")])
def test_the_dialect_is_detected(kind: Kind, name: str, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        assert service.session.dialect.name == name


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_answer_never_doubles_a_gradient(kind: Kind, trainer: EmbeddedTrainer) -> None:
    drops = {"forward_backward": [2] if kind in ("open-rl", "tuft") else [1]}  # where the first one is the forward
    with (
        imitate(kind, trainer=trainer, drops_answers=drops) as server,
        connected(server, known(kind)) as service,
    ):
        client = model_on(service)
        saved = client.save_state("before").result().path

        def step() -> None:
            client.forward_backward_custom(BATCH, preference)
            client.optim_step(STEP).result()

        with pytest.raises(AnswerLost, match=f"may have executed it.* Resume from {saved}") as raised:
            step()
        assert raised.value.operation in ("forward_backward", "optim_step")
        assert raised.value.model_id == client.model_id
        assert server.ran["optim_step"] == 0
        assert server.ran["forward_backward"] <= drops["forward_backward"][0]
        with contextlib.suppress(AnswerLost):  # the failure of the pass, if nobody has read it yet
            client.get_info()


def test_a_rejected_request_leaves_its_number_to_the_next(trainer: EmbeddedTrainer) -> None:
    with imitate("tuft", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(TinkerLightningError):
            client.save_state("a name with blanks/and slashes", ttl_seconds=1).result()
        logprobs_of(client)


@pytest.mark.parametrize(("kind", "wrong"), [("skyrl", "tuft"), ("tuft", "skyrl")])
def test_a_wrong_dialect_is_named_as_the_cause(kind: Kind, wrong: str, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server, known(wrong)) as service:
        client = model_on(service)
        with pytest.raises(TinkerLightningError, match=f"Does the server speak the dialect '{wrong}'"):
            client.forward(BATCH, "cross_entropy").result()


def test_clipping_that_a_server_ignores_raises(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(Unsupported, match=r"grad_clip_norm=1\.0: servers of the dialect 'skyrl' ignore it"):
            client.optim_step(AdamParams(grad_clip_norm=1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_checkpoint_is_not_found(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(NotFound, match=r"load_state: .*Checkpoint not found: .*/nothing \("):
            client.load_state(f"tinker://{client.model_id}/weights/nothing").result()


def test_states_that_cannot_be_deleted_are_reported(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        path = client.save_state("kept").result().path
        with pytest.raises(Unsupported, match="stays on the server"):
            client.delete_checkpoint(path)


def test_sampling_from_older_weights_does_not_replace_the_model(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        old = client.save_weights_and_get_sampling_client()
        assert len(old.compute_logprobs(BATCH[0].model_input).result()) == 6  # the first one is added
        client.forward_backward_custom(BATCH, preference)
        client.optim_step(STEP).result()
        with pytest.raises(Unsupported, match="would replace the weights"):
            old.compute_logprobs(BATCH[0].model_input)
        client.save_weights_and_get_sampling_client().compute_logprobs(BATCH[0].model_input).result()


@pytest.mark.parametrize("kind", ["skyrl", "open-rl"])
def test_a_step_reports_the_norm_of_its_gradient_under_one_name(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        client.forward_backward_custom(BATCH, preference)
        metrics = client.optim_step(STEP).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] > 0


def test_a_crash_does_not_lose_the_answer_to_the_next_request(trainer: EmbeddedTrainer) -> None:
    with (
        imitate("tuft", trainer=trainer) as server,
        ServiceClient(
            base_url=server.url, api_key=server.behaviour.api_key, retry_policy=RetryPolicy(0.0), dialect="tuft"
        ) as service,
    ):
        client = model_on(service)
        for _ in range(5):
            with pytest.raises(OperationFailed, match="HTTP 500"):
                service.weights_info("tinker://unknown/weights/x")  # after which the connection is closed
            client.forward_backward(BATCH, "cross_entropy").result()


def stepped(client: TrainingClient) -> np.ndarray[Any, Any]:
    """Trains a step on two calls, and returns the log-probabilities after it."""
    client.forward_backward_custom(BATCH[:2], preference)
    client.forward_backward_custom(BATCH[1:], preference)
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    return logprobs_of(client)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_path(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server, known(kind)) as service:
        client = model_on(service)
        before = logprobs_of(client)
        first = stepped(client)
        assert np.abs(first - before).max() > 1e-3
        saved = client.save_state("state").result().path
        second = stepped(client)
        client.load_state_with_optimizer(saved).result()
        np.testing.assert_allclose(logprobs_of(client), first, rtol=1e-6)
        if server.behaviour.saves_optimizer:
            np.testing.assert_allclose(stepped(client), second, rtol=1e-5)
        current = logprobs_of(client)
        sampler = client.save_weights_and_get_sampling_client()
        scores = sampler.compute_logprobs(BATCH[0].model_input).result()
        assert scores[0] is None
        np.testing.assert_allclose(np.array(scores[1:], float), current[: len(scores) - 1], rtol=1e-3, atol=1e-4)
        drawn = sampler.sample(BATCH[0].model_input, 2, SamplingParams(max_tokens=3, seed=1)).result()
        assert len(drawn.sequences) == 2
        try:
            client.delete_checkpoint(saved)
        except Unsupported:
            assert "delete" in server.behaviour.lacks
        else:
            assert not service.checkpoint_exists(saved)


class Alternating(httpx.AsyncBaseTransport):
    """A load balancer in front of servers of different kinds: from some request on, it takes turns."""

    def __init__(self, *servers: Imitation, after: int) -> None:
        self.servers, self.left = servers, after

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.left -= 1
        server = self.servers[0 if self.left >= 0 else self.left % len(self.servers)]
        return await server.transport.handle_async_request(request)


def train_through(transport: httpx.AsyncBaseTransport, api_key: str | None) -> None:
    settings: Any = {"api_key": api_key, "transport": transport, "retry_policy": RetryPolicy(2.0, 0.05)}
    with ServiceClient(base_url="http://imitated", **settings) as service:
        client = model_on(service)
        for _ in range(8):
            client.forward_backward_custom(BATCH, preference)
            client.optim_step(STEP).result()


@pytest.mark.parametrize("after", [0, 8])
@pytest.mark.parametrize("kinds", [("skyrl", "tuft"), ("tuft", "skyrl"), ("together", "tuft")], ids="-".join)
def test_servers_of_different_kinds_behind_one_url_are_one_error(
    kinds: tuple[Kind, Kind], after: int, trainer: EmbeddedTrainer
) -> None:
    with imitate(kinds[0], trainer=trainer, hold=0.1) as first, imitate(kinds[1], trainer=trainer, hold=0.1) as second:
        key = first.behaviour.api_key or second.behaviour.api_key
        with pytest.raises(TinkerLightningError) as raised:
            train_through(Alternating(first, second, after=after), key)
    assert re.search(r"http://imitated .*POST /api/v1/\w+: .* connect to one of them", str(raised.value))
