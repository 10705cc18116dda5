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
    │           └── combined_loader  the "loader" of each training loader
    └── tinker                       the "section" of this package
        ├── version
        ├── windows                  a "call" or "server call", with its "datum"s, for each call of a remote model
        ├── local_gradients          the gradients of local parameters in the window, by name
        ├── window_metrics           the metrics of the window's micro-batches, each with its number of datums
        ├── wandb                    a "run" for each W&B logger
        ├── rows                     the number of "rows" logged so far, by the names of CSV files and the ids of runs
        └── strategy                 the "position", or None if the trainer has another strategy
            ├── rng                  "rng"
            └── loop_position        "loops", with the "epoch" metrics

`KEYS` has the keys of each part. Files of any other version are rejected, so a change of a key changes `VERSION`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.saved_state import check_format, check_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
"""The version of the section; a file of any other version is rejected."""

SECTION = "tinker"
"""The key of the section in a checkpoint."""

RECORD = "_extra_state"
"""The end of the keys of records in a state dict."""

OPTIMIZERS = "optimizer_states"
"""A key of Lightning that files saved with `save_weights_only=True` lack."""

LOADERS = "loops.fit_loop.state_dict.combined_loader"
"""The path of the states of training loaders, where Lightning keeps them."""

LOG_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
"""The arguments of `self.log` that Lightning stores with a value and compares with the next call."""

WINDOW = ("windows", "local_gradients", "window_metrics")
"""The keys of the accumulation window in the section."""

KEYS = {
    "section": ("version", *WINDOW, "strategy"),  # and "wandb" and "rows" if there is a trainer
    "call": ("loss", "datums", "gradients"),
    "server call": ("loss", "datums", "gradients", "config", "added", "inputs"),
    "datum": ("rest", "inputs"),
    "run": ("project", "id"),
    "rows": ("csv", "wandb"),
    "position": ("rng", "loop_position"),
    "rng": ("torch", "numpy", "python"),
    "loops": (
        *("where", "is_cut", "epochs", "batches", "is_last_batch", "logged_steps", "accumulate", "reloaded"),
        *("callback_metrics", "row", "epoch_metrics"),
    ),
    "epoch": ("logged", "metrics"),
    "logged": (*LOG_ARGUMENTS, "reduce_fx", "metric_attribute", "value", "weight", "last"),
    "metric": ("count", "states"),
    "loader": ("drawn", "count", "start", "inner"),  # and "before", a "resting loader", if "start" is None
    "loader start": ("rng", "generators", "is_warm"),
    "resting loader": ("generators", "is_warm"),
}
"""The keys of each part of a checkpoint."""

# Entries of Lightning that a resume reads.
_LIGHTNING_ENTRIES = ("global_step", "loops.fit_loop.epoch_progress.current", "loops.fit_loop.state_dict")


def new_section(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of a checkpoint that is about to be written."""
    section: dict[str, Any] = checkpoint.setdefault(SECTION, {"version": VERSION})
    return section


def read_section(checkpoint: Mapping[str, Any], file: object, *keys: str) -> dict[str, Any]:
    """Returns the section of a checkpoint; raises `InvalidInput` if it lacks a key or has another format version."""
    if SECTION not in checkpoint:
        raise InvalidInput(
            f"{file} lacks {SECTION!r}: it was not written by a RemoteModule, or was changed since. Load a checkpoint "
            "of the module's class."
        )
    return check_format(checkpoint[SECTION], f"the {SECTION!r} section of {file}", "version", VERSION, keys)


def read_window(checkpoint: Mapping[str, Any], file: object) -> dict[str, Any] | None:
    """Returns the section of a checkpoint with its accumulation window; None for a file of weights that has none."""
    if SECTION not in checkpoint and OPTIMIZERS not in checkpoint:
        return None
    section = read_section(checkpoint, file, *WINDOW)
    for name, window in section["windows"].items():
        for call in window:
            what = f"the accumulation window of {name!r} in {file}"
            check_keys(call, what, KEYS["call"])
            check_keys(call, what, KEYS["call" if call["loss"] is None else "server call"])
            for datum in call["datums"]:
                check_keys(datum, f"a datum in {what}", KEYS["datum"])
    return section


def read_position(checkpoint: Mapping[str, Any], file: object) -> dict[str, Any] | None:
    """Returns the position in random numbers and loops; None for a file of another strategy."""
    if OPTIMIZERS not in checkpoint:
        raise InvalidInput(
            f"{file} lacks {OPTIMIZERS!r}: it was saved with save_weights_only=True, or is damaged. Resume from a full "
            "checkpoint, or load the weights with load_from_checkpoint and fit without ckpt_path."
        )
    position: dict[str, Any] | None = read_section(checkpoint, file, "strategy")["strategy"]
    if position is None:
        return None
    paths = [*_LIGHTNING_ENTRIES]
    paths += [f"{SECTION}.strategy.rng.{key}" for key in KEYS["rng"]]
    paths += [f"{SECTION}.strategy.loop_position.{key}" for key in KEYS["loops"]]
    for path in paths:
        check_entry(checkpoint, file, path)
    return position


def read_loaders(checkpoint: Mapping[str, Any], file: object) -> list[dict[str, Any]]:
    """Returns the states of the training loaders; none at the start of an epoch, where no loader is in use."""
    states: list[dict[str, Any]] = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
    for state in states:
        what = f"'combined_loader' of {file}"
        check_keys(state, what, KEYS["loader"])
        if state["start"] is not None:
            check_keys(state["start"], what, KEYS["loader start"])
    return states


def read_runs(section: Mapping[str, Any], file: object) -> list[dict[str, str]]:
    """Returns the W&B runs that a checkpoint names."""
    runs: list[dict[str, str]] = section.get("wandb", [])
    for run in runs:
        check_keys(run, f"a W&B run in {file}", KEYS["run"])
    return runs


def read_rows(section: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Returns how many rows were logged before a checkpoint was saved."""
    rows: dict[str, Any] = section.get("rows", {"csv": {}, "wandb": {}})
    check_keys(rows, f"the logged rows in {file}", KEYS["rows"])
    return rows


def check_entry(checkpoint: Mapping[str, Any], file: object, path: str) -> None:
    """Raises `InvalidInput` if a checkpoint lacks an entry of its nested dicts, for example `loops.fit_loop`."""
    part: Any = checkpoint
    for key in path.split("."):
        check_keys(part, f"{path!r} of {file}", (key,))
        part = part[key]
