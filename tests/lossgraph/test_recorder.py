"""Loss functions become graphs with the same value and gradient; others raise with the line."""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

import functools
import math
import random
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.helpers.traced_losses import B, T, assert_same, expected, optional, run
from tinker_lightning import LossFnOutput
from tinker_lightning.errors import InvalidInput, InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph.graph_loss import SCALE, GraphLoss, scale_by_input
from tinker_lightning.lossgraph.trace import trace_batch_loss, trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Callable

LEARNED = torch.tensor(2.0)


def test_arithmetic_indexing_and_shapes() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        (length,) = logprobs.shape
        pairs = torch.stack([logprobs[:-1], logprobs[1:]], -1)
        first, second = pairs.unbind(-1)
        picked = logprobs[weights > 0].sum() + logprobs[[0, 2]].sum() + logprobs[None, ..., ::2].sum()
        value = (first - second).abs().sum() / length + (weights @ logprobs) ** 2 + picked
        return value, {"custom/largest:mean": logprobs.max(0).values}

    assert_same(loss)


def test_tensors_made_of_numbers() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        ramp = torch.arange(logprobs.shape[0], dtype=logprobs.dtype, device=logprobs.device)
        mask = torch.ones_like(weights) * torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0], dtype=weights.dtype)
        return (logprobs * ramp * mask).sum() * torch.tensor(0.5), {}

    assert_same(loss)


def test_pythons_own_work_is_done_while_tracing() -> None:
    scales: dict[str, Any] = {"a": 0.5, "b": np.float32(2.0)}

    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        total = sum(scale * logprobs.pow(i + 1).mean() for i, scale in enumerate(scales.values()))
        return total + math.pi * weights.sum() * 0, {f"custom/{name}:sum": logprobs.sum() for name in scales}

    assert_same(loss)


def test_math_on_numbers_that_are_not_known_yet() -> None:
    def loss(logprobs: Tensor, temperature: Tensor) -> Any:
        size = logprobs.shape[0]
        return (logprobs / math.sqrt(size) + sqrt(size) * logprobs * temperature).sum() / math.log(size), {}

    assert_same(loss, {"logprobs": 1, "temperature": 0})


def test_no_grad_ends_gradients_as_it_does_in_python() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        with torch.no_grad():
            ratio = (logprobs - weights).exp()
            largest, _ = ratio.max(0)
            count = ratio.shape[0]
            half = count / 2
        top = ratio.topk(2).values
        inner = (ratio.clamp(0.8, 1.2) * logprobs).sum() + largest * logprobs.sum() / count + half * top.sum()
        return inner + logprobs.detach().sum() * logprobs[0], {"custom/ratio:mean": ratio.mean()}

    assert_same(loss)


def test_items_can_be_set() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        kept = logprobs.clone()
        kept[weights < 0] = 0.0
        kept[0] = logprobs[1] * 2
        kept[2:4] = kept[2:4] + 1
        return (kept * weights).sum(), {}

    assert_same(loss)


def test_item_is_a_number_without_a_gradient() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        total = -(logprobs * weights).sum()
        spread = logprobs.var().item()
        return total * total.item() / (1 + spread), {"custom/mean:mean": logprobs.mean()}

    assert_same(loss)


def test_an_item_is_not_changed_by_what_is_written_later() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        doubled = logprobs * 2
        before = doubled[0].item()
        doubled *= 3
        return (doubled * before).sum() + doubled[0], {}

    assert_same(loss)


def test_modules_without_parameters_are_traced_through() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        return torch.nn.LogSigmoid()(logprobs * weights).neg().mean(), {}

    assert_same(loss)


