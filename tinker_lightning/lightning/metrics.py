"""Token-weighted torchmetrics of log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class TokenNLL(Metric):
    """The mean negative log-likelihood of all tokens so far, by weight.

    >>> metric = TokenNLL()
    >>> metric.update(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 1.0]))
    >>> metric.update(torch.tensor([-5.0]), torch.tensor([2.0]))
    >>> metric.compute()
    tensor(3.5000)
    """

    higher_is_better = False
    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Any, exclude_state: Sequence[str] = ()) -> Self:
        """Keeps the sums on the CPU in float64: half precision would saturate, and some devices lack float64."""
        del fn, exclude_state
        return self

    def update(self, logprobs: Tensor, weights: Tensor) -> None:
        """Adds the tokens of a batch."""
        # Not in place, because a tensor created in inference mode cannot be changed outside it.
        counted = weights.cpu().double()
        self.total = self.total - (logprobs.cpu().double() * counted).sum()
        self.weight = self.weight + counted.sum()

    def compute(self) -> Tensor:
        """Returns the mean over all tokens; NaN if there are none."""
        return (self.total / self.weight).float()


class TokenPerplexity(TokenNLL):
    """The perplexity of all tokens so far: `exp` of their mean negative log-likelihood.

    >>> metric = TokenPerplexity()
    >>> metric.update(torch.zeros(3), torch.ones(3))
    >>> metric.compute()
    tensor(1.)
    """

    def compute(self) -> Tensor:
        """Returns the perplexity of all tokens; NaN if there are none."""
        return super().compute().exp()


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
