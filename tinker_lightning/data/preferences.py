"""Pairs of answers, of which one is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.data.row_data import RowData

if TYPE_CHECKING:
    from tinker_lightning.rows.formats import RowFormat
    from tinker_lightning.types import Datum


class PreferenceData(RowData):
    """Pairs of answers to one prompt: batches are lists of pairs of datums, chosen and rejected.

    A row is a dict with `prompt`, `chosen` and `rejected`, each a string or a list of messages. Without `prompt`, the
    answers are whole chats, whose common start is the prompt. Weights are 1 on the answers. The arguments are those of
    `RowData`; `batch_size` counts pairs.
    """

    def convert(self, row: Any, rows: RowFormat) -> tuple[Datum, Datum]:
        """Converts a row to a chosen and a rejected datum."""
        return rows.pair(row)
