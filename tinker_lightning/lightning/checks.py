"""Rejects unsupported Trainer configurations before anything is sent."""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.spike import SpikeDetection
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.tuner import lr_finder

from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import _compat
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.remote.lm import RemoteHandle
from tinker_lightning.remote.optimizers import RemoteOptimizer
from tinker_lightning.rows.formats import DatumLike, is_row

if TYPE_CHECKING:
    from collections.abc import Iterable

    import lightning.pytorch as pl
    from torch.optim import Optimizer

    from tinker_lightning.lightning.module import RemoteModule

# The names of Lightning's loaders in `_compat`, and the argument of a data module that takes a file for each.
_SOURCES = {
    "TRAIN_SOURCE": "",
    "VAL_SOURCE": "validation=",
    "VALIDATE_SOURCE": "validation=",
    "TEST_SOURCE": "test=",
    "PREDICT_SOURCE": "test=",
}

# Callbacks that read `outputs["loss"]`.
_READERS = (LearningRateFinder, SpikeDetection)


def check(trainer: pl.Trainer, module: RemoteModule) -> None:
    """Raises `InvalidInput` for a trainer that cannot train a remote model correctly."""
    module.check_open()
    check_processes(trainer)
    _check_precision(trainer)
    _check_imports(trainer)
    _check_callbacks(trainer, module)
    _check_loaders(trainer)
    composition.check_timeout("regularizer_timeout", module.regularizer_timeout)
    if _compat.COMPILER_CONTEXT.get(module) is not None:
        raise InvalidInput(
            f"torch.compile has nothing to compile in {type(module).__name__}: the passes run on the server. Fit the "
            "module itself; a loss that is costly can be compiled alone."
        )


def check_free(module: RemoteModule, trainer: pl.Trainer | None) -> None:
    """Raises `InvalidInput` for a second trainer while another one runs the module.

    The module is detached from the second one, which would call its hooks when it fails.
    """
    if trainer is None or not module.has_trainer or module.trainer is trainer:
        return
    other = module.trainer
    if other.state.status == TrainerStatus.RUNNING and other.lightning_module is module:
        _compat.STRATEGY_MODULE.set(trainer, None)
        raise InvalidInput(
            f"this {type(module).__name__} is being run by another trainer, and both would number the requests of one "
            "remote model. Wait for the first trainer, or create a second module."
        )


def check_optimizers(trainer: pl.Trainer, module: RemoteModule) -> None:
    """Raises `InvalidInput` if no optimizer would train the remote model."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidInput(
            f"all parameters of this {type(module).__name__} are frozen, so there is nothing to train; call unfreeze() "
            "first"
        )
    check_steps(trainer.optimizers)
    if not module.automatic_optimization or not module.lm.handle.requires_grad:
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if not any(one is module.lm.handle for group in groups for one in group["params"]):
        raise InvalidInput(
            f"no optimizer of this {type(module).__name__} has the remote model's parameters, so its gradients would "
            "accumulate forever. Pass them to RemoteAdamW(self.parameters()) in configure_optimizers, or freeze the "
            "model with self.lm.requires_grad_(False)."
        )


def check_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raises `InvalidInput` for an optimizer that has a remote model's parameters but steps locally."""
    for optimizer in optimizers:
        if any(isinstance(each, RemoteOptimizer) for each in (optimizer, *vars(optimizer).values())):
            continue  # also as the inner optimizer of a wrapper
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if any(isinstance(one, RemoteHandle) and one.requires_grad for one in parameters):
            raise InvalidInput(
                f"{type(optimizer).__name__} cannot train a remote model: its weights and gradients are on the server. "
                "Return RemoteAdamW(self.parameters()) from configure_optimizers, which also trains local parameters; "
                f"in manual optimization, {type(optimizer).__name__} can train the local ones alone."
            )


def count_steps(module: RemoteModule) -> float:
    """Returns the number of optimizer steps of a fit, for the module's schedule; infinite if it need not be known.

    Raises:
        InvalidInput: If the schedule depends on the number, which is not known, or would not be followed.
    """
    given = f"schedule={module.schedule!r}, warmup={module.warmup}"
    if not module.automatic_optimization:
        raise InvalidInput(
            f"{given}: with manual optimization, nothing steps the schedule. Override configure_optimizers, and step "
            "its scheduler in training_step."
        )
    steps = module.trainer.estimated_stepping_batches if module.has_trainer else math.inf
    steps = math.inf if steps == -1 else steps
    if not math.isfinite(steps) and (module.schedule != "constant" or 0 < module.warmup < 1):
        raise InvalidInput(
            f"{given} needs the number of steps, which is unknown, because the training data has no length or the fit "
            "no end. Set max_steps of the Trainer, or a constant schedule with the warmup as a number of steps."
        )
    if steps <= module.warmup and module.warmup >= 1 and not _compat.FAST_DEV_RUN.get(module.trainer):
        warnings.warn(
            f"{given}: the fit has {steps} steps, and ends before the learning rate has reached "
            f"{module.learning_rate}. Set a lower warmup, for example 0.1, a share of the steps.",
            stacklevel=2,
        )
    return steps


