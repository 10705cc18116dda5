"""Chats to train on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tinker_lightning.data.row_data import RowData
from tinker_lightning.errors import check_choice

if TYPE_CHECKING:
    from tinker_lightning.rows.formats import RowFormat
    from tinker_lightning.types import Datum


class ChatData(RowData):
    """Chats, prompts with completions, or texts: batches are lists of datums.

    A row is a dict with `messages`, with `prompt` and `completion`, or with `text`; or a list of messages, or a string,
    which is a text. Weights are 1 on the assistant's messages and their ends, on the completion, or on the whole text.

    Args:
        *args: See `RowData`.
        train_on: Whether to train on `all` assistant messages of a chat or on the `last` one.
        **kwargs: See `RowData`.
    """

    def __init__(self, *args: Any, train_on: Literal["all", "last"] = "all", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_choice("train_on", train_on, ("all", "last"))
        self._only_last = train_on == "last"

    def convert(self, row: Any, rows: RowFormat) -> Datum:
        """Converts a row to a datum."""
        return rows.datum(row)


class PreferenceData(RowData):
    """Pairs of answers to one prompt: batches are lists of pairs of datums, chosen and rejected.

    A row is a dict with `prompt`, `chosen` and `rejected`, each a string or a list of messages. Without `prompt`, the
    answers are whole chats, whose common start is the prompt. Weights are 1 on the answers. The arguments are those of
    `RowData`; `batch_size` counts pairs.
    """

    def convert(self, row: Any, rows: RowFormat) -> tuple[Datum, Datum]:
        """Converts a row to a chosen and a rejected datum."""
        return rows.pair(row)


class PromptData(RowData):
    """Prompts with any other columns: batches are lists of dicts, in which `prompt` is a `ModelInput`.

    A row is a prompt, or a dict with `prompt`, a string or a list of messages, or with `messages`, whose last answer is
    left out. Strings are messages of the user unless `as_text`, also those that are whole rows.
    Other columns, such as the right answer, are kept as they are. The arguments are those of `RowData`.
    """

    def convert(self, row: Any, rows: RowFormat) -> dict[str, Any]:
        """Converts a row to a dict with the prompt and the other columns."""
        columns = row if isinstance(row, Mapping) else {"prompt": row}
        return {**columns, "prompt": rows.prompt(columns)}
