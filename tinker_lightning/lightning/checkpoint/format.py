"""The format of checkpoint files: its version, and every key that this package writes and reads.

    checkpoint                       Lightning's file, which loads with `weights_only=True`
    ├── state_dict
    │   └── <model>._extra_state     the record of a remote model, see `remote.saved_state`
    ├── optimizer_states             missing if the file was saved with `save_weights_only=True`
    ├── global_step
    ├── loops
    │   └── fit_loop
    │       ├── epoch_progress
    │       └── state_dict
    │           └── combined_loader  a `LoaderState` for each training loader
    └── tinker                       `Section`
        ├── version
        ├── windows, …               `WindowState`
        ├── wandb                    a `RunState` for each W&B run
        └── strategy                 `Position`, None for a file of another strategy
            ├── rng                  `RngState`
            └── loop_position        `LoopPosition`

A file of any other version is rejected. So a change of a key is a change of `VERSION`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.saved_state import FORMAT_VERSION, check_format, check_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

VERSION = FORMAT_VERSION

SECTION = "tinker"
"""The key of the section in a checkpoint."""

RECORD = "_extra_state"
"""The end of the keys of records in a state dict."""

OPTIMIZERS = "optimizer_states"
"""A key of Lightning that files saved with `save_weights_only=True` lack."""

LOADERS = "loops.fit_loop.state_dict.combined_loader"
"""The path of the states of training loaders, where Lightning keeps them."""

# Entries of Lightning that a resume reads.
_LIGHTNING_ENTRIES = ("global_step", "loops.fit_loop.epoch_progress.current", "loops.fit_loop.state_dict")


class DatumState(TypedDict):
    """A datum of an accumulation window."""

    rest: Tensor  # JSON of the datum without its inputs
    inputs: dict[str, Tensor]


class CallState(TypedDict):
    """A call in an accumulation window; `loss` is None if the loss was evaluated locally."""

    loss: str | None
    datums: list[DatumState]
    gradients: list[Tensor] | None


class ServerCallState(CallState):
    """A call of a server-side loss."""

    config: dict[str, float | str]
    added: float | None
    inputs: dict[str, Tensor]


class WindowState(TypedDict):
    """The accumulation window of a module."""

    windows: dict[str, list[CallState | ServerCallState]]  # by the name of the parameter
    local_gradients: dict[str, Tensor]
    window_metrics: list[tuple[dict[str, float], int]]


class RngState(TypedDict):
    """The states of the random number generators."""

    torch: Tensor
    numpy: list[Any]
    python: list[Any]


class LogArguments(TypedDict):
    """The arguments of `self.log` that Lightning stores with a value and compares with the next call."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    enable_graph: bool
    add_dataloader_idx: bool


class LoggedValue(LogArguments):
    """A value that was logged in the current epoch."""

    reduce_fx: str
    metric_attribute: str | None
    value: Tensor | None
    weight: Any
    last: Tensor | None


class MetricState(TypedDict):
    """The state of a torchmetrics metric."""

    count: int
    states: dict[str, Any]


class EpochMetrics(TypedDict):
    """The logged values and the metrics of the current epoch."""

    logged: list[LoggedValue]
    metrics: dict[str, MetricState]


class LoopPosition(TypedDict):
    """The position of Lightning's loops, see `loop_position`."""

    where: str
    is_cut: bool
    epochs: list[int]
    batches: list[int]
    is_last_batch: bool
    logged_steps: int
    accumulate: int
    reloaded: list[Any]
    callback_metrics: dict[str, Tensor]
    row: dict[str, Any] | None
    epoch_metrics: EpochMetrics


class LoaderSettings(TypedDict):
    """The state that the next pass of a loader depends on, apart from the global generators."""

    generators: list[Tensor]
    is_warm: bool


class LoaderStart(LoaderSettings):
    """The state at the start of a pass of a loader."""

    rng: RngState


class LoaderPosition(TypedDict):
    """The position of a training loader after the last batch trained."""

    drawn: int
    count: int
    start: LoaderStart | None  # None if the next pass has not started
    inner: Any  # the state of a loader that has one