def test_two_dimensions_and_functional_losses() -> None:
    def loss(logprobs: Tensor, teacher: Tensor, weights: Tensor) -> Any:
        loss = F.kl_div(logprobs.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
        smooth = F.smooth_l1_loss(logprobs, teacher, beta=0.5) + F.cross_entropy(logprobs, teacher.argmax(-1))
        return (loss * weights).sum() + smooth, {}

    assert_same(loss, {"logprobs": 2, "teacher": 2, "weights": 1})


def test_a_loss_may_be_all_that_is_returned() -> None:
    alone = trace_datum_loss(lambda logprobs: logprobs.sum(), {"logprobs": 1})
    assert alone({"logprobs": torch.tensor([1.0, 2.0])}, {}) == LossFnOutput(torch.tensor(3.0))
    batch = trace_batch_loss(lambda data, logprobs: logprobs.sum() * data["weights"].sum(), "mine", "logprobs")
    assert batch.program.graph.output[1] == {}


class Likelihood(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = torch.nn.LogSigmoid()

    def forward(self, logprobs: Tensor, weights: Tensor) -> Any:
        return -(self.sigmoid(logprobs) * weights).sum() / sqrt(logprobs.shape[0]), {}


class Margin(torch.nn.Module):
    def forward(self, outputs: Tensor, _: Any, mask: Tensor, factor: float = 0.5) -> Any:
        return LossFnOutput((outputs[..., 0] * mask).sum() * factor)


def test_a_module_is_a_function_with_the_parameters_of_its_forward() -> None:
    assert_same(Likelihood())
    loss = trace_batch_loss(Margin(), "margin", "logits")
    assert loss.settings({"factor": 2.0}) == {"factor": 2.0}
    assert torch.equal(run(loss, {}, factor=2.0)[1], expected(Margin(), {}, factor=2.0)[1])
    bound = trace_batch_loss(functools.partial(Margin(), factor=3.0), "margin", "logits")
    assert bound.settings({}) == {"factor": 3.0}


def test_partials_methods_and_objects() -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, logprobs: Tensor, weights: Tensor) -> Any:
            return -(logprobs * weights).sum() * self.factor, {}

        def method(self, logprobs: Tensor, weights: Tensor) -> Any:
            return self(logprobs, weights)

    assert_same(Scaled(0.5))
    assert_same(Scaled(2.0).method)

    def inner(factor: float, logprobs: Tensor, weights: Tensor) -> Any:
        return (logprobs * weights).mean() * factor, {}

    assert_same(functools.partial(inner, 3.0))


def test_a_scale_can_be_an_input() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        return -(logprobs * weights)[1:].sum(), {"custom/sum:sum": logprobs.sum()}

    plain = assert_same(loss)
    scaled = scale_by_input(plain)
    assert scaled.inputs == {"logprobs": 1, "weights": 1, SCALE: 0}
    x, weights = torch.randn(4), torch.randn(4)
    output = scaled({"logprobs": x}, {"weights": weights, SCALE: torch.tensor(0.25)})
    unscaled = plain({"logprobs": x}, {"weights": weights})
    assert output.loss == unscaled.loss * 0.25
    assert output.diagnostics == unscaled.diagnostics


def branches(logprobs: Tensor, weights: Tensor) -> Any:
    if logprobs.sum() > 0:
        return logprobs.sum(), {}
    return weights.sum(), {}


def loops(logprobs: Tensor, weights: Tensor) -> Any:
    return sum(each for each in logprobs), {}


def joins(logprobs: Any, weights: Tensor) -> Any:
    return torch.cat(logprobs).sum(), {}


def counts(logprobs: Tensor, weights: Tensor) -> Any:
    return logprobs.sum() / len(logprobs), {}


def ranges(logprobs: Tensor, weights: Tensor) -> Any:
    return sum(logprobs[i] for i in range(logprobs.shape[0])), {}


def captures(logprobs: Tensor, weights: Tensor) -> Any:
    return (logprobs * LEARNED).sum(), {}


def foreign(logprobs: Tensor, weights: Tensor) -> Any:
    return torch.as_tensor(np.exp(logprobs)).sum(), {}


def to_numpy(logprobs: Tensor, weights: Tensor) -> Any:
    return logprobs.sum() * logprobs.detach().numpy().sum(), {}


def floats(logprobs: Tensor, weights: Tensor) -> Any:
    return logprobs.sum() * float(weights.sum()), {}


def randoms(logprobs: Tensor, weights: Tensor) -> Any:
    return (logprobs * torch.rand(5)).sum(), {}


def drops_out(logprobs: Tensor, weights: Tensor) -> Any:
    return F.dropout(logprobs).sum(), {}


def goes_back(logprobs: Tensor, weights: Tensor) -> Any:
    logprobs.sum().backward()
    return logprobs.sum(), {}


def has_a_module(logprobs: Tensor, weights: Tensor) -> Any:
    return torch.nn.Linear(5, 1)(logprobs).sum(), {}


def has_an_array(logprobs: Tensor, weights: Tensor) -> Any:
    return (logprobs * np.ones(5)).sum(), {}


def is_wrong(logprobs: Tensor, weights: Tensor) -> Any:
    return logprobs.sum() + undefined_name, {}  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "line", "because"),
    [
        (branches, "if logprobs.sum() > 0:", "branches on the value or size of a tensor"),
        (loops, "for each in logprobs", "loops over a tensor"),
        (joins, "torch.cat(logprobs)", r"the batch is already one tensor, \[B, T\]"),
        (counts, "len(logprobs)", r"len\(\) of a tensor.* use x.shape\[0\]"),
        (ranges, "range(logprobs.shape[0])", "as a Python integer"),
        (captures, "logprobs * LEARNED", r"uses a tensor of shape \[\] from outside"),
        (foreign, "np.exp(logprobs)", "numpy|ufunc"),
        (to_numpy, ".numpy().sum()", r"calls .numpy\(\), which a graph cannot hold"),
        (floats, "float(weights.sum())", r"with float\(\)"),
        (randoms, "torch.rand(5)", "torch.rand, which is not among the functions"),
        (drops_out, "F.dropout(logprobs)", "'torch.nn.functional.dropout' is not among"),
        (goes_back, "logprobs.sum().backward()", r".backward\(\)"),
        (has_a_module, "torch.nn.Linear(5, 1)", "from outside|torch.empty"),
        (has_an_array, "np.ones(5)", "numpy"),
        (is_wrong, "undefined_name", "NameError"),
    ],
)
def test_what_cannot_be_traced(fn: Callable[..., Any], line: str, because: str) -> None:  # R3.6
    with pytest.raises(LossNotTraceable, match=f"(?s){because}") as caught:
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})
    message = str(caught.value)
    assert __file__ in message
    assert line in message.splitlines()[0]
    assert "torch.where" in message  # one way out
    assert "forward_backward_custom" in message  # the other


