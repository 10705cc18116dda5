"""Data modules of chats, preferences and prompts.

`RowData` reads, converts, checks and counts the rows of files and datasets; `ChatData`, `PreferenceData` and
`PromptData` convert them to datums, pairs of datums and prompts.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from tinker_lightning.data.sources import (
    ConvertedRows,
    Converter,
    Counts,
    RowStream,
    check_source,
    count_tokens,
    iterate_rows,
    keep_row,
    source_name,
)
from tinker_lightning.errors import InvalidDatum, InvalidInput, check_choice
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.rows.batches import SimilarLengths
from tinker_lightning.rows.formats import PromptFormat, RowFormat
from tinker_lightning.types import Datum, collate
from tinker_lightning.types.template import read_template

logger = logging.getLogger("tinker_lightning")

Part: TypeAlias = Literal["train", "validation", "test", "predict"]


class RowData(pl.LightningDataModule):
    """Loads rows of a file or dataset, converted with the tokenizer of the module's server.

    In memory, all rows are converted and checked before training starts. With the strategy `tinker`, a run resumes at
    the batch where it stopped.

    Args:
        train: A JSON Lines file, a dataset of the package `datasets`, or any other collection of rows.
        validation: The same, or the share of `train` to hold out, for example 0.1.
        test: The same, for `Trainer.test`.
        batch_size: The number of rows in a batch.
        max_length: The maximum number of tokens of a row; by default, and at most, the context of the model.
        truncate: The treatment of longer rows: `error` raises, `left` and `right` cut that side, `drop` leaves them
            out. Rows that were cut or dropped are counted, logged, and in `report`.
        bad_rows: The treatment of rows that cannot be converted or have an empty answer: `error` raises with file and
            line, `skip` leaves them out and counts them.
        shuffle: Whether to shuffle the training rows in each epoch.
        group_by_length: Whether the training rows of a batch have similar lengths; needs `shuffle`.
        streaming: Whether to read and convert rows during training, for files that are larger than memory.
        shuffle_buffer: The number of rows to shuffle among while streaming.
        num_workers: The number of processes that convert rows.
        seed: The seed of the choice of held-out rows.
        tokenizer: A Hugging Face tokenizer, in place of the one that the module's server names.
        chat_template: A file with a chat template, or a template, in place of the tokenizer's own.
        renderer: The name of a renderer of `tinker_cookbook`, or a renderer, in place of the chat template.
        system: A system message for chats that have none.
        as_text: Whether strings under `prompt`, `completion`, `chosen` and `rejected` are plain text. By default they
            are messages of the user and the assistant.
    """

    _only_last = False

    def __init__(
        self,
        train: Any = None,
        validation: Any = None,
        *,
        test: Any = None,
        batch_size: int = 8,
        max_length: int | None = None,
        truncate: Literal["error", "left", "right", "drop"] = "error",
        bad_rows: Literal["error", "skip"] = "error",
        shuffle: bool = True,
        group_by_length: bool = False,
        streaming: bool = False,
        shuffle_buffer: int = 1000,
        num_workers: int = 0,
        seed: int = 0,
        tokenizer: Any = None,
        chat_template: str | os.PathLike[str] | None = None,
        renderer: Any = None,
        system: str | None = None,
        as_text: bool = False,
    ) -> None:
        super().__init__()
        check_choice("truncate", truncate, ("error", "left", "right", "drop"))
        check_choice("bad_rows", bad_rows, ("error", "skip"))
        if not isinstance(batch_size, int) or batch_size < 1:
            what = "at least 1" if isinstance(batch_size, int) else "a whole number"
            raise InvalidInput(f"batch_size must be {what}, got {batch_size!r}")
        if max_length is not None and max_length < 2:
            raise InvalidInput(f"max_length must be at least 2, got {max_length}")
        if group_by_length and (streaming or not shuffle):
            raise InvalidInput("group_by_length orders all rows in each epoch: pass shuffle=True and streaming=False")
        self.batch_size = batch_size
        self.report: dict[str, dict[str, Any]] = {}
        """The source and format of the rows of each part, and how many were kept, truncated, dropped and skipped."""
        self._share = validation if isinstance(validation, float) else None
        if self._share is not None and not 0 < self._share < 1:
            raise InvalidInput(f"validation must be a file, a dataset, or a share between 0 and 1, got {validation}")
        if self._share is not None and streaming:
            raise InvalidInput("a share of a stream cannot be held out; pass a file or dataset as validation")
        self._sources: dict[Part, Any] = {"train": train, "test": test}
        if self._share is None:
            self._sources["validation"] = validation
        for part, source in self._sources.items():
            if source is not None:
                check_source(source, part, read_again=streaming)
        if validation is None:  # Lightning validates if the method is overridden
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        self._max_length = max_length
        self._truncate = truncate
        self._bad_rows = bad_rows
        self._shuffle = shuffle
        self._group_by_length = group_by_length
        self._streaming = streaming
        self._buffer_size = shuffle_buffer
        self._num_workers = num_workers
        self._seed = seed
        self._tokenizer = tokenizer
        self._chat_template = None if chat_template is None else read_template(chat_template)
        self._renderer = renderer
        self._format = {"system": system, "as_text": as_text}
        self._used: tuple[Any, int | None] = None, None
        self._datasets: dict[Part, Any] = {}
        self._counts: dict[Part, Counts] = {}
        self._held_out: list[tuple[str, Any]] = []

    def convert(self, row: Any, rows: RowFormat) -> Any:
        """Converts a row to an item of the dataset. Override it for rows of another kind.

        For `predict`, `rows` converts to prompts in place of datums.
        """
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        """Reads and converts the rows of a stage, once for each tokenizer."""
        wanted: dict[str, tuple[Part, ...]] = {
            "fit": ("train", "validation"),
            "validate": ("validation",),
            "test": ("test",),
            "predict": ("predict",),
        }
        used = self._tokenizer_and_length()
        if used != self._used:  # by another module
            self._used = used
            self._datasets.clear()
        for part in wanted[stage]:
            origin = self._origin(part)
            is_held_out = origin == "validation" and self._share is not None
            needed: Part = "train" if is_held_out else origin
            if self._sources.get(needed) is not None:
                if is_held_out:
                    self._load("train")
                self._load(part)
            elif needed == "train" or stage != "fit":
                what = TrainerFn(stage).value
                raise InvalidInput(f"there is no data to {what}: pass {needed}=... to {type(self).__name__}")

    @override
    def train_dataloader(self) -> Any:
        """Returns the loader of the training rows."""
        return self._loader("train", shuffle=self._shuffle)

    @override
    def val_dataloader(self) -> Any:
        """Returns the loader of the validation rows."""
        return self._loader("validation")

    @override
    def test_dataloader(self) -> Any:
        """Returns the loader of the test rows."""
        return self._loader("test")

    @override
    def predict_dataloader(self) -> Any:
        """Returns the prompts of the test rows, else of the validation rows, else of the training rows, in order."""
        return self._loader("predict")

    @override
    def teardown(self, stage: str) -> None:
        """Logs the counts of streamed rows."""
        del stage
        if self._streaming:
            for part in self._datasets:
                self._log(part)

    def _origin(self, part: Part) -> Part:
        """Returns the part whose rows are loaded; `predict` has no rows of its own."""
        if part != "predict":
            return part
        order: tuple[Part, ...] = ("test", "validation", "train")
        sources = {**self._sources, "validation": self._sources.get("validation") or self._share}
        return next((part for part in order if sources[part] is not None), "train")

    def _empty(self, part: Part, counts: Counts) -> InvalidInput:
        origin = self._origin(part)
        source = self._sources.get(origin)
        where = f"{origin} ({os.fspath(source)})" if isinstance(source, str | os.PathLike) else origin
        hint = "" if counts.has_left_out else ". Is it empty?"
        return InvalidInput(f"{where}: no row is left: {counts.describe()}{hint}")

    def _load(self, part: Part) -> None:
        if part in self._datasets:
            return
        counts = self._counts[part] = Counts(self._num_workers)
        convert = self._converter(part, counts)
        if self._streaming:
            source = self._sources[self._origin(part)]
            trial = Counts()
            if all(item is None for item in itertools.starmap(self._converter(part, trial), iterate_rows(source))):
                raise self._empty(part, trial)
            size = self._buffer_size if part == "train" and self._shuffle else 0
            self._datasets[part] = RowStream(source, convert, size)
            return
        rows, kept, items = self._read(part), [], []
        loader = DataLoader(
            ConvertedRows(rows, convert), collate_fn=operator.itemgetter(0), num_workers=self._num_workers
        )
        for row, item in zip(rows, loader, strict=True):
            if isinstance(item, InvalidDatum):
                raise item
            if item is not None:
                kept.append(row)
                items.append(item)
        if not items:
            raise self._empty(part, counts)
        if part == "train" and self._share is not None:
            order = torch.randperm(len(items), generator=torch.Generator().manual_seed(self._seed)).tolist()
            held_out = max(1, round(self._share * len(items)))
            if held_out == len(items):
                raise InvalidInput(f"a share of {self._share} of {len(items)} rows leaves none to train on")
            self._datasets["validation"] = [items[i] for i in sorted(order[:held_out])]
            self._held_out = [kept[i] for i in sorted(order[:held_out])]
            items = [items[i] for i in sorted(order[held_out:])]
            self._counts["validation"] = counts.split(self._datasets["validation"], left_out=False)
            self._counts[part] = counts.split(items, left_out=True)
            self._log("validation")
        self._datasets[part] = items
        self._log(part)

    def _read(self, part: Part) -> list[tuple[str, Any]]:
        """Returns the rows of a part with their origins."""
        origin = self._origin(part)
        if origin == "validation" and self._share is not None:
            return self._held_out
        if isinstance(self._sources[origin], Iterator):  # can be read once, but may be needed again for `predict`
            self._sources[origin] = list(self._sources[origin])
        return list(iterate_rows(self._sources[origin]))

    def _converter(self, part: Part, counts: Counts) -> Converter:
        is_prompt = part == "predict"
        rows = self._rows(counts, PromptFormat if is_prompt else RowFormat)
        return Converter(
            functools.partial(self._prompt if is_prompt else self.convert, rows=rows),
            counts,
            drop_long=self._truncate == "drop",
            skip_bad=self._bad_rows == "skip",
        )

    def _prompt(self, row: Any, rows: RowFormat) -> Any:
        return keep_row(self.convert(row, rows), row, rows)

    def _log(self, part: Part) -> None:
        if (counts := self._counts.get(part)) is not None:
            origin = self._origin(part)
            source = self._sources.get(origin, self._sources["train"])
            name = source_name(source, None if origin in self._sources else self._share)
            self.report[part] = {"source": name, **counts.as_dict()}
            level = logging.WARNING if counts.has_left_out or self.report[part]["truncated"] else logging.INFO
            logger.log(level, "%s: %s", part, counts.describe())

    def _loader(self, part: Part, *, shuffle: bool = False) -> Any:
        dataset = self._datasets[part]
        if isinstance(dataset, RowStream):
            return DataLoader(dataset, batch_size=self.batch_size, collate_fn=collate, num_workers=self._num_workers)
        if shuffle and self._group_by_length:
            sampler = SimilarLengths([count_tokens(item) for item in dataset], self.batch_size)
            return DataLoader(dataset, batch_size=self.batch_size, sampler=sampler, collate_fn=collate)
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=shuffle, collate_fn=collate)

    def _tokenizer_and_length(self) -> tuple[Any, int | None]:
        """Returns the tokenizer and the maximum length of a row, which is at most the context of the model."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        tokenizer, length = self._tokenizer, self._max_length
        if isinstance(module, RemoteModule):
            module.check_open()
            tokenizer = tokenizer or module.tokenizer
            context = module.lm.backend.max_context_length()
            if length is not None and context is not None and length > context:
                raise InvalidInput(f"max_length={length} exceeds the context of the model, {context} tokens")
            length = length or context
        if tokenizer is None:
            raise InvalidInput(f"pass tokenizer=... to use {type(self).__name__} without a RemoteModule")
        return tokenizer, length

    def _rows(self, counts: Counts, kind: type[RowFormat]) -> RowFormat:
        tokenizer, length = self._used
        if self._chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.name_or_path, tokenizer.chat_template = self._chat_template
        renderer = self._renderer
        if isinstance(renderer, str):
            renderer = _cookbook_renderer(renderer, tokenizer)
        return kind(
            tokenizer,
            length,
            self._truncate if self._truncate != "drop" else "error",
            only_last=self._only_last,
            renderer=renderer,
            count=counts.add,
            **self._format,  # type: ignore[arg-type]
        )


