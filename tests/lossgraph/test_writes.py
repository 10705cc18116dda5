"""In-place operations have the same result in a graph, which modifies no tensor, as in Python, or tracing raises."""

# a loss has parameters that it does not use

from __future__ import annotations

import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.helpers.soaking import mostly_soak
from tests.helpers.traced_losses import T, assert_same
from tinker_lightning.errors import InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph import recorder
from tinker_lightning.lossgraph.functions import FUNCTIONS, METHODS, check_arguments
from tinker_lightning.lossgraph.recorder import IN_PLACE
from tinker_lightning.lossgraph.source_lines import SourceLine
from tinker_lightning.lossgraph.stand_ins import SHARING
from tinker_lightning.lossgraph.trace import trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Callable


def targets(fn: Callable[..., Any]) -> list[str]:
    """The calls in the graph of a loss on one datum."""
    return [node.target for node in trace_datum_loss(fn, {"logprobs": 1, "weights": 1}).program.graph.calls]


def test_parts_of_a_tensor_show_what_is_written_to_it() -> None:  # R3.2
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        scaled = logprobs * weights
        same = scaled
        scaled[0] = scaled[0] * 5.0
        scaled[1:] = scaled[1:] + weights[1:]
        same -= 1.0
        scaled[weights > 0] *= 3.0
        scaled[2:].exp().sum()  # of a part that nothing uses after the next write
        scaled[2:] = scaled[2:] * 0.5
        first, rest = scaled[0], scaled[1:]
        return scaled.sum() + first * 3 + (rest * 2).sum() + rest[1:][0] + same.mean(), {}

    assert_same(loss)
    assert not any(target.endswith("_") for target in targets(loss))


def test_a_part_can_be_changed_if_nothing_else_uses_its_memory() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        ratio = (logprobs * weights).exp().float()
        ratio[weights < 0] = 0.0
        rest = (logprobs + weights)[1:]
        rest += 1
        return ratio.double().sum() + rest.square().sum(), {}

    assert_same(loss)


@pytest.mark.parametrize("name", ["truediv", "floordiv", "mod", "pow"])
def test_operators_without_a_method(name: str) -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        scaled, whole = logprobs.exp() + 1, weights.clone()
        if name == "truediv":
            scaled /= weights.exp() * logprobs.exp()
        elif name == "floordiv":
            whole //= 0.5
        elif name == "mod":
            scaled %= 1.5
        else:
            scaled **= 2
        return (scaled * whole).sum(), {}

    assert_same(loss)


def test_masks_in_place() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        kept, lost = weights > 0, weights > 1
        both = kept
        kept &= logprobs > 0
        lost |= ~both
        kept ^= lost
        return (logprobs * both).sum() + (logprobs * kept * lost).sum(), {}

    assert_same(loss)


def test_augmented_assignment_is_arithmetic() -> None:
    """Other servers know these calls."""

    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        total = -(logprobs * weights).sum()
        total += logprobs.mean()
        total /= 5
        count = weights.shape[0]
        count += 1
        return total * count, {}

    assert_same(loss)
    assert not {"operator.setitem", "clone"} & set(targets(loss))


@pytest.mark.parametrize("method", sorted(IN_PLACE))
def test_methods_in_place(method: str) -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        x = weights * logprobs
        arguments: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys(("add_", "sub_", "mul_", "div_"), (x.exp() + 0.5,)),
            "clamp_": (-0.5, 0.5),
            **dict.fromkeys(("clamp_max_", "clamp_min_"), (0.1,)),
            "copy_": (x[0],),
            "fill_": (x.sum(),),
            "masked_fill_": (x > 0, 2.0),
            "pow_": (2,),
            **dict.fromkeys(("scatter_", "scatter_add_"), (0, x.argsort(), x * 3)),
        }
        changed = logprobs.exp() * weights.exp()
        returned = getattr(changed, method)(*arguments.get(method, ()))
        return (changed * weights).sum() + returned.square().sum() + 0 * logprobs.sum(), {}

    assert_same(loss)


def test_shape_and_dtype_stay() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        half = logprobs.half().clone()
        half += weights
        half[0] = weights[1]
        half.mul_(weights)
        return half.sum().double(), {}

    assert_same(loss)
    grown = trace_datum_loss(lambda logprobs, weights: _grown(logprobs, weights), {"logprobs": 1, "weights": 1})
    with pytest.raises(InvalidLoss, match="expand_as failed"):
        grown({"logprobs": torch.ones(3)}, {"weights": torch.ones(3)})


