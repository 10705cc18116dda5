"""A base loss and regularizers of every kind, and their evaluation."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.composition import Regularizer

Returned = tuple[Tensor, dict[Any, Any]]
LONG = 30.0  # seconds after which a test that hangs fails


def logprobs() -> list[Tensor]:
    return [torch.tensor([-1.0, -2.0]).requires_grad_(), torch.tensor([-3.0]).requires_grad_()]


def base(_: list[Any], lp: list[Tensor]) -> Returned:
    return -torch.cat(lp).sum(), {"nll": torch.cat(lp).mean(), 7: 1}


def square(_: list[Any], lp: list[Tensor]) -> Returned:
    return (torch.cat(lp) ** 2).sum(), {"largest": torch.cat(lp).abs().max()}


def first(_: list[Any], lp: list[Tensor]) -> Returned:
    return lp[0].sum(), {}


async def last(_: list[Any], lp: list[Tensor]) -> Returned:
    await asyncio.sleep(0)
    return 2 * lp[1].sum(), {"count": torch.tensor([1])}


THREE = (
    Regularizer(square, 0.5, "square", run_in_executor=True),
    Regularizer(last, lambda step: 0.25 * step, "last"),
    Regularizer(first, -1, "first"),
)


def evaluate(*terms: Regularizer, base: Any = base, **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    return composition.evaluate([], logprobs(), base, terms, step=2, **settings)
