"""The official SDK's own custom losses run on the embedded trainer, in one pass, by its `create_custom_loss`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.helpers.reference import gathered
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "tml-any"
TEXTS = ("hello world, this is a text", "a short one", "and another, of a middling length")
RANKS: Any = {"logprobs": 1, "advantages": 1, "old": 1, "strength": 0}


@pytest.fixture(scope="module", autouse=True)
def _no_telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    """In float64, where gradients can be compared to many digits."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"), dtype=torch.float64)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def service(trainer: EmbeddedTrainer, running: Any) -> Iterator[tinker.ServiceClient]:
    with running(create_app(trainer)) as url, tinker.ServiceClient(base_url=url, api_key=KEY) as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()


def data(**more: Any) -> list[types.Datum]:
    made = []
    for i, text in enumerate(TEXTS):
        ids, random = list(text.encode()), np.random.default_rng(i)
        inputs: Any = {
            "target_tokens": ids[1:],
            "advantages": random.normal(0, 1, len(ids) - 1).astype(np.float32),
            "old": torch.tensor(random.normal(-5.5, 0.1, len(ids) - 1), dtype=torch.float32),
            "strength": torch.tensor(0.5 + i),
            **more,
        }
        made.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return made


def clipped(logprobs: Any, advantages: Any, old: Any, strength: Any) -> Any:
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() * strength / math.sqrt(2.0)
    length = logprobs.shape[0]
    return loss, {"custom/ratio:mean": ratio.sum() / length, "custom/loss:sum": loss}


def on_the_client(datums: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
    """The same for a whole batch, as a plain custom loss."""
    total = torch.zeros(())
    for datum, each in zip(datums, logprobs, strict=True):
        inputs = [datum.loss_fn_inputs[name].to_torch() for name in ("advantages", "old", "strength")]
        total = total + clipped(each, *inputs)[0]
    return total, {}


def test_a_handle_is_run_by_the_server_in_one_pass(  # R3.7, R5.5
    trainer: EmbeddedTrainer, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    handle = service.create_custom_loss(clipped, RANKS).result()
    assert handle.loss_id is not None
    results = []
    for _ in range(8):
        results.append(training.forward_backward_custom(data(), handle).result())
        training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    model_id = training.get_info().model_id
    kinds = [trainer.scheduler.find(f"{model_id}:{number}").kind for number in range(1, 17)]
    assert kinds == ["forward_backward", "optim_step"] * 8
    assert results[-1].metrics["loss:sum"] < results[0].metrics["loss:sum"]
    assert results[0].metrics["custom/loss:sum"] == pytest.approx(results[0].metrics["loss:sum"])
    assert results[0].metrics["custom/ratio:mean"] == pytest.approx(1.0, abs=0.2)
    assert [len(output["logprobs"].data) for output in results[0].loss_fn_outputs] == [len(t) - 1 for t in TEXTS]


def test_the_update_is_that_of_the_same_loss_on_the_client(
    trainer: EmbeddedTrainer, service: tinker.ServiceClient
) -> None:
    losses: list[Callable[..., Any] | Any] = [
        service.create_custom_loss(renamed(clipped), RANKS).result(),
        on_the_client,
    ]
    gradients, values = [], []
    for loss in losses:
        training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        result = training.forward_backward_custom(data(), loss).result()
        values.append(result.metrics["loss:sum"])
        gradients.append(gathered(trainer, training.get_info().model_id))
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[1].norm()


def renamed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that the SDK has not seen in this session; it rejects a repeated one."""

    def other(logprobs: Any, advantages: Any, old: Any, strength: Any) -> Any:
        loss, metrics = fn(logprobs, advantages, old, strength)
        return loss + 0.0, metrics

    return other


def test_two_dimensions_sparse_and_dense(
    trainer: EmbeddedTrainer, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    def distilled(logprobs: Any, weights: Any) -> Any:
        return -(logprobs * weights).sum(), {"custom/mass:mean": logprobs.exp().sum(-1).mean()}

    ids = torch.tensor(list(TEXTS[0].encode()))
    targets = torch.stack([ids[1:], (ids[1:] + 1) % 256, *[torch.zeros_like(ids[1:])] * 6], -1)
    weights = torch.tensor([[0.75, 0.25, *[0.0] * 6]]).repeat(len(targets), 1)
    inputs: Any = {"target_tokens": targets, "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)
    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None
    handle = service.create_custom_loss(distilled, {"logprobs": 2, "weights": 2}).result()
    result = training.forward_backward_custom([datum], handle).result()
    right = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    plain = right.forward_backward([datum], "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"])
    assert torch.allclose(
        gathered(trainer, training.get_info().model_id), gathered(trainer, right.get_info().model_id), atol=1e-12
    )


def test_the_sdk_writes_down_arguments_with_nothing_in_them(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    """`out=None`, of which torch itself makes an argument."""

    def angled(logprobs: Any, old: Any) -> Any:
        return (torch.nn.functional.normalize(logprobs, dim=0) * old).sum() + torch.norm(logprobs), {}

    handle = service.create_custom_loss(angled, {"logprobs": 1, "old": 1}).result()
    output = training.forward_backward_custom(data(), handle).result()
    logprobs = [torch.tensor(each["logprobs"].data) for each in output.loss_fn_outputs]
    olds = [datum.loss_fn_inputs["old"].to_torch() for datum in data()]
    expected = sum(float(angled(*pair)[0]) for pair in zip(logprobs, olds, strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_graphs_of_the_sdk_that_the_server_does_not_accept(service: tinker.ServiceClient) -> None:
    def noisy(logprobs: Any) -> Any:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.BadRequestError, match=r"'torch\.rand_like' is not among those"):
        service.create_custom_loss(noisy, {"logprobs": 1}).result()


def test_a_loss_that_fails_says_where(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    def reshaped(logprobs: Any) -> Any:
        return logprobs.reshape(7, 7).sum(), {}

    handle = service.create_custom_loss(reshaped, {"logprobs": 1}).result()
    with pytest.raises(
        tinker.RequestFailedError, match=r"datum 0: reshaped: node 'reshape': reshape failed: shape '\[7, 7\]'"
    ):
        training.forward_backward_custom(data(), handle).result()
    training.forward_backward(data(weights=[1.0] * 26)[:1], "cross_entropy").result()  # the model stays usable
