"""Chats to train on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tinker_lightning.data.row_data import RowData, check_choice

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
