"""Functions that a server-side loss may call. The page `docs/server-functions.md` is made from the list.

`UPDATE_DOCS=1 pytest tests/lossgraph/test_functions.py` regenerates it.
"""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.graph_programs import X, call, run
from tests.helpers.soaking import mostly_soak
from tests.helpers.traced_losses import assert_same
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.functions import FUNCTIONS, METHODS
from tinker_lightning.lossgraph.graph import Node, Ref
from tinker_lightning.lossgraph.guards import ATTRIBUTES
from tinker_lightning.lossgraph.recorder import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "server-functions.md"
BEGIN, END = "<!-- the list -->\n", "<!-- its end -->\n"
# Under these names nobody calls them.
INSIDE = ("torch._C.", "torch.functional.", "torch.nn.functional._", "builtins.", "operator.", "getattr")
SIGNS = {
    "add": "x + y",
    "sub": "x - y",
    "mul": "x * y",
    "truediv": "x / y",
    "floordiv": "x // y",
    "mod": "x % y",
    "pow": "x ** y",
    "matmul": "x @ y",
    "neg": "-x",
    "pos": "+x",
    "abs": "abs(x)",
    "invert": "~x",
    "and_": "x & y",
    "or_": "x | y",
    "xor": "x ^ y",
    "lshift": "x << y",
    "rshift": "x >> y",
    "eq": "x == y",
    "ne": "x != y",
    "lt": "x < y",
    "le": "x <= y",
    "gt": "x > y",
    "ge": "x >= y",
    "getitem": "x[i]",
    "setitem": "x[i] = y",
}


def listing() -> str:
    names = [name for name in FUNCTIONS if not name.startswith(INSIDE)]
    plain = {name.removeprefix("torch.") for name in names if name.count(".") == 1 and name.startswith("torch.")}
    methods = set(METHODS)
    parts: list[tuple[str, Iterable[str]]] = [
        ("Of Python", list(SIGNS.values())),
        ("Functions of torch that are methods of tensors too: `torch.exp(x)` and `x.exp()`", plain & methods),
        ("Other functions of torch: `torch.stack([x, y])`", plain - methods),
        ("Other methods of tensors: `x.view(-1)`", methods - plain),
        ("Methods that change the tensor, which tracing replaces by those that return a new one", IN_PLACE),
    ]
    folders = sorted({name.rpartition(".")[0] for name in names if name.count(".") > 1})
    for folder in [*folders, "math"]:
        inside = {name.removeprefix(f"{folder}.") for name in names if name.rpartition(".")[0] == folder}
        parts.append((f"Of `{folder}`" + (", on numbers" if folder == "math" else ""), inside))
    parts.append(("Attributes", ATTRIBUTES))
    return "\n".join(f"## {title}\n\n{wrapped(inside)}\n" for title, inside in parts)


def wrapped(names: Iterable[str]) -> str:
    ordered = names if isinstance(names, list) else sorted(names)
    lines = [""]
    for each in (f"`{name}`" for name in ordered):
        separator = ", " if lines[-1] else ""
        if len(lines[-1]) + len(separator) + len(each) < 140:
            lines[-1] += separator + each
        else:
            lines[-1] += ","
            lines.append(each)
    return "\n".join(lines)


def test_the_page_has_the_list() -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    whole = head + BEGIN + listing() + END + tail
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(whole)
    assert PAGE.read_text() == whole


def test_everything_is_on_the_page() -> None:
    operators = {name.removeprefix("operator.") for name in FUNCTIONS if name.startswith("operator.")}
    assert operators - {"inv", "not_"} == SIGNS.keys()  # the one is `~x` too, the other Python decides itself
    told = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    for name in {*FUNCTIONS, *METHODS}:
        if not name.startswith(INSIDE):
            assert f"`{name.rpartition('.')[2]}`" in told, name


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (x * 1).div_(2) + (x * 1).exp_() + (x * 1).neg_(),
        lambda x: (x * 1).div_(2, rounding_mode="floor") + x,
        lambda x: torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 1.0) * x,
        lambda x: torch.linalg.norm(x) + torch.linalg.norm(x, dim=1).sum() + torch.linalg.norm(x, ord="fro"),
        lambda x: torch.linalg.norm(x[0], 1) + torch.linalg.norm(x, ord=float("inf")),
        lambda x: torch.special.expm1(x) + torch.special.expit(x) + torch.special.entr(x.exp()),
        lambda x: torch.special.logsumexp(x, 1) + torch.special.log_softmax(x, 1).sum(1),
        lambda x: torch.trace(x) + x.T.trace(),
        lambda x: F.layer_norm(x, x.shape[-1:]) * F.selu(x) + F.mish(x),
        lambda x: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0)),
        lambda x: pad_sequence([x[0, :3], x[1, :2]], batch_first=True, padding_value=2.0),
    ],
)
def test_what_losses_of_vectors_and_entropies_use(change: Callable[[Tensor], Tensor]) -> None:
    assert_same(lambda logprobs: (change(logprobs).sum(), {}), {"logprobs": 2})


