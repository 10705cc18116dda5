"""Library losses accept the same batches on a server as locally, and raise the same errors for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.loss_cases import batch
from tests.helpers.loss_library import LIBRARY, case_of
from tests.helpers.loss_mistakes import MISTAKES
from tests.helpers.reference import gathered
from tests.helpers.soaking import first_only, mostly_soak
from tinker_lightning import Datum, custom_loss, losses
from tinker_lightning.errors import InvalidDatum, InvalidInput, TinkerLightningError
from tinker_lightning.lightning import routes
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient, TrainingClient


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("library"), dtype=torch.float64)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def submitted(client: TrainingClient, route: routes.RouteName, loss: Any, data: list[Datum], **config: float) -> Any:
    """The result of a pass on that route."""
    chosen = routes.choose(loss, config, route, lambda: client, reduction="sum")
    assert chosen.route == ("two-pass" if route == "two-pass" else "server")
    if chosen.runs_locally:
        return client.forward_backward_custom(data, chosen.loss).result()
    return client.forward_backward(data, chosen.loss, chosen.config).result()


def raised_error(
    client: TrainingClient, route: routes.RouteName, loss: Any, data: list[Datum]
) -> tuple[type[Exception], str]:
    """The error for an invalid batch."""
    with pytest.raises(TinkerLightningError) as caught:
        submitted(client, route, loss, data)
    return type(caught.value), str(caught.value)


def with_input(datum: Datum, name: str, value: Any) -> Datum:
    return Datum(datum.model_input, {**datum.loss_fn_inputs, name: value})


def gradient(trainer: EmbeddedTrainer, service: ServiceClient, submit: Callable[[TrainingClient], Any]) -> Any:
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    value = submit(client).metrics["loss:sum"]
    return value, gathered(trainer, client.model_id)


# Those whose shape no datum checks by itself.
FREE = ("reference_logprobs", "teacher_logprobs", "reward", "label", "kl_weights")
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda _: -10.0,
    "a vector of one": lambda _: torch.tensor([-10.0]),
    "one too few": lambda right: right[:-1],
    "NaN": lambda right: torch.full_like(right, torch.nan),
}


@pytest.mark.parametrize("wrong", mostly_soak(WRONG, but=["a vector of one"]))
@pytest.mark.parametrize(
    ("loss", "name"), [(loss, name) for loss, (_, names) in LIBRARY.items() for name in names if name in FREE]
)
def test_an_input_that_does_not_fit_raises_alike_on_every_route(
    client: TrainingClient, loss: str, name: str, wrong: str
) -> None:  # R5.7
    data, _ = case_of(loss)
    for i, datum in enumerate(data):
        right = datum.loss_fn_inputs[name].to_torch()
        value = right.new_zeros(2) if name in ("reward", "label") and wrong != "NaN" else WRONG[wrong](right)
        data[i] = with_input(datum, name, value)
    here = raised_error(client, "two-pass", LIBRARY[loss][0], data)
    assert here[0] is InvalidDatum
    assert here[1].startswith(f"datum 0: {name} has ")
    assert (
        raised_error(client, "auto", LIBRARY[loss][0], data)
        == raised_error(client, "server", LIBRARY[loss][0], data)
        == here
    )


@pytest.mark.parametrize("mistake", [mistake for mistake, (_, data, _) in MISTAKES.items() if data])
def test_a_mistake_is_named_alike_on_every_route(client: TrainingClient, mistake: str) -> None:  # R1.9, R5.7
    loss, data, message = MISTAKES[mistake]
    here = raised_error(client, "two-pass", loss, data)
    assert message in here[1]
    assert raised_error(client, "auto", loss, data) == here


def test_nothing_is_sent_of_a_batch_that_is_rejected(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    raised_error(client, "auto", losses.dpo, batch()[0][:3])
    _, adapter = trainer.registry.model(client.model_id).ready()
    assert adapter.gradient == {}
    submitted(client, "auto", losses.dpo, batch()[0][:4])  # and the next batch is taken


@pytest.mark.parametrize("loss", first_only([losses.ppo, losses.gspo, losses.cispo, losses.grpo], 2))
@pytest.mark.parametrize("names", [["clip_high_threshold"], ["clip_low_threshold", "clip_high_threshold"]])
def test_thresholds_that_only_some_datums_have(
    trainer: EmbeddedTrainer, service: ServiceClient, loss: Any, names: list[str]
) -> None:  # R5.7
    data, _ = batch()
    for i, name in enumerate(names):
        ratio = torch.full((data[i].model_input.length,), 1.0 + 0.01 * i)
        data[i] = with_input(data[i], name, ratio)
    before = [dict(datum.loss_fn_inputs) for datum in data]
    here = gradient(trainer, service, lambda client: submitted(client, "two-pass", loss, data, clip_low_threshold=0.5))
    there = gradient(trainer, service, lambda client: submitted(client, "auto", loss, data, clip_low_threshold=0.5))
    assert there[0] == pytest.approx(here[0], rel=1e-6)
    assert (there[1] - here[1]).norm() <= 1e-5 * here[1].norm()
    assert [datum.loss_fn_inputs for datum in data] == before


def test_a_registered_loss_of_the_library_takes_inputs_given_once(
    service: ServiceClient, client: TrainingClient
) -> None:  # R3.4
    loss = custom_loss(service, name="preferences", on="logprobs")(losses.dpo)
    data, _ = batch(lengths=(5, 2, 7, 3))
    rows = np.zeros((4, 7), np.float32)
    bare = []
    for i, datum in enumerate(data):
        inputs = dict(datum.loss_fn_inputs)
        reference = inputs.pop("reference_logprobs").to_numpy()
        rows[i, : len(reference)] = reference
        bare.append(Datum(datum.model_input, inputs))
    expected = client.forward(data, loss).result().metrics["loss:sum"]
    once = client.forward(bare, loss, loss_fn_inputs={"reference_logprobs": rows}).result()
    assert once.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    for wrong in (rows.sum(1), rows.sum(1, keepdims=True)):
        with pytest.raises(InvalidDatum, match=r"datum 0: reference_logprobs has the shape \["):
            client.forward(bare, loss, loss_fn_inputs={"reference_logprobs": wrong})
    with pytest.raises(InvalidInput, match="reference_logprobs must have one row for each of the 4 datums"):
        client.forward(bare, loss, loss_fn_inputs={"reference_logprobs": rows[:3]})
