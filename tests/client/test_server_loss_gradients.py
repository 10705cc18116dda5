"""A loss gives the same gradient wherever it runs: on the server in one pass, or here in two."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.fuzzing import examples
from tests.helpers.loss_library import LIBRARY
from tests.helpers.reference import gathered
from tests.helpers.soaking import mostly_soak
from tinker_lightning import Datum, LossFnOutput, custom_loss, losses
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import Batch
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.engine import batch_pass
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient, TrainingClient

Expression: TypeAlias = tuple[Any, ...]
LENGTHS = (9, 4, 7, 6)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    """In float64, where what differs is the formula and not its rounding."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"), dtype=torch.float64)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


@pytest.fixture(scope="module")
def model(service: ServiceClient, trainer: EmbeddedTrainer) -> TrainingClient:
    """A model whose adapter has moved, so that all of it has gradients."""
    model = service.create_lora_training_client("tiny", rank=4, seed=1)
    model.forward_backward(batch(), "cross_entropy")
    model.optim_step().result()
    return model


def batch(alternatives: int = 0) -> list[Datum]:
    """Pairs of datums with every input that a loss of the library reads."""
    random = np.random.default_rng(0)
    data = []
    for number, length in enumerate(LENGTHS):
        shape = (length, alternatives) if alternatives else (length,)
        inputs: dict[str, Any] = {
            "weights": random.random(shape).astype(np.float32) + 0.1,
            # Far from the model's, so that what the wire rounds off is little of the difference.
            "reference_logprobs": random.normal(-3.0, 0.3, shape).astype(np.float32),
            "teacher_logprobs": random.normal(-3.0, 0.3, shape).astype(np.float32),
            "logprobs": random.normal(-5.5, 0.1, shape).astype(np.float32),
            "advantages": random.normal(0, 1, shape).astype(np.float32),
            "sequence_ratio_mask": np.ones(shape, np.float32),
            "reward": np.float32(random.normal()),
            "label": np.float32(number % 4 == 0),
            "kl_weights": np.ones(shape, np.float32),
        }
        data.append(Datum.from_targets(random.integers(0, 256, length), random.integers(0, 256, shape), **inputs))
    return data


def gradient(trainer: EmbeddedTrainer, model: TrainingClient, send: Callable[[], Any]) -> Tensor:
    """What a pass adds."""
    _, adapter = trainer.registry.model(model.model_id).ready()
    adapter.gradient = {}
    send().result()
    return gathered(trainer, model.model_id)


def assert_same(got: Tensor, right: Tensor, tolerance: float = 1e-6) -> None:
    assert (got - right).norm() <= tolerance * right.norm() + 1e-9
    assert right.norm() > 0


# Formulas of a token's log-probability `p`, its weight `w` and a reference `q`, smooth enough that what the wire rounds
# to float32 (half a unit in the seventh digit of p) stays as small in the gradient.
LEAVES = ("p", "w", "q", "d")
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": lambda x: x.sigmoid(),
    "softplus": torch.nn.functional.softplus,
    "exp": lambda x: (x * 0.2).exp(),
    "square": lambda x: x**2,
    "neg": lambda x: -x,
    "cumsum": lambda x: x.cumsum(-1) / x.shape[-1],
    "centered": lambda x: x - x.mean(-1, keepdim=True),
    "flip": lambda x: x.flip(-1),
    "clamp": lambda x: x.clamp(-3.0, 3.0),
    "where": lambda x: torch.where(x > 0.1, x, 0.5 * x),
    "detach": lambda x: x.detach() * x,
    "root": lambda x: (x**2 + 1.0).sqrt(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: 0.3 * x * y,
    "logaddexp": torch.logaddexp,
    "max": torch.maximum,
    "div": lambda x, y: x / (0.2 * y**2 + 2.0),
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "logsumexp": lambda x: torch.logsumexp(x.flatten(), 0),
    "norm": lambda x: (x**2).sum().add(1.0).sqrt(),
}
expressions = st.recursive(
    st.sampled_from(LEAVES).map(lambda leaf: (leaf,)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), inner), st.tuples(st.sampled_from(sorted(BINARY)), inner, inner)
    ),
    max_leaves=6,
)


