"""Custom losses as pure functions: what a loss gets, what it must return, what becomes of its gradient."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinker_lightning import Datum, ModelInput, TensorData
from tinker_lightning.errors import (
    InvalidDatum,
    InvalidLoss,
    LossNotFinite,
    LossNotScalar,
    LossNotTensor,
    LossWithoutGradient,
    OperationFailed,
)
from tinker_lightning.losses import custom
from tinker_lightning.types import ForwardBackwardOutput, ProvenanceSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LENGTHS = (3, 1, 5)


def datums(**more: Any) -> list[Datum]:
    return [
        Datum(ModelInput.from_ints(range(n)), {"target_tokens": np.arange(n), "weights": np.ones(n), **more})
        for n in LENGTHS
    ]


def logprobs() -> list[Tensor]:
    return [torch.linspace(-n, -1, n).requires_grad_() for n in LENGTHS]


def evaluate(loss: Callable[[list[Any], list[Tensor]], Any], leaves: list[Tensor] | None = None) -> custom.Evaluation:
    lp = logprobs() if leaves is None else leaves
    return custom.differentiate(
        lambda: custom.loss_and_metrics(loss(datums(), lp), lp), lp, name=custom.function_name(loss)
    )


def test_the_gradient_of_each_datum_keeps_its_shape() -> None:  # R1.3
    evaluation = evaluate(lambda _, lp: (sum(((each**2).sum() for each in lp), torch.zeros(())), {}))
    assert [gradient.tolist() for gradient in evaluation.gradients] == [(2 * each).tolist() for each in logprobs()]
    assert evaluation.value == sum((each**2).sum().item() for each in logprobs())


def test_a_loss_may_come_without_metrics() -> None:
    assert evaluate(lambda _, lp: lp[0].sum()).metrics == {}


def test_a_datum_that_the_loss_does_not_use_gets_a_gradient_of_zero() -> None:
    first, second, third = evaluate(lambda _, lp: (lp[1].sum(), {})).gradients
    assert (first.tolist(), second.tolist(), third.tolist()) == ([0.0] * 3, [1.0], [0.0] * 5)


def test_local_parameters_get_their_gradients() -> None:  # R5.2
    temperature = torch.nn.Parameter(torch.tensor(2.0))
    evaluation = evaluate(lambda _, lp: ((torch.cat(lp) * temperature).sum(), {}))
    assert temperature.grad is not None
    assert temperature.grad.item() == sum(each.sum().item() for each in logprobs())
    assert evaluation.gradients[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode: Any) -> None:
    output = ForwardBackwardOutput([{"logprobs": TensorData(np.full(n, -1.0))} for n in LENGTHS])
    with mode():
        leaves = custom.logprob_leaves(output, datums())
        evaluation = evaluate(lambda _, lp: ((lp[0] ** 2).sum(), {}), leaves)
    assert evaluation.gradients[0].tolist() == [-2.0] * 3


def _nan_gradient(_: list[Any], lp: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    zero = lp[2] - lp[2].detach()
    return zero.norm() + zero.sqrt().sum(), {}


BAD: dict[str, tuple[Callable[[list[Any], list[Tensor]], Any], type[InvalidLoss], str]] = {
    "a number": (lambda _, lp: (lp[0].sum().item(), {}), LossNotTensor, r"returned float .* do not call \.item\(\)"),
    "nothing": (lambda *_: None, LossNotTensor, r"returned NoneType .* Return \(loss, metrics\)"),
    "three things": (lambda _, lp: (lp[0].sum(), {}, 1), LossNotTensor, r"returned tuple .* Return \(loss, metrics\)"),
    "a list": (lambda _, lp: [lp[0].sum(), {}], LossNotTensor, r"returned list .* Return \(loss, metrics\)"),
    "the other way round": (
        lambda _, lp: ({}, lp[0].sum()),
        LossNotTensor,
        r"returned dict .* Return \(loss, metrics\)",
    ),
    "numpy": (lambda _, lp: (lp[0].detach().numpy().sum(), {}), LossNotTensor, "returned float32"),
    "many values": (lambda _, lp: (lp[0], {}), LossNotScalar, r"shape \[3\] .* \.sum\(\) or \.mean\(\)"),
    "no values": (lambda _, lp: (lp[0][:0], {}), LossNotScalar, r"shape \[0\]"),
    "a complex value": (lambda _, lp: (lp[0].sum() * 1j, {}), LossNotScalar, "complex64; reduce it to one real value"),
    "NaN": (
        lambda _, lp: (lp[0].sum() * float("nan"), {}),
        LossNotFinite,
        "the loss is nan. .* no gradient was acc",
    ),
    "infinity": (lambda _, lp: ((-1000 * lp[0]).exp().sum(), {}), LossNotFinite, "the loss is inf. .* overflows"),
    "a NaN gradient": (_nan_gradient, LossNotFinite, "datum 2: the loss is 0.0, but its gradient .* square root"),
    "a detached loss": (lambda _, lp: (lp[0].sum().detach(), {}), LossWithoutGradient, r"without \.detach\(\)"),
    "a constant": (
        lambda *_: (torch.tensor(1.0, requires_grad=True) * 2, {}),
        LossWithoutGradient,
        "does not depend on the log-probabilities",
    ),
    "an integer": (lambda *_: (torch.tensor(1), {}), LossWithoutGradient, "does not depend on the log-prob"),
    "metrics that are no dict": (lambda _, lp: (lp[0].sum(), [1.0]), InvalidLoss, "returned list as its metrics, not"),
    "no metrics": (lambda _, lp: (lp[0].sum(), None), InvalidLoss, "returned NoneType as its metrics"),
    "a metric of many values": (
        lambda _, lp: (lp[0].sum(), {"all": lp[0]}),
        InvalidLoss,
        r"metric 'all' is not a single number, but Tensor\. Reduce it with \.mean\(\)",
    ),
    "a metric that is a text": (
        lambda _, lp: (lp[0].sum(), {"a": "3.0"}),
        InvalidLoss,
        "metric 'a' is not a single number, but str",
    ),
    "a metric that is none": (lambda _, lp: (lp[0].sum(), {"a": None}), InvalidLoss, "metric 'a' .* NoneType"),
    "a metric that is a list": (lambda _, lp: (lp[0].sum(), {"a": [1.0]}), InvalidLoss, "metric 'a' .* list"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_trained_on_raises_with_the_fix(what: str) -> None:  # R1.9
    loss, kind, message = BAD[what]
    with pytest.raises(InvalidLoss, match=message) as caught:
        evaluate(loss)
    assert type(caught.value) is kind


def test_a_rejected_loss_leaves_local_parameters_alone() -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))
    with pytest.raises(InvalidLoss, match="metric"):
        evaluate(lambda _, lp: (lp[0].sum() * scale, {"text": "no"}))
    assert scale.grad is None


def test_what_the_loss_raises_is_raised_as_it_is() -> None:
    def broken(_: list[Any], __: list[Tensor]) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        evaluate(broken)


def test_metrics_become_strings_and_floats() -> None:  # R1.7
    given = {
        "t": torch.tensor([3]),
        1: 2,
        "n": np.float64(0.5),
        "b": np.bool_(True),
        "g": torch.ones((), requires_grad=True),
    }
    metrics = custom.numbers(given)
    assert metrics == {"t": 3.0, "1": 2.0, "n": 0.5, "b": 1.0, "g": 1.0}
    assert all(type(value) is float for value in metrics.values())


def test_the_forward_needs_targets_only() -> None:  # R1.1
    spans = [ProvenanceSpan("prompt", "a", 0, 2)]
    inputs: dict[str, Any] = {"target_tokens": [[1, 2], [3, 4]], "reference": TensorData([0.5])}
    (reduced,) = custom.forward_datums([Datum(ModelInput.from_ints([1, 2]), inputs, spans, spans)])
    assert set(reduced.loss_fn_inputs) == {"target_tokens", "weights"}
    assert reduced.loss_fn_inputs["weights"] == TensorData(np.zeros((2, 2), np.float32))
    assert reduced.model_input_spans == tuple(spans)
    kept = custom.forward_datums(datums())
    assert kept[0].loss_fn_inputs["weights"] == TensorData(np.ones(3, np.float32))
    with pytest.raises(InvalidDatum, match="datum 1: target_tokens: missing"):
        custom.forward_datums([datums()[0], Datum(ModelInput.from_ints([1]), {})])


def test_leaves_have_the_shape_of_the_targets() -> None:  # R1.1, R1.2
    data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [[1, 2], [3, 4]]})]
    flat = ForwardBackwardOutput([{"logprobs": TensorData([-1.0, -2.0, -3.0, -4.0])}])
    (leaf,) = custom.logprob_leaves(flat, data)
    assert leaf.tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.dtype == torch.float32


def test_an_answer_that_does_not_fit_is_the_servers_fault() -> None:
    data = datums()
    fitting: list[dict[str, TensorData]] = [{"logprobs": TensorData(np.zeros(n))} for n in LENGTHS]
    with pytest.raises(OperationFailed, match="answered for 2 datums, but 3 were sent"):
        custom.logprob_leaves(ForwardBackwardOutput(fitting[:2]), data)
    with pytest.raises(OperationFailed, match="datum 1: the server sent no logprobs, only loss"):
        custom.logprob_leaves(ForwardBackwardOutput([fitting[0], {"loss": TensorData([1.0])}, fitting[2]]), data)
    with pytest.raises(OperationFailed, match=r"datum 0: the server sent logprobs of shape \[1\] for targets of \[3\]"):
        custom.logprob_leaves(ForwardBackwardOutput([fitting[1], fitting[1], fitting[2]]), data)


async def _async_loss(_: list[Any], lp: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    return lp[0].sum(), {}


class _AsyncCallable:
    async def __call__(self, _: list[Any], lp: list[Tensor]) -> Tensor:
        return lp[0].sum()


@pytest.mark.parametrize("loss", [_async_loss, partial(_async_loss), _AsyncCallable()])
def test_an_async_loss_is_named_before_anything_is_sent(loss: Any) -> None:
    with pytest.raises(InvalidLoss, match=r"Async|_async_loss is an async function.* Write it with def"):
        custom.check_arguments(loss)


def test_an_awaitable_that_a_loss_returns_is_named() -> None:
    with pytest.raises(InvalidLoss, match=r"returned an awaitable.* Write it with def"):
        evaluate(lambda data, lp: _async_loss(data, lp))


def test_a_gradient_of_zero_everywhere_warns_once_with_the_name_of_the_loss() -> None:
    def rounded(_: list[Any], lp: list[Tensor]) -> Tensor:
        return torch.cat(lp).round().sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not any(gradient.any() for gradient in evaluate(rounded).gradients)
    assert [str(each.message)[:50] for each in caught] == ["the gradient of the loss rounded is zero for every"]


def test_a_metric_with_a_name_of_the_protocol_is_returned_next_to_it() -> None:
    backward = ForwardBackwardOutput([{}], {"loss:sum": 4.0, "tokens:sum": 9.0}, "kind")
    evaluation = custom.Evaluation(1.5, {"loss:sum": 3.0, "tokens:sum": 7.0}, [])
    metrics = custom.add_loss_metrics(backward, evaluation).metrics
    server = {"loss:sum": 1.5, "tokens:sum": 9.0, "surrogate_loss:sum": 4.0}
    assert metrics == server | {"loss/loss:sum": 3.0, "loss/tokens:sum": 7.0}


def test_the_result_has_the_losss_value_and_metrics() -> None:  # R1.6, R1.7
    backward = ForwardBackwardOutput([{}], {"loss:sum": 4.0, "tokens:sum": 9.0}, "kind")
    evaluation = custom.Evaluation(1.5, {"mine": 2.0, "tokens:sum": 7.0}, [])
    result = custom.add_loss_metrics(backward, evaluation)
    expected = {"loss:sum": 1.5, "loss/tokens:sum": 7.0, "mine": 2.0}
    assert result.metrics == expected | {"surrogate_loss:sum": 4.0, "tokens:sum": 9.0}
    assert result.loss_fn_output_type == "kind"
    assert backward.metrics == {"loss:sum": 4.0, "tokens:sum": 9.0}
    bare = custom.add_loss_metrics(ForwardBackwardOutput([{}]), evaluation)  # servers may give no metrics at all
    assert bare.metrics == expected
