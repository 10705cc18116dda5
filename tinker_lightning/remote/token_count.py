"""Counts the tokens that are sent to a server and sampled there."""

from __future__ import annotations

import contextlib
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import ModelInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_lightning.types import Datum


@dataclass(slots=True)
class TokenCount:
    """Tokens by what servers charge for: passes with a gradient, passes without one and prompts, and samples."""

    trained: int = 0
    prefilled: int = 0
    sampled: int = 0

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TokenCount) -> TokenCount:
        return TokenCount(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def tokens_of(data: Iterable[Datum | ModelInput]) -> int:
    """Returns the number of tokens of datums or prompts, without those that have an image of unknown length."""
    total = 0
    for each in data:
        with contextlib.suppress(InvalidInput):
            total += (each if isinstance(each, ModelInput) else each.model_input).length
    return total
