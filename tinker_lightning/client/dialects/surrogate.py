"""The built-in loss whose gradient carries the gradient of a custom loss on a kind of server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tinker_lightning.client.dialects.values import check_values
from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinker_lightning.types import Datum


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A built-in loss that is linear in one of its inputs, and the factors that the server applies to its gradient.

    - `cross_entropy`: linear in its weights, where the server computes a plain weighted sum.
    - `importance_sampling`: linear in its advantages at ratio 1, so it needs the log-probabilities of the forward.
    - `cispo` with both thresholds at 1: linear in its advantages at any ratio.

    Args:
        loss: Which of the three.
        per_length: Whether the server divides the gradient of each sequence by its length.
        per_batch: Whether it also divides by the number of sequences: of the call, or of all calls since the last
            optimizer step.
        even_batch: Whether the number of sequences must be even.
    """

    loss: Literal["cross_entropy", "importance_sampling", "cispo"] = "cross_entropy"
    per_length: bool = False
    per_batch: Literal["no", "call", "window"] = "no"
    even_batch: bool = False

    def __post_init__(self) -> None:
        check_values("surrogate", self)
        if self.loss == "cross_entropy" and (self.per_length or self.per_batch != "no" or self.even_batch):
            raise InvalidInput(
                "surrogate: cross_entropy carries gradients only as a plain sum, without per_length, per_batch and "
                "even_batch. Use cispo or importance_sampling with the factors by which the server divides them."
            )
        if self.even_batch and self.per_batch == "window":
            raise InvalidInput("surrogate: even_batch: not supported with per_batch='window'")

    @property
    def config(self) -> dict[str, float | str]:
        """The settings of the loss."""
        return {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0} if self.loss == "cispo" else {}

    def length_factor(self, datum: Datum) -> float:
        """Returns what undoes the server's division by the length of a sequence."""
        return float(math.prod(datum.loss_fn_inputs["target_tokens"].shape)) if self.per_length else 1.0

    def datums(
        self, data: Sequence[Datum], gradients: Sequence[Tensor], logprobs: Sequence[Tensor] | None
    ) -> list[Datum]:
        """Returns the datums whose surrogate loss has these gradients, but for the division by sequences.

        Args:
            data: The datums of the custom loss.
            gradients: The gradient of the custom loss with respect to the log-probabilities of each datum.
            logprobs: These log-probabilities; only `importance_sampling` needs them.

        Raises:
            InvalidInput: If a datum has several targets per position, which only `cross_entropy` supports.
        """
        made = []
        for i, (datum, gradient) in enumerate(zip(data, gradients, strict=True)):
            targets = datum.loss_fn_inputs["target_tokens"]
            if self.loss == "cross_entropy":
                inputs = {"weights": TensorData(-gradient, copy=False)}
            elif len(targets.shape) != 1:
                raise InvalidInput(
                    f"datum {i}: target_tokens has the shape {targets.shape}, but custom losses on this server are "
                    f"sent as {self.loss}, which has one target per position. Pass one target per position."
                )
            else:
                known = torch.zeros_like(gradient) if logprobs is None else logprobs[i].detach()
                inputs = {
                    "logprobs": TensorData.from_torch(known),
                    "advantages": TensorData(-gradient * self.length_factor(datum), copy=False),
                }
            made.append(datum.with_only_inputs({"target_tokens": targets, **inputs}))
        return made


def times(data: Sequence[Datum], factor: int) -> list[Datum]:
    """Returns the datums with their advantages multiplied, which undoes a division by the number of sequences."""
    return [
        datum.with_inputs(
            advantages=TensorData.wrap(datum.loss_fn_inputs["advantages"].to_numpy() * np.float32(factor))
        )
        for datum in data
    ]


def completed(data: list[Datum]) -> list[Datum]:
    """Returns an even number of datums: the last one is repeated without a gradient if necessary."""
    if len(data) % 2 == 0:
        return data
    nothing = np.zeros(data[-1].loss_fn_inputs["target_tokens"].shape, np.float32)
    return [*data, data[-1].with_inputs(advantages=nothing)]
