"""Batches as losses read them, from a list of datums or from stacked tensors, and the token counts of their means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn.utils.rnn import pad_sequence

from tinker_lightning.errors import InvalidDatum, InvalidInput, MissingInput

# Datums with one tensor of log-probabilities each, or stacked inputs by name with stacked log-probabilities, `[B, T]`.
Data: TypeAlias = Sequence[Any] | Mapping[str, Tensor]
Logprobs: TypeAlias = Sequence[Tensor] | Tensor
Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]
# Turns the sum of a library loss over a batch into a mean.
TokenCount: TypeAlias = Callable[[Sequence[Any]], float]

_SOURCES = {
    "weights": "Datum.from_tokens(tokens, weights) sets it: 0 on the prompt, 1 on the response",
    "logprobs": "pass the log-probabilities that the sampler returned with its tokens, and 0 on the prompt",
    "advantages": "pass one for each target token, and 0 on the prompt",
    "sequence_ratio_mask": "pass 1 for tokens that count towards the ratio of the sequence, 0 for others",
    "reference_logprobs": "pass those of the reference model, e.g. from its compute_logprobs, and 0 on the prompt",
    "teacher_logprobs": "pass the teacher's log-probability of each of the [T, K] targets",
    "reward": "pass one number for the datum",
    "kl_weights": "pass 1 on a mismatched response, which only the estimate of KL reads, and 0 elsewhere",
    "label": "pass 1 for a desirable response and 0 for an undesirable one",
}
# The fix for inputs that have no value at some positions. A log-probability of 0 would mean certainty.
_WEIGHTLESS = "pass any finite value where there is none, and a weight of 0"
_GAPS = {
    "logprobs": "pass 0 where there is none, and an advantage of 0",
    "reference_logprobs": _WEIGHTLESS,
    "teacher_logprobs": _WEIGHTLESS,
    "reward": "leave out datums without a reward",
}
_RANKS = {
    1: "this loss takes one target per position, [T]: the token that was sampled or written. Weighted alternatives are "
    "for cross_entropy and topk_distillation.",
    2: "this loss takes K alternatives per position, [T, K]: the most likely tokens of a teacher. For one target per "
    "position use cross_entropy.",
}
# The least probability of the complement that float32 still distinguishes from 0.
_LEAST_REST = 1e-6


class EmptyBatch(InvalidInput):
    """The batch has no datums."""


class Rehearsal(list[Any]):
    """Datums on which a loss is called only to check them; a `Batch` reads the first position of each."""

    def __init__(self, data: Sequence[Any]) -> None:
        super().__init__(data)
        self.defaults: dict[str, float] = {}  # by the name of an input that some datums lack


class Batch:
    """The log-probabilities and inputs of a batch as tensors with one row per datum.

    Shorter datums are padded with zeros, so a formula weighted by an input (`weights`, `advantages`) needs no mask.
    Stacked tensors are used unchanged; while a loss is traced, they are `torch.fx` proxies.

    Args:
        data: Datums of this library or of the official SDK, or a dict of stacked inputs.
        logprobs: One tensor per datum, or all of them stacked. The attribute is `[B, T]` or `[B, T, K]`.
        rank: The required rank of the targets: 1 for `[T]`, 2 for `[T, K]`; any by default.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([1, 2], [2, 3], weights=[0, 1]), Datum.from_targets([1], [2], weights=[1])]
    >>> batch = Batch(data, [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    >>> batch.logprobs
    tensor([[-1., -2.],
            [-3.,  0.]])
    >>> batch.tokens("weights")
    tensor([[0., 1.],
            [1., 0.]])
    """

    __slots__ = ("_datums", "_each", "_end", "_stacked", "logprobs")

    logprobs: Tensor

    def __init__(self, data: Data, logprobs: Logprobs, *, rank: Literal[1, 2] | None = None) -> None:
        self._datums: Sequence[Any] = ()
        self._each: Sequence[Tensor] = ()
        self._end = 1 if isinstance(data, Rehearsal) else None
        self._stacked: Mapping[str, Tensor] | None = None
        if isinstance(data, Mapping):
            self._stacked, self.logprobs = data, _check_rank(logprobs, rank)  # type: ignore[arg-type]  # stacked, too
            return
        if not len(data) or len(data) != len(logprobs):
            kind = InvalidInput if len(data) else EmptyBatch
            raise kind(f"a loss needs one tensor per datum, got {len(logprobs)} for {len(data)} datums")
        self._datums, self._each = data, list(logprobs)
        for i, each in enumerate(self._each):
            if rank is not None and each.dim() != rank:
                raise InvalidDatum(f"datum {i}: its targets have the shape {list(each.shape)}, but {_RANKS[rank]}")
            if each.shape[1:] != self._each[0].shape[1:]:
                raise InvalidDatum(
                    f"datum {i}: its targets have the shape {list(each.shape)}, but those of datum 0 "
                    f"{list(self._each[0].shape)}. Pass equally many for all, with weight 0 on spare ones."
                )
        self.logprobs = self._padded(self._each)

    def tokens(self, name: str) -> Tensor:
        """Returns an input with the shape of the log-probabilities; raises `InvalidDatum` if a datum lacks it."""
        if self._stacked is not None:
            return _required(self._stacked, name)
        return self._padded([self._entry(i, name) for i in range(len(self._datums))])

    def tokens_or(self, name: str, default: float) -> Tensor | float:
        """Returns an optional input, filled with the default for datums that lack it; a number if all of them do."""
        if self._stacked is not None:
            return self._stacked.get(name, default)
        if not any(name in datum.loss_fn_inputs for datum in self._datums):
            return default
        return self.tokens_filled(name, default)

    def tokens_filled(self, name: str, default: float) -> Tensor:
        """Returns an optional input as a tensor, filled with the default for datums that lack it."""
        if self._stacked is not None:
            return _required(self._stacked, name)
        present = [name in datum.loss_fn_inputs for datum in self._datums]
        if isinstance(self._datums, Rehearsal) and not all(present):
            self._datums.defaults[name] = default
        entries = [
            self._entry(i, name) if has else torch.full_like(self._each[i], default, requires_grad=False)
            for i, has in enumerate(present)
        ]
        return self._padded(entries)

    def weights(self, *, per_datum: bool = False) -> Tensor:
        """Returns the `weights`; raises `InvalidDatum` if all of them, or with `per_datum` all of a datum, are 0."""
        weights = self.tokens("weights")
        has_some = [bool(self._entry(i, "weights").any()) for i in range(len(self._datums))]
        if per_datum:
            check_each_counts(has_some)
        if has_some and not any(has_some):
            raise InvalidDatum(
                f"none of the tokens of these {len(has_some)} datums has a weight, so there is nothing to train on. "
                "Leave them out, or give their responses a weight of 1."
            )
        return weights

    def each(self) -> Iterator[tuple[int, Batch]]:
        """Yields the index of each datum and a batch of that datum alone; nothing for stacked inputs."""
        for i, (datum, logprobs) in enumerate(zip(self._datums, self._each, strict=True)):
            yield i, Batch([datum], [logprobs])

    def sequences(self, name: str) -> Tensor:
        """Returns an input that has one value per datum, `[B]`."""
        if self._stacked is not None:
            return _required(self._stacked, name)
        return torch.cat([self._entry(i, name, one=True).reshape(1) for i in range(len(self._datums))])

    def _padded(self, entries: Sequence[Tensor]) -> Tensor:
        return pad_sequence([entry[: self._end] for entry in entries], batch_first=True)

    def _entry(self, i: int, name: str, *, one: bool = False) -> Tensor:
        inputs, logprobs = self._datums[i].loss_fn_inputs, self._each[i]
        if name not in inputs:
            raise MissingInput(f"datum {i}: {name}: missing; {_fix(name)}")
        tensor: Tensor = inputs[name].to_torch()
        if tensor.numel() != 1 if one else tensor.shape != logprobs.shape:
            expected = "one number" if one else f"the shape of the log-probabilities, {list(logprobs.shape)}"
            raise InvalidDatum(f"datum {i}: {name} has the shape {list(tensor.shape)}, but it must have {expected}")
        if not torch.isfinite(tensor).all():
            fix = _GAPS.get(name, "pass 0 where there is no value")
            raise InvalidDatum(f"datum {i}: {name} has NaN or infinite entries; {fix}")
        return tensor.to(logprobs.dtype)


def _check_rank(logprobs: Tensor, rank: int | None) -> Tensor:
    """Returns stacked log-probabilities as a tensor, and checks the rank of their targets."""
    logprobs = logprobs[...]  # the only use of a traced function's log-probabilities as a tensor
    if rank is None:
        return logprobs
    if is_traced(logprobs):
        return logprobs.permute(*range(rank + 1))  # unchanged; a graph raises on another rank when it runs
    if logprobs.dim() != rank + 1:
        raise InvalidDatum(f"the datums' targets have the shape {list(logprobs.shape[1:])}, but {_RANKS[rank]}")
    return logprobs


def _required(inputs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in inputs:
        raise MissingInput(f"{name}: missing; {_fix(name)}")
    return inputs[name]


def _fix(name: str) -> str:
    return f"{_SOURCES.get(name, 'the loss reads it')}. Datum.from_targets(..., {name}=...) takes it."


def is_traced(value: object) -> bool:
    """Returns whether a value is a proxy, whose size is not known yet."""
    return isinstance(value, fx.Proxy)


def check_each_counts(has_some: Sequence[bool]) -> None:
    """Raises `InvalidDatum` for a datum without weighted tokens: its mean, 0, would mean certainty in a comparison."""
    if not all(has_some):
        raise InvalidDatum(
            f"datum {has_some.index(False)}: none of its tokens has a weight, so it cannot be compared with the "
            "others of its group. Leave the group out, or give the response a weight of 1."
        )


def groups(values: Tensor, size: int) -> Tensor:
    """Arranges values of datums, `[B]`, in groups of consecutive datums, `[B / size, size]`.

    >>> groups(torch.arange(4), 2)
    tensor([[0, 1],
            [2, 3]])
    """
    if size < 1:
        raise InvalidInput(f"a group needs at least one datum, got a size of {size}")
    if not is_traced(values) and values.shape[0] % size:  # a graph checks it when it runs
        raise InvalidInput(
            f"{values.shape[0]} datums are not a whole number of groups of {size}. The datums of a group are "
            f"consecutive: let each item of the loader be a group, a list of {size} datums, and shuffle those."
        )
    return values.reshape(-1, size)


def mean_where(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean of the values that count, or the share of those that are true; 0 if none counts.

    >>> mean_where(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, False, True]))
    tensor(3.5000)
    """
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)


def drop_nan(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drops metrics that are NaN because no token counts; a traced loss keeps all of them.

    >>> drop_nan({"ratio": torch.tensor(torch.nan), "action_tokens": torch.tensor(0)})
    {'action_tokens': tensor(0)}
    """
    return {name: value for name, value in metrics.items() if is_traced(value) or not torch.isnan(value)}


def sequence_sums(values: Tensor, weights: Tensor, *, mean: bool = False) -> Tensor:
    """Returns the weighted sum of each sequence's values, `[B]`; with `mean`, divided by the tokens that count.

    >>> sequence_sums(torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[0.0, 1.0, 1.0]]), mean=True)
    tensor([4.])
    """
    total = (weights * values).sum(-1)
    return total / (weights != 0).sum(-1).clamp(min=1) if mean else total


def log_complement(logprobs: Tensor) -> Tensor:
    """Returns `log(1 - exp(x))`, the log-probability of everything else."""
    return logprobs.clamp(max=-_LEAST_REST).expm1().neg().log()


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