@pytest.mark.parametrize("options", [{"ord": 2}, {"ord": -2.0}, {"ord": "nuc"}, {"ord": 2, "dim": (0, 1)}])
def test_norms_of_matrices_that_need_their_singular_values(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidLoss, match=r"of a matrix is not supported: it needs a singular value decomposition"):
        run(call("torch.linalg.norm", X, **options))


def test_rows_are_not_padded_one_by_one() -> None:
    with pytest.raises(InvalidLoss, match="pad_sequence takes a list of tensors, not a tensor"):
        run(call("torch._C._nn.pad_sequence", X))
    long, short = call("torch.zeros", 1 << 22), call("torch.zeros", 1)
    with pytest.raises(InvalidLoss, match="would create a tensor of"):
        run(long, short, call("torch._C._nn.pad_sequence", [Ref(1), *[Ref(2)] * 63]))


WAYS = (("call_function", "torch."), ("call_method", ""))
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", mostly_soak(INTEGERS, but=[torch.int8, torch.int64]))
@pytest.mark.parametrize("form", ["tensors", "by a number", "of a number"])
@pytest.mark.parametrize(
    ("op", "target", "options"),
    [
        ("call_function", "operator.floordiv", {}),
        ("call_function", "operator.mod", {}),
        *((op, prefix + name, {}) for op, prefix in WAYS for name in ("floor_divide", "remainder", "fmod")),
        *((op, f"{prefix}div", {"rounding_mode": mode}) for op, prefix in WAYS for mode in ("floor", "trunc")),
        *((op, f"{prefix}divide", {"rounding_mode": mode}) for op, prefix in WAYS for mode in ("floor", "trunc")),
    ],
)
def test_the_smallest_integer_can_be_divided_by_minus_one(
    op: str, target: str, options: dict[str, Any], form: str, dtype: torch.dtype
) -> None:  # R3.7
    """In torch that is SIGFPE, which ends the process; elsewhere the guard must not change a result."""
    low = torch.iinfo(dtype).min
    if form == "of a number" and (op == "call_method" or target == "torch.fmod"):
        pytest.skip("torch takes no number there")
    x, y = torch.tensor([low, low, -7, 7, 6, -6], dtype=dtype), torch.tensor([-1, 3, -1, -1, 4, -4], dtype=dtype)
    plain = getattr(operator if target.startswith("operator") else torch, target.rpartition(".")[2])
    for given, other in zip(x.tolist(), y.tolist(), strict=True):
        one, two = torch.tensor([given], dtype=dtype), torch.tensor([other], dtype=dtype)
        left, right = {"tensors": (X, Ref(1)), "by a number": (X, other), "of a number": (given, Ref(1))}[form]
        calls = [call("torch.tensor", [other], dtype=dtype), Node(op, "result", target, (left, right), options)]
        got = run(*calls, x=one)
        assert got.dtype == dtype
        if given == low and other == -1:
            assert got.item() in (low, 0)  # the quotient wraps
        else:
            assert torch.equal(
                got, plain(one if left is X else given, two if isinstance(right, Ref) else other, **options)
            )


@pytest.mark.parametrize("target", ["operator.lshift", "operator.rshift"])
@pytest.mark.parametrize("count", [-1, 63, 64, 2**40])
def test_shifts_by_any_number_return(target: str, count: int) -> None:  # R3.7
    low = torch.tensor([-(2**63), 1])
    assert run(call("torch.tensor", [count, count]), call(target, X, Ref(1)), x=low).shape == (2,)
    assert run(call(target, X, count), x=low).shape == (2,)
