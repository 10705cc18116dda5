"""Log-probabilities of a reference model, requested without waiting and cached by content."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.types import ModelInput
from tinker_lightning.types.datum import to_datum

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.types import Datum

REFERENCE = "reference_logprobs"


def check_reference(reference: str) -> None:
    """Raises `InvalidInput` for a reference that is neither the base model nor a path."""
    if reference != "base" and "://" not in reference:
        raise InvalidInput(
            f"reference must be 'base' or the tinker:// path of saved sampler weights, got {reference!r}"
        )


class References:
    """Adds `reference_logprobs` to datums. Each sequence is scored once.

    Args:
        lm: The model that is trained.
        reference: `base` for its base model, or the path of saved sampler weights.
        cache: A file that keeps the log-probabilities.
        keep: Whether to keep them in memory for datums that are trained again.
    """

    def __init__(self, lm: RemoteLM, reference: str, cache: str | Path | None, *, keep: bool = True) -> None:
        self._lm = lm
        self._reference = reference
        self._cache = cache
        self._keep = keep
        self._opened: tuple[str, Any] | None = None
        self._pending: dict[bytes, Any] = {}
        self._cached: dict[bytes, NDArray[np.float32]] = {}

    def open(self) -> tuple[str, Any]:
        """Returns the name of the reference model and a client that samples from it, created once."""
        if self._opened is None:
            backend = self._lm.backend
            if self._reference == "base":
                name = backend.get_info().model_data.model_name or ""
                self._opened = name, backend.create_base_sampling_client()
            else:
                self._opened = self._reference, backend.create_sampling_client(self._reference)
        return self._opened

    def request(self, data: Sequence[Any]) -> None:
        """Requests the log-probabilities that are not cached, without waiting for them."""
        tokens = self._missing(data)
        self._read(set(tokens) - self._cached.keys() - self._pending.keys())
        for key, ids in tokens.items():
            if key not in self._cached and key not in self._pending:
                self._pending[key] = self.open()[1].compute_logprobs(ModelInput.from_ints(ids))
                self._lm.handle.remote.tokens.prefilled += len(ids)

    def add_to(self, data: Sequence[Any]) -> list[Any]:
        """Returns datums with `reference_logprobs`; waits for pending requests."""
        self.request(data)
        pending = [key for key in self._missing(data) if key in self._pending]
        # Nothing precedes the first token.
        arrived = {key: np.array(self._pending.pop(key).result()[1:], np.float32) for key in pending}
        self._cached |= arrived
        self._write(arrived)
        added = [
            each if REFERENCE in each.loss_fn_inputs else each.with_inputs({REFERENCE: self._cached[self._key(each)]})
            for each in map(to_datum, data)
        ]
        if not self._keep:
            self._cached.clear()
        return added

    def _missing(self, data: Sequence[Any]) -> dict[bytes, NDArray[np.int64]]:
        """Returns the tokens of datums without reference log-probabilities, by the key of their content."""
        missing = [to_datum(datum) for datum in data if REFERENCE not in datum.loss_fn_inputs]
        return {self._key(datum): whole_sequence(datum) for datum in missing}

    def _key(self, datum: Any) -> bytes:
        return hashlib.sha256(self.open()[0].encode() + b"\0" + whole_sequence(to_datum(datum)).tobytes()).digest()

    def _read(self, keys: set[bytes]) -> None:
        if self._cache is None or not keys:
            return
        with closing(self._database()) as database:
            for key in keys:
                if row := database.execute("SELECT logprobs FROM reference WHERE key = ?", (key,)).fetchone():
                    self._cached[key] = np.frombuffer(row[0], np.float32)

    def _write(self, arrived: dict[bytes, NDArray[np.float32]]) -> None:
        if self._cache is None or not arrived:
            return
        rows = [(key, logprobs.tobytes()) for key, logprobs in arrived.items()]
        with closing(self._database()) as database, database:
            database.executemany("INSERT OR REPLACE INTO reference VALUES (?, ?)", rows)

    def _database(self) -> sqlite3.Connection:
        # Opened for each batch: a connection cannot be pickled or used from other threads.
        database = sqlite3.connect(self._cache or ":memory:")
        database.execute("CREATE TABLE IF NOT EXISTS reference (key BLOB PRIMARY KEY, logprobs BLOB)")
        return database


def whole_sequence(datum: Datum) -> NDArray[np.int64]:
    """Returns the whole sequence of a datum: its input and the last target."""
    inputs = np.array(datum.model_input.to_ints(), np.int64)
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    if targets.shape != inputs.shape or (targets[:-1] != inputs[1:]).any():
        raise InvalidDatum(
            "target_tokens are not the next tokens of the input, so a reference model cannot score them. Build the "
            "datum with Datum.from_tokens(tokens, weights), or add reference_logprobs to it."
        )
    return np.append(inputs, targets[-1])