def evaluated(expression: Expression, p: Tensor, w: Tensor, q: Tensor) -> Tensor:
    name, *arguments = expression
    if name in LEAVES:
        return {"p": 0.3 * (p + 5.5), "w": w, "q": q + 5.5, "d": 0.2 * (p - q)}[name]
    values = [evaluated(argument, p, w, q) for argument in arguments]
    return UNARY[name](*values) if len(values) == 1 else BINARY[name](*values)


def reduced(expression: Expression, reduction: str, p: Tensor, w: Tensor, q: Tensor) -> Tensor:
    # With p itself, so that there is always something to train.
    return REDUCTIONS[reduction](evaluated(expression, p, w, q) * w - 0.7371 * p * w)


@examples(12, 400, derandomize=True)
@given(
    expression=expressions,
    reduction=st.sampled_from(sorted(REDUCTIONS)),
    form=st.sampled_from(["datum", "logprobs", "logits"]),
)
def test_any_traceable_loss_has_the_gradient_of_two_passes(  # R3.7, R5.7
    trainer: EmbeddedTrainer,
    service: ServiceClient,
    model: TrainingClient,
    expression: Expression,
    reduction: str,
    form: str,
) -> None:
    formula = partial(reduced, expression, reduction)

    def datum_loss(logprobs: Tensor, weights: Tensor, reference_logprobs: Tensor) -> Any:
        loss = formula(logprobs, weights, reference_logprobs)
        return loss, {"custom/loss:sum": loss}

    def batch_loss(data: Any, logprobs: Any) -> Any:
        stacked = Batch(data, logprobs)
        loss = formula(stacked.logprobs, stacked.tokens("weights"), stacked.tokens("reference_logprobs"))
        return loss, {"loss": loss}

    def logit_loss(model_outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, inputs["target_tokens"].unsqueeze(-1)).squeeze(-1) * mask
        loss, metrics = batch_loss(inputs, logprobs)
        return LossFnOutput(loss, logprobs, metrics)

    data = batch()
    if form == "datum":
        ranks = {"logprobs": 1, "weights": 1, "reference_logprobs": 1}
        loss: Any = service.create_custom_loss(datum_loss, ranks).result()
        assert loss.loss_id is not None
        here: Any = loss
    else:
        loss = custom_loss(service, "mine", on=form)(batch_loss if form == "logprobs" else logit_loss)  # type: ignore[arg-type]
        here = batch_loss
    right = gradient(trainer, model, lambda: model.forward_backward_custom(data, here))
    assert_same(gradient(trainer, model, lambda: model.forward_backward(data, loss)), right)


@pytest.mark.parametrize("name", LIBRARY)
def test_every_loss_of_the_library_has_the_gradient_of_two_passes(  # R5.7
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient, name: str
) -> None:
    loss, _ = LIBRARY[name]
    data = batch(4 if "topk" in name else 0)
    on_the_server = custom_loss(service, "library", on="logprobs")(loss)
    right = gradient(trainer, model, lambda: model.forward_backward_custom(data, loss))
    assert_same(gradient(trainer, model, lambda: model.forward_backward(data, on_the_server)), right)
    metrics = model.forward(data, "library").result().metrics
    expected = model.forward_backward_custom(data, loss).result().metrics
    for key in metrics.keys() - {"tokens:sum"}:
        assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    assert len(metrics) > 3