class LoaderState(LoaderPosition, total=False):
    """The state of a training loader, with its settings if its next pass has not started."""

    before: LoaderSettings


class RunState(TypedDict):
    """A W&B run."""

    project: str
    id: str


class Position(TypedDict):
    """The position in random numbers and loops."""

    rng: RngState
    loop_position: LoopPosition


class Section(WindowState, total=False):
    """The section of a checkpoint."""

    version: int
    strategy: Position | None
    wandb: list[RunState]


def new_section(checkpoint: dict[str, Any]) -> Section:
    """Returns the section of a checkpoint that is about to be written."""
    section: Section = checkpoint.setdefault(SECTION, {"version": VERSION})
    return section


def read_section(checkpoint: Mapping[str, Any], file: object, *keys: str) -> Section:
    """Returns the section of a checkpoint; raises `InvalidInput` if it lacks a key or has another format version."""
    if SECTION not in checkpoint:
        raise InvalidInput(
            f"{file} lacks {SECTION!r}: it was not written by a RemoteModule, or was changed since. Load a checkpoint "
            "of the module's class."
        )
    section: Any = check_format(checkpoint[SECTION], f"the {SECTION!r} section of {file}", "version", keys)
    return section  # type: ignore[no-any-return]


def read_window(checkpoint: Mapping[str, Any], file: object) -> Section | None:
    """Returns the section of a checkpoint with its accumulation window; None for a file of weights that has none."""
    if SECTION not in checkpoint and OPTIMIZERS not in checkpoint:
        return None
    section = read_section(checkpoint, file, *WindowState.__annotations__)
    for name, window in section["windows"].items():
        for call in window:
            what = f"the accumulation window of {name!r} in {file}"
            _check(call, CallState, what)
            _check(call, CallState if call["loss"] is None else ServerCallState, what)
            for datum in call["datums"]:
                _check(datum, DatumState, f"a datum in {what}")
    return section


def read_position(checkpoint: Mapping[str, Any], file: object) -> Position | None:
    """Returns the position in random numbers and loops; None for a file of another strategy."""
    if OPTIMIZERS not in checkpoint:
        raise InvalidInput(
            f"{file} lacks {OPTIMIZERS!r}: it was saved with save_weights_only=True, or is damaged. Resume from a full "
            "checkpoint, or load the weights with load_from_checkpoint and fit without ckpt_path."
        )
    position = read_section(checkpoint, file, "strategy")["strategy"]
    if position is None:
        return None
    paths = [*_LIGHTNING_ENTRIES]
    paths += [f"{SECTION}.strategy.rng.{key}" for key in RngState.__annotations__]
    paths += [f"{SECTION}.strategy.loop_position.{key}" for key in LoopPosition.__annotations__]
    for path in paths:
        check_entry(checkpoint, file, path)
    return position


def read_loaders(checkpoint: Mapping[str, Any], file: object) -> list[LoaderState]:
    """Returns the states of the training loaders; none at the start of an epoch, where no loader is in use."""
    states: list[LoaderState] = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
    for state in states:
        what = f"'combined_loader' of {file}"
        _check(state, LoaderPosition, what)
        if state["start"] is not None:
            _check(state["start"], LoaderStart, what)
    return states


def read_runs(section: Section, file: object) -> list[RunState]:
    """Returns the W&B runs that a checkpoint names."""
    runs = section.get("wandb", [])
    for run in runs:
        _check(run, RunState, f"a W&B run in {file}")
    return runs


def check_entry(checkpoint: Mapping[str, Any], file: object, path: str) -> None:
    """Raises `InvalidInput` if a checkpoint lacks an entry of its nested dicts, for example `loops.fit_loop`."""
    part: Any = checkpoint
    for key in path.split("."):
        check_keys(part, f"{path!r} of {file}", (key,))
        part = part[key]


def _check(state: Mapping[str, Any], kind: Any, what: str) -> None:
    check_keys(state, what, kind.__annotations__)
