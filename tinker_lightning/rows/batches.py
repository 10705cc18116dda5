"""Batches of a loader: rows of similar lengths, and their conversion to datums and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data._utils.collate import default_collate_fn_map
from typing_extensions import override

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.rows.formats import COLUMNS, DatumLike, PromptLike, is_row
from tinker_lightning.types import ModelInput
from tinker_lightning.types.datum import check_not_mapped
from tinker_lightning.types.model_input import to_model_input

if TYPE_CHECKING:
    from tinker_lightning.rows.formats import RowFormat

T = TypeVar("T")
_POOL = 50  # batches, among which rows are sorted by length


class SimilarLengths(Sampler[int]):
    """The order of an epoch in which the rows of a batch have similar lengths.

    Rows are shuffled with torch's generator and sorted by length in pools of 50 batches, whose batches are shuffled.
    Each epoch has other batches; a short batch is the last one.

    Args:
        lengths: The length of each row.
        batch_size: The number of rows in a batch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self._lengths = torch.tensor(lengths)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    @override
    def __iter__(self) -> Iterator[int]:
        pools = torch.randperm(len(self)).split(_POOL * self._batch_size)
        batches = torch.cat([pool[self._lengths[pool].argsort(stable=True)] for pool in pools]).split(self._batch_size)
        full = len(self) // self._batch_size
        order = [batches[i] for i in torch.randperm(full).tolist()]
        yield from torch.cat([*order, *batches[full:]]).tolist()


def datums_of(batch: Any, rows: Callable[[], RowFormat]) -> list[Any]:
    """Returns the datums of a batch: a list of datums, texts, chats and dicts, or a single one.

    `rows` is called only if there is something to convert.
    """
    if isinstance(batch, list) and batch and all(isinstance(item, DatumLike) for item in batch):
        return list(batch)
    if isinstance(batch, DatumLike) or is_row(batch):
        batch = [batch]
    if not isinstance(batch, Sequence) or not all(isinstance(item, DatumLike) or is_row(item) for item in batch):
        for each in batch if isinstance(batch, list | tuple) else [batch]:
            check_not_mapped(each)
        got = type(batch).__name__
        if isinstance(batch, list | tuple):
            other = next(item for item in batch if not isinstance(item, DatumLike) and not is_row(item))
            if isinstance(other, list | tuple) and other and all(isinstance(each, DatumLike) for each in other):
                raise InvalidDatum(
                    f"the batch has groups of {len(other)} datums, such as the pairs of PreferenceData, which DPO and "
                    "KTO train on. Use ChatData, or override datums(self, batch) to flatten them."
                )
            got += f" of {type(other).__name__}"
        raise InvalidDatum(
            f"a batch must be a list of datums, texts, chats or dicts with {', '.join(COLUMNS[:4])}; got {got}. Pass "
            "collate_fn=tinker_lightning.collate to the DataLoader, or override datums(self, batch) to build them."
        )
    if not batch:
        raise InvalidDatum("the batch has no datums; drop empty batches in the loader")
    return [item if isinstance(item, DatumLike) else convert_row(i, rows().datum, item) for i, item in enumerate(batch)]


def convert_row(index: int, convert: Callable[[Any], T], row: Any) -> T:
    """Converts a row of a batch; errors name its index."""
    if isinstance(row, Mapping) and any(_is_column(row.get(name)) for name in COLUMNS):
        raise InvalidDatum(
            f"{next(name for name in COLUMNS if name in row)} has one value per row: torch's default collate_fn has "
            "turned rows into columns. Pass collate_fn=tinker_lightning.collate to the DataLoader."
        )
    try:
        return convert(row)
    except InvalidDatum as error:
        raise type(error)(f"row {index} of the batch: {error}") from error


def _is_column(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    if isinstance(value[0], Mapping):  # messages, each with the roles of all rows
        return isinstance(value[0].get("role", value[0].get("from")), list | tuple)
    return isinstance(value[0], str | list | tuple)


def as_list(datums: Any) -> list[Any]:
    """Returns the result of `datums`, which may be any iterable, as a list."""
    if isinstance(datums, list):
        return datums
    if isinstance(datums, DatumLike):
        return [datums]
    if not isinstance(datums, Iterable):
        raise InvalidDatum(f"datums(batch) must return a list of datums, but returned {type(datums).__name__}")
    return list(datums)


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


def prompts_of(batch: Any, rows: Callable[[], RowFormat]) -> list[ModelInput]:
    """Returns the prompts of a batch: one or several datums, model inputs, texts, chats, dicts or rows of tokens.

    `rows` is called only if there is something to convert.
    """
    if isinstance(batch, Tensor | np.ndarray):
        return [ModelInput.from_ints(row) for row in (batch if batch.ndim > 1 else [batch])]
    if is_row(batch) or not isinstance(batch, Sequence) or (batch and isinstance(batch[0], int)):
        return [_prompt(0, batch, rows)]
    if all(isinstance(item, Tensor) and item.ndim == 1 for item in batch) and len({len(item) for item in batch}) == 1:
        raise InvalidInput(
            f"a list of {len(batch)} tensors of {len(batch[0])} tokens each: torch's default collate_fn transposes "
            f"{len(batch[0])} prompts into it. Pass collate_fn=tinker_lightning.collate to the DataLoader."
        )
    return [_prompt(i, item, rows) for i, item in enumerate(batch)]


def _prompt(index: int, item: Any, rows: Callable[[], RowFormat]) -> ModelInput:
    if isinstance(item, DatumLike):
        return to_model_input(item.model_input)
    if isinstance(item, PromptLike):
        return to_model_input(item)
    if isinstance(item, str):
        return ModelInput.from_ints(rows().tokenizer.encode(item))
    if isinstance(item, Mapping) and isinstance(item.get("prompt"), PromptLike):
        return to_model_input(item["prompt"])
    return convert_row(index, rows().prompt, item) if is_row(item) else _from_tokens(item)


def _from_tokens(item: Any) -> ModelInput:
    if isinstance(item, Mapping):
        raise InvalidDatum(f"a prompt is read from the column prompt or messages; this row has {', '.join(item)}")
    return ModelInput.from_ints(item)


def except_datums(batch: Any, convert: Callable[[Any], Any]) -> Any:
    """Converts a batch except for datums and prompts: Lightning cannot rebuild frozen dataclasses of the SDK."""
    if isinstance(batch, DatumLike | PromptLike):
        return batch
    if type(batch) is dict:
        return {key: except_datums(each, convert) for key, each in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(except_datums(each, convert) for each in batch)
    return convert(batch)


# With this, a loader without a collate_fn also yields lists of datums.
default_collate_fn_map[DatumLike] = lambda batch, *, collate_fn_map=None: list(batch)  # noqa: ARG005
