"""Python in a traced function means the same as in an ordinary call: types, text, attributes, sizes."""

# ruff: noqa: ARG004, ARG005, E731  # a loss has parameters that it does not use

from __future__ import annotations

import copy
import math
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.traced_losses import B, T, assert_same, expected, run
from tinker_lightning import LossFnOutput
from tinker_lightning.errors import InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph.graph import Graph
from tinker_lightning.lossgraph.trace import trace_batch_loss, trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.lossgraph.graph_loss import GraphLoss


def assert_batch_same(fn: Callable[..., Any], **settings: Any) -> GraphLoss:
    """The graph of a loss on logits has the function's value and gradient, to the bit."""
    traced = trace_batch_loss(fn, "mine", "logits")
    if changed := {name: value for name, value in settings.items() if traced.hyperparameters[name].fixed}:
        traced = trace_batch_loss(fn, "mine", "logits", changed)
    inputs = {"weights": torch.rand(B, T, dtype=torch.float64)}
    (output, gradient), (wanted, right) = run(traced, inputs, **settings), expected(fn, inputs, **settings)
    assert torch.equal(output.loss, wanted.loss)
    assert torch.equal(gradient, right)
    return traced


# Types.


@singledispatch
def doubled(value: Any) -> Any:
    return value


@doubled.register
def _(value: Tensor) -> Any:
    return value * 2


def matched(value: Any) -> Any:
    match value:
        case Tensor():
            return value * 3
        case _:
            return 0.0


@pytest.mark.parametrize(
    "fn",
    [
        lambda logprobs, weights: ((logprobs * (weights if isinstance(weights, Tensor) else 1.0)).sum(), {}),
        lambda logprobs, weights: ((logprobs * (weights if torch.is_tensor(weights) else 1.0)).sum(), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.data, Tensor) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.max(0).values, Tensor) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.max(), Tensor) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights, torch.nn.Parameter) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if hasattr(weights, "loss_fn_inputs") else 3), {}),
        lambda logprobs, weights: (doubled(logprobs).sum() + matched(logprobs).sum(), {}),
    ],
)
def test_tensors_have_the_type_of_tensors(fn: Any) -> None:  # R3.2
    assert_same(fn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.max(0), tuple) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.shape[0], int) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.shape[0] / 2, float) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.shape, tuple) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.sum().item(), Tensor) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if isinstance(weights.sum().item(), int | float) else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * (2 if hasattr(weights.shape[0], "item") else 3), {}),
        lambda logprobs, weights: (logprobs.sum() * doubled(weights.shape[0]), {}),
        lambda logprobs, weights: (logprobs.sum() * matched(weights.shape[0]), {}),
    ],
)
def test_the_type_of_anything_else_raises(fn: Any) -> None:
    """Of a size, a number or a tuple it is not known, so that no branch is taken silently."""
    with pytest.raises(LossNotTraceable, match=r"test_python.py:\d+: (?s:.*)(asks for the type|reads the attribute)"):
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})


def test_what_a_function_catches_is_raised_all_the_same() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        try:
            scale = float(weights.sum())
        except Exception:
            scale = 1.0
        return logprobs.sum() * scale, {}

    with pytest.raises(LossNotTraceable, match=r"scale = float\(weights.sum\(\)\)\n"):
        trace_datum_loss(loss, {"logprobs": 1, "weights": 1})


def by_type(outputs: Tensor, inputs: Any, mask: Tensor, a: float = 1, b: float = 0.5) -> LossFnOutput:
    scale = a if isinstance(a, int) else 10.0
    return LossFnOutput(outputs.square().mean() * scale * b)


@pytest.mark.parametrize("settings", [{}, {"a": 3}, {"a": 2.5}, {"a": 3, "b": 0.25}])
def test_a_setting_whose_type_is_asked_for_is_fixed(settings: dict[str, float]) -> None:
    traced = assert_batch_same(by_type, **settings)
    assert traced.hyperparameters["a"].fixed
    assert not traced.hyperparameters["b"].fixed


def test_a_setting_that_is_a_fraction_by_default_stays_one() -> None:
    traced = trace_batch_loss(by_type, "mine", "logits")
    assert type(traced.settings({"b": 2})["b"]) is float
    assert type(traced.settings({"b": np.float32(0.5)})["b"]) is float


def test_numbers_of_numpy_are_settings() -> None:
    def loss(outputs: Tensor, inputs: Any, mask: Tensor, b: Any = np.float32(0.5)) -> LossFnOutput:  # noqa: B008
        return LossFnOutput(outputs.sum() * b)

    traced = assert_batch_same(loss, b=0.25)
    assert traced.settings({"b": np.int64(2)}) == {"b": 2.0}
    assert trace_batch_loss(loss, "mine", "logits", {"b": np.float32(2.0)}).hyperparameters["b"].default == 2.0  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "use",
    [
        lambda m, b: torch.full((2,), b),
        lambda m, b: torch.full((m.shape[0], 2), 2 * b),
        lambda m, b: torch.full_like(m, b),
        lambda m, b: torch.tensor(b) * torch.tensor([b, 1.0]).sum() * torch.as_tensor(b),
        lambda m, b: torch.add(m, m, alpha=b),
        lambda m, b: torch.where(m > 0, b, 0.0),
        lambda m, b: torch.clamp(m, -b, b),
        lambda m, b: torch.arange(m.shape[0]) * b,
    ],
)
def test_torch_may_look_at_a_setting_without_fixing_it(use: Any) -> None:
    """torch asks for the type, too, from the same line."""
    loss = lambda outputs, inputs, mask, b=0.5: LossFnOutput(outputs.sum() * use(mask, b).sum())
    assert not assert_batch_same(loss, b=0.25).hyperparameters["b"].fixed


