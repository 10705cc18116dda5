"""Graphs run like the Python function they come from; a run that would take too much memory or time raises first."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.graph_programs import X, call, method, program, run
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph import functions
from tinker_lightning.lossgraph.graph import Node, Ref
from tinker_lightning.lossgraph.program import Limits, Use


@pytest.fixture
def bounded() -> Any:
    """Whatever a test does takes little memory and time."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB
    assert time.perf_counter() - started < 15


N = 1 << 22  # so many elements are within the limits; its square is not
BIG = 10**12
# Each has two inputs, a matrix and a vector of whole numbers, so that Ref(2) is its first call.
BOMBS: dict[str, tuple[Node, ...]] = {
    "zeros": (call("torch.zeros", BIG),),
    "zeros whose size overflows": (call("torch.zeros", [2**62, 2**62]),),
    "full": (call("torch.full", (BIG,), 1.0),),
    "ones, on a device of its choice": (call("torch.ones", BIG, device=torch.device("cpu")),),
    "arange": (call("torch.arange", BIG),),
    "arange of tiny steps": (call("torch.arange", 0.0, 1.0, 1e-13),),
    "linspace": (call("torch.linspace", 0, 1, BIG),),
    "eye": (call("torch.eye", 10**6),),
    "one_hot": (call("torch.nn.functional.one_hot", Ref(1), BIG),),
    "new_zeros": (method("new_zeros", X, (BIG,)),),
    "repeat": (method("repeat", X, BIG, 1),),
    "repeat_interleave": (call("torch.repeat_interleave", X, BIG),),
    "tile": (call("torch.tile", X, (BIG, 1)),),
    "expand, then copy": (
        method("reshape", X, (-1, 1)),
        method("expand", Ref(2), -1, BIG),
        method("clone", Ref(3)),
    ),
    "expand, then sum": (method("reshape", X, (-1, 1)), method("expand", Ref(2), -1, BIG), method("sum", Ref(3))),
    "outer product": (call("torch.zeros", N), call("torch.outer", Ref(2), Ref(2))),
    "broadcast": (
        call("torch.zeros", [N, 1]),
        call("torch.zeros", [1, N]),
        call("operator.mul", Ref(2), Ref(3)),
    ),
    "broadcast inside a reduction": (
        call("torch.zeros", [N, 1]),
        call("torch.zeros", [1, N]),
        call("torch.nn.functional.mse_loss", Ref(2), Ref(3)),
    ),
    "cosine similarity": (
        call("torch.zeros", [N, 1, 1]),
        call("torch.zeros", [1, N, 1]),
        call("torch.cosine_similarity", Ref(2), Ref(3), -1),
    ),
    "matmul": (call("torch.zeros", [N, 1]), call("torch.zeros", [1, N]), call("torch.matmul", Ref(2), Ref(3))),
    "matmul whose operands are broadcast": (
        call("torch.zeros", [1024, 1, 1, 4096]),
        call("torch.zeros", [1, 1024, 4096, 1]),
        call("operator.matmul", Ref(2), Ref(3)),
    ),
    "a long matmul": (call("torch.zeros", [2048, 2048]), *(call("torch.mm", Ref(2 + i), Ref(2)) for i in range(20))),
    "einsum": (
        call("torch.zeros", [N]),
        call("torch.einsum", "i,j->ij", Ref(2), Ref(2)),
    ),
    "einsum of many": (call("torch.einsum", "i,j,k->", Ref(1), Ref(1), Ref(1)),),
    "cat": (call("torch.zeros", N), call("torch.cat", [Ref(2)] * 64)),
    "stack": (call("torch.zeros", N), call("torch.stack", [Ref(2)] * 64)),
    "pad": (call("torch.nn.functional.pad", X, (0, BIG)),),
    "unfold": (call("torch.zeros", N), method("unfold", Ref(2), 0, N // 2, 1)),
    "diag": (call("torch.zeros", N), call("torch.diag_embed", Ref(2))),
    "masks that meet index tensors": (
        call("torch.ones", N),
        call("operator.gt", Ref(2), 0),
        call("torch.zeros", [N, 1], dtype=torch.int64),
        call("torch.zeros", [N, 1]),
        call("operator.getitem", Ref(5), (Ref(3), Ref(4))),
    ),
    "set items by index tensors that are broadcast": (
        call("torch.zeros", [4, 4]),
        call("torch.zeros", [N, 1], dtype=torch.int64),
        call("torch.zeros", [1, N], dtype=torch.int64),
        call("operator.setitem", Ref(2), (Ref(3), Ref(4)), 0.0),
    ),
    "masked_select of what is broadcast": (
        call("torch.zeros", [N, 1]),
        call("torch.ones", [1, N], dtype=torch.bool),
        call("torch.masked_select", Ref(2), Ref(3)),
    ),
    "nonzero, then its square": (
        call("torch.ones", N),
        call("torch.nonzero", Ref(2)),
        call("operator.mul", Ref(3), 1.0),
        method("reshape", Ref(4), (1, -1)),
        call("operator.mul", Ref(4), Ref(5)),
    ),
    "one tensor after another": tuple(call("torch.zeros", N) for _ in range(64)),
    "the same tensor read a thousand times": (call("torch.zeros", N), *(method("sum", Ref(2)) for _ in range(1000))),
    "sorts": (call("torch.zeros", N), *(call("torch.sort", Ref(2)) for _ in range(20))),
    "diff": (call("torch.zeros", N), call("torch.diff", Ref(2), N - 1)),
    "roll": (call("torch.roll", X, [1] * 20000, [0] * 20000),),
    "pieces": (call("torch.zeros", N), call("torch.split", Ref(2), 1)),
    "pieces by method": (call("torch.zeros", N), method("split", Ref(2), 1)),
    "unbind": (call("torch.zeros", N), call("torch.unbind", Ref(2))),
    "chunks": (call("torch.zeros", N), call("torch.chunk", Ref(2), N)),
    "dimensions": tuple(method("unsqueeze", X if not i else Ref(1 + i), 0) for i in range(40)),
    "nuclear norm": (call("torch.functional.norm", X, "nuc"),),
    "int pow": (call("operator.pow", 10, 10**9),),
    "int pow of pow": (call("operator.pow", 2, 62), call("operator.pow", Ref(2), Ref(2))),
    "int shift": (call("operator.lshift", 1, 10**9),),
    "int product": (call("operator.mul", 2**62, 2**62),),
    "math.floor of a huge float": (call("math.floor", 1e308),),
    "math.exp": (call("math.exp", 1e6),),
    "text times a number": (call("operator.mul", "a", 10**9),),
    "a list times a number": (call("operator.mul", [0], 10**9),),
    "text formatting": (call("operator.mod", "%1000000000d", 1),),
    "text added to itself": (call("operator.add", "a", "a"),),
    "tuples added to each other": tuple(
        call("operator.add", *([(1, 2)] * 2 if not i else [Ref(1 + i)] * 2)) for i in range(40)
    ),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.usefixtures("bounded")
def test_bombs(name: str) -> None:  # R3.7
    with pytest.raises(InvalidLoss, match=r"node 'bomb_\d+'"):
        program(*BOMBS[name], inputs=2)([torch.zeros(3, 4), torch.zeros(1, dtype=torch.int64)])


def against_quickselect(n: int) -> Tensor:
    """Values that let a quickselect by the median of three drop two at a time."""
    at, values = list(range(n)), [float(n)] * n
    for low in range(0, n - 3, 2):
        middle = low + (n - 1 - low) // 2
        at[middle], at[low + 1] = at[low + 1], at[middle]
        values[at[low + 1]], values[at[low]] = float(low), float(low + 1)
    return torch.tensor(values)


@pytest.mark.parametrize("target", ["median", "nanmedian", "topk", "quantile", "sort", "argsort"])
def test_no_order_of_values_makes_a_call_slow(target: str) -> None:  # R3.7
    n = 1 << 17
    arguments = {"topk": (n // 2,), "quantile": (0.5,)}.get(target, ())
    values = against_quickselect(n)
    started = time.perf_counter()
    run(method(target, X, *arguments), x=values)
    assert time.perf_counter() - started < 1.0


def test_kthvalue_is_not_listed() -> None:  # R3.7
    """torch needs quadratic time for it on values that are chosen for that; `sort` and `topk` do not."""
    with pytest.raises(InvalidLoss, match=r"the function 'torch\.kthvalue' is not among those"):
        run(call("torch.kthvalue", X, 1))


def test_the_gradient_of_a_running_product_is_quick() -> None:  # R3.7
    """Also where a division cannot compute it."""
    x = torch.rand(1 << 18)
    x[1000:] = 0
    x.requires_grad_()
    started = time.perf_counter()
    run(method("cumprod", X, 0), method("sum", Ref(1)), x=x).backward()
    assert time.perf_counter() - started < 1.0


def test_a_large_input_raises_too() -> None:
    with pytest.raises(InvalidLoss, match="node 'x0': it would create a tensor of 1e"):
        program(method("sum", X))([torch.zeros(1).expand(10**9)])


def test_a_run_has_a_deadline() -> None:
    slow = Limits(seconds=-1.0)
    with pytest.raises(InvalidLoss, match="checking the loss took -1 s and was stopped"):
        program(method("sum", X))([torch.zeros(3)], slow)
    ready = program(method("sum", X))
    ready._plans[(slow, (torch.Size([3]), torch.float32))] = 1, Use()
    with pytest.raises(InvalidLoss, match="has run for -1 s and was stopped"):
        ready([torch.zeros(3)], slow)


def test_shapes_are_checked_before_anything_is_computed() -> None:
    wrong = program(method("sum", X), call("operator.add", X, Ref(1)), inputs=2)
    with pytest.raises(InvalidLoss, match=r"node 'bomb_1': operator\.add failed: .*broadcast"):
        wrong.check([torch.zeros(3, device="meta"), torch.zeros(4, device="meta")])
    wrong.check([torch.zeros(3, device="meta"), torch.zeros(3, device="meta")])


def test_an_error_of_torch_names_the_node() -> None:
    index = torch.tensor([[7]])
    with pytest.raises(InvalidLoss, match=r"node 'bomb_0': torch\.gather failed: index 7 is out of bounds"):
        run(call("torch.gather", X, 1, Ref(1)), x=[torch.zeros(1, 4), index])
    with pytest.raises(InvalidLoss, match="node 'bomb_0': the attribute '__class__' is not supported"):
        run(call("getattr", X, "__class__"))
    with pytest.raises(InvalidLoss, match="the attribute 'grad_fn' is not supported"):
        run(call("builtins.getattr", X, "grad_fn"))
    with pytest.raises(InvalidLoss, match="sum failed"):
        run(method("sum", "text"))
    unknown = program(call("torch.exp", X))  # of which it was forgotten that its size cannot be told
    unknown._functions = [functions.Function(torch.nonzero)]
    with pytest.raises(InvalidLoss, match=r"the size of the result of torch\.exp depends on values"):
        unknown([torch.ones(2)])


def test_values_whose_size_depends_on_values() -> None:
    """From there on each call is checked when it is made."""
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    total = run(call("operator.gt", X, 0), call("operator.getitem", X, Ref(1)), method("sum", Ref(2)), x=x)
    total.backward()
    assert total.item() == 4.0
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 1.0]
    places = (
        call("operator.gt", X, 0),
        call("torch.nonzero", Ref(1), as_tuple=True),
        call("operator.getitem", Ref(2), 0),
    )
    assert run(*places, x=x).tolist() == [0, 2]
    with pytest.raises(InvalidLoss, match=r"node 'bomb_2': it would create a tensor of 2e"):
        run(call("operator.gt", X, 0), call("operator.getitem", X, Ref(1)), method("repeat", Ref(2), 10**9), x=x)


def test_items_are_set_in_a_copy_with_a_gradient() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    calls = (call("operator.gt", X, 1.5), call("operator.setitem", X, Ref(1), 0.0), method("sum", Ref(2)))
    total = run(*calls, x=x)
    assert x._version == 0
    total.backward()
    assert total.item() == 1.0
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 0.0]


def test_devices_are_where_the_run_is() -> None:
    assert run(call("torch.zeros", 3, device=torch.device("cuda"))).device.type == "cpu"
    assert run(call("getattr", X, "device"), call("torch.ones", 2, device=Ref(1))).device.type == "cpu"
    assert run(method("cuda", X)).device.type == "cpu"
    assert run(method("to", X, torch.device("cuda"), torch.float64)).dtype == torch.float64


def test_numbers_and_shapes() -> None:
    size = (call("getattr", X, "shape"), call("operator.getitem", Ref(1), -1), call("operator.mul", Ref(2), 0.5))
    assert run(*size, call("operator.truediv", X, Ref(3))).shape == (3, 4)
    assert run(*size, call("math.sqrt", Ref(3))) == pytest.approx(2**0.5)
    assert run(call("getattr", X, "shape"), call("operator.add", Ref(1), (1,)), method("reshape", X, Ref(2))).ndim == 3
    top = (call("torch.topk", X, 2), call("getattr", Ref(1), "indices"))
    assert run(*top).dtype == torch.int64
    with pytest.raises(InvalidLoss, match=r"math\.log works on numbers; use torch\.log for tensors"):
        run(call("math.log", X))


# What each function that takes one tensor needs besides it.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "amax": (-1,),
    "argsort": (-1,),
    "broadcast_to": ((2, 3, 4),),
    "clamp": (-1.0, 1.0),
    "clamp_max": (1.0,),
    "clamp_min": (-1.0,),
    "clip": (-1.0, 1.0),
    "cummax": (0,),
    "cummin": (0,),
    "cumprod": (0,),
    "cumsum": (0,),
    "diagonal": (0, 0, 1),
    "expand": (2, 3, 4),
    "flatten": (0,),
    "flip": ((0,),),
    "full_like": (2.0,),
    "log_softmax": (-1,),
    "logcumsumexp": (-1,),
    "logsumexp": (-1,),
    "movedim": (0, 1),
    "narrow": (0, 0, 2),
    "new_full": ((2,), 1.0),
    "new_ones": ((2,),),
    "new_tensor": ([1.0, 2.0],),
    "new_zeros": ((2,),),
    "normalize": (),
    "one_hot": (5,),
    "pad": ((1, 1),),
    "permute": ((1, 0),),
    "quantile": (0.5,),
    "nanquantile": (0.5,),
    "repeat": (2, 2),
    "repeat_interleave": (2,),
    "reshape": ((4, 3),),
    "roll": (1,),
    "select": (0, 1),
    "softmax": (-1,),
    "softmin": (-1,),
    "split": (2,),
    "chunk": (2,),
    "swapaxes": (0, 1),
    "threshold": (0.0, 1.0),
    "tile": ((2, 1),),
    "to": (torch.float64,),
    "topk": (2,),
    "transpose": (0, 1),
    "unflatten": (1, (2, 2)),
    "unfold": (0, 2, 1),
    "unsqueeze": (0,),
    "view": (4, 3),
    "layer_norm": ((4,),),
    "special_logsumexp": (-1,),
}
WHOLE = ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "one_hot")


def unary(table: dict[str, Any]) -> list[str]:
    """The names whose functions take one tensor, found by trying."""
    found = []
    for name, function in sorted(table.items()):
        short = name.rpartition(".")[2]
        if short == "where":  # with one argument it is another function
            continue
        x = torch.rand(3, 4) if short not in WHOLE else torch.randint(0, 3, (3, 4))
        try:
            function.call(x, *ARGUMENTS.get(short, ()))
        except Exception:  # noqa: S112  # it takes more than one tensor, or none
            continue
        found.append(name)
    return found


@pytest.mark.parametrize(
    "op_and_name",
    [("call_method", name) for name in unary(functions.METHODS)]
    + [("call_function", name) for name in unary(functions.FUNCTIONS) if name.startswith("torch")],
)
def test_everything_on_the_list_that_takes_a_tensor_runs(op_and_name: tuple[str, str]) -> None:
    """Its size can be told before it runs, or it is known that it cannot; and the result is torch's."""
    op, name = op_and_name
    short = name.rpartition(".")[2]
    x = torch.rand(3, 4) + 0.1 if short not in WHOLE else torch.randint(0, 3, (3, 4))
    arguments = ARGUMENTS.get(short, ())
    expected = functions.find(op, name).call(x.clone(), *arguments)
    given = x.clone()
    got = program(Node(op, "bomb", name, (X, *arguments)))([given])
    assert given._version == 0  # R3.7
    torch.testing.assert_close(plain(got), plain(expected), equal_nan=True)


def plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value


def test_most_of_the_list_is_covered_by_the_test_above() -> None:
    assert len(unary(functions.METHODS)) > 120
    assert isinstance(run(method("abs", X)), Tensor)


def test_memory_behind_a_mask_adds_to_that_before_it() -> None:  # R5.11
    grown = program(
        method("exp", X),
        call("operator.gt", Ref(1), 0.0),
        call("operator.getitem", Ref(1), Ref(2)),
    )
    reserved: list[int] = []
    grown([torch.zeros(1000)], Limits(memory=20_000, reserve=reserved.append))
    # exp, the mask, as many selected values as there can be, and gradients of the largest.
    assert max(reserved) == 4000 + 1000 + 4000 + 3 * 4000
    with pytest.raises(InvalidLoss, match=r"up to here the loss takes .* of memory"):
        grown([torch.zeros(1000)], Limits(memory=8_000))


def test_a_copy_of_an_expanded_tensor_behind_a_mask_counts() -> None:  # R5.11
    copied = program(
        call("operator.gt", X, 0.0),
        call("operator.getitem", X, Ref(1)),
        method("sum", Ref(2)),
        method("expand", Ref(3), 100_000),
        *(method("contiguous", Ref(4)) for _ in range(3)),
    )
    reserved: list[int] = []
    assert len(copied([torch.ones(10)], Limits(reserve=reserved.append))) == 100_000
    assert 3 * 400_000 <= max(reserved) < 3_000_000
    with pytest.raises(InvalidLoss, match=r"up to here the loss takes .* of memory"):
        copied([torch.ones(10)], Limits(memory=1_100_000))
