"""Torchmetrics of log-probabilities and rewards, whose values do not depend on the split into batches."""

from tinker_lightning.metrics.scores import (
    BitsPerByte,
    RewardAccuracy,
    RewardMargin,
    Scores,
    TokenNLL,
    TokenPerplexity,
)

__all__ = ["BitsPerByte", "RewardAccuracy", "RewardMargin", "Scores", "TokenNLL", "TokenPerplexity"]
