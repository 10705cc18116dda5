"""Torchmetrics of log-probabilities and rewards, whose values do not depend on the split into batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class _Mean(Metric):
    """A mean over everything so far, as two sums, so that it does not depend on the split into batches."""

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def _apply(self, fn: Any, exclude_state: Sequence[str] = ()) -> Self:
        """Keeps the sums on the CPU in float64: half precision would saturate, and some devices lack float64."""
        del fn, exclude_state
        return self

    def _add(self, values: Tensor, weights: Tensor | None = None) -> None:
        # Not in place, because a tensor created in inference mode cannot be changed outside it.
        weights = torch.ones_like(values) if weights is None else weights
        self.total = self.total + (values * weights).sum()
        self.weight = self.weight + weights.sum()

    @override
    def compute(self) -> Tensor:
        """Returns the mean; NaN if there is nothing."""
        return (self.total / self.weight).float()


class TokenNLL(_Mean):
    """The mean negative log-likelihood of all tokens so far, by weight.

    >>> metric = TokenNLL()
    >>> metric.update(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 1.0]))
    >>> metric.update(torch.tensor([-5.0]), torch.tensor([2.0]))
    >>> metric.compute()
    tensor(3.5000)
    """

    higher_is_better = False

    @override
    def update(self, logprobs: Tensor, weights: Tensor) -> None:
        """Adds the tokens of a batch."""
        self._add(-logprobs.cpu().double(), weights.cpu().double())


class TokenPerplexity(TokenNLL):
    """The perplexity of all tokens so far: `exp` of their mean negative log-likelihood.

    >>> metric = TokenPerplexity()
    >>> metric.update(torch.zeros(3), torch.ones(3))
    >>> metric.compute()
    tensor(1.)
    """

    @override
    def compute(self) -> Tensor:
        """Returns the perplexity of all tokens; NaN if there are none."""
        return super().compute().exp()


class BitsPerByte(TokenNLL):
    """The negative log-likelihood of all tokens so far in bits per byte of text, which tokenizers do not change.

    >>> metric = BitsPerByte()
    >>> metric.update(torch.tensor([0.25]).log(), torch.ones(1), num_bytes=4)
    >>> metric.compute()
    tensor(0.5000)
    """

    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_bytes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, logprobs: Tensor, weights: Tensor, num_bytes: int = 0) -> None:
        """Adds the tokens of a batch and the number of bytes of the text that they stand for."""
        super().update(logprobs, weights)
        self.num_bytes = self.num_bytes + num_bytes

    @override
    def compute(self) -> Tensor:
        """Returns the bits per byte; NaN if there is no text."""
        return (self.total / self.num_bytes / math.log(2)).float()


class RewardMargin(_Mean):
    """The mean over all pairs so far of the chosen response's reward minus the rejected one's.

    >>> metric = RewardMargin()
    >>> metric.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5]))
    >>> metric.compute()
    tensor(1.2500)
    """

    higher_is_better = True

    @override
    def update(self, chosen: Tensor, rejected: Tensor) -> None:
        """Adds the rewards of pairs, `[B]` each."""
        self._add(chosen.cpu().double() - rejected.cpu().double())


class RewardAccuracy(_Mean):
    """The share of all pairs so far whose chosen response has the higher reward; a tie is not a win.

    >>> metric = RewardAccuracy()
    >>> metric.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.5]))
    >>> metric.compute()
    tensor(0.5000)
    """

    higher_is_better = True

    @override
    def update(self, chosen: Tensor, rejected: Tensor) -> None:
        """Adds the rewards of pairs, `[B]` each."""
        self._add((chosen > rejected).cpu().double())


class Scores(torch.nn.ModuleDict):
    """Holds the negative log-likelihood and perplexity of each stage and loader, created with its first batch."""

    def updated(self, stage: str, loader: int, scored: Iterable[tuple[Tensor, Tensor]]) -> dict[str, TokenNLL]:
        """Updates the metrics of a loader with the log-probabilities and weights of a batch and returns them."""
        metrics: dict[str, TokenNLL] = {}
        for name, kind in (("nll", TokenNLL), ("perplexity", TokenPerplexity)):
            key = f"{stage}_{name}_{loader}"
            if key not in self:
                self[key] = kind()
            metrics[name] = self[key]  # type: ignore[assignment]  # a dict of any modules
        for logprobs, weights in scored:
            for metric in metrics.values():
                metric.update(logprobs, weights)
        return metrics
