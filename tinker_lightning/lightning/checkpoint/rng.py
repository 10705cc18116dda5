"""Captures and restores the random number generators of torch, numpy and Python together."""

from __future__ import annotations

import random
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


Snapshot: TypeAlias = tuple[Any, Any, Any]


def capture(states: Snapshot | None = None) -> dict[str, Any]:
    """Returns the states of a snapshot, by default of now, as plain data that loads with `weights_only=True`."""
    torch_state, (kind, keys, position, has_gauss, gauss), (version, words, next_gauss) = states or snapshot()
    return {
        "torch": torch_state,
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(words, dtype=torch.int64), next_gauss],
    }


def restore(state: dict[str, Any]) -> None:
    """Restores the result of `capture`."""
    kind, keys, position, has_gauss, gauss = state["numpy"]
    version, words, next_gauss = state["python"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    _set((state["torch"], numpy_state, (version, tuple(words.tolist()), next_gauss)))


def digest(state: dict[str, Any], generators: Iterable[Tensor] = ()) -> int:
    """Returns a hash of the result of `capture` and the states of further generators."""
    _, keys, position, *_ = state["numpy"]
    digest = zlib.crc32(str(position).encode())
    for part in (state["torch"], keys, state["python"][1], *generators):
        digest = zlib.crc32(part.numpy().tobytes(), digest)
    return digest


@contextmanager
def isolate() -> Iterator[None]:
    """Isolates the generators in a `with` block: they are restored at its end."""
    outside = snapshot()
    try:
        yield
    finally:
        _set(outside)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators for the `with` block, and restores them at its end."""
    with isolate():
        torch.default_generator.manual_seed(seed)  # leaves the generators of GPUs alone
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def snapshot() -> Snapshot:
    """Returns the current states; faster than `capture`."""
    return torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate()


def _set(states: Snapshot) -> None:
    torch_state, numpy_state, python_state = states
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
