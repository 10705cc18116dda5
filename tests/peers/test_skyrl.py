"""Our client and `Trainer.fit` on a real SkyRL 0.3.0 server with its JAX backend. Run it with `tox -e skyrl`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.real_servers import skyrl, write_tiny_qwen
from tinker_lightning import AdamParams, Datum, ModelInput, RemoteModule, SamplingParams, ServiceClient, connect
from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tinker_lightning.client import TrainingClient

# The packages of this environment warn of each other.
pytestmark = pytest.mark.filterwarnings("default")

# Small enough for the log-probabilities to change linearly in the gradient.
STEP = AdamParams(learning_rate=1500.0, beta1=0.0, beta2=0.0, eps=1e9)
RNG = np.random.default_rng(0)


def datum(n: int) -> Datum:
    tokens = RNG.integers(5, 200, n + 1)
    return Datum(
        ModelInput.from_ints(tokens[:-1].tolist()), {"target_tokens": tokens[1:], "weights": np.ones(n, np.float32)}
    )


BATCH = [datum(6), datum(9), datum(4)]
# Gradients of both signs; those of the second sequence sum to zero.
GRADIENTS = [RNG.normal(size=each.model_input.length).astype(np.float32) for each in BATCH]
GRADIENTS[1] -= GRADIENTS[1].mean()
PAIRS = [(datum(int(RNG.integers(4, 9))), datum(int(RNG.integers(4, 9)))) for _ in range(16)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of the server, and its base model."""
    model = write_tiny_qwen(tmp_path_factory.mktemp("model"))
    with skyrl(tmp_path_factory.mktemp("skyrl"), model) as url:
        yield url, str(model)


@pytest.fixture(scope="module")
def service(server: tuple[str, str]) -> Iterator[ServiceClient]:
    with connect(server[0]) as service:
        yield service


@pytest.fixture
def client(service: ServiceClient, server: tuple[str, str]) -> TrainingClient:
    return service.create_lora_training_client(server[1], rank=8, seed=1)


def logprobs_of(client: TrainingClient) -> NDArray[np.float64]:
    output = client.forward(BATCH, "cross_entropy").result()
    return np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs]).astype(np.float64)


def response(client: TrainingClient, start: str, accumulate: Callable[[], object]) -> NDArray[np.float64]:
    """The change of all log-probabilities by a step from the same weights."""
    client.load_state_with_optimizer(start).result()
    before = logprobs_of(client)
    accumulate()
    client.optim_step(STEP).result()
    return logprobs_of(client) - before


def linear(indices: Sequence[int]) -> Callable[[list[Any], list[torch.Tensor]], Any]:
    """A custom loss whose gradients are `GRADIENTS`."""

    def loss(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [(torch.from_numpy(GRADIENTS[i]) * each).sum() for i, each in zip(indices, logprobs, strict=True)]
        return torch.stack(terms).sum(), {}

    return loss


def send_alone(client: TrainingClient, url: str, i: int) -> None:
    """Sends one datum by SkyRL's `importance_sampling`, whose only factor then is one over the length."""
    data, n = BATCH[i], BATCH[i].model_input.length
    known = client.forward([data], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    values = {"advantages": -GRADIENTS[i] * n, "logprobs": known}
    inputs = {name: {"data": list(map(float, value)), "dtype": "float32"} for name, value in values.items()}
    targets = data.loss_fn_inputs["target_tokens"].to_numpy().tolist()
    chunk = {"type": "encoded_text", "tokens": [int(t) for part in data.model_input.chunks for t in part.tokens]}  # type: ignore[union-attr]
    body = {
        "model_id": client.model_id,
        "forward_backward_input": {
            "loss_fn": "importance_sampling",
            "data": [
                {
                    "model_input": {"chunks": [chunk]},
                    "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64"}, **inputs},
                }
            ],
        },
    }
    with httpx.Client(base_url=f"{url}/api/v1/", timeout=300) as http:
        request = http.post("forward_backward", json=body).json()["request_id"]
        assert http.post("retrieve_future", json={"request_id": request}).status_code == 200


