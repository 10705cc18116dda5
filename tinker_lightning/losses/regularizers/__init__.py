"""Regularizers: ready-made functions, the `Regularizer` record, and their composition with a base loss."""

from tinker_lightning.losses.regularizers.composition import Regularizer
from tinker_lightning.losses.regularizers.functions import (
    consistency,
    entropy,
    forward_kl,
    length,
    reverse_kl,
    sparsity,
    symmetric_kl,
    topology,
)

__all__ = [
    "Regularizer",
    "consistency",
    "entropy",
    "forward_kl",
    "length",
    "reverse_kl",
    "sparsity",
    "symmetric_kl",
    "topology",
]
