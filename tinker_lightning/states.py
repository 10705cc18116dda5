"""Remote states that checkpoint files name: what stands in a file, and when a state is no longer named by any."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import Datum, ModelInput, TensorData
from tinker_lightning.window import Call, ServerCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger("tinker_lightning")

# Where a checkpoint file names the state on the server.
STATE_KEY = "tinker"
_UNREADABLE = "?"


def window_state(window: Sequence[Call | ServerCall]) -> list[dict[str, Any]]:
    """A window as tensors and plain data, which a file gives back without running code."""
    return [
        {
            "loss": _loss_name(call) if isinstance(call, ServerCall) else None,
            "config": dict(call.config) if isinstance(call, ServerCall) else {},
            "datums": [_datum_state(datum) for datum in call.datums],
            "gradients": call.gradients,
        }
        for call in window
    ]


def window_from(state: Sequence[dict[str, Any]]) -> list[Call | ServerCall]:
    """The window that a file has kept."""
    window: list[Call | ServerCall] = []
    for entry in state:
        datums = [_datum_from(datum) for datum in entry["datums"]]
        if entry["loss"] is None:
            window.append(Call(datums, entry["gradients"]))
        else:
            window.append(ServerCall(datums, entry["loss"], entry["config"], entry["gradients"]))
    return window


def _loss_name(call: ServerCall) -> str:
    if hasattr(call.loss, "loss_id"):  # the server forgets it with its session
        raise InvalidInput(
            f"a checkpoint in the midst of a window cannot keep the loss {call.name!r}, which lives as long as its "
            "session. Save at the end of a step, or give it a name with custom_loss."
        )
    return call.name


def _datum_state(datum: Datum) -> dict[str, Any]:
    inputs: dict[str, Tensor] = {name: tensor.to_torch().clone() for name, tensor in datum.loss_fn_inputs.items()}
    return {"tokens": torch.from_numpy(datum.model_input.tokens().copy()), "inputs": inputs}


def _datum_from(state: dict[str, Any]) -> Datum:
    inputs = {name: TensorData.from_torch(tensor) for name, tensor in state["inputs"].items()}
    return Datum(ModelInput.from_ints(state["tokens"]), inputs)


class References:
    """Which remote state each checkpoint file names, so that one goes when its last file has gone.

    The answer is read from the files: they outlive the process that wrote them.

    Args:
        delete: Removes a state on the server.
        folders: Where checkpoint files may lie.
    """

    def __init__(self, delete: Callable[[str], object], folders: Callable[[], Iterable[str]]) -> None:
        self._delete = delete
        self._folders = folders
        self._known: dict[str, str | None] = {}
        self._read: dict[Path, tuple[tuple[int, int], str | None]] = {}

    def named_by(self, file: str | Path) -> str | None:
        """The path of the state that a file names; None if there is no such file, or it names none."""
        path = Path(file)
        try:
            status = path.stat()
        except OSError:
            return self._known.get(str(file)) if "://" in str(file) else None
        key = (status.st_mtime_ns, status.st_size)
        known = self._read.get(path)
        if known is None or known[0] != key:
            known = self._read[path] = (key, _read_name(path))
        return known[1]

    def wrote(self, file: str | Path, state: str | None) -> None:
        """A file was written, or read, that names a state; it counts wherever it lies."""
        self._known[str(file)] = state

    def is_named(self, state: str) -> bool:
        """Whether some file names a state, as far as one can see."""
        return any(self.named_by(file) in (state, _UNREADABLE) for file in self._files())

    def release(self, state: str | None) -> None:
        """Deletes a state that no file names any more; a failure is logged, for nothing is lost by it."""
        if state is None or self.is_named(state):
            return
        try:
            self._delete(state)
        except Exception as error:
            logger.warning("%s is named by no checkpoint file any more, but could not be deleted: %s", state, error)

    def gone(self, file: str | Path) -> None:
        """A file was removed; those that lay beside it still count."""
        self._known[str(file)] = None

    def _files(self) -> set[str | Path]:
        """Those in the folders of checkpoints, those that are known, and those beside them."""
        beside = {Path(file).parent for file in self._known if "://" not in file}
        found = {file for folder in self._folders() for file in Path(folder).rglob("*.ckpt")}
        return found | {file for folder in beside for file in folder.glob("*.ckpt")} | set(self._known)


def _read_name(file: Path) -> str | None:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # others' may be large
        state = content.get(STATE_KEY)
        return str(state["path"]) if state else None
    except Exception as error:
        logger.warning("%s could not be read; remote states are kept while it may name one: %s", file, error)
        return _UNREADABLE
