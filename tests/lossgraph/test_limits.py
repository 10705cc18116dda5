"""The work of a call beyond its arguments and its result is counted, so that no single one runs for minutes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.graph_programs import call, method, program
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graph import Node, Ref
from tinker_lightning.lossgraph.program import Limits

# For each estimate calls that take much more time or memory than the elements that they are given and return, the
# elements that are too few to let them run, and those that are enough.
ESTIMATES: dict[str, tuple[tuple[Node, ...], Limits, Limits]] = {}


def estimate(name: str, *calls: Node, few: int, enough: int, limit: str = "total") -> None:
    less: dict[str, Any] = {limit: few}
    more: dict[str, Any] = {limit: enough}
    ESTIMATES[name] = calls, Limits(**less), Limits(**more)


for _dtype, _work in ((torch.float32, 1 << 20), (torch.float64, 1 << 20), (torch.bfloat16, 1 << 27)):
    for _name in ("matmul", "mm", "inner"):
        estimate(
            f"{_name} of {_dtype}",
            call("torch.ones", [256, 256], dtype=_dtype),
            call(f"torch.{_name}", Ref(1), Ref(1)),
            few=_work,
            enough=_work + 300_000,
        )
estimate(
    "mm of torch.int64",
    call("torch.ones", [64, 64], dtype=torch.int64),
    call("torch.mm", Ref(1), Ref(1)),
    few=1 << 21,
    enough=(1 << 21) + 20_000,
)
estimate(
    "bmm",
    call("torch.ones", [4, 128, 128]),
    call("torch.bmm", Ref(1), Ref(1)),
    few=1 << 19,
    enough=(1 << 19) + 300_000,
)
for _name, _shape in (("mv", [64, 64]), ("dot", [64])):
    estimate(
        _name,
        call("torch.ones", _shape, dtype=torch.int64),
        call("torch.ones", [64], dtype=torch.int64),
        call(f"torch.{_name}", Ref(1), Ref(2)),
        few=8 * torch.Size(_shape).numel(),
        enough=8 * torch.Size(_shape).numel() + 10_000,
    )
estimate(
    "einsum",
    call("torch.ones", [256, 256]),
    call("torch.einsum", "ij,jk->ik", Ref(1), Ref(1)),
    few=1 << 20,
    enough=(1 << 20) + 300_000,
)
estimate(
    "einsum of whole numbers",
    call("torch.ones", [64, 64], dtype=torch.int64),
    call("torch.einsum", "ij,jk->ik", Ref(1), Ref(1)),
    few=1 << 21,
    enough=(1 << 21) + 20_000,
)
estimate(
    "einsum of what is broadcast",
    call("torch.ones", [64, 64, 64]),
    call("torch.ones", [1, 64, 64]),
    call("torch.einsum", "bij,bjk->bk", Ref(1), Ref(2)),
    few=1 << 20,
    enough=(1 << 20) + 600_000,
)
for _name in ("sort", "argsort", "median", "nanmedian", "topk", "quantile", "nanquantile"):
    _more = {"topk": (2,), "quantile": (0.5,), "nanquantile": (0.5,)}.get(_name, ())
    estimate(
        _name, call("torch.ones", 10_000), method(_name, Ref(1), *_more), few=16 * 10_000, enough=16 * 10_000 + 50_000
    )
estimate(
    "setitem",
    call("torch.zeros", [4, 4]),
    call("torch.zeros", [500, 1], dtype=torch.int64),
    call("torch.zeros", [1, 500], dtype=torch.int64),
    call("operator.setitem", Ref(1), (Ref(2), Ref(3)), 0.0),
    few=500 * 500,
    enough=500 * 500 + 5_000,
)
estimate(
    "setitem by a mask",
    call("torch.zeros", [100, 100]),
    call("operator.gt", Ref(1), 0.0),
    call("operator.setitem", Ref(1), Ref(2), 0.0),
    few=4 * 100 * 100 + 30_000,
    enough=4 * 100 * 100 + 60_000,
)
estimate(
    "what a matmul copies",
    call("torch.zeros", [64, 1, 1, 64]),
    call("torch.zeros", [1, 64, 64, 1]),
    call("torch.matmul", Ref(1), Ref(2)),
    few=64**3 - 1,
    enough=64**3,
    limit="elements",
)
estimate(
    "what a reduction makes on the way",
    call("torch.zeros", [500, 1]),
    call("torch.zeros", [1, 500]),
    call("torch.nn.functional.mse_loss", Ref(1), Ref(2)),
    few=500 * 500 - 1,
    enough=500 * 500,
    limit="elements",
)
estimate(
    "what a mask may pick",
    call("torch.ones", [100, 100]),
    call("operator.gt", Ref(1), 0.0),
    call("operator.getitem", Ref(1), Ref(2)),
    few=4 * 100 * 100 + 20_000,
    enough=4 * 100 * 100 + 40_000,
)
estimate(
    "the places of what is true",
    call("torch.ones", [100, 100]),
    call("torch.nonzero", Ref(1)),
    few=4 * 100 * 100 + 5_000,
    enough=4 * 100 * 100 + 40_000,
)
estimate(
    "what a difference puts together",
    call("torch.zeros", [500]),
    call("torch.diff", Ref(1), prepend=Ref(1)),
    few=999,
    enough=1000,
    limit="elements",
)
estimate(
    "what stands in sequences",
    call("torch.ones", [32, 2]),
    call("torch.unbind", Ref(1)),
    call("torch.stack", Ref(2)),
    few=32 * 1024,
    enough=32 * 1024 + 1_000,
)


# The same where arguments are given by name.
estimate(
    "matmul by names",
    call("torch.ones", [256, 256]),
    call("torch.matmul", other=Ref(1), input=Ref(1)),
    few=1 << 20,
    enough=(1 << 20) + 300_000,
)
estimate("sort by name", call("torch.ones", 10_000), call("torch.sort", input=Ref(1)), few=160_000, enough=210_000)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", ESTIMATES)
def test_what_a_call_takes_is_counted_before_it_is_made(name: str) -> None:  # R3.7
    calls, few, enough = ESTIMATES[name]
    with pytest.raises(InvalidLoss, match=f"node 'bomb_{len(calls) - 1}'.* are allowed"):
        program(*calls)([torch.zeros(1)], few)
    program(*calls)([torch.zeros(1)], enough)


def test_a_product_that_would_take_minutes_raises_at_once() -> None:  # R3.7
    """Of whole numbers, within the limits of the largest batch."""
    largest = Limits(elements=1 << 29, total=1 << 32, seconds=60.0)
    product = program(call("torch.ones", [3600, 3600], dtype=torch.int64), call("torch.matmul", Ref(1), Ref(1)))
    with pytest.raises(InvalidLoss, match="matrix products count least in float32"):
        product.check([torch.zeros(1)], largest)
