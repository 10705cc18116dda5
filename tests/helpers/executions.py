"""What a trainer has carried out, by its own log."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import TYPE_CHECKING

from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class ExecutionLog(logging.Handler):
    """What a trainer has carried out, by its own log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._executed: list[tuple[str, int, str]] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"op=(\S+) model=(\S+) seq=(\d+) .* ok$", record.getMessage())
        if found:
            with self._changed:
                self._executed.append((found[2], int(found[3]), found[1]))
                self._changed.notify_all()

    def of(self, model_id: str, last: int) -> list[tuple[int, str]]:
        """The operations of a model, with the last one, which is logged just after its result was handed out."""
        with self._changed:
            self._changed.wait_for(lambda: any(entry[:2] == (model_id, last) for entry in self._executed), timeout=10)
            return self.executed(model_id)

    def executed(self, model_id: str) -> list[tuple[int, str]]:
        """Number and kind of each operation of a model so far, in the order in which they ran."""
        return [(number, kind) for model, number, kind in self._executed if model == model_id]


@contextlib.contextmanager
def logged_trainer(folder: Path) -> Iterator[tuple[EmbeddedTrainer, ExecutionLog]]:
    """A trainer and what it carries out."""
    logger, log = logging.getLogger("tinker_lightning.server"), ExecutionLog()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    trainer = EmbeddedTrainer(["tiny"], data_dir=folder)
    try:
        yield trainer, log
    finally:
        trainer.close()
        logger.removeHandler(log)
        logger.setLevel(level)