@pytest.mark.parametrize(
    ("fn", "ranks", "because"),
    [
        (lambda logprobs: [logprobs.sum()], {"logprobs": 1}, r"must return \(loss, metrics\)"),
        (lambda logprobs: (1.0, {}), {"logprobs": 1}, "its loss as a tensor computed from what it is given, got float"),
        (
            lambda logprobs: (logprobs.sum(), {"custom/x:sum": 1.0}),
            {"logprobs": 1},
            "metric 'custom/x:sum' must be a tensor",
        ),
        (lambda logprobs: (logprobs.sum(), {"x": logprobs.sum()}), {"logprobs": 1}, "custom/<name>:sum"),
        (lambda logprobs: (logprobs.sum(), {}), {}, "input_ranks must give the number of dimensions of logprobs"),
        (lambda logprobs: (logprobs.sum(), {}), {"logprobs": 0}, r"logprobs, with 1 dimension \(\[T\]\) or 2"),
        (lambda logprobs: (logprobs.sum(), {}), {"logprobs": 3}, "logprobs, with 1 dimension"),
        (lambda weights: (weights.sum(), {}), {"weights": 1}, "the first input must be logprobs"),
        (lambda logprobs, X: (logprobs.sum(), {}), {"logprobs": 1, "X": 1}, "use lowercase letters"),
        (lambda logprobs, w=1: (logprobs.sum(), {}), {"logprobs": 1, "w": 1}, "a plain one without a default"),
        (lambda logprobs, *rest: (logprobs.sum(), {}), {"logprobs": 1}, "a plain one without a default"),
    ],
)
def test_signatures_and_results_of_a_datums_loss(fn: Any, ranks: dict[str, int], because: str) -> None:
    with pytest.raises(InvalidLoss, match=because):
        trace_datum_loss(fn, ranks)


