"""Converts the batches of a loader to datums and prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from tinker_lightning.client.sdk.inputs import check_not_mapped, to_model_input
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.types import ModelInput

if TYPE_CHECKING:
    from lightning.pytorch.plugins import Precision


@runtime_checkable
class DatumLike(Protocol):
    """A datum of this library or of the official SDK."""

    model_input: Any
    loss_fn_inputs: Any


@runtime_checkable
class PromptLike(Protocol):
    """A model input of this library or of the official SDK."""

    chunks: Any


def datums_of(batch: Any) -> list[Any]:
    """Returns the datums of a batch, which must be a list of datums or a single one."""
    if isinstance(batch, DatumLike):
        return [batch]
    if not isinstance(batch, Sequence) or not all(isinstance(datum, DatumLike) for datum in batch):
        for each in batch if isinstance(batch, list | tuple) else [batch]:
            check_not_mapped(each)
        got = type(batch).__name__
        if isinstance(batch, list | tuple):
            got += f" of {type(next(item for item in batch if not isinstance(item, DatumLike))).__name__}"
        raise InvalidDatum(
            f"a batch must be a list of datums, got {got}. Pass collate_fn=tinker_lightning.collate to the DataLoader, "
            "or override datums(self, batch) to build them."
        )
    if not batch:
        raise InvalidDatum("the batch has no datums; drop empty batches in the loader")
    return list(batch)


def as_list(given: Any) -> list[Any]:
    """Returns the result of `datums`, which may be any iterable, as a list."""
    if isinstance(given, list):
        return given
    if isinstance(given, DatumLike):
        return [given]
    if not isinstance(given, Iterable):
        raise InvalidDatum(f"datums(batch) must return a list of datums, but returned {type(given).__name__}")
    return list(given)


def count_datums(batch: Any) -> int:
    """Returns the number of datums in nested lists, tuples and dicts.

    >>> from tinker_lightning import Datum
    >>> count_datums({"pairs": [(Datum.from_tokens([1, 2]), Datum.from_tokens([1, 3]))], "names": ["first"]})
    2
    """
    if isinstance(batch, DatumLike):
        return 1
    if isinstance(batch, dict):
        return sum(map(count_datums, batch.values()))
    return sum(map(count_datums, batch)) if isinstance(batch, list | tuple) else 0


def prompts_of(batch: Any, tokenizer: Callable[[], Any]) -> list[ModelInput]:
    """Returns the prompts of a batch: one or several datums, model inputs, strings or rows of tokens.

    The tokenizer is fetched only for strings.
    """
    if isinstance(batch, Tensor | np.ndarray):
        return [ModelInput.from_ints(row) for row in (batch if batch.ndim > 1 else [batch])]
    if not isinstance(batch, Sequence) or isinstance(batch, str) or (batch and isinstance(batch[0], int)):
        return [_prompt(batch, tokenizer)]
    if all(isinstance(item, Tensor) and item.ndim == 1 for item in batch) and len({len(item) for item in batch}) == 1:
        raise InvalidInput(
            f"a list of {len(batch)} tensors of {len(batch[0])} tokens each: torch's default collate_fn transposes "
            f"{len(batch[0])} prompts into it. Pass collate_fn=tinker_lightning.collate to the DataLoader."
        )
    return [_prompt(item, tokenizer) for item in batch]


def _prompt(item: Any, tokenizer: Callable[[], Any]) -> ModelInput:
    if isinstance(item, DatumLike):
        return to_model_input(item.model_input)
    if isinstance(item, str):
        return ModelInput.from_ints(tokenizer().encode(item))
    return to_model_input(item) if isinstance(item, PromptLike) else ModelInput.from_ints(item)


def except_datums(batch: Any, convert: Callable[[Any], Any]) -> Any:
    """Converts a batch except for datums and prompts: Lightning cannot rebuild frozen dataclasses of the SDK."""
    if isinstance(batch, DatumLike | PromptLike):
        return batch
    if type(batch) is dict:
        return {key: except_datums(each, convert) for key, each in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(except_datums(each, convert) for each in batch)
    return convert(batch)


def keep_datums(plugin: Precision) -> None:
    """Makes a precision plugin leave datums and prompts unchanged."""
    convert = functools.partial(type(plugin).convert_input, plugin)
    plugin.convert_input = functools.partial(except_datums, convert=convert)  # type: ignore[method-assign]


# With this, a loader without a collate_fn also yields lists of datums.
default_collate_fn_map[DatumLike] = lambda batch, *, collate_fn_map=None: list(batch)  # noqa: ARG005
