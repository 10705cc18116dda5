"""Batches to try losses on, and values with gradients to compare."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning import Datum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LENGTHS = (5, 2, 7, 3, 6, 4)


class Numbers:
    """Scattered numbers in [0, 1), the same on every machine: the fractional parts of `k²·φ`."""

    def __init__(self, seed: int) -> None:
        self.at = 1000 * seed + 1

    def __call__(self, n: int) -> Tensor:
        k = torch.arange(self.at, self.at + n, dtype=torch.float64)
        self.at += n
        return (k * k * 0.6180339887498949) % 1


def batch(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> tuple[list[Datum], list[Tensor]]:
    """Datums with everything that a loss on `[T]` targets reads, and log-probabilities in float64; the first token of
    each is a prompt.
    """
    numbers = Numbers(seed)
    data, logprobs = [], []
    for i, n in enumerate(lengths):
        mask = (torch.arange(n) > 0).float()
        p = -3 * numbers(n)
        data.append(
            Datum.from_targets(
                range(n),
                range(1, n + 1),
                weights=mask,
                kl_weights=mask,
                label=float(i % 4 == 0),
                logprobs=p + numbers(n) - 0.5,
                reference_logprobs=p + 2 * numbers(n) - 1,
                advantages=mask * (4 * numbers(n) - 2),
                sequence_ratio_mask=mask,
                reward=4 * numbers(1)[0] - 2,
            )
        )
        logprobs.append(p)
    return data, logprobs


def distillation(seed: int = 0, lengths: Sequence[int] = LENGTHS, k: int = 3) -> tuple[list[Datum], list[Tensor]]:
    """The same with `[T, K]` targets: the likeliest tokens of a teacher with a vocabulary of eight."""
    numbers = Numbers(seed)
    data, logprobs = [], []
    for n in lengths:
        student, teacher = ((4 * numbers(n * 8)).reshape(n, 8).log_softmax(-1).float() for _ in range(2))
        best, tokens = teacher.topk(k)
        weights = (torch.arange(n) > 0).float()[:, None].expand(n, k)
        data.append(Datum.from_targets(range(n), tokens, weights=weights, teacher_logprobs=best))
        logprobs.append(student.gather(-1, tokens).double())
    return data, logprobs


def stacked(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The same batch as tensors with one row per datum; what fills the rows up stands in no datum."""

    def stack(tensors: list[Tensor]) -> Tensor:
        if tensors[0].ndim == 0:
            return torch.stack(tensors)
        rows = max(map(len, tensors))
        return torch.stack([torch.cat([each, each.new_zeros(rows - len(each), *each.shape[1:])]) for each in tensors])

    names = [name for name in data[0].loss_fn_inputs if name != "target_tokens"]
    inputs = {name: stack([entry(datum, name) for datum in data]) for name in names}
    return inputs, stack([each.detach() for each in logprobs])


def entry(datum: Datum, name: str) -> Tensor:
    """An input of a datum, in float64."""
    return datum.loss_fn_inputs[name].to_torch().double()


def value_and_gradient(loss: Callable[[list[Datum], list[Tensor]], Any], *case: Any) -> tuple[float, Tensor]:
    """The loss of a batch and its gradient by all log-probabilities, as one vector."""
    data, logprobs = case
    leaves = [each.clone().requires_grad_() for each in logprobs]
    returned = loss(data, leaves)
    value = returned[0] if isinstance(returned, tuple) else returned
    gradients = torch.autograd.grad(value, leaves)
    return value.item(), torch.cat([gradient.flatten() for gradient in gradients])


def assert_same(got: tuple[float, Tensor], expected: tuple[float, Tensor], tolerance: float = 1e-12) -> None:
    """Both values and both gradients agree."""
    assert math.isclose(got[0], expected[0], rel_tol=tolerance, abs_tol=tolerance), (got[0], expected[0])
    assert (got[1] - expected[1]).norm() <= tolerance * max(1.0, expected[1].norm().item())