def _grown(logprobs: Tensor, weights: Tensor) -> Any:
    total = logprobs.sum()
    total += weights
    return total.sum(), {}


def test_what_has_no_gradient_is_changed_under_no_grad() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        with torch.no_grad():
            scaled, copied = logprobs * 2, weights.clone()
            scaled *= weights
            scaled[0] = 3.0
            scaled.add_(1.0)
            copied[1] = logprobs[1]
        return (scaled * copied * logprobs).sum(), {}

    assert_same(loss)


def test_what_has_no_gradient_may_be_given_one() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        with torch.no_grad():
            scaled = logprobs * 2
        scaled[1:] = scaled[1:] + logprobs[1:] * weights[1:]
        return (scaled * weights).sum(), {}

    assert_same(loss)


def test_what_is_given_is_not_changed() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        logprobs, weights = logprobs.clone(), weights.clone()
        logprobs *= 2
        weights[0] = 7.0
        return (logprobs * weights).sum(), {}

    x, weights = torch.ones(3, requires_grad=True), torch.ones(3)
    traced = trace_datum_loss(loss, {"logprobs": 1, "weights": 1})
    assert traced({"logprobs": x}, {"weights": weights}).loss == 18
    assert (x._version, weights._version) == (0, 0)


def an_input(logprobs: Tensor, weights: Tensor) -> Any:
    weights[0] = 7.0
    return (logprobs * weights).sum(), {}


def a_view_of_an_input(logprobs: Tensor, weights: Tensor) -> Any:
    flat = weights.view(-1)
    flat *= 2
    return (logprobs * flat).sum(), {}


def perhaps_an_input(logprobs: Tensor, weights: Tensor) -> Any:
    weights = weights.float()
    weights.clamp_(0, 1)
    return (logprobs * weights).sum(), {}


@pytest.mark.parametrize("fn", [an_input, a_view_of_an_input, perhaps_an_input])
def test_writing_to_an_input_raises(fn: Callable[..., Any]) -> None:
    reason = r"test_writes.py:\d+: .*\n.*modifies an input, or a tensor that may share memory with one.*x\.clone\(\)"
    with pytest.raises(LossNotTraceable, match=rf"(?s){reason}"):
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})


