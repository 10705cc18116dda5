"""What a loader gives, as datums and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from tinker_lightning.client.official import to_model_input
from tinker_lightning.errors import InvalidDatum
from tinker_lightning.types import Datum, ModelInput


def datums_of(batch: Any) -> list[Any]:
    """The datums of a batch: a list of them as it is, and one as a list.

    Raises:
        InvalidDatum: If the batch is empty or no list of datums.
    """
    if is_datum(batch):
        return [batch]
    if not isinstance(batch, Sequence) or not all(is_datum(datum) for datum in batch):
        raise InvalidDatum(
            f"a batch must be a list of datums, got {type(batch).__name__}. Give the DataLoader "
            "collate_fn=tinker_lightning.collate, or override datums(self, batch) to build them."
        )
    if not batch:
        raise InvalidDatum("the batch has no datums; drop empty batches in the loader")
    return list(batch)


def weights_of(datum: Any) -> Tensor:
    """The weight of each target; ones where a datum has none."""
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        return torch.ones(datum.loss_fn_inputs["target_tokens"].shape)
    tensor: Tensor = weights.to_torch()
    return tensor


def is_datum(value: Any) -> bool:
    """Whether it is a datum, ours or the official SDK's."""
    return hasattr(value, "model_input") and hasattr(value, "loss_fn_inputs")


def prompt_of(item: Any, tokenizer: Any) -> ModelInput:
    """What to sample from: the input of a datum, an input, a text, or tokens."""
    if is_datum(item):
        return to_model_input(item.model_input)
    if isinstance(item, str):
        return ModelInput.from_ints(tokenizer.encode(item))
    return to_model_input(item) if hasattr(item, "chunks") else ModelInput.from_ints(item)


# A loader without a collate_fn of its own then gives lists of datums, too.
default_collate_fn_map[Datum] = lambda batch, *, collate_fn_map=None: list(batch)  # noqa: ARG005