def clipping_optimizer(optimizer: Any, algorithm: str | None) -> RemoteOptimizer:
    """Returns an optimizer that can clip the gradient of a remote model; raises `InvalidInput` for any other."""
    if str(algorithm or "norm").rsplit(".", 1)[-1].lower() != "norm":
        raise InvalidInput(
            "gradient_clip_algorithm='value' is not supported: the gradient of a remote model is on the server, "
            "which only clips by norm. Use gradient_clip_algorithm='norm'."
        )
    if not isinstance(optimizer, RemoteOptimizer):
        raise InvalidInput(
            "gradient_clip_val requires an optimizer that steps on the server, such as RemoteAdamW, but this one is "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def check_processes(trainer: pl.Trainer) -> None:
    """Raises `InvalidInput` if the trainer would run several processes."""
    launched = max(_compat.CLUSTER_ENVIRONMENT.get(trainer).world_size(), _compat.NUM_NODES_FLAG.get(trainer))
    # On a GPU machine, "auto" counts the GPUs, which are not used; on a CPU, the user has set the number.
    devices = len(_compat.PARALLEL_DEVICES.get(trainer)) if _compat.ACCELERATOR_FLAG.get(trainer) == "cpu" else 1
    count = max(trainer.world_size, launched, devices)
    if count > 1:
        raise InvalidInput(
            f"this trainer would run {count} processes, each of which would train its own model on a part of the data. "
            "The passes run on the server: use Trainer(strategy='tinker', devices=1, num_nodes=1) in one process."
        )


def reads_losses(trainer: pl.Trainer) -> bool:
    """Returns whether a callback of Lightning reads the loss of each step immediately, as a learning rate search does.

    While a search runs, the callbacks are those of the search.
    """
    callbacks = _compat.CALLBACKS.get(trainer)
    return any(isinstance(one, _READERS) or type(one).__module__ == lr_finder.__name__ for one in callbacks)


def _check_loaders(trainer: pl.Trainer) -> None:
    """Raises `InvalidInput` for rows without a loader: Lightning would take each of them for a loader."""
    stage = trainer.state.fn.value if trainer.state.fn is not None else "fit"
    for name, argument in _SOURCES.items():
        source = getattr(_compat, name).get(trainer)
        if isinstance(source, str | os.PathLike):
            others = "..., " if stage == "fit" and argument else ""
            raise InvalidInput(
                f"got the path {os.fspath(source)!r} where Lightning expects a loader, and would take each character "
                "for a batch. Pass a data module such as ChatData or PreferenceData: "
                f"trainer.{stage}(module, ChatData({others}{argument}{os.fspath(source)!r}))."
            )
        if isinstance(source, list | tuple) and any(isinstance(item, DatumLike) or is_row(item) for item in source):
            raise InvalidInput(
                f"got a list of {len(source)} rows where Lightning expects a loader, and would take each row for a "
                f"loader. Wrap them: trainer.{stage}(module, DataLoader(rows, batch_size=4, "
                "collate_fn=tinker_lightning.collate))."
            )


def _check_precision(trainer: pl.Trainer) -> None:
    plugin = trainer.precision_plugin
    if getattr(plugin, "scaler", None) is not None:
        raise InvalidInput(
            f"{type(plugin).__name__} scales the loss against underflow, which would train the remote model with a "
            "gradient that is too large. The server chooses its own precision: leave `precision` at its default, or "
            "use 'bf16-mixed' for local parameters."
        )


def _check_imports(trainer: pl.Trainer) -> None:
    objects: list[Any] = [*_compat.CALLBACKS.get(trainer), *trainer.loggers, trainer.datamodule, trainer.profiler]  # type: ignore[attr-defined]
    for one in objects:
        if any(base.__module__.split(".")[0] == "pytorch_lightning" for base in type(one).__mro__):
            raise InvalidInput(
                f"{type(one).__name__} is from the package pytorch_lightning, which this trainer does not recognize. "
                "Import it from lightning.pytorch instead."
            )


class OtherTrainer:
    """Stands for the strategy in a Trainer of `pytorch_lightning`, whose own error would be that it does not exist."""

    def __init__(self) -> None:
        raise InvalidInput(
            "this Trainer is from the package pytorch_lightning, which does not recognize modules of lightning. Create "
            "it with lightning: import lightning.pytorch as pl."
        )


def register_elsewhere(name: str) -> None:
    """Registers the strategy in `pytorch_lightning`, if that is imported, to raise an error that names the fix."""
    if (other := sys.modules.get("pytorch_lightning.strategies")) is not None:
        other.StrategyRegistry.register(name, OtherTrainer, "Raises an error", override=True)


def _check_callbacks(trainer: pl.Trainer, module: RemoteModule) -> None:
    is_all_remote = all(isinstance(parameter, RemoteHandle) for parameter in module.parameters())
    for callback in _compat.CALLBACKS.get(trainer):
        if isinstance(callback, BatchSizeFinder):
            raise InvalidInput(
                "BatchSizeFinder looks for the batch size that fills local memory, but the passes run on the server. "
                "Choose a batch size; accumulate_grad_batches increases it without additional waits."
            )
        if isinstance(callback, _READERS) and not module.chosen_route().runs_locally:
            raise InvalidInput(
                f"{type(callback).__name__} needs the loss immediately, but this loss runs on the server and arrives "
                "later. Set route = 'two-pass', or leave the callback out."
            )
        if (
            isinstance(callback, LearningRateFinder)
            and (module.schedule != "constant" or module.warmup)
            and _compat.SETS_RATE.get(callback)
            and not _compat.ENDS_AFTER_SEARCH.get(callback)
        ):
            raise InvalidInput(
                f"LearningRateFinder would set a learning rate that schedule={module.schedule!r}, "
                f"warmup={module.warmup} undoes at the next step. Search first: Tuner(trainer).lr_find(module, data); "
                "then fit without the callback."
            )
        if isinstance(callback, BaseFinetuning | ModelPruning) and is_all_remote:
            raise InvalidInput(
                f"{type(callback).__name__} changes local parameters, and this {type(module).__name__} has none: its "
                "layers are on the server. Use train_mlp, train_attn and train_unembed to choose which are trained."
            )
