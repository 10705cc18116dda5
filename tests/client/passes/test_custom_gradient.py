"""The gradient that a custom loss accumulates on the server is that of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.client_data import DATA, TEXTS, policy
from tests.helpers.fuzzing import examples
from tests.helpers.reference import lora_model
from tinker_lightning import AdamParams
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning import Datum
    from tinker_lightning.client import TrainingClient

Scalar: TypeAlias = Callable[[list[Tensor]], Tensor]

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "square": lambda x: x**2 / 8,
    "exp": lambda x: (x / 4).exp(),
    "tanh": lambda x: (x / 4).tanh(),
    "sine": lambda x: (x / 3).sin() + x,
    "softplus": lambda x: torch.nn.functional.softplus(x + 5),
    "root": lambda x: (1 - x).sqrt(),
    "clamped": lambda x: x.clamp(max=-5.0) ** 2,
    "huber": lambda x: torch.nn.functional.huber_loss(x, torch.full_like(x, -5.5), reduction="none") + 2 * x,
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "logsumexp": lambda x: x.logsumexp(0),
    "norm": lambda x: x.norm(),
    "variance": lambda x: x.var() + x.mean(),
    "first and last": lambda x: x[0] * 2 - x[-1],
    "ranked": lambda x: (x.sort().values * torch.linspace(0.5, 1.5, len(x), dtype=x.dtype)).sum(),
}
COMBINATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - 0.5 * b,
    "times": lambda a, b: a + 0.1 * (a / (1 + a.abs())) * (b / (1 + b.abs())),
    "ratio": lambda a, b: a + b / (1 + b.abs()),
    "preference": lambda a, b: -torch.nn.functional.logsigmoid(0.1 * (a - b)) * 10 + a,
    "larger": lambda a, b: torch.maximum(a, b) + 0.3 * torch.minimum(a, b),
}


@st.composite
def scalars(draw: st.DrawFn) -> Scalar:
    """A number made of one datum's log-probabilities, or of all."""
    which = draw(st.sampled_from([0, 1, 2, None]))
    change = ELEMENTWISE[draw(st.sampled_from(list(ELEMENTWISE)))]
    reduce = REDUCTIONS[draw(st.sampled_from(list(REDUCTIONS)))]
    return lambda logprobs: reduce(change(torch.cat(logprobs) if which is None else logprobs[which]))


def losses() -> st.SearchStrategy[Scalar]:
    """Compositions of such numbers, across datums."""

    def combine(parts: st.SearchStrategy[Scalar]) -> st.SearchStrategy[Scalar]:
        def composed(left: Scalar, right: Scalar, how: str) -> Scalar:
            return lambda logprobs: COMBINATIONS[how](left(logprobs), right(logprobs))

        return st.builds(composed, parts, parts, st.sampled_from(list(COMBINATIONS)))

    return st.recursive(scalars(), combine, max_leaves=5)


class Double:
    """A model of a float64 trainer, and plain autograd through the same Hugging Face model."""

    def __init__(self, trainer: EmbeddedTrainer, model: TrainingClient) -> None:
        self.model = model
        self._base, self._adapter = lora_model(trainer, model.model_id)
        base, self.logprobs = self._base, list[Tensor]()
        with base.lora.use(self._adapter.weights) as parameters:
            for text in TEXTS:
                ids = torch.tensor(list(text.encode()))
                logits = base.model(input_ids=ids[None, :-1]).logits[0]
                self.logprobs.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
        self._parameters = dict(parameters)

    def reference(self, loss: Scalar) -> Tensor:
        """The gradient of a loss; the graph is kept, for the weights stay as they are."""
        value = loss(self.logprobs)
        with self._base.lora.use(self._adapter.weights):  # which a backward through the model needs, too
            gradients = torch.autograd.grad(value, list(self._parameters.values()), retain_graph=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def gathered(self) -> Tensor:
        """The gradient that waits on the server."""
        return torch.cat([self._adapter.gradient[name].flatten() for name in self._parameters])


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Double]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("double"), dtype=torch.float64)
    with embedded_service(trainer) as service:
        model = service.create_lora_training_client("tiny", rank=2, seed=2)
        for _ in range(2):
            model.forward_backward(DATA, "cross_entropy")
            model.optim_step(AdamParams(learning_rate=1e-2)).result()
        yield Double(trainer, model)
    trainer.close()


@examples(12, 400, derandomize=True, database=None)
@hypothesis.given(loss=losses())
def test_the_gradient_identity_holds(double: Double, loss: Scalar) -> None:  # R1.3, R1.4, R1.5
    expected = double.reference(loss)
    hypothesis.assume(expected.norm() > 1e-9)
    double.model.optim_step(AdamParams(learning_rate=0.0))  # which clears the gradient of the loss before
    double.model.forward_backward_custom(
        DATA, lambda _, leaves: (loss([leaf.double() for leaf in leaves]), {})
    ).result()
    # The protocol carries float32, whose rounding a difference of nearly equal terms magnifies.
    assert (double.gathered() - expected).norm() <= 1e-5 * expected.norm()


POLICY = [policy(text, seed) for seed, text in enumerate(TEXTS)]


def _ratios(data: list[Datum], logprobs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    inputs = [datum.loss_fn_inputs for datum in data]
    pairs = zip(inputs, logprobs, strict=True)
    return [((p - each["logprobs"].to_torch()).exp(), each["advantages"].to_torch()) for each, p in pairs]


def importance_sampling(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    return -torch.cat([ratio * advantage for ratio, advantage in _ratios(data, logprobs)]).sum(), {}


def ppo(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    terms = [torch.minimum(r * a, r.clamp(0.9, 1.1) * a) for r, a in _ratios(data, logprobs)]
    return -torch.cat(terms).sum(), {}


@pytest.mark.parametrize("loss", [importance_sampling, ppo])
def test_a_built_in_loss_written_out_gives_the_same_gradient(double: Double, loss: Any) -> None:  # R1.11
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if loss is ppo else None
    double.model.optim_step(AdamParams(learning_rate=0.0))
    built_in = double.model.forward_backward(POLICY, loss.__name__, config).result()
    expected = double.gathered().clone()
    double.model.optim_step(AdamParams(learning_rate=0.0))
    custom = double.model.forward_backward_custom(POLICY, loss).result()
    assert (double.gathered() - expected).norm() <= 1e-6 * expected.norm()
    assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
