"""A window in a checkpoint file: what comes back is what was put in, without running code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinker_lightning.client import LossHandle
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.checkpoint.contents import state_in, window_from, window_state
from tinker_lightning.lightning.checkpoint.format import VERSION, read_window
from tinker_lightning.remote.calls import Call, ServerCall
from tinker_lightning.remote.saved_state import SavedState
from tinker_lightning.types import Datum, ImageChunk, ModelInput, ProvenanceSpan, TensorData

if TYPE_CHECKING:
    from pathlib import Path

SPANS = [ProvenanceSpan("prompt", "first", 0, 1), ProvenanceSpan("sampled", "second", 0, 2)]
DATUMS = {
    "plain": Datum.from_tokens([1, 2, 3, 4], weights=[0, 0, 1, 1]),
    "with a number and a gap": Datum(
        ModelInput.from_ints([1, 2]),
        {"target_tokens": [2, 3], "reward": TensorData(np.float32(0.5)), "mask": np.array([0.0, np.nan], np.float32)},
    ),
    "with K targets": Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [[1, 2, 3], [4, 5, 6]]}),
    "with spans": Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]}, SPANS, SPANS),
    "with an image": Datum(
        ModelInput([ImageChunk(b"picture", "png", expected_tokens=3), *ModelInput.from_ints([7]).chunks]),
        {"target_tokens": [0, 0, 0, 8]},
    ),
}


def through_a_file(call: Call | ServerCall, folder: Path) -> Call | ServerCall:
    torch.save(window_state([call]), folder / "window")
    (back,) = window_from(torch.load(folder / "window", weights_only=True))
    return back


@pytest.mark.parametrize("name", DATUMS)
def test_a_datum_is_the_same_behind_a_file(name: str, tmp_path: Path) -> None:
    datum = DATUMS[name]
    gradients = [torch.randn(datum.loss_fn_inputs["target_tokens"].shape)]
    back = through_a_file(Call([datum], gradients), tmp_path)
    (kept,) = back.datums
    assert kept.model_input == datum.model_input
    assert (kept.model_input_spans, kept.loss_fn_input_spans) == (datum.model_input_spans, datum.loss_fn_input_spans)
    for key, tensor in datum.loss_fn_inputs.items():
        assert kept.loss_fn_inputs[key].shape == tensor.shape
        assert kept.loss_fn_inputs[key].dtype == tensor.dtype
        np.testing.assert_array_equal(kept.loss_fn_inputs[key].to_numpy(), tensor.to_numpy())
    assert back.gradients is not None
    assert torch.equal(back.gradients[0], gradients[0])


def test_a_loss_of_the_server_is_kept_by_its_name(tmp_path: Path) -> None:
    call = ServerCall([DATUMS["plain"]], "ppo", {"clip_low_threshold": 0.9}, [torch.tensor(0.25)], added=1.5)
    back = through_a_file(call, tmp_path)
    assert isinstance(back, ServerCall)
    assert (back.loss, back.config, back.gradients, back.added) == (call.loss, call.config, call.gradients, 1.5)


def test_a_loss_that_ends_with_its_session_cannot_be_kept() -> None:
    loss: Any = None
    handle = LossHandle("clipped", "session", loss, "session:loss:0")
    with pytest.raises(InvalidInput, match=r"cannot keep the loss 'clipped'.*after an optimizer step.*custom_loss"):
        window_state([ServerCall([DATUMS["plain"]], handle, {}, [torch.tensor(1.0)])])


@pytest.mark.parametrize("key", ["loss", "datums", "gradients", "config", "added", "inputs"])
def test_a_window_without_a_key_is_rejected(key: str) -> None:
    window = window_state([ServerCall([DATUMS["plain"]], "ppo", {}, [torch.tensor(0.25)])])
    del window[0][key]
    section = {"windows": {"lm.handle": window}, "local_gradients": {}, "window_metrics": []}
    with pytest.raises(InvalidInput, match=rf"the accumulation window of 'lm\.handle' in a\.ckpt lacks '{key}'"):
        read_window({"tinker": {"version": VERSION, **section}}, "a.ckpt")


def test_the_state_that_a_file_names_is_told_from_the_state_of_other_modules() -> None:
    state = SavedState("tinker://x", "tiny", 4, 7)
    others = {"head._extra_state": torch.zeros(3), "other._extra_state": None}
    entries = {**others, "student._extra_state": state.to_tensor()}
    assert state_in({"state_dict": entries}, "a.ckpt") == state
    with pytest.raises(InvalidInput, match=r"a\.ckpt is not a checkpoint file of Lightning"):
        state_in({"model": entries}, "a.ckpt")
    with pytest.raises(InvalidInput, match=r"a\.ckpt names no remote model"):
        state_in({"state_dict": others}, "a.ckpt")
