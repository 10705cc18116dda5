"""Recomputes the activations of decoder layers in the backward pass, instead of keeping them."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """Returns the layers that transformers can recompute, in the order in which they run."""
    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Makes these layers keep only their inputs in a forward pass with gradients.

    transformers does this for models in training mode only, in which dropout is active too.
    """
    layers = layers if torch.is_grad_enabled() else []
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
