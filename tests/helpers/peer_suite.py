"""What our client and `Trainer.fit` must do on every real server of another project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tinker_lightning import AdamParams, Datum, ModelInput, RemoteModule, ServiceClient, connect
from tinker_lightning.doctor import CHECKS, examine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tinker_lightning.client import TrainingClient

RNG = np.random.default_rng(0)


class Server(NamedTuple):
    """A running server.

    Args:
        url: Its URL.
        base_model: The base model.
        step: The learning rate of a step that changes log-probabilities linearly, and well above rounding.
        learning_rate: The learning rate that trains the base model.
        api_key: The key that it wants.
    """

    url: str
    base_model: str
    step: float
    learning_rate: float
    api_key: str | None = None

    def params(self, grad_clip_norm: float = 0.0) -> AdamParams:
        """Moves the weights by a multiple of the gradient."""
        return AdamParams(learning_rate=self.step, beta1=0.0, beta2=0.0, eps=1e9, grad_clip_norm=grad_clip_norm)


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


def logprobs_of(client: TrainingClient) -> NDArray[np.float64]:
    output = client.forward(BATCH, "cross_entropy").result()
    return np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs]).astype(np.float64)


def response(
    client: TrainingClient, params: AdamParams, start: str, accumulate: Callable[[], object]
) -> NDArray[np.float64]:
    """The change of all log-probabilities by a step from the same weights."""
    client.load_state_with_optimizer(start).result()
    before = logprobs_of(client)
    accumulate()
    client.optim_step(params).result()
    return logprobs_of(client) - before


def linear(indices: Sequence[int]) -> Callable[[list[Any], list[torch.Tensor]], Any]:
    """A custom loss whose gradients are `GRADIENTS`."""

    def loss(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [(torch.from_numpy(GRADIENTS[i]) * each).sum() for i, each in zip(indices, logprobs, strict=True)]
        return torch.stack(terms).sum(), {}

    return loss


def compared(found: NDArray[np.float64], truth: NDArray[np.float64]) -> tuple[float, float]:
    """The cosine between two responses, and the ratio of their norms."""
    norms = np.linalg.norm(found), np.linalg.norm(truth)
    return float(found @ truth / norms[0] / norms[1]), float(norms[0] / norms[1])


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


class PeerSuite:
    """The tests of one server: a subclass has a fixture `server`, and sends single datums as that server takes them."""

    @pytest.fixture(scope="class")
    def service(self, server: Server) -> Iterator[ServiceClient]:
        with connect(server.url, api_key=server.api_key) as service:
            yield service

    @pytest.fixture
    def client(self, service: ServiceClient, server: Server) -> TrainingClient:
        return service.create_lora_training_client(server.base_model, rank=8, seed=1)

    def send_alone(self, client: TrainingClient, server: Server, i: int) -> None:
        """Sends one datum with its gradient by a built-in loss whose factor is known."""
        raise NotImplementedError

    def test_custom_losses_have_their_gradient(self, client: TrainingClient, server: Server) -> None:  # R3.3, R5.4
        step, start = server.params(), client.save_state("gradient").result().path
        truth = sum(
            (response(client, step, start, lambda i=i: self.send_alone(client, server, i)) for i in range(3)),  # type: ignore[misc]
            np.zeros(1),
        )
        calls = {
            "one call": lambda: client.forward_backward_custom(BATCH, linear([0, 1, 2])),
            "two calls": lambda: [
                client.forward_backward_custom(BATCH[:1], linear([0])),
                client.forward_backward_custom(BATCH[1:], linear([1, 2])),
            ],
        }
        for name, call in calls.items():
            cosine, ratio = compared(response(client, step, start, call), truth)
            print(f"{name}: cosine {cosine:.6f}, norm {ratio:.5f}")
            assert cosine >= 0.9999, name
            assert abs(ratio - 1) <= 3e-3, name

    def test_the_built_in_cross_entropy_is_a_plain_sum(self, client: TrainingClient, server: Server) -> None:
        step, start = server.params(), client.save_state("builtin").result().path
        weighted = [each.with_inputs(weights=np.abs(g)) for each, g in zip(BATCH, GRADIENTS, strict=True)]

        def nll(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            terms = [-(torch.from_numpy(np.abs(g)) * each).sum() for g, each in zip(GRADIENTS, logprobs, strict=True)]
            return torch.stack(terms).sum(), {}

        built_in = response(client, step, start, lambda: client.forward_backward(weighted, "cross_entropy"))
        custom = response(client, step, start, lambda: client.forward_backward_custom(BATCH, nll))
        np.testing.assert_allclose(built_in, custom, rtol=1e-3, atol=1e-6)
        value = client.forward_backward(weighted, "cross_entropy").result().metrics["loss:sum"]
        assert value > 0  # computed from the log-probabilities where the server reports none

    def test_the_doctor_measures_the_known_dialect(self, service: ServiceClient, server: Server) -> None:
        names = ("linear", "advantages", "custom losses")
        report = examine(service, server.base_model, [check for check in CHECKS if check.name in names])
        assert report.dialect == service.session.dialect
        assert report.results[-1].status == "ok", report.results

    def test_fit_accumulates_validates_and_resumes(
        self, service: ServiceClient, server: Server, client: TrainingClient, tmp_path: Path
    ) -> None:
        start = client.save_state("fit").result().path

        def module() -> Preference:
            return Preference(
                service.create_training_client_from_state_with_optimizer(start), learning_rate=server.learning_rate
            )

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
        resumed = Preference(
            service.create_lora_training_client(server.base_model, rank=8), learning_rate=server.learning_rate
        )
        fit(resumed, 6, tmp_path, tmp_path / "half.ckpt")
        moved = (scores(whole) - before).abs().max()
        assert (scores(resumed) - scores(whole)).abs().max() < 1e-3 * moved
