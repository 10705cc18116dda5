"""Rows of JSON Lines files and datasets: read, counted and converted, in memory or as a stream."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tinker_lightning.errors import InvalidDatum, InvalidInput, TooLong
from tinker_lightning.remote.calls import tokens_of
from tinker_lightning.rows.columns import FORMATS
from tinker_lightning.rows.formats import RowFormat, is_chat
from tinker_lightning.types import Datum, ModelInput
from tinker_lightning.types.chat import parse_json

logger = logging.getLogger("tinker_lightning")

_NAMES = ("rows", "tokens", "trained_tokens", "truncated", "dropped", "skipped", *FORMATS)
# Endings of files that are not JSON Lines, and the builder of the package `datasets` that reads them.
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}
_BUILDERS |= dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "json")


class EncodedRow(bytes):
    """A row as a line of a file, decoded when it is converted."""

    __slots__ = ()


def iterate_rows(source: Any) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a file or dataset with their origins, `data.jsonl:17` or `row 17`."""
    if not isinstance(source, str | os.PathLike):
        yield from ((f"row {i}", row) for i, row in enumerate(source))
        return
    is_one, rows = _detect_array(source)
    if is_one:
        rows = _read_array(source) if rows is None else rows
        yield from ((f"{os.fspath(source)}: row {i}", row) for i, row in enumerate(rows))
    else:
        with open(source, "rb") as file:
            yield from (
                (f"{os.fspath(source)}:{i}", EncodedRow(line)) for i, line in enumerate(file, 1) if line.strip()
            )


def read_rows(source: Any, part: str) -> list[Any]:
    """Returns the rows of a file or dataset as they are; errors name the file and the line."""
    check_source(source, part)
    rows = []
    for where, row in iterate_rows(source):
        try:
            rows.append(_parse(row) if isinstance(row, EncodedRow) else row)
        except InvalidDatum as error:
            raise InvalidDatum(f"{where}: {error}") from error
    return rows


def check_source(source: Any, part: str, *, read_again: bool = False) -> None:
    """Raises `InvalidInput` if a dataset cannot be read, or only once although it is read in each epoch."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if os.path.isdir(source):
            files = sorted(name for name in os.listdir(source) if name.endswith((".jsonl", ".json")))
            one = f"a file in it, for example {os.path.join(path, files[0])}" if files else "a JSON Lines file"
            loaded = ", or the dataset that datasets.load_dataset(...) or load_from_disk(...) makes of it"
            raise InvalidInput(f"{part}: {path} is a folder. Pass {one}{loaded}.")
        if not os.path.isfile(source):
            raise InvalidInput(f"{part}: there is no file {path}")
        if builder := _BUILDERS.get(os.path.splitext(path)[1]):
            raise InvalidInput(
                f"{part}: {path} is not a JSON Lines file. Pass the dataset that the package datasets makes of it: "
                f"datasets.load_dataset({builder!r}, data_files={path!r}, split='train')."
            )
        if read_again and _detect_array(source)[0]:
            raise InvalidInput(
                f"{part}: {path} is one JSON array, which cannot be streamed. Write one row per line, for example "
                f"with: jq -c '.[]' {path} > rows.jsonl"
            )
    elif isinstance(source, Mapping):
        raise InvalidInput(
            f"{part} must be one dataset, got a {type(source).__name__} with {', '.join(map(str, source)) or 'nothing'}"
            "; pass one of its parts"
        )
    elif not isinstance(source, Iterable):
        raise InvalidInput(
            f"{part} must be a JSON Lines file, a dataset or a list of rows, got {type(source).__name__}"
        )
    elif read_again and isinstance(source, Iterator):
        raise InvalidInput(
            f"{part} is a {type(source).__name__}, which can be read once, but a stream is read in each epoch. Pass a "
            "file, a dataset, or a list of rows."
        )


def source_name(source: Any, share: float | None = None) -> str:
    """Returns a file as the user wrote it, or the kind of another source, and the share of it that is held out."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
    return name if share is None else f"{share} of {name}"


def count_tokens(item: Any) -> int:
    """Returns the number of tokens that a pass computes for a datum, a pair, or the prompt in a dict."""
    return tokens_of(part for part in _parts(item) if isinstance(part, Datum | ModelInput))