# Losses of a whole batch.


ALL_NAMES: list[tuple[str, ...]] = [(), ("weights",), ("reference",), ("weights", "reference")]


@pytest.mark.parametrize("names", ALL_NAMES)
def test_a_graph_is_traced_for_the_inputs_of_a_batch(names: tuple[str, ...]) -> None:  # R3.2
    loss = trace_batch_loss(optional, "optional", "logits", present=names)
    assert loss.reads == {"weights", "reference"}
    assert loss.fits({"weight": 1.0, "power": 4}, names)
    assert not any(loss.fits({"weight": 1.0, "power": 4}, other) for other in ALL_NAMES if other != names)
    inputs = {name: torch.rand(B, T, dtype=torch.float64) for name in names}
    output, gradient = run(loss, inputs, weight=0.25, power=3)
    wanted, right = expected(optional, inputs, weight=0.25, power=3)
    assert torch.equal(gradient, right)
    assert torch.equal(output.logprobs, wanted.logprobs)
    assert output.diagnostics["mean"].item() == wanted.diagnostics["mean"]
    assert output.diagnostics["constant"] == 1.0
    assert loss.description == "What it does depends on what it is given."


def test_settings_by_which_python_decides_are_fixed() -> None:
    def loss(outputs: Tensor, inputs: Any, mask: Tensor, beta: float = 0.1, kind: str = "sum", low: float = 0.0) -> Any:
        if low > 0:
            outputs = outputs.clamp(min=low)
        value = outputs.sum() if kind == "sum" else outputs.mean()
        return LossFnOutput(beta * value)

    traced = trace_batch_loss(loss, "mine", "logits")
    assert {name: each.fixed for name, each in traced.hyperparameters.items()} == {
        "beta": False,
        "kind": True,
        "low": True,
    }
    assert traced.settings({"beta": 2.0, "kind": "sum"}) == {"beta": 2.0, "kind": "sum", "low": 0.0}
    with pytest.raises(InvalidInput, match=r"kind of mine is fixed to 'sum'.*under another name with kind='mean'"):
        traced.settings({"kind": "mean"})
    other = trace_batch_loss(loss, "mine", "logits", {"kind": "mean", "low": 0.5})
    assert torch.equal(run(other, {})[1], expected(loss, {}, kind="mean", low=0.5)[1])


@pytest.mark.parametrize(
    ("settings", "because"),
    [
        ({"gamma": 1.0}, "optional has no setting 'gamma'; it takes weight, power"),
        ({"weight": math.nan}, "weight must be a finite number, got nan"),
        ({"weight": "much"}, "weight must be a finite number, got 'much'"),
    ],
)
def test_settings_that_a_loss_cannot_take(settings: dict[str, Any], because: str) -> None:
    with pytest.raises(InvalidInput, match=because):
        trace_batch_loss(optional, "optional", "logits").settings(settings)


