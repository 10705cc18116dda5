"""How the losses read a batch: datums one by one, or the same tensors stacked already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn.utils.rnn import pad_sequence

from tinker_lightning.errors import InvalidDatum, InvalidInput

# Datums with one tensor of log-probabilities each; or inputs by name and log-probabilities, stacked: `[B, T]`.
Data: TypeAlias = Sequence[Any] | Mapping[str, Tensor]
Logprobs: TypeAlias = Sequence[Tensor] | Tensor
Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]

_WHERE_FROM = {
    "weights": "Datum.from_tokens(tokens, weights) sets it: 0 on the prompt, 1 on the response",
    "logprobs": "give those that the sampler returned with its tokens, and 0 on the prompt",
    "advantages": "give one for each target token, and 0 on the prompt",
    "sequence_ratio_mask": "give 1 on the tokens that count in the sequence's ratio, 0 on others",
    "reference_logprobs": "give those of the reference model, e.g. from its compute_logprobs, and 0 on the prompt",
    "teacher_logprobs": "give the teacher's log-probability of each of the [T, K] targets",
    "reward": "give one number for the datum",
}
# What to give where an input has no value. A log-probability of 0 would be certainty.
_WEIGHTLESS = "give any finite value where there is none, and a weight of 0"
_GAPS = {
    "logprobs": "give 0 where there is none, and an advantage of 0",
    "reference_logprobs": _WEIGHTLESS,
    "teacher_logprobs": _WEIGHTLESS,
    "reward": "leave a datum without one out",
}
_RANKS = {
    1: "there must be one at each position, [T]: the token that was sampled or written. Weighted alternatives are for "
    "cross_entropy and topk_distillation.",
    2: "there must be K alternatives at each position, [T, K]: a teacher's likeliest tokens. For one target at each "
    "position use cross_entropy.",
}


class EmptyBatch(InvalidInput):
    """There are no datums."""


class Rehearsal(list[Any]):
    """Datums that a loss is called on only to check them: a `Batch` of them has the first position of each.

    Attributes:
        defaults: What the loss takes where only some of the datums have an input, by its name.
    """

    def __init__(self, data: Sequence[Any]) -> None:
        super().__init__(data)
        self.defaults: dict[str, float] = {}


class Batch:
    """The log-probabilities and inputs of a batch as tensors with one row per datum.

    Shorter datums are filled with zeros behind their end. A formula weighted by an input (`weights`, `advantages`) is
    zero there by itself, so that it needs no other mask.

    What is stacked already is taken as it is, which is how a loss is traced: the tensors may be `torch.fx` proxies.

    Args:
        data: Datums, ours or the official SDK's; or a dict of stacked inputs.
        logprobs: One tensor for each datum; or all of them stacked.
        rank: Of each datum's targets, if only one will do: 1 for `[T]`, 2 for `[T, K]`.

    Attributes:
        logprobs: `[B, T]`, or `[B, T, K]` for K alternatives at each position.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([1, 2], [2, 3], weights=[0, 1]), Datum.from_targets([1], [2], weights=[1])]
    >>> batch = Batch(data, [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    >>> batch.logprobs
    tensor([[-1., -2.],
            [-3.,  0.]])
    >>> batch.tokens("weights")
    tensor([[0., 1.],
            [1., 0.]])

    Raises:
        InvalidInput: If there are no datums, not one tensor for each, or targets of different or wrong ranks.
    """

    __slots__ = ("_datums", "_each", "_end", "_stacked", "logprobs")

    logprobs: Tensor

    def __init__(self, data: Data, logprobs: Logprobs, *, rank: Literal[1, 2] | None = None) -> None:
        self._datums: Sequence[Any] = ()
        self._each: Sequence[Tensor] = ()
        self._end = 1 if isinstance(data, Rehearsal) else None
        self._stacked: Mapping[str, Tensor] | None = None
        if isinstance(data, Mapping):
            self._stacked, self.logprobs = data, _of_rank(logprobs, rank)  # type: ignore[arg-type]  # stacked, too
            return
        if not len(data) or len(data) != len(logprobs):
            kind = InvalidInput if len(data) else EmptyBatch
            raise kind(f"a loss needs one tensor for each datum, got {len(logprobs)} for {len(data)} datums")
        self._datums, self._each = data, list(logprobs)
        for i, each in enumerate(self._each):
            if rank is not None and each.dim() != rank:
                raise InvalidDatum(f"datum {i}: its targets have the shape {list(each.shape)}, but {_RANKS[rank]}")
            if each.shape[1:] != self._each[0].shape[1:]:
                raise InvalidDatum(
                    f"datum {i}: its targets have the shape {list(each.shape)}, but those of datum 0 "
                    f"{list(self._each[0].shape)}. Give all as many alternatives, with weight 0 on spare ones."
                )
        self.logprobs = self._padded(self._each)

    def tokens(self, name: str) -> Tensor:
        """An input with one value for each log-probability, shaped like these.

        Raises:
            InvalidDatum: If a datum lacks it, or has it in another shape, or with NaN or infinity in it.
        """
        if self._stacked is not None:
            return _required(self._stacked, name)
        return self._padded([self._entry(i, name) for i in range(len(self._datums))])

    def tokens_or(self, name: str, default: float) -> Tensor | float:
        """The same for an input that not every datum must have; the number itself if none has it."""
        if self._stacked is not None:
            return self._stacked.get(name, default)
        present = [name in datum.loss_fn_inputs for datum in self._datums]
        if not any(present):
            return default
        if isinstance(self._datums, Rehearsal) and not all(present):
            self._datums.defaults[name] = default
        entries = [
            self._entry(i, name) if has else torch.full_like(self._each[i], default, requires_grad=False)
            for i, has in enumerate(present)
        ]
        return self._padded(entries)

    def weights(self, *, of_each: bool = False) -> Tensor:
        """The `weights`, for losses that mean nothing where nothing has one.

        Args:
            of_each: Whether every datum must have some, not only the batch.

        Raises:
            InvalidDatum: If there are none.
        """
        weights = self.tokens("weights")
        has_some = [bool(self._entry(i, "weights").any()) for i in range(len(self._datums))]
        if of_each:
            check_each_counts(has_some)
        if has_some and not any(has_some):
            raise InvalidDatum(
                f"none of the tokens of these {len(has_some)} datums has a weight, so there is nothing to train on. "
                "Leave them out, or give their responses a weight of 1."
            )
        return weights

    def each(self) -> Iterator[tuple[int, Batch]]:
        """Every datum with its number, as a batch of its own and whole, for checks of values; none if stacked."""
        for i, (datum, logprobs) in enumerate(zip(self._datums, self._each, strict=True)):
            yield i, Batch([datum], [logprobs])

    def sequences(self, name: str) -> Tensor:
        """An input with one value for each datum, `[B]`.

        Raises:
            InvalidDatum: If a datum lacks it, or has more than one value.
        """
        if self._stacked is not None:
            return _required(self._stacked, name)
        return torch.cat([self._entry(i, name, one=True).reshape(1) for i in range(len(self._datums))])

    def _padded(self, entries: Sequence[Tensor]) -> Tensor:
        return pad_sequence([entry[: self._end] for entry in entries], batch_first=True)

    def _entry(self, i: int, name: str, *, one: bool = False) -> Tensor:
        inputs, logprobs = self._datums[i].loss_fn_inputs, self._each[i]
        if name not in inputs:
            raise InvalidDatum(f"datum {i}: {name}: missing; {_mend(name)}")
        tensor: Tensor = inputs[name].to_torch()
        if tensor.numel() != 1 if one else tensor.shape != logprobs.shape:
            wanted = "one number" if one else f"the shape of the log-probabilities, {list(logprobs.shape)}"
            raise InvalidDatum(f"datum {i}: {name} has the shape {list(tensor.shape)}, but it must have {wanted}")
        if not torch.isfinite(tensor).all():
            mend = _GAPS.get(name, "give 0 where there is no value")
            raise InvalidDatum(f"datum {i}: {name} has NaN or infinite entries; {mend}")
        return tensor.to(logprobs.dtype)


def _of_rank(logprobs: Tensor, rank: int | None) -> Tensor:
    """Stacked log-probabilities, of targets of that rank."""
    logprobs = logprobs[...]  # a traced function's log-probabilities may be used as a tensor only so
    if rank is None:
        return logprobs
    if is_traced(logprobs):
        return logprobs.permute(*range(rank + 1))  # as they are; a graph refuses another rank when it runs
    if logprobs.dim() != rank + 1:
        raise InvalidDatum(f"the datums' targets have the shape {list(logprobs.shape[1:])}, but {_RANKS[rank]}")
    return logprobs


def _required(inputs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in inputs:
        raise InvalidInput(f"{name}: missing; {_mend(name)}")
    return inputs[name]


def _mend(name: str) -> str:
    return f"{_WHERE_FROM.get(name, 'the loss reads it')}. Datum.from_targets(..., {name}=...) takes it."


def is_traced(value: object) -> bool:
    """Whether it is a stand-in, which has no size yet."""
    return isinstance(value, fx.Proxy)


def check_each_counts(has_some: Sequence[bool]) -> None:
    """Refuses a datum of which no token counts, where datums are compared: an empty mean is 0, which is certainty.

    Raises:
        InvalidDatum: Says which.
    """
    if not all(has_some):
        raise InvalidDatum(
            f"datum {has_some.index(False)}: none of its tokens has a weight, so that it cannot be compared with the "
            "others of its group. Leave the group out, or give the response a weight of 1."
        )


def groups(values: Tensor, size: int) -> Tensor:
    """Values of datums, `[B]`, by groups of consecutive datums: `[B / size, size]`.

    >>> groups(torch.arange(4), 2)
    tensor([[0, 1],
            [2, 3]])

    Raises:
        InvalidInput: If the last group is not whole, or a group would have no datum.
    """
    if size < 1:
        raise InvalidInput(f"a group has at least one datum, got a size of {size}")
    if not is_traced(values) and values.shape[0] % size:  # which is checked when the graph runs
        raise InvalidInput(
            f"{values.shape[0]} datums are no whole number of groups of {size}. The datums of a group stand one behind "
            f"the other: let the loader give groups, e.g. a list of {size} datums as one item, and shuffle those."
        )
    return values.reshape(-1, size)


def mean_where(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of the values, or the share of the truths, that count; 0 if none does.

    >>> mean_where(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, False, True]))
    tensor(3.5000)
    """
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)


def with_value(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leaves out metrics that are NaN, because nothing counts towards them; a traced loss cannot know, and keeps them.

    >>> with_value({"ratio": torch.tensor(torch.nan), "action_tokens": torch.tensor(0)})
    {'action_tokens': tensor(0)}
    """
    return {name: value for name, value in metrics.items() if is_traced(value) or not torch.isnan(value)}


def sequence_sums(values: Tensor, weights: Tensor, *, mean: bool = False) -> Tensor:
    """The weighted sum of each sequence's values, `[B]`; with `mean` divided by the number of tokens that count.

    >>> sequence_sums(torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[0.0, 1.0, 1.0]]), mean=True)
    tensor([4.])
    """
    total = (weights * values).sum(-1)
    return total / (weights != 0).sum(-1).clamp(min=1) if mean else total
