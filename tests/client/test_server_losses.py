"""Losses of one's own that run on the server: by a decorator under a name, or by a handle of one datum."""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.helpers.reference import gathered
from tinker_lightning import AdamParams, Datum, LossFnOutput, custom_loss, losses
from tinker_lightning.client import LossHandle, ServiceClient, TrainingClient
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.errors import (
    ClientClosed,
    InvalidDatum,
    InvalidInput,
    InvalidLoss,
    LossNotFinite,
    LossNotScalar,
    LossNotTraceable,
    LossWithoutGradient,
    ServerUnreachable,
)
from tinker_lightning.lossgraph.tracing.trace import trace_batch_loss
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.endpoints import handshake
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEXTS = (b"All happy families are alike.", b"Call me Ishmael.", b"It was a bright cold day")
T = max(map(len, TEXTS)) - 1


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("losses"))
    yield trainer
    trainer.close()


@pytest.fixture
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


@pytest.fixture
def model(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def texts(**inputs: Callable[[int, int], Any]) -> list[Datum]:
    """A datum for each text; inputs are functions of its number and length."""
    data = []
    for i, text in enumerate(TEXTS):
        ids = np.frombuffer(text, np.uint8).astype(np.int64)
        named = {name: make(i, len(ids) - 1) for name, make in inputs.items()}
        data.append(Datum.from_targets(ids[:-1], ids[1:], **named))
    return data


def tokens(i: int, length: int) -> Any:
    return np.random.default_rng(i + 100 * length).integers(0, 256, length)


def reference(i: int, length: int) -> Any:
    return np.random.default_rng(i).normal(-5.5, 0.1, length).astype(np.float32)


def trains(model: TrainingClient, data: list[Datum], loss: Any, rate: float = 2e-2, **options: Any) -> Any:
    """The metrics of six steps; the loss must fall."""
    history = []
    for _ in range(6):
        history.append(model.forward_backward(data, loss, **options))
        model.optim_step(AdamParams(learning_rate=rate))
    metrics = [result.result().metrics for result in history]
    assert metrics[-1]["loss:sum"] < metrics[0]["loss:sum"]
    return metrics


def picked(model_outputs: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities of tokens, where -100 stands for none."""
    safe = ids.clone()
    safe[ids == -100] = 0
    return model_outputs.log_softmax(-1).gather(dim=-1, index=safe.unsqueeze(-1)).squeeze(-1) * mask


# The guide's worked examples. R3.5


def minimal(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
    """The negative log-likelihood of the targets."""
    logprobs = picked(model_outputs, loss_fn_inputs["target_tokens"], attention_mask)
    loss = -logprobs.sum()
    return LossFnOutput(loss=loss, logprobs=logprobs, diagnostics={"loss": loss.item()})


def dpo(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor, beta: float = 0.1) -> LossFnOutput:
    """Preferences against a reference model's log-probabilities."""
    lengths = attention_mask.sum(dim=1, keepdim=True).clamp(min=1)
    scores = {}
    for side in ("chosen", "rejected"):
        policy = picked(model_outputs, loss_fn_inputs[f"{side}_tokens"], attention_mask)
        scores[side] = policy.sum(dim=1) / lengths.squeeze()
        scores[f"{side} reference"] = loss_fn_inputs[f"reference_{side}_logprobs"].sum(dim=1) / lengths.squeeze()
    gap = scores["chosen"] - scores["rejected"]
    loss = -F.logsigmoid(beta * (gap - scores["chosen reference"] + scores["rejected reference"])).mean()
    accuracy = (gap > 0).float().mean()
    diagnostics = {"reward_accuracy": accuracy.item(), "mean_gap": gap.mean().item(), "loss:sum": loss.item()}
    return LossFnOutput(loss, gap, diagnostics)


def contrastive(
    outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor, temperature: float = 0.07
) -> LossFnOutput:
    """One text against another, as a choice between two."""
    count = attention_mask.sum().clamp(min=1)
    names = ("positive_tokens", "negative_tokens")
    scores = [picked(outputs, loss_fn_inputs[name], attention_mask).sum() / count for name in names]
    logits = torch.stack(scores) / temperature
    loss = F.cross_entropy(logits.unsqueeze(0), torch.tensor([0], device=logits.device))
    return LossFnOutput(loss, None, {"score_gap": (scores[0] - scores[1]).item()})


def kl_regularized(
    outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor, kl_weight: float = 0.1
) -> LossFnOutput:
    """Likelihood, and if there is a reference, a pull towards it."""
    logprobs = picked(outputs, loss_fn_inputs["target_tokens"], attention_mask)
    weights = loss_fn_inputs.get("weights")
    if weights is None:
        weights = torch.ones_like(loss_fn_inputs["target_tokens"], dtype=torch.float32)
    nll = -(logprobs * weights * attention_mask).sum()
    kl: Any = 0.0
    ref = loss_fn_inputs.get("reference_logprobs")
    if ref is not None:
        whole = outputs.log_softmax(-1)
        kl = ((whole.exp() * (whole - ref.unsqueeze(-1))).sum(dim=-1) * attention_mask).sum()
    mean = nll.item() / (weights * attention_mask).sum().clamp(min=1).item()
    kept = kl if isinstance(kl, float) else kl.item()
    return LossFnOutput(nll + kl_weight * kl, logprobs, {"mean_nll": mean, "kl": kept})


def padded(make: Callable[[int, int], Any]) -> Any:
    rows = [make(i, len(text) - 1) for i, text in enumerate(TEXTS)]
    return np.stack([np.pad(row, (0, T - len(row))) for row in rows])


PREFERENCES = {
    "chosen_tokens": tokens,
    "rejected_tokens": lambda i, length: tokens(i + 7, length),
    "reference_chosen_logprobs": reference,
    "reference_rejected_logprobs": lambda i, length: reference(i + 7, length),
}


def test_the_minimal_example(service: ServiceClient, model: TrainingClient) -> None:  # R3.1, R3.2
    custom_loss(service, name="my_loss")(minimal)
    metrics = trains(model, texts(), "my_loss")
    assert metrics[0]["loss"] == metrics[0]["loss:sum"]
    result = model.forward(texts(), "my_loss").result()
    plain = model.forward(texts(weights=lambda _, n: np.ones(n, np.float32)), "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    for got, right in zip(result.loss_fn_outputs, plain.loss_fn_outputs, strict=True):
        assert got["logprobs"].to_numpy() == pytest.approx(right["logprobs"].to_numpy(), rel=1e-4)


def test_dpo_with_inputs_given_once(service: ServiceClient, model: TrainingClient) -> None:  # R3.4, R3.5
    custom_loss(service, name="dpo")(dpo)
    once = {name: padded(make) for name, make in PREFERENCES.items()}
    metrics = trains(model, texts(), "dpo", loss_fn_config={"beta": 0.5}, loss_fn_inputs=once)
    assert metrics[-1]["reward_accuracy"] == 1.0
    assert metrics[-1]["mean_gap"] > metrics[0]["mean_gap"]


def test_inputs_given_once_or_by_datum_are_the_same(service: ServiceClient, model: TrainingClient) -> None:  # R3.4
    loss = custom_loss(service, name="dpo")(dpo)
    once = {name: padded(make) for name, make in PREFERENCES.items()}
    first = model.forward(texts(), loss, loss_fn_inputs=once).result()
    second = model.forward(texts(**PREFERENCES), loss).result()
    third = model.forward(texts(), loss, loss_fn_inputs={name: torch.tensor(each) for name, each in once.items()})
    assert first == second == third.result()


def test_the_contrastive_example(service: ServiceClient, model: TrainingClient) -> None:  # R3.5
    custom_loss(service, name="contrastive")(contrastive)
    data = texts(positive_tokens=tokens, negative_tokens=lambda i, n: tokens(i + 7, n))
    metrics = trains(model, data, "contrastive", loss_fn_config={"temperature": 0.5})
    assert metrics[-1]["score_gap"] > metrics[0]["score_gap"]
    assert model.forward(data, "contrastive").result().loss_fn_outputs == [{}, {}, {}]


def test_the_kl_regularized_example(service: ServiceClient, model: TrainingClient) -> None:  # R3.5
    loss = custom_loss(service, name="kl_regularized")(kl_regularized)
    metrics = trains(model, texts(reference_logprobs=reference), loss)
    assert metrics[0]["kl"] != 0
    assert model.forward(texts(), loss).result().metrics["kl"] == 0
    halves = texts(weights=lambda _, n: np.full(n, 0.5, np.float32))
    half, whole = (model.forward(data, loss).result().metrics["loss:sum"] for data in (halves, texts()))
    assert half == pytest.approx(whole / 2, rel=1e-5)


def test_tokens_that_stand_for_none(service: ServiceClient, model: TrainingClient) -> None:
    """As transformers writes them; the function says what they mean."""

    @custom_loss(service, name="masked")
    def masked(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
        labels = loss_fn_inputs["labels"]
        logprobs = picked(model_outputs, labels, attention_mask)
        loss = -torch.where(labels == -100, 0.0, logprobs).sum()
        return LossFnOutput(loss, logprobs)

    def labels(_: int, length: int) -> Any:
        return np.where(np.arange(length) % 2, -100, 65)

    trains(model, texts(labels=labels), "masked")


# Names, settings, lists.


def test_losses_are_listed(service: ServiceClient) -> None:  # R3.3, R3.4
    custom_loss(service, name="my_loss")(minimal)
    custom_loss(service)(dpo)
    listed = service.list_loss_functions()
    built_in = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
    assert listed["available_loss_functions"] == [*built_in, "my_loss", "dpo"]
    assert listed["descriptions"]["my_loss"] == "The negative log-likelihood of the targets."
    assert all(listed["descriptions"].values())


def test_a_session_does_not_see_anothers_losses(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient
) -> None:
    custom_loss(service, name="mine")(minimal)
    with embedded_service(trainer) as other:
        assert "mine" not in other.list_loss_functions()["available_loss_functions"]
        stranger = other.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidInput, match="loss_fn 'mine' is not known here"):
            stranger.forward_backward(texts(), "mine").result()
        with pytest.raises(InvalidLoss, match="mine was registered with another client"):
            stranger.forward_backward(texts(), service.losses.by_name["mine"])
    model.forward(texts(), "mine").result()


def test_hyperparameters_have_defaults_and_change_with_each_call(  # R3.1
    service: ServiceClient, model: TrainingClient
) -> None:
    @custom_loss(service, name="power")
    def power(outputs: Tensor, inputs: Any, mask: Tensor, factor: float = 2.0, exponent: int = 1) -> LossFnOutput:
        loss = factor * (outputs * mask.unsqueeze(-1)).square().mean() ** exponent
        return LossFnOutput(loss)

    def value(**config: float) -> float:
        return model.forward(texts(), power, config).result().metrics["loss:sum"]

    base = value(factor=1.0)
    assert value() == pytest.approx(2 * base)
    assert value(exponent=3) == pytest.approx(2 * base**3)


def test_a_setting_that_decides_what_is_computed_is_uploaded_at_its_first_use(
    service: ServiceClient, model: TrainingClient
) -> None:
    @custom_loss(service, name="either")
    def either(outputs: Tensor, inputs: Any, mask: Tensor, kind: str = "sum") -> LossFnOutput:
        squares = (outputs * mask.unsqueeze(-1)).square()
        return LossFnOutput(squares.sum() if kind == "sum" else squares.mean())

    total = model.forward(texts(), "either").result().metrics["loss:sum"]
    mean = model.forward(texts(), "either", {"kind": "mean"}).result().metrics["loss:sum"]
    assert mean == pytest.approx(total / (len(TEXTS) * T * 258), rel=1e-2)
    fixed = custom_loss(service, name="fixed", kind="mean")(either)
    assert model.forward(texts(), fixed).result().metrics["loss:sum"] == mean


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "as it is"])
def test_what_the_decorator_fixes_no_call_changes(service: ServiceClient, model: TrainingClient, trace: bool) -> None:
    def power(data: Any, logprobs: Tensor, factor: float = 2.0, offset: float = 0.0) -> Any:
        return -factor * logprobs.sum() + offset, {}

    loss = custom_loss(service, name="power", on="logprobs", trace=trace, factor=0.5)(power)
    base = model.forward(texts(), loss).result().metrics["loss:sum"]
    again = model.forward(texts(), "power", {"factor": 0.5, "offset": 3.0}).result().metrics["loss:sum"]
    assert again == pytest.approx(base + 3.0)
    with pytest.raises(InvalidInput, match=r"factor of power was fixed to 0\.5 by custom_loss and cannot be 9\.0"):
        model.forward_backward(texts(), loss, {"factor": 9.0})
    with pytest.raises(InvalidInput, match=r"factor of power was fixed to 0\.5"):
        loss({}, torch.zeros(1, 2), factor=9.0)


def test_a_decorated_function_is_still_a_function(service: ServiceClient) -> None:
    loss = custom_loss(service, name="mine")(minimal)
    assert (getattr(loss, "__name__", None), loss.__doc__) == ("minimal", "The negative log-likelihood of the targets.")
    output = loss(torch.zeros(1, 2, 4), {"target_tokens": torch.tensor([[1, 2]])}, torch.ones(1, 2))
    assert output.loss.item() == pytest.approx(2 * np.log(4))


def test_a_name_can_be_given_anew(service: ServiceClient, model: TrainingClient) -> None:
    """A pass has the loss that had the name when it was called, whenever it is computed."""

    def scaled(factor: float) -> Callable[..., LossFnOutput]:
        return lambda outputs, inputs, mask: LossFnOutput(factor * (outputs * mask.unsqueeze(-1)).square().mean())

    custom_loss(service, name="mine")(scaled(1.0))
    first = model.forward(texts(), "mine")
    custom_loss(service, name="mine")(scaled(3.0))
    second = model.forward(texts(), "mine")
    assert second.result().metrics["loss:sum"] == pytest.approx(3 * first.result().metrics["loss:sum"])


# A loss of one datum.


def clipped(logprobs: Tensor, advantages: Tensor, old: Tensor) -> Any:
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": ratio.detach().sign().sum()}


RANKS = {"logprobs": 1, "advantages": 1, "old": 1}


def policy() -> list[Datum]:
    return texts(advantages=lambda i, n: np.random.default_rng(i).normal(size=n).astype(np.float32), old=reference)


def test_a_loss_of_one_datum_costs_one_pass(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient
) -> None:  # R5.7
    handle = service.create_custom_loss(clipped, RANKS).result()
    trains(model, policy(), handle, 2e-3)
    kinds = [trainer.scheduler.find(f"{model.model_id}:{n}").kind for n in range(1, 13)]
    assert kinds == ["forward_backward", "optim_step"] * 6
    one, two = model.forward_backward(policy(), handle), model.forward_backward_custom(policy(), handle)
    for name in ("loss:sum", "custom/ratio:mean", "custom/tokens:sum"):
        assert one.result().metrics[name] == pytest.approx(two.result().metrics[name], rel=1e-5)
    assert service.create_custom_loss(clipped, RANKS).result() is handle


def test_a_handle_takes_inputs_given_once(service: ServiceClient, model: TrainingClient) -> None:  # R3.4
    handle = service.create_custom_loss(clipped, RANKS).result()
    data = policy()
    rows = {name: [datum.loss_fn_inputs[name].to_numpy() for datum in data] for name in ("advantages", "old")}
    assert model.forward(texts(), handle, loss_fn_inputs=rows).result() == model.forward(data, handle).result()


def test_built_in_losses_take_inputs_given_once(service: ServiceClient, model: TrainingClient) -> None:  # R3.3, R3.4
    data = texts(advantages=lambda i, n: np.random.default_rng(i).normal(size=n).astype(np.float32), logprobs=reference)
    once = {
        name: torch.tensor(padded(lambda i, _, name=name: data[i].loss_fn_inputs[name].to_numpy()))  # type: ignore[misc]
        for name in ("advantages", "logprobs")
    }
    given = model.forward(texts(), "ppo", loss_fn_inputs=once).result()
    assert given == model.forward(data, "ppo").result()
    with pytest.raises(InvalidInput, match="advantages is given for the batch, and by datum 0 too"):
        model.forward(data, "ppo", loss_fn_inputs=once)
    with pytest.raises(InvalidInput, match="advantages must have one row for each of the 3 datums"):
        model.forward(texts(), "ppo", loss_fn_inputs={"advantages": torch.zeros(2, T)})


@contextlib.contextmanager
def without(
    trainer: EmbeddedTrainer, running: Any, monkeypatch: pytest.MonkeyPatch, *, server_side: bool
) -> Iterator[ServiceClient]:
    """A server that has no extensions, and runs losses of one datum or not."""
    config = {**handshake.CLIENT_CONFIG, "custom_loss_server_side": server_side}
    monkeypatch.setattr(handshake, "CLIENT_CONFIG", config)
    with running(create_app(trainer, extended=False)) as url, ServiceClient(url) as service:
        yield service


@pytest.mark.parametrize("server_side", [True, False], ids=["server side", "client side"])
def test_a_handle_on_any_server(
    trainer: EmbeddedTrainer, running: Any, monkeypatch: pytest.MonkeyPatch, server_side: bool
) -> None:  # R5.4, R5.7
    """Without our extensions a scale goes as an input of each datum; without the feature, losses are computed here."""
    with without(trainer, running, monkeypatch, server_side=server_side) as service:
        handle = service.create_custom_loss(clipped, RANKS).result()
        assert isinstance(handle, LossHandle)
        assert (handle.loss_id is not None) == server_side
        gradients, results = [], []
        for scale in (1.0, 1 / 3):
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            results.append(model.forward_backward(policy(), handle, scale=scale).result())
            gradients.append(gathered(trainer, model.model_id))
            forward = model.forward(policy(), handle).result()
        assert (gradients[1] - gradients[0] / 3).norm() < 1e-5 * gradients[1].norm()
        with pytest.raises(InvalidInput, match="without settings; pass beta with each datum"):
            model.forward_backward(policy(), handle, {"beta": 1.0})
        with pytest.raises(InvalidDatum, match="datum 0: advantages: missing; clipped reads it"):
            model.forward(texts(), handle)
        for result in (results[1], forward):
            for name in ("loss:sum", "custom/ratio:mean", "custom/tokens:sum"):
                assert result.metrics[name] == pytest.approx(results[0].metrics[name], rel=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "dro"])
