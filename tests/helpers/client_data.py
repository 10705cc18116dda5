"""Datums for tests of the client, and a loss on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from tinker_lightning import Datum, ModelInput, TensorData

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    Running: TypeAlias = Callable[[Any], contextlib.AbstractContextManager[str]]


TEXTS = ("hello world, this is a text", "a short one", "and another, of a middling length")


def datum(text: str, **inputs: Any) -> Datum:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    named = inputs or {"weights": np.ones(len(ids) - 1, np.float32)}
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], **named})


def policy(text: str, seed: int, **inputs: Any) -> Datum:
    """A datum of reinforcement learning: what the policy thought, and how good it was."""
    random = np.random.default_rng(seed)
    logprobs = random.normal(-5.5, 0.2, len(text) - 1).astype(np.float32)
    advantages = random.normal(0, 1, len(text) - 1).astype(np.float32)
    return datum(text, logprobs=logprobs, advantages=advantages, **inputs)


def top_k(text: str, *, sparse: bool) -> Datum:
    """Two targets at each position, in four columns."""
    ids = list(text.encode())
    targets = np.array([[i, (i + 1) % 256, 0, 0] for i in ids[1:]])
    weights = np.array([[0.75, 0.25, 0.0, 0.0]] * len(targets), np.float32)
    named = {"target_tokens": TensorData(targets), "weights": TensorData(weights)}
    if sparse:
        named = {name: csr(tensor.to_numpy()) for name, tensor in named.items()}
    return Datum(ModelInput.from_ints(ids[:-1]), named)


def csr(dense: Any) -> TensorData:
    rows, columns = np.nonzero(dense)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return TensorData(dense[rows, columns], None, list(dense.shape), pointers, columns)


DATA = [datum(text) for text in TEXTS]


def nll(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Cross-entropy as a custom loss."""
    loss = -torch.cat([each.flatten() for each in logprobs]).sum()
    return loss, {"nll": loss}
