"""Prompts to answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinker_lightning.data.row_data import RowData

if TYPE_CHECKING:
    from tinker_lightning.rows.formats import RowFormat


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
