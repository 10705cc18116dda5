"""Token counts that turn the sum of a library loss into a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum

TokenCount: TypeAlias = Callable[[Sequence[Any]], float]


def target_weights(datum: Any) -> Tensor:
    """Returns the weight of each target; ones if the datum has no weights."""
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        return torch.ones(tuple(datum.loss_fn_inputs["target_tokens"].shape))
    tensor: Tensor = weights.to_torch()
    return tensor


def total_weight(data: Sequence[Any]) -> float:
    """Returns the sum of the weights of a batch; raises `InvalidDatum` if it is not above 0."""
    return _positive(_sum(target_weights(datum) for datum in data), len(data))


def weighted_tokens(data: Sequence[Any]) -> float:
    """Returns the number of tokens of a batch with a nonzero weight."""
    return _sum(target_weights(datum) != 0 for datum in data)


def weighted_positions(data: Sequence[Any]) -> float:
    """Returns the sum over positions of the largest weight of each position's alternatives, `[T, K]`."""
    return _positive(_sum(target_weights(datum).amax(-1) for datum in data), len(data))


def action_tokens(data: Sequence[Any]) -> float:
    """Returns the number of tokens with an advantage; 1 if there are none, because equal rewards are not an error."""
    return max(action_weight(data), 1.0)


def action_weight(data: Sequence[Any]) -> float:
    """Returns how much a batch counts in a mean over action tokens: their number, which may be 0."""
    advantages = [datum.loss_fn_inputs.get("advantages") for datum in data]
    return _sum(each.to_torch() != 0 for each in advantages if each is not None)


def _sum(tensors: Any) -> float:
    return math.fsum(float(tensor.sum(dtype=torch.float64)) for tensor in tensors)


def _positive(total: float, datums: int) -> float:
    if math.isnan(total):
        return 1.0  # the loss itself names the datum
    if total <= 0:
        raise InvalidDatum(
            f"the weights of these {datums} datums sum to {total:g}, so the loss has no mean over tokens. Leave out "
            'batches without a weighted token, or set reduction = "sum" on the module.'
        )
    return total