class Counts:
    """Counts rows and tokens of a dataset in one pass over it, also in the worker processes of a loader.

    Args:
        num_workers: The number of worker processes.
    """

    def __init__(self, num_workers: int = 0) -> None:
        # For this pass over the data and the fullest one before, one row per process: adding to shared memory is not
        # atomic.
        self._numbers = torch.zeros(2, num_workers + 1, len(_NAMES), dtype=torch.int64).share_memory_()

    def start_pass(self) -> None:
        """Starts to count again; an incomplete last pass does not hide an earlier one."""
        current, fullest = self._numbers[:, _process()]
        fullest.copy_(torch.maximum(current, fullest))
        current.zero_()

    def add(self, name: str, number: int = 1) -> None:
        """Increases a count."""
        self._numbers[0, _process(), _NAMES.index(name)] += number

    def add_item(self, item: Any) -> None:
        """Counts the tokens of a row that is kept."""
        self.add("rows")
        self.add("tokens", count_tokens(item))
        for part in _parts(item):
            if isinstance(part, Datum):
                weights = part.loss_fn_inputs.get("weights")
                trained = part.model_input.length if weights is None else int((weights.to_numpy() != 0).sum())
                self.add("trained_tokens", trained)

    def split(self, items: Iterable[Any], *, left_out: bool) -> Counts:
        """Returns the counts of some of the rows that were kept, if asked with the rows that this pass has left out."""
        part = Counts()
        for item in items:
            part.add_item(item)
        counts = dict(zip(_NAMES, self._numbers.amax(0).sum(0).tolist(), strict=True))
        for name in (*FORMATS, *(("truncated", "dropped", "skipped") if left_out else ())):
            part.add(name, counts[name])
        return part

    @property
    def has_left_out(self) -> bool:
        """Whether rows were dropped or skipped."""
        counts = self.as_dict()
        return bool(counts["dropped"] or counts["skipped"])

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts by name, and the names of the formats of the rows as `format`."""
        counts = dict(zip(_NAMES, self._numbers.amax(0).sum(0).tolist(), strict=True))
        return {"format": ", ".join(name for name in FORMATS if counts.pop(name)), **counts}

    def describe(self) -> str:
        """Returns the counts as text."""
        counts = self.as_dict()
        kind = counts["format"] and f" ({counts['format']})"
        text = f"{counts['rows']} rows{kind} with {counts['tokens']} tokens, {counts['trained_tokens']} of them trained"
        left = {
            "truncated": "truncated",
            "dropped": "dropped because they are too long",
            "skipped": "skipped as invalid",
        }
        return ", ".join([text, *(f"{counts[name]} {what}" for name, what in left.items() if counts[name])])


class Converter:
    """Converts rows to items of a dataset; returns None for a row that is dropped or skipped.

    Args:
        convert: Converts one row; raises `TooLong` or another `InvalidDatum`.
        counts: The counts to add to.
        drop_long: Whether to drop rows that are too long instead of raising.
        skip_bad: Whether to skip other rows that cannot be converted instead of raising.
    """

    def __init__(self, convert: Callable[[Any], Any], counts: Counts, *, drop_long: bool, skip_bad: bool) -> None:
        self._convert = convert
        self.counts = counts
        self._drop_long = drop_long
        self._skip_bad = skip_bad

    def __call__(self, where: str, row: Any) -> Any:
        """Converts a row; errors name its origin."""
        try:
            try:
                item = self._convert(_parse(row) if isinstance(row, EncodedRow) else row)
            except RecursionError as error:
                raise InvalidDatum("it is nested too deeply") from error
        except InvalidDatum as error:
            is_long = isinstance(error, TooLong)
            if not (self._drop_long if is_long else self._skip_bad):
                raise type(error)(f"{where}: {error}") from error
            if not is_long and not self.counts.as_dict()["skipped"]:
                logger.warning("%s is skipped, as are others like it: %s", where, error)
            self.counts.add("dropped" if is_long else "skipped")
            return None
        self.counts.add_item(item)
        return item


class RowPrompt(ModelInput):
    """A prompt that keeps the row of the dataset that it was made from, for what is written next to a prediction."""

    __slots__ = ("row",)

    def __init__(self, prompt: ModelInput, row: Any) -> None:
        super().__init__(prompt.chunks)
        self.row = row


def keep_row(item: Any, row: Any, rows: RowFormat) -> Any:
    """Returns a prompt, or a dict with a `prompt`, that keeps its row; of a pair the first one's."""
    item = item[0] if isinstance(item, tuple) else item
    if isinstance(item, Datum):  # of a conversion that does not use `rows`
        item = rows.datum(item)
    if isinstance(item, ModelInput):
        return RowPrompt(item, row)
    if isinstance(item, Mapping) and isinstance(item.get("prompt"), ModelInput):
        return {**item, "prompt": RowPrompt(item["prompt"], row)}
    return item