def test_a_scale_on_a_server_without_extensions(
    trainer: EmbeddedTrainer, running: Any, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    data = texts(
        weights=lambda _, n: np.ones(n, np.float32),
        logprobs=reference,
        advantages=lambda i, n: np.random.default_rng(i).normal(size=n).astype(np.float32),
    )
    with without(trainer, running, monkeypatch, server_side=True) as service:
        gradients = []
        for scale in (1.0, 0.25):
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            model.forward_backward(data, loss, scale=scale).result()
            gradients.append(gathered(trainer, model.model_id))
        assert (gradients[1] - gradients[0] / 4).norm() < 1e-6 * gradients[1].norm()
        with pytest.raises(InvalidLoss, match="does not accept whole-batch losses, so mine cannot run there"):
            custom_loss(service, name="mine")(minimal)
        assert "gspo" in service.list_loss_functions()["available_loss_functions"]


# Functions as they are.


def untraceable(outputs: Tensor, inputs: Any, mask: Tensor, least: float = 0.0) -> LossFnOutput:
    """Does what no graph can say."""
    loss = (outputs * mask.unsqueeze(-1)).square().mean()
    if loss.item() < least:
        loss = loss * 0
    return LossFnOutput(loss, None, {"looked": 1.0})


def test_functions_of_two_sessions_may_have_one_name(
    service: ServiceClient, model: TrainingClient, trainer: EmbeddedTrainer
) -> None:
    @custom_loss(service, name="plain", trace=False)
    def ours(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, {"ours": 1.0})

    with embedded_service(trainer) as other:

        @custom_loss(other, name="plain", trace=False)
        def theirs(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
            return LossFnOutput(outputs.sum(), None, {"theirs": 1.0})

        their_model = other.create_lora_training_client("tiny", rank=4)
        assert "theirs" in their_model.forward(texts(), "plain").result().metrics
        assert "ours" in model.forward(texts(), "plain").result().metrics

        @custom_loss(service, name="plain", trace=False)
        def again(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
            return LossFnOutput(outputs.sum(), None, {"again": 1.0})

        assert "again" in model.forward(texts(), "plain").result().metrics
        assert "ours" in model.forward(texts(), ours).result().metrics


def test_a_handle_that_is_still_a_future(service: ServiceClient, model: TrainingClient) -> None:
    handle = service.create_custom_loss(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1})
    with pytest.raises(InvalidInput, match=r"loss_fn is a future; pass .* create_custom_loss\(\.\.\.\)\.result\(\)"):
        model.forward_backward(texts(), handle)  # type: ignore[arg-type]


def test_a_function_in_this_process_needs_no_tracing(service: ServiceClient, model: TrainingClient) -> None:
    custom_loss(service, name="plain", trace=False)(untraceable)
    metrics = trains(model, texts(), "plain", 1e-3)
    assert metrics[0]["looked"] == 1.0
    assert "plain" in service.list_loss_functions()["available_loss_functions"]
    with pytest.raises(InvalidInput, match="plain does not know 'gamma'; it takes least"):
        model.forward(texts(), "plain", {"gamma": 1.0}).result()

    @custom_loss(service, name="raises", trace=False)
    def raises(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        raise ZeroDivisionError("oh")

    with pytest.raises(InvalidInput, match="raises: it raised ZeroDivisionError: oh"):
        model.forward(texts(), "raises").result()

    @custom_loss(service, name="reads", trace=False)
    def reads(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum() * inputs["reward"])

    with pytest.raises(InvalidInput, match="loss_fn_inputs: reward: missing; reads reads it"):
        model.forward(texts(), "reads").result()


@pytest.mark.parametrize("metrics", [None, 1.0, ["loss"], torch.tensor(1.0)], ids=str)
@pytest.mark.parametrize("on", ["logits", "logprobs"])
def test_metrics_of_a_function_that_are_no_dict(
    service: ServiceClient, model: TrainingClient, on: Any, metrics: Any
) -> None:  # R3.6
    def on_logits(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, metrics)

    def on_logprobs(data: Any, logprobs: Tensor) -> Any:
        return logprobs.sum(), metrics

    loss = custom_loss(service, name="odd", on=on, trace=False)(on_logits if on == "logits" else on_logprobs)
    if on == "logits" and metrics is None:  # an output of a class of one's own may have none
        assert model.forward(texts(), loss).result().metrics["tokens:sum"] > 0
        return
    with pytest.raises(InvalidInput, match=r"odd: it must return its \w+ as a dict, but returned \w+; "):
        model.forward_backward(texts(), loss).result()


def test_pickled_functions_need_the_owners_leave(trainer: EmbeddedTrainer, running: Any) -> None:  # R3.6, R3.7
    with running(create_app(trainer)) as url, ServiceClient(url) as service:
        with pytest.raises(InvalidInput, match="--allow-pickled-losses and an --api-key"):
            custom_loss(service, name="pickled", trace=False)(untraceable)
        with pytest.raises(InvalidLoss, match="cannot be pickled"):
            custom_loss(service, name="pickled", trace=False)(_with_a_lock())


def _with_a_lock() -> Callable[..., LossFnOutput]:
    import threading

    lock = threading.Lock()

    def locked(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        with lock:
            return LossFnOutput(outputs.sum())

    return locked


def test_pickled_functions_run_where_the_owner_allows_it(tmp_path: Any, running: Any) -> None:  # R3.7
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, allow_pickled_losses=True)
    try:
        with running(create_app(trainer, api_key="tml-k")) as url, ServiceClient(url, "tml-k") as service:
            custom_loss(service, name="pickled", trace=False)(untraceable)
            model = service.create_lora_training_client("tiny", rank=4)
            trains(model, texts(), "pickled", 1e-3)
            with pytest.raises(InvalidInput, match="a loss cannot be called 'ppo'"):
                custom_loss(service, name="ppo", trace=False)(untraceable)
    finally:
        trainer.close()


# Mistakes. R3.6


def test_what_is_not_serializable_is_refused_at_decoration(service: ServiceClient) -> None:  # R3.6
    with pytest.raises(LossNotTraceable, match=r"(?s)if loss.item\(\) < least.*branches on the value.*two|second"):
        custom_loss(service, name="mine")(untraceable)
    assert "mine" not in service.list_loss_functions()["available_loss_functions"]


def test_an_unknown_loss_is_named_with_those_that_are_known(model: TrainingClient) -> None:  # R3.6
    with pytest.raises(
        InvalidInput, match=r"loss_fn 'nowhere' is not known here; known are cross_entropy.*@custom_loss"
    ):
        model.forward_backward(texts(), "nowhere").result()


def test_a_missing_input_is_named(service: ServiceClient, model: TrainingClient) -> None:  # R3.6
    custom_loss(service, name="dpo")(dpo)
    with pytest.raises(InvalidInput, match=r"loss_fn_inputs: reference_chosen_logprobs, .*: missing; dpo reads it"):
        model.forward_backward(texts(chosen_tokens=tokens), "dpo").result()
    data = [*texts(**PREFERENCES)[:2], *texts()[2:]]
    with pytest.raises(InvalidInput, match="datum 2: chosen_tokens: missing; datum 0 has it"):
        model.forward_backward(data, "dpo").result()
    handle = service.create_custom_loss(clipped, RANKS).result()
    with pytest.raises(InvalidDatum, match="datum 0: advantages: missing; clipped reads it"):
        model.forward_backward(texts(), handle)
    with pytest.raises(InvalidDatum, match=r"datum 0: old: has the shape \[\], but clipped takes 1 dimensions"):
        model.forward_backward(texts(advantages=reference, old=lambda i, _: float(i)), handle)


def test_an_unreachable_server_is_named() -> None:  # R3.6
    with ServiceClient("http://127.0.0.1:1", retry_policy=RetryPolicy(0.0)) as service:  # noqa: SIM117
        with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
            custom_loss(service, name="mine")(minimal)


def test_what_is_no_client_and_no_function(service: ServiceClient, model: TrainingClient) -> None:
    with pytest.raises(InvalidInput, match=r"custom_loss takes the client that connect\(\) returns, got str"):
        custom_loss("http://localhost", name="mine")  # type: ignore[arg-type]
    custom_loss(model, name="by_a_model")(minimal)
    assert "by_a_model" in service.list_loss_functions()["available_loss_functions"]
    with pytest.raises(InvalidInput, match="on must be one of logits, logprobs, got 'tokens'"):
        custom_loss(service, name="mine", on="tokens")  # type: ignore[arg-type]
    with pytest.raises(InvalidLoss, match="decorates functions, got str"):
        custom_loss(service, name="mine")("minimal")  # type: ignore[arg-type]
    with pytest.raises(InvalidLoss, match="mine has no hyperparameter 'gamma'"):
        custom_loss(service, name="mine", gamma=1.0)(minimal)
    with pytest.raises(InvalidInput, match="a loss cannot be called 'cross_entropy'"):
        custom_loss(service, name="cross_entropy")(minimal)
    service.close()
    with pytest.raises(ClientClosed):
        custom_loss(service, name="mine")(minimal)


@pytest.mark.parametrize(
    ("loss", "kind", "because"),
    [
        (lambda o, m: o[..., 0], LossNotScalar, r"mine: the loss has the shape \[3, 28\]"),
        (lambda o, m: (o.sum() - o.sum()).log(), LossNotFinite, "mine: the loss is -inf"),
        (lambda o, m: o.sum() * torch.nan, LossNotFinite, "mine: the loss is nan"),
        (lambda o, m: m.sum() * 1.0, LossWithoutGradient, "mine: the loss does not depend on the outputs"),
        (
            lambda o, m: o.detach().sum(),
            LossWithoutGradient,
            "mine: the loss does not depend on the outputs",
        ),
        (lambda o, m: (o * 0).square().sum().sqrt(), LossNotFinite, "mine: .* its gradient has NaN"),
        (lambda o, m: o.sum() + m.sum(dim=7), InvalidLoss, "mine: node 'sum_2': sum failed: Dimension out of range"),
    ],
)
@pytest.mark.parametrize("trace", [True, False])
def test_losses_that_cannot_be_trained_on(  # R1.9
    trainer: EmbeddedTrainer,
    service: ServiceClient,
    model: TrainingClient,
    loss: Any,
    kind: type[InvalidLoss],
    because: str,
    trace: bool,
) -> None:
    """Each is of the class that it has where the loss is computed here."""
    custom_loss(service, name="mine", trace=trace)(lambda outputs, inputs, mask: LossFnOutput(loss(outputs, mask)))
    because = because if trace else because.replace("node 'sum_2': sum failed", "it raised IndexError")
    with pytest.raises(kind, match=because) as raised:
        model.forward_backward(texts(), "mine").result()
    assert type(raised.value) is kind
    _, adapter = trainer.registry.model(model.model_id).ready()
    assert adapter.gradient == {}
    model.optim_step(AdamParams(learning_rate=0.0)).result()  # and the model goes on


@pytest.mark.parametrize(
    ("loss", "kind", "because"),
    [
        (lambda p: p, LossNotScalar, r"datum 0: mine: the loss has the shape \[28\]"),
        (lambda p: p.sum() * torch.nan, LossNotFinite, "datum 0: mine: the loss is nan. Look for a division by zero"),
        (lambda p: p.detach().sum(), LossWithoutGradient, "datum 0: mine: the loss does not depend on"),
        (lambda p: (p * 0).sum().sqrt(), LossNotFinite, "datum 0: mine: .* its gradient has NaN"),
        (lambda p: p.sum(dim=7).sum(), InvalidLoss, "datum 0: mine: node 'sum_1': sum failed: Dimension out of range"),
    ],
)
def test_losses_of_one_datum_that_cannot_be_trained_on(  # R1.9
    service: ServiceClient, model: TrainingClient, loss: Any, kind: type[InvalidLoss], because: str
) -> None:
    def mine(logprobs: Tensor) -> Any:
        return loss(logprobs), {}

    handle = service.create_custom_loss(mine, {"logprobs": 1}).result()
    with pytest.raises(kind, match=because) as raised:
        model.forward_backward(texts(), handle).result()
    assert type(raised.value) is kind
    if kind is LossNotFinite and "is nan" in because:
        with pytest.raises(LossNotFinite, match=because):
            model.forward(texts(), handle).result()


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    ("logprobs", "got"),
    [
        (lambda o: o.flatten(0, 1)[:, 0], r"the shape \[84\]"),
        (lambda o: o.mean(), r"the shape \[\]"),
        (lambda o: o[:2, :, 0], r"the shape \[2, 28\]"),
    ],
)
def test_logprobs_that_are_not_by_datum_are_refused(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient, logprobs: Any, got: str, trace: bool
) -> None:
    custom_loss(service, name="mine", trace=trace)(lambda o, inputs, mask: LossFnOutput(o.sum(), logprobs(o)))
    for run in (model.forward, model.forward_backward):
        with pytest.raises(InvalidLoss, match=rf"mine: its logprobs must have one row for each of the 3 datums.*{got}"):
            run(texts(), "mine").result()
    assert trainer.registry.model(model.model_id).ready()[1].gradient == {}


def test_truth_values_are_refused_where_they_would_no_longer_be_a_mask(service: ServiceClient) -> None:
    model = service.create_lora_training_client("tiny", rank=2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for given in (mask, mask.numpy(), mask.tolist()):
        with pytest.raises(InvalidInput, match=r"mask is boolean.*Pass mask\.float\(\)"):
            model.forward(texts(), "minimal", loss_fn_inputs={"mask": given})


def test_settings_of_a_function_are_held_to_what_those_of_a_graph_are(
    service: ServiceClient, model: TrainingClient
) -> None:
    seen: list[dict[str, Any]] = []

    @custom_loss(service, name="mine", trace=False)
    def mine(o: Tensor, i: Any, m: Tensor, beta: float = 0.5, k: int = 2, mode: str = "a", top: Any = None) -> Any:
        seen.append({"beta": beta, "k": k, "mode": mode, "top": top})
        return LossFnOutput(o.sum())

    model.forward(texts(), "mine", {"beta": 1, "k": 3.0, "mode": "b", "top": 4}).result()
    assert seen == [{"beta": 1.0, "k": 3, "mode": "b", "top": 4}]
    assert [type(seen[0][name]) for name in ("beta", "k")] == [float, int]
    for name, value in (("beta", float("nan")), ("beta", "text"), ("k", float("inf")), ("top", float("nan"))):
        with pytest.raises(InvalidInput, match=f"loss_fn_config: {name} must be a finite number, got"):
            model.forward(texts(), "mine", {name: value}).result()
    with pytest.raises(InvalidInput, match="mine does not know 'gamma'; it takes beta, k, mode, top"):
        model.forward(texts(), "mine", {"gamma": 1.0}).result()


def test_an_error_of_a_graph_has_the_users_line(service: ServiceClient, model: TrainingClient) -> None:  # R3.6
    @custom_loss(service, name="three")
    def three(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        squared = outputs * outputs
        masked = squared * mask.unsqueeze(-1)
        return LossFnOutput((masked * inputs["third"]).mean())

    with pytest.raises(InvalidLoss) as raised:
        model.forward_backward(texts(), "three", loss_fn_inputs={"third": np.ones((2, 3), np.float32)}).result()
    assert "three: node 'mul_2': operator.mul failed: " in str(raised.value)
    assert str(raised.value).endswith('return LossFnOutput((masked * inputs["third"]).mean())')
    assert f"\n    at {__file__}:" in str(raised.value)
    assert raised.value.operation == "forward_backward"


@pytest.mark.parametrize("on_server", [True, False])
def test_an_error_of_a_handle_has_the_users_line(trainer: EmbeddedTrainer, on_server: bool, monkeypatch: Any) -> None:
    def mine(logprobs: Tensor, third: Tensor) -> Any:
        doubled = 2 * logprobs
        return (doubled * third).sum(), {}

    if not on_server:
        monkeypatch.setitem(handshake.CLIENT_CONFIG, "custom_loss_server_side", False)
    with embedded_service(trainer) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        handle = service.create_custom_loss(mine, {"logprobs": 1, "third": 1}).result()
        assert (handle.loss_id is not None) == on_server
        with pytest.raises(InvalidLoss, match=r"datum 0: mine: node 'mul_1': operator\.mul failed") as raised:
            model.forward_backward(texts(third=lambda *_: np.ones(3)), handle).result()
    assert f"\n    at {__file__}:" in str(raised.value)
    assert str(raised.value).endswith("return (doubled * third).sum(), {}")


def test_a_training_client_can_take_a_loss_too(service: ServiceClient, model: TrainingClient) -> None:
    loss = custom_loss(model, name="mine")(minimal)
    assert "mine" in service.list_loss_functions()["available_loss_functions"]
    for each in (loss, "mine"):
        assert model.forward_backward(texts(), each).result().metrics["loss:sum"] > 0
    other = service.create_lora_training_client("tiny", rank=4)
    assert other.forward(texts(), "mine").result().metrics["loss:sum"] > 0


def test_an_input_given_once_that_the_loss_does_not_read_is_refused(  # R3.4, R3.6
    service: ServiceClient, model: TrainingClient
) -> None:
    custom_loss(service, name="pulled")(kl_regularized)
    rows = {"wird": np.zeros((3, T))}
    with pytest.raises(
        InvalidInput, match=r"pulled does not read 'wird'; it reads reference_logprobs, target_tokens, weights$"
    ):
        model.forward_backward(texts(), "pulled", loss_fn_inputs=rows).result()
    optional = {"weights": np.ones((3, T))}  # the function asks for it
    assert model.forward(texts(), "pulled", loss_fn_inputs=optional).result().metrics["loss:sum"] > 0
    assert model.forward(texts(wird=reference), "pulled").result()  # a datum may have more than one loss needs

    handle = service.create_custom_loss(clipped, RANKS).result()
    with pytest.raises(InvalidInput, match="clipped does not read 'wird'; it reads advantages, old, target_tokens"):
        model.forward(policy(), handle, loss_fn_inputs=rows)
    with pytest.raises(InvalidInput, match="ppo does not read 'wird'; it reads advantages, clip_high_threshold, clip"):
        model.forward(policy(), "ppo", loss_fn_inputs=rows)
    preference = custom_loss(service, name="preference", on="logprobs")(losses.dpo)
    with pytest.raises(InvalidInput, match="preference does not read 'wird'; it reads reference_logprobs, target_toke"):
        model.forward(texts(), preference, loss_fn_inputs=rows)


def test_a_built_in_loss_that_is_not_finite(model: TrainingClient) -> None:  # R1.9
    data = texts(logprobs=lambda _, n: np.full(n, -1e30), advantages=lambda _, n: np.ones(n))
    with pytest.raises(LossNotFinite, match=r"datum 0: importance_sampling: the loss is -inf; .* Look for tokens"):
        model.forward_backward(data, "importance_sampling").result()


def test_what_is_wrong_with_a_datum_keeps_its_class(model: TrainingClient) -> None:
    with pytest.raises(InvalidDatum, match="datum 0: advantages: missing") as raised:
        model.forward_backward(texts(logprobs=reference), "ppo").result()
    assert type(raised.value) is InvalidDatum


def test_an_upload_that_is_refused_keeps_its_class(service: ServiceClient) -> None:
    loss = trace_batch_loss(minimal, "mine", "logits")
    with pytest.raises(InvalidLoss, match="a loss cannot be called '7'"):
        service.losses.register(replace(loss, name="7"))


def test_a_handle_of_another_session(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    handle = service.create_custom_loss(clipped, RANKS).result()
    with embedded_service(trainer) as other:
        stranger = other.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidLoss, match="clipped was created in another session"):
            stranger.forward_backward(policy(), handle)
        with pytest.raises(InvalidInput, match="this session has no loss"):
            stranger.forward_backward(policy(), "custom", {"loss_id": handle.loss_id or ""}).result()
    model = service.create_lora_training_client("tiny", rank=4)
    with pytest.raises(InvalidInput, match="clipped is a per-datum loss without settings; pass beta with each datum"):
        model.forward_backward(policy(), handle, {"beta": 1.0})


def test_a_batch_that_does_not_fit_is_not_split(
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom_loss(service, name="mine")(minimal)
    monkeypatch.setattr("tinker_lightning.client.chunking.split", lambda data, *_: [[each] for each in data])
    with pytest.raises(InvalidInput, match=r"3 datums do not fit into one request, and mine@.* is computed from"):
        model.forward_backward(texts(), "mine")


def test_inputs_whose_shapes_do_not_fit(service: ServiceClient, model: TrainingClient) -> None:
    @custom_loss(service, name="mine")
    def mine(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum() * inputs["extra"].sum())

    with pytest.raises(InvalidInput, match=r"datum 1: extra has the shape \[2, 3\], but that of datum 0 \[1, 3\]"):
        model.forward(texts(extra=lambda i, _: np.zeros((i + 1, 3))), "mine").result()
    with pytest.raises(InvalidInput, match="loss_fn_inputs: extra: not an array of numbers"):
        model.forward(texts(), "mine", loss_fn_inputs={"extra": "text"})
    with pytest.raises(InvalidInput, match="extra is given for the batch, and by datum 0 too"):
        model.forward(texts(extra=reference), "mine", loss_fn_inputs={"extra": 1.0}).result()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda i, n: np.zeros(n, np.float32), [3, T]),
        (lambda i, n: np.zeros((n, 2), np.float32), [3, T, 2]),
        (lambda i, n: np.float32(i), [3]),
        (lambda i, n: np.zeros(5, np.float32), [3, 5]),
        (lambda i, n: np.zeros((5, 2), np.float32), [3, 5, 2]),
    ],
)
def test_how_inputs_of_datums_are_stacked(
    service: ServiceClient, model: TrainingClient, make: Any, shape: list[int]
) -> None:
    seen: list[list[int]] = []

    @custom_loss(service, name="looks", trace=False)
    def looks(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        seen.append(list(inputs["extra"].shape))
        return LossFnOutput(outputs.sum())

    model.forward(texts(extra=make), "looks").result()
    assert seen == [shape]


@pytest.mark.parametrize("trace", [True, False])
def test_a_loss_with_kwargs_gets_the_settings_of_the_call(  # R3.1
    service: ServiceClient, model: TrainingClient, trace: bool
) -> None:
    def scaled(data: Any, logprobs: Any, base: float = 1.0, **others: float) -> Any:
        total = logprobs.sum() * base
        for name in sorted(others):
            total = total * others[name]
        return total, {"grad_norm": logprobs.mean(), **{name: logprobs.sum() * value for name, value in others.items()}}

    loss = custom_loss(service, name="scaled", on="logprobs", trace=trace)(scaled)
    plain = model.forward(texts(), loss).result().metrics
    assert "grad_norm" in plain  # a diagnostic may have any name
    for settings in ({"factor": 3.0}, {"factor": 0.5}, {"base": 2.0, "factor": 4.0, "other": 0.25}):
        metrics = model.forward(texts(), loss, settings).result().metrics
        assert metrics["loss:sum"] == pytest.approx(plain["loss:sum"] * math.prod(settings.values()), rel=1e-5)
        assert metrics["factor"] == pytest.approx(plain["loss:sum"] * settings["factor"], rel=1e-5)
    assert model.forward(texts(), loss).result().metrics == pytest.approx(plain)
    fixed = custom_loss(service, name="fixed", on="logprobs", trace=trace, factor=2.0)(scaled)
    assert model.forward(texts(), fixed).result().metrics["factor"] == pytest.approx(plain["loss:sum"] * 2, rel=1e-5)


def test_a_number_that_changes_with_each_call_uploads_nothing(  # R3.1, R5.6
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tempered(data: Any, logprobs: Any, beta: float = 1.0, kind: str = "sum") -> Any:
        weighted = logprobs * data.get("weights", 1.0) * beta
        return weighted.sum() if kind == "sum" else weighted.mean()

    loss = custom_loss(service, name="tempered", on="logprobs")(tempered)
    uploads: list[str] = []
    register = service.losses.register

    def counted(each: Any) -> str:
        uploads.append(each.name)
        return register(each)

    monkeypatch.setattr(service.losses, "register", counted)
    weighted = texts(weights=lambda _, n: np.ones(n))
    for beta in (0.1, 0.2, 0.3):
        model.forward(weighted, loss, {"beta": beta}).result()
    assert uploads == []
    for kind in ("mean", "sum", "mean"):
        model.forward(weighted, loss, {"kind": kind}).result()
    assert uploads == ["tempered"]  # once for the other kind
