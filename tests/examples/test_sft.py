"""The SFT example runs from end to end: on `tiny` in seconds, and as a soak test on a model that can read."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest

from examples import sft

if TYPE_CHECKING:
    from pathlib import Path

# Lightning's advice for loaders as small as these, and its use of a name that torch calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.soak)])
def test_the_chats_that_are_held_out_become_likelier(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.9
    limit: dict[str, Any] = {"limit_train_batches": 4, "limit_val_batches": 1} if model == "tiny" else {}
    monkeypatch.setattr(pl, "Trainer", partial(pl.Trainer, **limit))
    before, after = sft.main(tmp_path, model)
    assert after["val_nll"] < 0.8 * before["val_nll"]