def columns_of(item: Any) -> Mapping[str, Any]:
    """Returns the columns of the row that an item of a batch of prompts was made from; none if it has no row."""
    prompt = item.get("prompt") if isinstance(item, Mapping) else item
    row = getattr(prompt, "row", item)
    if isinstance(row, Mapping):
        return {str(name): value for name, value in row.items()}
    return {"prompt": row} if isinstance(row, str) or is_chat(row) else {}


class ConvertedRows(Dataset[Any]):
    """Converts rows by index, for loaders with worker processes.

    An error is an item: torch would put the stack trace of a worker process into its message.
    """

    def __init__(self, rows: list[tuple[str, Any]], convert: Converter) -> None:
        self._rows = rows
        self._convert = convert

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._convert(*self._rows[index])
        except InvalidDatum as error:
            return error


class RowStream(IterableDataset[Any]):
    """Converts rows while they are read, so that a file may be larger than memory.

    Each worker of a loader converts its share of the rows; a streaming dataset of the package `datasets` chooses this
    share itself. Rows are shuffled within a buffer.
    """

    def __init__(self, source: Any, convert: Converter, buffer_size: int) -> None:
        self._source = source
        self._convert = convert
        self._buffer_size = buffer_size

    def __iter__(self) -> Iterator[Any]:
        self._convert.counts.start_pass()
        rows = iterate_rows(self._source)
        if (info := get_worker_info()) is not None:
            if _splits_itself(self._source):
                rows = ((f"worker {info.id}, {where}", row) for where, row in rows)
            else:
                rows = itertools.islice(rows, info.id, None, info.num_workers)
        converted = (self._convert(where, row) for where, row in rows)
        yield from _shuffle((item for item in converted if item is not None), self._buffer_size)


def _parts(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item if isinstance(item, tuple) else (item,)


def _process() -> int:
    """Returns 0 in the main process, and the number of a worker process of a loader, from 1."""
    info = get_worker_info()
    return 0 if info is None else info.id + 1


def _detect_array(source: str | os.PathLike[str]) -> tuple[bool, list[Any] | None]:
    """Returns whether a file is one JSON array, in place of a row per line, and its rows if it is one line."""
    with open(source, "rb") as file:
        lines = (line for line in file if line.strip())
        first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
        if not first.lstrip().startswith(b"["):
            return False, None
        try:
            value = json.loads(first)
        except (ValueError, RecursionError):  # an array over several lines, or a row that is damaged
            return not _has_rows(lines), None
        is_one = not is_chat(value) and next(lines, None) is None
        return is_one, value if is_one else None


def _has_rows(lines: Iterator[bytes]) -> bool:
    """Returns whether one of the lines is a row on its own, and not the last element of an array over several lines."""
    for line, following in itertools.pairwise(itertools.chain(lines, [b""])):
        is_whole = line.startswith((b"{", b"[")) and line.rstrip().endswith((b"}", b"]"))
        if is_whole and not following.lstrip().startswith(b"]"):
            with contextlib.suppress(ValueError, RecursionError):
                json.loads(line)
                return True
    return False


def _read_array(source: str | os.PathLike[str]) -> list[Any]:
    with open(source, "rb") as file:
        fix = ". The file must have one JSON object per line, or be one JSON array."
        return list(parse_json(file.read(), f"{os.fspath(source)}: ", fix))


def _splits_itself(source: Any) -> bool:
    """Returns whether a dataset yields other rows in each worker, as streaming ones of the package `datasets` do."""
    packages = {base.__module__.partition(".")[0] for base in type(source).__mro__}
    return isinstance(source, IterableDataset) and "datasets" in packages


def _shuffle(items: Iterator[Any], size: int) -> Iterator[Any]:
    """Yields items in random order within a buffer, with torch's generator."""
    buffer = list(itertools.islice(items, size)) if size > 1 else []
    for item in items:
        if buffer:
            index = int(torch.randint(len(buffer), ()))
            buffer[index], item = item, buffer[index]
        yield item
    yield from (buffer[i] for i in torch.randperm(len(buffer)).tolist())


def _parse(line: EncodedRow) -> Any:
    # Without its end, or an early end of the row would be reported on the line after it.
    return parse_json(line.rstrip(), fix=". A JSON Lines file has one JSON object per line.")
