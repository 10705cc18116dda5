"""Traced losses compared with the functions they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning import LossFnOutput
from tinker_lightning.lossgraph.graph_loss import GraphLoss
from tinker_lightning.lossgraph.trace import trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Callable

B, T, V = 3, 5, 11


def assert_same(fn: Callable[..., Any], ranks: dict[str, int] | None = None) -> GraphLoss:
    """The graph of a loss of one datum has its value, gradient and metrics, to the bit."""
    ranks = ranks or {"logprobs": 1, "weights": 1}
    traced = trace_datum_loss(fn, ranks)
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (T,), (T, 4)]
    inputs = {n: torch.randn(shapes[rank], dtype=torch.float64) for n, rank in ranks.items() if n != "logprobs"}
    leaves = [torch.randn(shapes[ranks["logprobs"]], dtype=torch.float64).requires_grad_() for _ in range(2)]
    leaves[1].data = leaves[0].data.clone()
    output = traced({"logprobs": leaves[0]}, {name: each.clone() for name, each in inputs.items()})
    loss, metrics = output.loss, output.diagnostics
    expected, named = fn(leaves[1], *(each.clone() for each in inputs.values()))
    assert torch.equal(loss, expected)
    assert {name: value.item() for name, value in metrics.items()} == {k: v.item() for k, v in named.items()}
    gradients = [torch.autograd.grad(*pair)[0] for pair in zip((loss, expected), leaves, strict=True)]
    assert torch.equal(*gradients)
    return traced


def run(loss: GraphLoss, inputs: dict[str, Tensor], **settings: Any) -> tuple[LossFnOutput, Tensor]:
    torch.manual_seed(0)
    leaf = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(T) < torch.tensor([[5], [3], [1]])).double()
    sources = {"model_outputs": leaf, "attention_mask": mask}
    output = GraphLoss.decode(loss.encode())(sources, inputs, loss.settings(settings))
    return output, torch.autograd.grad(output.loss, leaf)[0]


def expected(fn: Callable[..., Any], inputs: dict[str, Tensor], **settings: Any) -> tuple[LossFnOutput, Tensor]:
    torch.manual_seed(0)
    leaf = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(T) < torch.tensor([[5], [3], [1]])).double()
    output = fn(leaf, {name: tensor.clone() for name, tensor in inputs.items()}, mask, **settings)
    return output, torch.autograd.grad(output.loss, leaf)[0]


def optional(outputs: Tensor, inputs: Any, mask: Tensor, weight: float = 0.5, power: int = 2) -> LossFnOutput:
    """What it does depends on what it is given.

    And this is not part of the description.
    """
    logprobs = outputs.log_softmax(-1)[..., 0] * mask
    weights = inputs.get("weights")
    if weights is None:
        weights = torch.ones_like(logprobs)
    loss = -(logprobs * weights).sum()
    if "reference" in inputs:
        loss = loss + weight * ((logprobs - inputs["reference"]) ** power).sum()
    return LossFnOutput(loss, logprobs, {"mean": logprobs.mean().item(), "constant": 1.0})