@pytest.mark.parametrize(
    ("fn", "because"),
    [
        (lambda logprobs, weights: (logprobs.sum() * torch.full((2,), weights.sum()).sum(), {}), "torch.ones.* value"),
        (lambda logprobs, weights: (logprobs.sum() * torch.full((2,), weights.sum().item()).sum(), {}), "torch.ones"),
        (lambda logprobs, weights: (logprobs.sum() * torch.full_like(weights, weights[0]).sum(), {}), "torch.ones"),
        (lambda logprobs, weights: (logprobs.sum() * math.sqrt(weights.sum().item()), {}), "use torch.sqrt"),
    ],
)
def test_a_tensor_in_the_place_of_a_number(fn: Any, because: str) -> None:  # R3.6
    """There torch would read its memory."""
    with pytest.raises(LossNotTraceable, match=f"(?s)test_python.py:[0-9]+: .*{because}"):
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})


# Text, attributes, sizes.


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_setting_in_a_text_is_fixed() -> None:
    def loss(outputs: Tensor, inputs: Any, mask: Tensor, beta: float = 0.5, gamma: float = 1.0) -> LossFnOutput:
        return LossFnOutput(outputs.sum() * beta * gamma, None, {f"loss_at_{beta}": outputs.mean()})

    traced = assert_batch_same(loss, gamma=2.0)
    assert traced.hyperparameters["beta"].fixed
    assert not traced.hyperparameters["gamma"].fixed
    assert list(run(traced, {})[0].diagnostics) == ["loss_at_0.5"]


@pytest.mark.parametrize(
    ("fn", "because"),
    [
        (
            lambda logprobs, weights: (logprobs.sum(), {f"custom/{weights.sum()}:sum": logprobs.sum()}),
            "formats a value as text",
        ),
        (
            lambda logprobs, weights: (logprobs.sum(), {f"custom/{[weights]}:sum": logprobs.sum()}),
            "formats a value as text",
        ),
        (lambda logprobs, weights: (logprobs.sum() * logprobs.real, {}), "the attribute 'real'.*can read T, data,"),
        (lambda logprobs, weights: (logprobs.sum() * logprobs.nbytes, {}), "the attribute 'nbytes'"),
        (lambda logprobs, weights: (logprobs.sum() * logprobs.lenght, {}), "Tensor has no attribute 'lenght'"),
        (lambda logprobs, weights: (logprobs.sum() * (logprobs.grad_fn is None), {}), "the attribute 'grad_fn'"),
        (lambda logprobs, weights: (StraightThrough.apply(logprobs).sum(), {}), "a custom backward"),  # type: ignore[no-untyped-call]
        (lambda logprobs, weights: (copy.deepcopy(logprobs).sum(), {}), "copies a tensor.*x.clone"),
        (lambda logprobs, weights: (copy.copy(logprobs).sum(), {}), "x.clone"),
        (lambda logprobs, weights: (torch.exp(logprobs, out=weights).sum(), {}), "the argument 'out' is not supported"),
        (lambda logprobs, weights: (logprobs.reshape(*(logprobs * 2).shape, 1).sum(), {}), "batch, length = x.shape"),
        (lambda logprobs, weights: (logprobs.sum() * len((logprobs * 2).shape), {}), "of a shape.*use x.ndim"),
    ],
)
def test_rejected_with_the_line(fn: Any, because: str) -> None:  # R3.6
    with pytest.raises(LossNotTraceable, match=f"(?s)test_python.py:[0-9]+: .*{because}"):
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})


def test_dimensions_that_are_known() -> None:
    def loss(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        assert outputs.dim() == 3
        assert len(outputs.shape) == outputs.ndim == 3
        flat = outputs.reshape(*mask.shape[:-1], -1)
        return LossFnOutput((flat * mask.sum(1, keepdim=True)).sum() / math.sqrt(mask.ndim))

    assert_batch_same(loss)

    def of_a_datum(logprobs: Tensor, weights: Tensor) -> Any:
        return (logprobs * (weights if weights.dim() == logprobs.ndim else weights[:, None])).sum(), {}

    assert_same(of_a_datum)


@pytest.mark.parametrize("attribute", ["__class__", "grad_fn", "real", 1, None, {"ref": "x"}])
@pytest.mark.parametrize("target", ["getattr", "builtins.getattr"])
def test_a_graph_that_reads_other_attributes_raises(target: str, attribute: Any) -> None:  # R3.4
    def graph(name: Any) -> dict[str, Any]:
        read = {"op": "call_function", "name": "y", "target": target, "args": [{"ref": "x"}, name], "kwargs": {}}
        nodes = [{"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}}, read]
        return {"nodes": [*nodes, {"op": "output", "name": "output", "target": "output", "args": [{"ref": "y"}]}]}

    Graph.decode(graph("T"))
    with pytest.raises(InvalidLoss, match=r"node 'y': the attribute .* is not supported; use one of T, data"):
        Graph.decode(graph(attribute))
