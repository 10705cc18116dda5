"""Functions of torch can be called in every way that torch accepts, or raise where they are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import ones
from torch.nn import functional as F  # noqa: N812

from tests.helpers.graph_messages import graph, node, ref
from tests.helpers.traced_losses import assert_same
from tinker_lightning.errors import InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph.graph import Graph
from tinker_lightning.lossgraph.program import Program
from tinker_lightning.lossgraph.trace import trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# Of these torch writes `out=None` down itself.
@pytest.mark.parametrize(
    "change",
    [
        lambda x: F.normalize(x, dim=-1),
        torch.norm,
        lambda x: torch.norm(input=x, p=1, dim=-1),
        lambda x: x * torch.ones(1, requires_grad=False, pin_memory=False),
    ],
)
def test_arguments_with_nothing_in_them_are_left_out(change: Callable[[Tensor], Tensor]) -> None:
    traced = assert_same(lambda logprobs: (change(logprobs).exp().sum(), {}), {"logprobs": 2})
    named = {name for each in traced.program.graph.calls for name in each.kwargs}
    assert not named & {"out", "requires_grad", "pin_memory"}


def test_a_graph_of_others_may_have_such_arguments() -> None:
    """The official SDK writes down what torch.fx does."""
    x = torch.tensor([[3.0, 4.0]])
    call = node("a", "torch.nn.functional.normalize", ref("logprobs"), p=2.0, dim=1, eps=1e-12, out=None)
    assert torch.equal(Program(Graph.decode(graph(call, output=ref("a"))))([x]), F.normalize(x))
    with pytest.raises(InvalidLoss, match="the argument 'out' is not supported"):
        Graph.decode(graph(node("a", "torch.nn.functional.normalize", ref("logprobs"), out=ref("logprobs"))))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.div(input=x, other=2),
        lambda x: torch.chunk(input=x, chunks=2)[1],
        lambda x: torch.unbind(input=x)[0],
        lambda x: torch.split(tensor=x, split_size_or_sections=2)[0],
        lambda x: torch.roll(input=x, shifts=1, dims=0),
        lambda x: torch.diff(input=x, dim=0),
        lambda x: torch.diff(x, dim=0, prepend=x[:1], append=x[-1:]),
        lambda x: x.diff(2, 0, x[:1]),
        lambda x: torch.repeat_interleave(input=x, repeats=2, dim=0),
        lambda x: torch.sort(input=x, dim=0).values,
        lambda x: torch.matmul(input=x, other=x.T),
        lambda x: torch.mm(mat2=x.T, input=x),
        lambda x: torch.dot(input=x[0], tensor=x[1]),
        lambda x: torch.mv(x, vec=x[0]),
        lambda x: torch.inner(input=x, other=x),
        lambda x: torch.where(condition=x > 0, input=x, other=0.0),
    ],
)
def test_arguments_by_name(change: Callable[[Tensor], Tensor]) -> None:
    assert_same(lambda logprobs: (change(logprobs).square().sum(), {}), {"logprobs": 2})


def test_the_places_of_what_is_true() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        (first,) = torch.nonzero(weights > 0, as_tuple=True)
        (second,) = (weights < 0).nonzero(as_tuple=True)
        third = torch.nonzero(weights > 0)[:, 0]
        return (logprobs[first] ** 2 + logprobs[third]).sum() - logprobs[second].exp().sum(), {}

    assert_same(loss)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros(x.shape[0], x.shape[1]) + 1,
        lambda x: torch.ones(*x.shape),
        lambda x: torch.ones(x.size(0), 4, dtype=torch.float64),
        lambda x: ones(x.shape[0], x.shape[1], device=x.device),
        lambda x: torch.ones(x.shape),
        lambda x: torch.ones(5, x.shape[1]),
    ],
)
def test_sizes_one_by_one(make: Callable[[Tensor], Tensor]) -> None:
    assert_same(lambda logprobs: ((logprobs * make(logprobs)).sum() * make(logprobs).sum(), {}), {"logprobs": 2})
    assert torch.ones is ones  # while it is traced it is another


def test_a_shape_has_a_number_of_elements() -> None:
    assert_same(lambda logprobs: (logprobs.sum() / logprobs.shape.numel() * logprobs[1:].numel(), {}), {"logprobs": 2})
    assert_same(lambda logprobs: (logprobs.sum() * logprobs.shape[:1].numel(), {}), {"logprobs": 2})


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 3, 4, 5])), "integer number of repeats, not a tensor"),
        (lambda x: torch.repeat_interleave(x, repeats=(x > 0).long()), "integer number of repeats, not a tensor"),
        (
            lambda x: torch.repeat_interleave(x, 2, output_size=10),
            r"got an unexpected keyword argument 'output_size'; on a server it takes \(input, repeats, dim\)",
        ),
        (lambda x: F.one_hot(x.argsort()), "one_hot: missing a required argument: 'num_classes'"),
        (lambda x: x + torch.rand(x.shape[0], 1), r"'torch\.rand' is not among those"),
        (lambda x: x.clamp(torch.finfo(x.dtype).min), r"a tensor's dtype, .* name a dtype, as in torch\.finfo"),
        (lambda x: x.long().clamp(torch.iinfo(x.long().dtype).min), "a tensor's dtype, which is not known"),
        (lambda x: x.to(torch.promote_types(x.dtype, torch.float64)), r"'torch\.promote_types' is not among those"),
        (lambda x: F.mse_loss(*[x]), "torch.nn.functional.mse_loss: missing a required argument: 'target'"),
    ],
)
def test_arguments_that_no_run_could_take(change: Callable[[Tensor], Tensor], because: str) -> None:
    with pytest.raises(LossNotTraceable, match=rf"(?s){__file__}:\d+: .*{because}.*forward_backward_custom"):
        trace_datum_loss(lambda logprobs: (change(logprobs).sum(), {}), {"logprobs": 1})


def test_a_server_looks_at_arguments_when_it_reads_a_graph() -> None:
    with pytest.raises(InvalidLoss, match=r"node 'a': torch\.diff: got an unexpected keyword argument 'to'"):
        Graph.decode(graph(node("a", "torch.diff", ref("logprobs"), to=3)))
    with pytest.raises(InvalidLoss, match="node 'a': chunk: missing a required argument: 'chunks'"):
        Graph.decode(graph(node("a", "chunk", ref("logprobs"), op="call_method")))