def test_a_function_of_lists_of_datums_raises() -> None:
    def lists(data: Any, logprobs: Any) -> Any:
        return sum((data[i].loss_fn_inputs["weights"].to_torch() * each).sum() for i, each in enumerate([logprobs])), {}

    def pairs(data: Any, logprobs: Any) -> Any:
        return sum(each.sum() for _, each in zip(data, logprobs, strict=True)), {}

    def counts(data: Any, logprobs: Any) -> Any:
        return logprobs.sum() / len(data), {}

    for fn, does in ((lists, "takes datum 0 of"), (pairs, "loops over"), (counts, r"counts")):
        told = rf"(?s)it {does} its data.*, but on a server data are inputs of .*data\['weights'\] is \[B, T\]"
        with pytest.raises(LossNotTraceable, match=told):
            trace_batch_loss(fn, "lists", "logprobs")


def test_whole_numbers_stay_whole() -> None:
    traced = trace_batch_loss(optional, "optional", "logits")
    assert type(traced.settings({"power": 3.0})["power"]) is int  # the wire knows only floats


def test_a_missing_input_is_named() -> None:  # R3.6
    def loss(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput((outputs[..., 0] * inputs["reward"][:, None] * inputs["weights"]).sum())

    traced = trace_batch_loss(loss, "mine", "logits")
    with pytest.raises(InvalidInput, match=r"loss_fn_inputs: reward: missing; mine reads it.*loss_fn_inputs={'reward'"):
        traced.select({"weights"})
    assert traced.select({"weights", "reward", "other"}) == ("reward", "weights")


@pytest.mark.parametrize(
    ("fn", "because"),
    [
        (lambda outputs: outputs.sum(), "a loss on logits takes .*model_outputs, loss_fn_inputs, attention_mask"),
        (lambda o, i, m, beta: o.sum(), "the hyperparameter beta needs a default"),
        (lambda o, i, m, beta=[1]: o.sum(), "the hyperparameter beta needs a default"),
        (lambda o, i, m: o.sum(), "must return a LossFnOutput"),
        (lambda o, i, m: LossFnOutput(1.0), "its loss as a tensor computed from what it is given"),
        (lambda o, i, m: LossFnOutput(o.sum(), [1]), "its logprobs as a tensor or None"),
        (lambda o, i, m: LossFnOutput(o.sum(), None, {"x": "y"}), "the metric 'x' must be a number"),
        (lambda o, i, m: LossFnOutput(o.sum(), None, {"a:b:c": 1.0}), "invalid diagnostic name 'a:b:c'"),
        (lambda o, i, m: LossFnOutput(sum(v.sum() for v in i.values())), "loops over all of its inputs"),
        (lambda o, i, m: LossFnOutput(o.sum() * len(i)), "counts its inputs"),
        (lambda o, i, m: LossFnOutput(o.sum() if o.sum() > 0 else -o.sum()), "branches on the value"),
    ],
)
def test_what_is_no_loss_of_a_batch(fn: Any, because: str) -> None:
    with pytest.raises(InvalidLoss, match=f"(?s){because}"):
        trace_batch_loss(fn, "mine", "logits")


@pytest.mark.parametrize("name", ["", "a b", "1st", "x" * 65, "a/b", "__class__.x@y", None])
def test_names_that_a_loss_cannot_have(name: Any) -> None:
    with pytest.raises(InvalidLoss, match="invalid loss name"):
        trace_batch_loss(optional, name, "logits")


def test_what_python_draws_is_drawn_once() -> None:
    """Documented: a traced function is the same at every call."""

    def loss(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum() * random.random())  # noqa: S311

    traced = trace_batch_loss(loss, "mine", "logits")
    assert torch.equal(run(traced, {})[1], run(traced, {})[1])


def test_the_same_function_has_the_same_digest() -> None:
    first, second = (trace_batch_loss(optional, "optional", "logits") for _ in range(2))
    assert first.digest == second.digest == GraphLoss.decode(first.encode()).digest
    assert first.digest != trace_batch_loss(optional, "optional", "logits", {"power": 3}).digest


def test_a_traced_loss_is_hashable() -> None:
    """A handle of it is a key wherever names of losses are."""
    loss = trace_datum_loss(lambda logprobs: logprobs.sum(), {"logprobs": 1})
    assert {loss: 1}[loss] == 1