class ChatData(RowData):
    """Chats, prompts with completions, or texts: batches are lists of datums.

    A row is a dict with `messages`, with `prompt` and `completion`, or with `text`; a row of ShareGPT (`conversations`)
    or Alpaca (`instruction`, `input`, `output`); a list of messages; or a string, which is a text. Weights are 1 on the
    assistant's messages and their ends, on the completion, or on the whole text. A message with `weight` 0 or `train`
    False is not trained.

    Args:
        *args: See `RowData`.
        train_on: The assistant messages of a chat to train on: `all`, or only the `last` one.
        **kwargs: See `RowData`.
    """

    def __init__(self, *args: Any, train_on: Literal["all", "last"] = "all", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_choice("train_on", train_on, ("all", "last"))
        self._only_last = train_on == "last"

    @override
    def convert(self, row: Any, rows: RowFormat) -> Datum:
        """Converts a row to a datum."""
        return rows.datum(row)


class PreferenceData(RowData):
    """Pairs of answers to one prompt, or single answers with a label.

    A pair is a dict with `prompt`, `chosen` and `rejected`, each a string or a list of messages. Without `prompt`, the
    answers are whole chats, whose common start is the prompt. Batches are lists of pairs of datums, chosen and
    rejected; `batch_size` counts pairs.

    For `KTO`, a row is also a dict with `prompt`, `completion` and `label`, true if the completion is desirable and
    false if not, or with `messages` and the `label` of the last one. Batches are lists of datums with `label`.

    Weights are 1 on the answers. See `RowData` for the arguments.
    """

    @override
    def convert(self, row: Any, rows: RowFormat) -> Datum | tuple[Datum, Datum]:
        """Converts a row to a chosen and a rejected datum, or to a datum with a label."""
        return rows.preference(row)


class PromptData(RowData):
    """Prompts with any other columns: batches are lists of dicts, in which `prompt` is a `ModelInput`.

    A row is a prompt, or a dict with `prompt`, a string or a list of messages, or with `messages`, whose last answer is
    left out. Strings, whole rows included, are messages of the user unless `as_text`. Other columns, such as the right
    answer, are kept as they are. See `RowData` for the arguments.
    """

    @override
    def convert(self, row: Any, rows: RowFormat) -> dict[str, Any]:
        """Converts a row to a dict with the prompt and the other columns."""
        columns = row if isinstance(row, Mapping) else {"prompt": row}
        return {**columns, "prompt": rows.prompt(columns)}


def _cookbook_renderer(name: str, tokenizer: Any) -> Any:
    try:
        from tinker_cookbook.renderers import get_renderer
    except ImportError as error:
        raise InvalidInput(
            f"renderer={name!r} needs the package tinker-cookbook. Install it with: python -m pip install "
            "tinker-cookbook"
        ) from error
    return get_renderer(name, tokenizer)