def flat(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    scaled.view(-1)[0] = 2.0
    return scaled.sum(), {}


def a_part(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    scaled_part = scaled[1:]
    scaled_part += 1
    return scaled.sum(), {}


def a_part_of_a_part(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    scaled_part = scaled[1:][0]
    scaled_part.zero_()
    return scaled.sum(), {}


def a_part_taken_before(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    first = scaled[0]
    scaled *= 2
    return scaled.sum() + first, {}


def the_second_of_two(logprobs: Tensor, weights: Tensor) -> Any:
    other, scaled = weights.exp(), logprobs * weights
    both = torch.broadcast_tensors(other, scaled)
    scaled *= 2
    return both[1].sum(), {}


def taken_before(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    column = scaled.unsqueeze(-1)
    scaled += 1
    return column.sum(), {}


def behind_the_gradient(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    scaled.data.clamp_(-1, 1)
    return scaled.sum(), {}


def without_a_gradient(logprobs: Tensor, weights: Tensor) -> Any:
    scaled = logprobs * weights
    with torch.no_grad():
        scaled.clamp_(-1, 1)
    return scaled.sum(), {}


@pytest.mark.parametrize(
    "fn",
    [flat, a_part, a_part_of_a_part, a_part_taken_before, the_second_of_two, taken_before, behind_the_gradient],
)
def test_other_views_cannot_be_used_after_a_change(fn: Callable[..., Any]) -> None:
    shares = r"return .*shares memory with another one, which was modified in place before"
    with pytest.raises(LossNotTraceable, match=rf"(?s)test_writes.py:\d+: {shares} \(.*test_writes.py:\d+: scaled"):
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})


def test_a_write_on_an_unknown_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "current_line", lambda: SourceLine(""))
    with pytest.raises(LossNotTraceable, match="shares memory with another one"):
        trace_datum_loss(taken_before, {"logprobs": 1, "weights": 1})


def test_augmented_assignment_to_an_index_names_the_rewrite() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        scaled = logprobs * weights
        scaled[1:] *= 0.5
        return scaled.sum(), {}

    with pytest.raises(LossNotTraceable, match=r"write x\[i\] = x\[i\] \+ y instead of x\[i\] \+= y"):
        trace_datum_loss(loss, {"logprobs": 1, "weights": 1})


def test_no_write_hides_from_the_gradient() -> None:
    with pytest.raises(LossNotTraceable, match=r"(?s)scaled.clamp_\(-1, 1\)\n.*under torch.no_grad.*detach"):
        trace_datum_loss(without_a_gradient, {"logprobs": 1, "weights": 1})


def a_program(seed: int) -> Callable[..., Any]:
    """Views, writes, numbers and `no_grad` in some order."""

    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        draw = random.Random(seed)  # noqa: S311
        values = [logprobs * 1.5, weights.clone(), logprobs + weights]
        total = logprobs.sum()
        for _ in range(8):
            x, y = draw.choice(values), draw.choice(values)
            with torch.no_grad() if draw.random() < 0.2 else contextlib.nullcontext():
                kind = draw.randrange(9)
                if kind == 0:
                    values.append(x.view(-1))
                elif kind == 1:
                    values.append(draw.choice([x.detach(), x.data, x.flip(0), x * 0.5]))
                elif kind == 2:
                    x += y * 0.5
                elif kind == 3:
                    x *= 1.25
                elif kind == 4:
                    x -= y
                elif kind == 5:
                    x /= y.exp() + 1
                elif kind == 6:
                    x[1:3] = y[2]
                elif kind == 7:
                    part = x[::2]
                    part += y[0] * y[1].item()
                else:
                    total = total + x.sum() * y.mean().item()
                values.append(x)
        if draw.random() < 0.5:  # tensors that share memory with a modified one may exist, but not be used
            values = draw.sample(values, 2)
        return total + sum(value.sum() * (i + 1) for i, value in enumerate(values)), {}

    return loss


@pytest.mark.parametrize("seed", mostly_soak([*range(40), 399, 512, 513], but=[*range(12), 14, 30, 36, 399, 512, 513]))
def test_any_order_of_views_and_writes(seed: int) -> None:
    """The graph computes the same, or there is none."""
    fn = a_program(seed)
    leaf = torch.randn(T, dtype=torch.float64, requires_grad=True)
    try:
        torch.autograd.grad(fn(leaf, torch.randn(T, dtype=torch.float64))[0], leaf)
    except RuntimeError:
        return  # no loss in Python either
    try:
        trace_datum_loss(fn, {"logprobs": 1, "weights": 1})
    except LossNotTraceable:
        reasons = r"(?s)test_writes.py:\d+: .*(shares memory with another one|under torch.no_grad\(\) it modifies)"
        with pytest.raises(LossNotTraceable, match=reasons):
            trace_datum_loss(fn, {"logprobs": 1, "weights": 1})
    else:
        assert_same(fn)


NOT_SHARING = sorted({name.rpartition(".")[2] for name in (*FUNCTIONS, *METHODS)} - SHARING - {"getitem", "getattr"})


@pytest.mark.filterwarnings("ignore")  # calls that nobody would write
@pytest.mark.parametrize("name", NOT_SHARING)
def test_what_is_not_said_to_share_memory_does_not(name: str) -> None:
    listed = [function for key, function in {**FUNCTIONS, **METHODS}.items() if key.rpartition(".")[2] == name]
    given: Any
    for given in (torch.rand(()), torch.rand(1), torch.rand(3), torch.rand(2, 3), torch.ones(3, dtype=torch.int64)):
        several: list[tuple[Any, ...]] = [(given,), (given, 1), (given, 0), (given, given), (given, given, given)]
        several += [([given],), (given, ()), (given, 0, 1), (given, (0,)), (given, [0, 0]), (given, (0, 0))]
        several += [(given > 0, given, given), (given, 0, given.long()), (given, given.dtype), (given.bool(), given)]
        for function, args in itertools.product(listed, several):
            try:
                check_arguments(name, function, args, {})  # as every graph's are, e.g. for `inplace`
                result = function.call(*args)
            except Exception:  # noqa: S112  # it does not take these
                continue
            for part in result if isinstance(result, tuple) else [result]:
                if isinstance(part, Tensor) and part.numel():
                    assert part.untyped_storage().data_ptr() != given.untyped_storage().data_ptr(), args
