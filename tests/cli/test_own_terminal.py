"""What a command prints next to its bar: lines of logs on lines of their own, without advice of other packages."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from tinker_lightning.cli.lightning_cli import own_terminal

if TYPE_CHECKING:
    import pytest

NAMES = ("lightning.pytorch", "lightning.fabric", "tinker_lightning")


def test_lines_do_not_tear_the_bar_and_loggers_are_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    before = [(logging.getLogger(name).handlers, logging.getLogger(name).level) for name in NAMES]
    show, filters = warnings.showwarning, list(warnings.filters)
    rank_zero = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with own_terminal():
        bar = Tqdm(total=2, file=sys.stdout, desc="Epoch 0")
        capsys.readouterr()
        rank_zero.info("GPU available: False, used: False")
        rank_zero.info("💡 Tip: For seamless cloud logging, try installing something")
        rank_zero.info("`Trainer.fit` stopped")
        logging.getLogger("tinker_lightning").warning("a step was skipped")
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn("a caution", stacklevel=1)
        shown = capsys.readouterr()
        bar.close()
    assert shown.err == "`Trainer.fit` stopped\na step was skipped\nwarning: a caution\n"
    assert shown.out.count("Epoch 0") == 3  # drawn again after each line
    assert [(logging.getLogger(name).handlers, logging.getLogger(name).level) for name in NAMES] == before
    assert warnings.showwarning is show
    assert list(warnings.filters) == filters