@pytest.mark.parametrize("order", [1, 2, 3.5])
def test_discounts_and_norms(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient, order: float
) -> None:  # R3.7
    def discounted(data: Any, logprobs: Any, gamma: float = 0.9) -> Any:
        stacked = Batch(data, logprobs)
        discounts = torch.cumprod(torch.full_like(stacked.logprobs, 1.0) * gamma, dim=-1)
        returns = discounts * stacked.tokens("weights") * stacked.logprobs
        likely = (stacked.logprobs / 10).exp().cumprod(-1).sum()
        return torch.linalg.vector_norm(returns, order, dim=-1).mean() - likely, {}

    loss = custom_loss(service, "discounted", on="logprobs")(discounted)
    right = gradient(trainer, model, lambda: model.forward_backward_custom(batch(), discounted))
    assert_same(gradient(trainer, model, lambda: model.forward_backward(batch(), loss)), right)


POLICY = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.mark.parametrize(
    ("name", "alternatives"),
    [(name, k) for name in ("cross_entropy", *POLICY) for k in (0, 3) if not (k and name == "gspo")],
)
def test_the_librarys_form_of_a_built_in_loss_is_that_loss(  # R3.3
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient, name: str, alternatives: int
) -> None:
    data = batch(alternatives)
    right = gradient(trainer, model, lambda: model.forward_backward(data, name))
    loss = custom_loss(service, f"own_{name}", on="logprobs")(getattr(losses, name))
    assert_same(gradient(trainer, model, lambda: model.forward_backward(data, loss)), right, 1e-9)


def test_one_ratio_for_a_sequence_of_alternatives_raises_wherever_it_runs(
    service: ServiceClient, model: TrainingClient
) -> None:
    on_the_server = custom_loss(service, "own_gspo", on="logprobs")(losses.gspo)
    own = custom_loss(service, "calls_gspo", on="logprobs")(lambda data, logprobs: losses.gspo(data, logprobs))
    with pytest.raises(InvalidInput, match=r"datum 0: target_tokens: has the shape \[9, 3\], but gspo has one ratio"):
        model.forward(batch(3), "gspo").result()
    with pytest.raises(InvalidDatum, match=r"datum 0: its targets have the shape \[9, 3\]"):
        model.forward(batch(3), on_the_server)
    with pytest.raises(InvalidDatum, match=r"datum 0: its targets have the shape \[9, 3\]"):
        model.forward_backward_custom(batch(3), losses.gspo).result()
    with pytest.raises(InvalidInput, match="dimensions"):  # a function that only calls it
        model.forward(batch(3), own).result()


@pytest.mark.parametrize(
    ("name", "scale"),
    mostly_soak(
        itertools.product(["cross_entropy", *POLICY], [0.25, 1 / 3, 3.0]),
        but=[("cross_entropy", 3.0), *((name, 1 / 3) for name in POLICY)],
    ),
)
def test_a_scale_multiplies_the_gradient_and_nothing_else(
    trainer: EmbeddedTrainer, model: TrainingClient, name: str, scale: float
) -> None:
    data = batch()
    right = gradient(trainer, model, lambda: model.forward_backward(data, name))
    # Not nearer: the model's norms compute in float32.
    assert_same(gradient(trainer, model, lambda: model.forward_backward(data, name, scale=scale)), right * scale)
    results = [model.forward_backward(data, name, scale=each).result() for each in (1.0, scale)]
    assert results[0].metrics == results[1].metrics


@pytest.mark.parametrize("kept", [1 << 40, 0], ids=["activations are kept", "activations are computed twice"])
def test_a_large_batch_is_computed_in_parts_with_the_same_gradient(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    data = batch()

    @custom_loss(service, name="whole", on="logprobs")
    def whole(data: Any, logprobs: Any) -> Any:
        stacked = Batch(data, logprobs)
        return (stacked.logprobs * stacked.tokens("weights")).sum().square() * 1e-4, {}

    right = gradient(trainer, model, lambda: model.forward_backward(data, whole))
    monkeypatch.setattr(batch_pass, "KEPT_BYTES", kept)
    _, adapter = trainer.registry.model(model.model_id).ready()
    adapter.token_budget = 9
    assert_same(gradient(trainer, model, lambda: model.forward_backward(data, whole)), right)
