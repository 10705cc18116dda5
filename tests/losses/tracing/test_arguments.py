"""A function of torch's can be called in all the ways that torch takes, or is refused where it is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.losses.graphs.test_graph import graph, node, ref
from tests.losses.tracing.test_record import assert_same
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses.graphs.graph import Graph
from tinker_lightning.losses.graphs.run import Program

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
    with pytest.raises(InvalidLoss, match="the argument 'out' is not taken"):
        Graph.decode(graph(node("a", "torch.nn.functional.normalize", ref("logprobs"), out=ref("logprobs"))))
