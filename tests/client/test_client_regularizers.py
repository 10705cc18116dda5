"""Regularizers through a client, on every backend, and behind a remote model's node of autograd."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.helpers.client_data import DATA, datum, nll
from tests.helpers.reference import gathered
from tests.helpers.soaking import first_only
from tinker_lightning import AdamParams, Regularizer, RemoteAdamW, RemoteLM
from tinker_lightning.errors import InvalidInput, InvalidLoss, LossWithoutGradient, OperationFailed, ResultTimeout
from tinker_lightning.losses import regularizers
from tinker_lightning.losses.regularizers import composition

if TYPE_CHECKING:
    from tests.helpers.backends import Backend, Recorded
    from tinker_lightning.client import TrainingClient

FAST = AdamParams(learning_rate=1e-2)
LONG = 30.0


def spread(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    variance = torch.cat(logprobs).var()
    return variance, {"deviation": variance.sqrt()}


async def judged(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    await asyncio.sleep(0.001)
    return (torch.cat(logprobs) ** 2).mean(), {"score": torch.tensor([7])}


THREE: list[Any] = [
    Regularizer(spread, 0.5, "spread"),
    {"fn": judged, "weight": 2, "name": "judged"},
    Regularizer(regularizers.sparsity, lambda step: 1.0 + step, "sparsity", run_in_executor=True),
]


def sum_of_three(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """The same loss as one function."""
    total = nll(data, logprobs)[0] + 0.5 * spread(data, logprobs)[0] + 2 * (torch.cat(logprobs) ** 2).mean()
    return total + regularizers.sparsity(data, logprobs)[0], {}


def test_an_iterable_in_the_third_position_is_regularizers(backend: Backend) -> None:  # R2.1
    keyword, plain = backend.model(), backend.model()
    expected = keyword.forward_backward_custom(DATA, nll, regularizers=THREE).result().metrics
    for terms in (THREE, tuple(THREE), iter(THREE)):
        assert backend.model().forward_backward_custom(DATA, nll, terms).result().metrics == expected
    alone = plain.forward_backward_custom(DATA, nll, "logprobs").result().metrics
    assert backend.model().forward_backward_custom(DATA, nll, []).result().metrics == alone
    with pytest.raises(InvalidInput, match="give one of them"):
        plain.forward_backward_custom(DATA, nll, THREE, regularizers=THREE)
    with pytest.raises(InvalidInput, match="a list of regularizers, got Regularizer"):
        plain.forward_backward_custom(DATA, nll, THREE[0])


@pytest.fixture
def model(recorded: Recorded) -> TrainingClient:
    return recorded.service.create_lora_training_client("tiny", rank=4, seed=1)


def test_three_regularizers_train_as_their_sum_and_are_logged_separately(backend: Backend) -> None:  # R2.1, R2.4, R2.7
    composed, single = backend.model(), backend.model()
    result = composed.forward_backward_custom(DATA, nll, regularizers=THREE).result()
    expected = single.forward_backward_custom(DATA, sum_of_three).result()

    got, plain = (gathered(backend.trainer, each.model_id) for each in (composed, single))
    assert (got - plain).norm() <= 1e-6 * plain.norm()

    metrics = result.metrics
    assert metrics["loss_total"] == metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"])
    assert metrics["base_loss"]["value"] == metrics["base_loss"]["nll"]
    assert metrics["loss_total"] == pytest.approx(metrics["base_loss"]["value"] + metrics["regularizer_total"])
    told = metrics["regularizers"]
    assert {name: set(each["custom"]) for name, each in told.items()} == {
        "spread": {"deviation"},
        "judged": {"score"},
        "sparsity": {"active"},
    }
    assert {name: each["weight"] for name, each in told.items()} == {"spread": 0.5, "judged": 2.0, "sparsity": 1.0}
    assert metrics["regularizer_total"] == pytest.approx(sum(each["contribution"] for each in told.values()))
    assert told["judged"]["grad_norm"] == pytest.approx(
        2 * told["judged"]["value"] ** 0.5 / sum(len(each.model_input.tokens()) for each in DATA) ** 0.5
    )
    flat = composition.flatten(metrics)
    assert all(type(value) is float for value in flat.values())
    assert {"regularizers/judged/custom/score", "base_loss/nll", "loss:sum"} <= set(flat)

    before = backend.bits(composed)
    composed.optim_step(FAST).result()
    assert backend.bits(composed) != before


def test_regularizers_alone_are_a_loss(backend: Backend) -> None:  # R2.1
    model = backend.model()
    metrics = model.forward_backward_custom(DATA, regularizers=THREE).result().metrics
    assert metrics["loss_total"] == metrics["regularizer_total"] == metrics["loss:sum"]
    assert "base_loss" not in metrics
    assert gathered(backend.trainer, model.model_id).norm() > 0


@pytest.mark.parametrize("none", [None, []])
def test_a_single_callback_is_as_it_was(backend: Backend, none: Any) -> None:  # R2.5, R2.7
    model = backend.model()
    before = model.forward_backward_custom(DATA, nll).result()
    after = model.forward_backward_custom(DATA, nll, regularizers=none).result()
    assert after.metrics == before.metrics
    assert not {"loss_total", "regularizers", "base_loss"} & set(after.metrics)
    assert all(isinstance(value, float) for value in after.metrics.values())


def test_weights_are_given_the_number_of_steps_before(backend: Backend) -> None:
    model = backend.model()
    steps: list[int] = []

    def weight(step: int) -> float:
        steps.append(step)
        return 0.1

    term = Regularizer(spread, weight, "spread")
    for _ in range(2):
        model.forward_backward_custom(DATA, nll, regularizers=[term])
        model.forward_backward_custom(DATA, nll, regularizers=[term]).result()
        model.save_state("between", overwrite=True).result()
        model.optim_step(FAST)
    model.forward_backward_custom(DATA, nll, regularizers=[term]).result()
    assert sorted(steps) == steps == [0, 0, 1, 1, 2]


def test_a_step_that_was_not_taken_does_not_count(model: TrainingClient) -> None:
    term = Regularizer(spread, float, "spread")
    model.forward_backward_custom(DATA, lambda _, lp: lp[0])
    with pytest.raises(InvalidLoss):
        model.optim_step(FAST)
    metrics: dict[str, Any] = model.forward_backward_custom(DATA, nll, regularizers=[term]).result().metrics
    assert metrics["regularizers"]["spread"]["weight"] == 0.0


def test_gradient_norms_can_be_switched_off(backend: Backend) -> None:
    metrics = backend.model().forward_backward_custom(DATA, nll, regularizers=THREE, grad_norms=False).result().metrics
    assert not [name for name in composition.flatten(metrics) if "grad_norm" in name]


def test_terms_never_run_on_the_loop_of_the_network(backend: Backend) -> None:
    model = backend.model()
    names: list[str] = []

    async def uses_the_client(_: list[Any], logprobs: list[Tensor]) -> Tensor:
        names.append(threading.current_thread().name)
        score: float = (await model.forward(DATA, "cross_entropy")).metrics["loss:sum"]  # by the network's loop
        return logprobs[0].sum() * score

    model.forward_backward_custom(
        DATA, nll, regularizers=[Regularizer(uses_the_client, 1e-3, "x")], regularizer_timeout=LONG
    )
    model.optim_step(FAST).result()
    assert names == ["tinker-lightning-background"]


def test_it_works_inside_a_running_event_loop(backend: Backend) -> None:  # as in Jupyter
    model = backend.model()

    async def cell() -> Any:
        awaited = await model.forward_backward_custom(DATA, nll, regularizers=THREE)
        blocked = model.forward_backward_custom(DATA, nll, regularizers=THREE).result()
        return awaited.metrics["loss_total"], blocked.metrics["loss_total"]

    first, second = asyncio.run(cell())
    assert first == second


def test_under_no_grad_it_still_trains(model: TrainingClient) -> None:
    with torch.no_grad():
        metrics: dict[str, Any] = model.forward_backward_custom(DATA, nll, regularizers=THREE).result().metrics
    assert all(each["grad_norm"] > 0 for each in metrics["regularizers"].values())


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (None, None),
            r"loss_fn must be a function of \(data, logprobs\), got NoneType; it may be None only if there",
        ),
        ((None, []), "got NoneType; it may be None only if"),
        (("cross_entropy", THREE), r"loss_fn must be a function of \(data, logprobs\), got str$"),
        ((nll, [*THREE, THREE[0]]), "regularizers 0 and 3 are both named 'spread'"),
        ((nll, THREE[0]), r"write \[regularizer\]"),
        ((nll, [{"fn": spread, "weight": float("nan"), "name": "x"}]), "regularizer 'x': weight is nan"),
    ],
)
def test_invalid_passes_raise_before_anything_is_sent(
    recorded: Recorded, model: TrainingClient, arguments: Any, message: str
) -> None:  # R1.9
    sent = len(recorded.record.requests)
    with pytest.raises(InvalidLoss, match=message):
        model.forward_backward_custom(DATA, arguments[0], regularizers=arguments[1])
    assert len(recorded.record.requests) == sent


def test_a_term_that_fails_is_named_and_stops_the_step(backend: Backend) -> None:
    model = backend.model()
    before = backend.bits(model)

    async def broken(_: list[Any], logprobs: list[Tensor]) -> Tensor:
        raise ConnectionError("the judge is down")

    good = model.forward_backward_custom(DATA, nll, regularizers=THREE)
    model.forward_backward_custom(DATA, nll, regularizers=[*THREE, Regularizer(broken, 1.0, "judge")])
    with pytest.raises(InvalidLoss, match="regularizer 'judge' failed: ConnectionError: the judge is down") as caught:
        model.optim_step(FAST)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert (caught.value.operation, caught.value.model_id) == ("forward_backward_custom", model.model_id)
    with pytest.raises(OperationFailed, match="not sent, because another loss"):
        good.result()
    assert backend.bits(model) == before


def test_a_term_that_takes_too_long_is_named(model: TrainingClient) -> None:
    async def never(_: list[Any], logprobs: list[Tensor]) -> Tensor:
        await asyncio.sleep(3600)
        return logprobs[0].sum()

    future = model.forward_backward_custom(
        DATA, nll, regularizers=[Regularizer(never, 1.0, "never")], regularizer_timeout=0.05
    )
    with pytest.raises(ResultTimeout, match=r"regularizer 'never': no value within 0\.05 s"):
        future.result()
    model.forward_backward_custom(DATA, nll, regularizers=THREE)
    model.optim_step(FAST).result()


@pytest.mark.parametrize("timeout", [0, -1.0, "10"])
def test_an_impossible_timeout_raises_at_the_call(recorded: Recorded, model: TrainingClient, timeout: Any) -> None:
    sent = len(recorded.paths())
    with pytest.raises(InvalidInput, match="regularizer_timeout must be a number of seconds above 0, or None, got"):
        model.forward_backward_custom(DATA, nll, regularizers=THREE, regularizer_timeout=timeout)
    assert len(recorded.paths()) == sent


def test_a_total_that_does_not_depend_on_the_model_raises(model: TrainingClient) -> None:  # R1.9
    scale = torch.ones((), requires_grad=True)
    future = model.forward_backward_custom(
        DATA, None, regularizers=[Regularizer(lambda *_: scale * 2, 1.0, "constant")]
    )
    with pytest.raises(LossWithoutGradient, match="does not depend on the log-probabilities"):
        future.result()


# Behind a remote model's node of autograd.


def test_gradient_norms_never_reach_the_remote_node(recorded: Recorded, model: TrainingClient) -> None:
    lm = RemoteLM(model)
    optimizer = RemoteAdamW(lm.parameters(), lr=1e-2)
    logprobs = lm(DATA)
    sent = recorded.paths()
    total, telemetry = composition.evaluate(DATA, logprobs, nll, THREE, step=0)
    assert all(each["grad_norm"] > 0 for each in telemetry["regularizers"].values())
    assert lm.handle.grad is None  # nothing waits for a step
    optimizer.step()
    assert recorded.paths() == sent
    total.backward()
    assert lm.handle.grad is not None


def test_the_step_has_the_gradient_of_the_total_once(backend: Backend) -> None:
    model, single = backend.model(), backend.model()
    for client, fn in ((model, None), (single, sum_of_three)):
        lm = RemoteLM(client)
        optimizer = RemoteAdamW(lm.parameters(), lr=1e-2)
        logprobs = lm(DATA)
        total = fn(DATA, logprobs)[0] if fn else composition.evaluate(DATA, logprobs, nll, THREE, step=0)[0]
        total.backward()
        optimizer.step()
        optimizer.sent[0].optim.result()
    # AdamW's first step hides the size of a gradient, its moments do not.
    got, plain = (_moments(backend, each.model_id) for each in (model, single))
    assert (got - plain).norm() <= 1e-5 * plain.norm()


def _moments(backend: Backend, model_id: str) -> Tensor:
    _, adapter = backend.trainer.registry.model(model_id).ready()
    state = adapter.training_state()
    found = [tensor.flatten() for name, tensor in sorted(state.items()) if "exp_avg" in name and "sq" not in name]
    assert found
    return torch.cat(found)


@pytest.mark.parametrize(
    "fn", first_only([regularizers.reverse_kl, regularizers.forward_kl, regularizers.symmetric_kl])
)
def test_a_divergence_from_a_reference_holds_the_model_there(recorded: Recorded, fn: Any) -> None:
    text = "hello world, this is a text"

    def drift(weight: float) -> float:
        model = recorded.service.create_lora_training_client("tiny", rank=4, seed=1)
        reference = model.forward([datum(text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
        data = [datum(text, reference_logprobs=reference)]
        for _ in range(8):
            model.forward_backward_custom(data, nll, regularizers=[Regularizer(fn, weight, "kl")])
            model.optim_step(AdamParams(learning_rate=5e-3))
        after = model.forward([datum(text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
        return float((after - reference).mean())

    free, held = drift(0.0), drift(100.0)
    assert 0 < held < free / 2
