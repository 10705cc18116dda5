"""The random number generators of this process: torch's, numpy's and Python's, kept, put back and saved together."""

from __future__ import annotations

import random
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Snapshot: TypeAlias = tuple[Any, Any, Any]


def capture(of: Snapshot | None = None) -> dict[str, Any]:
    """The state of all three as tensors and plain data, which a file gives back without running code.

    Args:
        of: Their states at an earlier time; now, if not given.
    """
    torch_state, (kind, keys, position, has_gauss, gauss), (version, words, next_gauss) = of or snapshot()
    return {
        "torch": torch_state,
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(words, dtype=torch.int64), next_gauss],
    }


def restore(state: dict[str, Any]) -> None:
    """Puts all three where they were."""
    kind, keys, position, has_gauss, gauss = state["numpy"]
    version, words, next_gauss = state["python"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    _put((state["torch"], numpy_state, (version, tuple(words.tolist()), next_gauss)))


def digest(state: dict[str, Any]) -> int:
    """A number that tells where all three stood."""
    _, keys, position, *_ = state["numpy"]
    digest = zlib.crc32(str(position).encode())
    for part in (state["torch"], keys, state["python"][1]):
        digest = zlib.crc32(part.numpy().tobytes(), digest)
    return digest


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside the `with` block, the generators are after it as they were before."""
    outside = snapshot()
    try:
        yield
    finally:
        _put(outside)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws random numbers that depend on the seed alone until the end of the `with` block; then as `kept`."""
    with kept():
        torch.default_generator.manual_seed(seed)  # and not those of GPUs
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def snapshot() -> Snapshot:
    """Their states as they are, which takes less time than `capture`."""
    return torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate()


def _put(states: Snapshot) -> None:
    torch_state, numpy_state, python_state = states
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