def test_custom_losses_have_their_gradient(client: TrainingClient, server: tuple[str, str]) -> None:  # R3.3, R5.4
    start = client.save_state("gradient").result().path
    truth = sum(response(client, start, lambda i=i: send_alone(client, server[0], i)) for i in range(3))  # type: ignore[misc]
    calls = {
        "one call": lambda: client.forward_backward_custom(BATCH, linear([0, 1, 2])),
        "two calls": lambda: [
            client.forward_backward_custom(BATCH[:1], linear([0])),
            client.forward_backward_custom(BATCH[1:], linear([1, 2])),
        ],
    }
    for name, call in calls.items():
        found = response(client, start, call)
        norms = np.linalg.norm(found), np.linalg.norm(truth)
        assert found @ truth / norms[0] / norms[1] >= 0.9999, name
        assert abs(norms[0] / norms[1] - 1) <= 3e-3, name


def test_the_built_in_cross_entropy_is_a_plain_sum(client: TrainingClient) -> None:
    start = client.save_state("builtin").result().path
    weighted = [each.with_inputs(weights=np.abs(g)) for each, g in zip(BATCH, GRADIENTS, strict=True)]

    def nll(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [-(torch.from_numpy(np.abs(g)) * each).sum() for g, each in zip(GRADIENTS, logprobs, strict=True)]
        return torch.stack(terms).sum(), {}

    built_in = response(client, start, lambda: client.forward_backward(weighted, "cross_entropy"))
    custom = response(client, start, lambda: client.forward_backward_custom(BATCH, nll))
    np.testing.assert_allclose(built_in, custom, rtol=1e-3, atol=1e-6)
    value = client.forward_backward(weighted, "cross_entropy").result().metrics["loss:sum"]
    assert value > 0  # SkyRL reports none, so it is computed from the log-probabilities


class Preference(RemoteModule):
    def datums(self, batch: Any) -> list[Datum]:
        return [each for pair in batch for each in pair]

    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        del data
        margins = torch.stack([logprobs[i].sum() - logprobs[i + 1].sum() for i in range(0, len(logprobs), 2)])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean(), {"margin": margins.mean()}


def fit(module: RemoteModule, steps: int, folder: Path, ckpt_path: Path | None = None) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy="tinker",
        max_steps=steps,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    pairs: Any = PAIRS
    train, validation = DataLoader(pairs, collate_fn=list), DataLoader(pairs[:4], collate_fn=list)
    trainer.fit(module, train, validation, ckpt_path=ckpt_path)
    return trainer


def test_fit_accumulates_validates_and_resumes(
    service: ServiceClient, server: tuple[str, str], client: TrainingClient, tmp_path: Path
) -> None:
    start = client.save_state("fit").result().path

    def module() -> Preference:
        return Preference(service.create_training_client_from_state_with_optimizer(start), learning_rate=2e-3)

    data = [each for pair in PAIRS for each in pair]

    def scores(trained: RemoteModule) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(trained.lm(data))

    def objective(scored: torch.Tensor) -> float:
        parts = scored.split([each.model_input.length for each in data])
        return float(whole.loss(data, list(parts))[0])

    whole, part = module(), module()
    before = scores(whole)
    metrics = fit(whole, 6, tmp_path).callback_metrics
    assert objective(scores(whole)) < 0.8 * objective(before)
    assert {"train_loss", "val_loss", "val_nll"} <= metrics.keys()
    fit(part, 3, tmp_path).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Preference(service.create_lora_training_client(server[1], rank=8), learning_rate=2e-3)
    fit(resumed, 6, tmp_path, tmp_path / "half.ckpt")
    moved = (scores(whole) - before).abs().max()
    assert (scores(resumed) - scores(whole)).abs().max() < 1e-3 * moved


def test_what_the_server_cannot_do_is_named(client: TrainingClient) -> None:
    with pytest.raises(Unsupported, match="grad_clip_norm"):
        client.optim_step(AdamParams(grad_clip_norm=1.0))
    with pytest.raises(Unsupported, match="stays on the server"):
        client.delete_checkpoint(client.save_state("kept").result().path)


def test_sampling_does_not_replace_the_model(client: TrainingClient) -> None:
    sampler = client.save_weights_and_get_sampling_client()
    prompt = BATCH[0].model_input
    assert len(sampler.sample(prompt, 2, SamplingParams(max_tokens=4)).result().sequences) == 2
    assert len(sampler.compute_logprobs(prompt).result()) == prompt.length
    client.forward_backward_custom(BATCH, linear([0, 1, 2]))
    client.optim_step(AdamParams(learning_rate=1e-3)).result()
    with pytest.raises(Unsupported, match="would replace the weights"):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=1))
