"""Metrics of log-probabilities, weighted by token, as torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenNLL(Metric):
    """The mean negative log-likelihood of all tokens seen, each counted by its weight.

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

    def update(self, logprobs: Tensor, weights: Tensor) -> None:
        """Adds the tokens of a batch."""
        self.total -= (logprobs.double() * weights.double()).sum()
        self.weight += weights.double().sum()

    def compute(self) -> Tensor:
        """The mean over all tokens; NaN if none has been seen."""
        return (self.total / self.weight).float()


class TokenPerplexity(TokenNLL):
    """The perplexity of all tokens seen: `exp` of their mean negative log-likelihood.

    >>> metric = TokenPerplexity()
    >>> metric.update(torch.zeros(3), torch.ones(3))
    >>> metric.compute()
    tensor(1.)
    """

    def compute(self) -> Tensor:
        """The perplexity of all tokens."""
        return super().compute().exp()
