"""The strategy of `Trainer(strategy="tinker")`: look-ahead, exact resume, and the lifetime of remote states."""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import _compat, checks, hooks
from tinker_lightning.lightning.checkpoint import contents, files, loop_position
from tinker_lightning.lightning.checkpoint.format import SECTION, new_section
from tinker_lightning.lightning.checkpoint.loaders import (
    IsolatedRngLoader,
    PositionedLoader,
    ResumableLoader,
    TrainedPosition,
    capture_rng,
    restore_rng,
    seeded_rng,
)
from tinker_lightning.lightning.checkpoint.retention import StateRetention
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.lightning.session import LAST_WAIT, WaitTerminated
from tinker_lightning.remote.lm import fresh_states, raise_first, settle, wait_for_all
from tinker_lightning.rows.batches import as_list, count_datums, except_datums

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import lightning.pytorch as pl
    import torch
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision

    from tinker_lightning.remote.calls import Pass

    _Path: TypeAlias = str | Path

logger = logging.getLogger("tinker_lightning")

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_RESUMED = (ResumableLoader, PositionedLoader)
_WRAPPED = (*_RESUMED, IsolatedRngLoader)


class TinkerStrategy(SingleDeviceStrategy):
    """Trains a `RemoteModule` with one wait per step, however many micro-batches the step has.

    Checkpoints also store the position in the data and the random number generators, so that a run resumes in the
    middle of an epoch as if it had never stopped. Local GPUs are not used.

    Args:
        look_ahead: Whether to send the forward passes of an accumulation window together.
        release_states: Whether to delete a remote state when no checkpoint file names it anymore.
            On servers that support expiry, a new state expires unless its file is written.
        max_wait: How many seconds the fit waits while no request gets a result. After that it ends with an error that
            names the newest checkpoint. None waits for as long as the server works, and five minutes for a silent one.
        checkpoint_io: The plugin that writes files, as for any strategy.
        precision_plugin: The precision of local parameters, as for any strategy.
    """

    strategy_name = "tinker"

    def __init__(
        self,
        *,
        look_ahead: bool = True,
        release_states: bool = True,
        max_wait: float | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        is_number = isinstance(max_wait, int | float) and not isinstance(max_wait, bool)
        if max_wait is not None and not (is_number and 0 < max_wait < math.inf):
            raise InvalidInput(f"max_wait must be a positive number of seconds, or None, got {max_wait!r}")
        super().__init__("cpu", CPUAccelerator(), checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.look_ahead = look_ahead
        self.release_states = release_states
        self.max_wait = max_wait
        self._ahead = LookAhead()
        self._resume: loop_position.Resume | None = None
        self._depth = 0  # 1 during training, 2 if a callback searches for a learning rate meanwhile
        self._snapshot: contents.BatchSnapshot | None = None
        self._loader_states: list[dict[str, Any]] | None = None  # the position in the loaders when training ended
        self._retention = StateRetention.of_module(lambda: self._module, self._checkpoint_folders)

    @property
    def _module(self) -> pl.LightningModule:
        """The module, which Lightning connects before it calls anything but the hooks of a failure."""
        assert self.lightning_module is not None  # noqa: S101 for the type checker
        return self.lightning_module

    @property
    def _trainer(self) -> pl.Trainer | None:
        """The trainer; None if the module is only connected, with `trainer.strategy.connect(module)`."""
        return _compat.ATTACHED_TRAINER.get(self._module)  # type: ignore[no-any-return]

    @property
    @override
    def accelerator(self) -> Accelerator:
        """The CPU accelerator on every machine, because the passes run on the server."""
        return CPUAccelerator()

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        del accelerator  # which Lightning has detected on this machine

    @override
    def setup_environment(self) -> None:
        """Keeps local parameters on the CPU, even if Lightning has detected a GPU."""
        checks.check_processes(self._module.trainer)
        self._retention.watch(self._module.trainer)
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = "cpu"
        _compat.keep_datums(self.precision_plugin)
        super().setup_environment()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Creates the optimizers; raises `InvalidInput` for one that cannot train a remote model."""
        super().setup_optimizers(trainer)
        checks.check_steps(self.optimizers)
        if self._resume is not None:  # a scheduler may have asked for loaders, before the file's states reach them
            _compat.TRAIN_LOADER.set(trainer, None)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the tensors of a batch but not its datums, unless the module overrides `transfer_batch_to_device`."""
        module = self._module
        if is_overridden("transfer_batch_to_device", module) or not count_datums(batch):
            return super().batch_to_device(batch, device, dataloader_idx)
        hook = _compat.CALL_BATCH_HOOK.get(module)
        to = device or module.device
        moved = except_datums(batch, lambda part: hook("transfer_batch_to_device", part, to, dataloader_idx))
        return hook("on_after_batch_transfer", moved, dataloader_idx)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Wraps training loaders for look-ahead and resume, and isolates the random numbers of other loaders."""
        if isinstance(dataloader, _WRAPPED):
            return dataloader
        if not self._module.trainer.training:
            return IsolatedRngLoader(dataloader)
        if isinstance(dataloader, TrainedPosition):
            return PositionedLoader(dataloader)
        batches: Any = self._module.trainer.fit_loop.epoch_loop.batch_progress
        return ResumableLoader(
            dataloader,
            lambda: batches.current.processed,
            lambda: batches.is_last_batch and batches.current.processed == batches.current.ready,
        )

    @override
    def on_train_start(self) -> None:
        """Restores loops and random number generators, after all code that runs before training."""
        self._ahead = LookAhead()
        self._loader_states = None
        self._depth += 1
        self._retention.adopt_loaded()
        trainer, resume, self._resume = self._module.trainer, self._resume, None
        if resume is None:
            return
        resume.restore_limits(trainer)
        loaders: Any = CombinedLoader(trainer.train_dataloader, "max_size_cycle").flattened
        for loader, state in zip(loaders, resume.loaders, strict=False):
            if state["start"] is None:  # its pass had not started when the file was written
                loader.load_state_dict(state)
        restore_rng(resume.rng)
        loop_position.restore_loops(trainer, resume.loops)

    # Training.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step, whose forward pass may have been sent at the start of its window."""
        module = self.lightning_module
        if not isinstance(module, RemoteModule):
            return super().training_step(*args, **kwargs)
        trainer = module.trainer
        self._snapshot = contents.BatchSnapshot.capture(trainer, module)
        if not self.look_ahead or not args:
            return super().training_step(*args, **kwargs)
        with self._ahead.step(trainer, module, args[0]):
            return super().training_step(*args, **kwargs)

    # Checkpoints.

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict with new remote states, which no other file names."""
        options = self._retention.save_options() if self.release_states else {}
        with fresh_states(self._module, **options), hooks.showing(self._trainer, "saving on the server"):
            return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint with the random number generators and the position in the loops.

        Deletes the remote states of a file that is overwritten, or the new ones if the file cannot be written.
        """
        files.secure(self)
        module, trainer = self._module, self._trainer
        if isinstance(module, RemoteModule):  # whose own hook may be overridden without super()
            contents.add_section(checkpoint, module)
        if trainer is not None:
            self._add_position(checkpoint, trainer)
        new = frozenset(state.path for state in contents.states_in(checkpoint, filepath).values())
        old = self._retention.before_save(filepath, new) if self.release_states else frozenset()
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except BaseException:
            # An asynchronous plugin raises the error of an earlier file, and still writes this one.
            if isinstance(self.checkpoint_io, AsyncCheckpointIO):
                self._retention.keep(new)
            elif self.release_states:
                self._retention.replaced(filepath, new)
            raise
        if self.release_states:
            self._retention.keep(new)
            self._retention.replaced(filepath, old, new)
        can_resume = "optimizer_states" in checkpoint  # not with save_weights_only=True
        hooks.note_file(trainer, filepath, new, checkpoint.get("global_step") if can_resume else None)

    def _add_position(self, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        """Adds the random number generators and the position in the loops and the data to a checkpoint."""
        section = new_section(checkpoint)
        position: dict[str, Any] = {"rng": capture_rng(), "loop_position": loop_position.capture(trainer)}
        if self._snapshot is not None and self._snapshot.is_under_way(trainer):
            # The batch is trained again after a resume: its draws, logs and gradients must not count twice.
            position["rng"] = self._snapshot.rng
            position["loop_position"]["epoch_metrics"] = self._snapshot.epoch_metrics
            section.update(self._snapshot.window.state())
        section["strategy"] = position
        if self._loader_states is not None and "loops" in checkpoint:  # loaders may have been replaced since
            checkpoint["loops"]["fit_loop"]["state_dict"].setdefault("combined_loader", self._loader_states)
        for each in trainer.loggers:
            each.save()  # rows before the checkpoint are not logged again after a resume

    @override
    def remove_checkpoint(self, filepath: _Path) -> None:
        """Removes a checkpoint and the remote states that no other file names."""
        old = self._retention.states_of(filepath) if self.release_states else frozenset()
        super().remove_checkpoint(filepath)
        if self.release_states:
            self._retention.replaced(filepath, old)
        hooks.note_file(self._trainer, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: _Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint as `files.read` does. The position is restored when training starts."""
        files.secure(self)
        checkpoint = files.read_by(self.checkpoint_io, checkpoint_path, weights_only)
        module, trainer = self._module, self._trainer
        if self.release_states and not self._depth:
            self._retention.loaded = checkpoint_path, trainer is not None and trainer.state.fn == TrainerFn.FITTING
        # A search for a learning rate in the middle of a fit restores the loops itself.
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and not self._depth:
            self._resume = None
            if SECTION in checkpoint or isinstance(module, RemoteModule):  # not a file of another strategy
                self._resume = loop_position.Resume.read(checkpoint, checkpoint_path, trainer)
            if self._resume is not None:
                self._resume.raise_limits(trainer, checkpoint)
        return checkpoint

    def _checkpoint_folders(self) -> list[str]:
        callbacks = [] if self._trainer is None else self._trainer.checkpoint_callbacks
        return [str(folder) for each in callbacks if (folder := getattr(each, "dirpath", None))]

    # The end.

    @override
    def on_train_end(self) -> None:
        """Waits for the last steps of remote models in other modules; a `RemoteModule` does so itself."""
        super().on_train_end()
        self._depth -= 1
        if self._depth:
            return  # the end of a search, after which the fit continues
        loaders: Any = CombinedLoader(self._module.trainer.train_dataloader, "max_size_cycle").flattened
        self._loader_states = [loader.state_dict() for loader in loaders if isinstance(loader, _RESUMED)]
        if not isinstance(self._module, RemoteModule):
            wait_for_all(self._module)
            raise_first(self._module)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Waits a few seconds for requests in flight and logs them, before loggers write their files."""
        super().on_exception(exception)
        self._retention.loaded = None  # if its state could not be loaded, no other request may wait for the server
        module = self.lightning_module
        seconds = 0.0 if isinstance(exception, WaitTerminated) else LAST_WAIT  # which has passed
        if isinstance(module, RemoteModule):
            module.settle(seconds, exception)
        elif module is not None:
            settle(module, seconds, exception)
        if module is not None:
            hooks.report_failure(module.trainer, exception)

    @override
    def teardown(self) -> None:
        """Drops forward passes that were sent ahead, and releases states after the last file has been written."""
        self._ahead = LookAhead()
        self._depth = 0
        if self._resume is not None and self.lightning_module is not None:  # training did not begin
            self._resume.restore_limits(self.lightning_module.trainer)
            # Otherwise Lightning would load it in the next fit, even without ckpt_path.
            _compat.LOADED_CHECKPOINT.set(self.lightning_module.trainer, {})
        self._resume = None
        super().teardown()
        if self.lightning_module is not None:  # not refused as one that another trainer runs
            self._retention.finish()


class LookAhead:
    """Holds forward passes that were sent before the steps that use them."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[list[Any], Pass | None]] = {}
        self._is_off = False

    @contextmanager
    def step(self, trainer: pl.Trainer, module: RemoteModule, batch: Any) -> Iterator[None]:
        """Sends all forward passes of a window at its first micro-batch; the step inside the block uses its own."""
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if number not in self._sent and not self._is_off:
            self._sent = dict(enumerate(self._send(trainer, module, batch), number))
        if number not in self._sent:
            yield
            return
        data, sent = self._sent.pop(number)
        remote, datums, own = module.lm.handle.remote, module.datums, vars(module).get("datums")
        remote.expected, remote.missed = sent, False
        # Inside the block, `datums(batch)` returns the datums whose forward pass was sent.
        module.datums = lambda other: data if other is batch else datums(other)  # type: ignore[method-assign, assignment]
        try:
            yield
            if sent is not None and remote.missed:
                self._turn_off(module, "its training_step uses other datums than datums(batch) returns")
        finally:
            remote.expected = None
            del module.datums
            if own is not None:
                module.datums = own  # type: ignore[method-assign]

    def _send(self, trainer: Any, module: RemoteModule, batch: Any) -> list[tuple[list[Any], Pass | None]]:
        """Sends the forward passes of the rest of this window, unless only one batch is left."""
        loader = trainer.train_dataloader
        if (
            not module.automatic_optimization
            or not module.chosen_route().needs_logprobs
            or not isinstance(loader, ResumableLoader)  # several loaders
            or is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        ):
            return []
        for name in _HOOKS:
            if is_overridden(name, module, RemoteModule) or is_overridden(name, trainer.datamodule):
                self._turn_off(module, f"its {name} changes batches before they are trained; do that in datums")
                return []
        index, size = trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches
        left = int(min((index // size + 1) * size, trainer.num_training_batches)) - index
        sent: list[tuple[list[Any], Pass | None]] = []
        # Earlier failures are raised here, not by a request whose own failure can wait for its step.
        with module.lm.backend.unread.held():
            seed, following = loader.seed, loader.peek(index, left - 1)
            for number, each in enumerate([batch, *following], index):
                try:
                    if each is not batch:
                        each = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(each))
                    # Each batch has its own random numbers: how far ahead it is drawn must not change them.
                    with seeded_rng(seed + number):
                        data = as_list(module.datums(each))
                    sent.append((data, module.lm.send(data) if left > 1 else None))
                except Exception:  # raised again by the step of this batch
                    break
        return sent

    def _turn_off(self, module: RemoteModule, reason: str) -> None:
        self._sent, self._is_off = {}, True
        logger.warning("%s is trained without look-ahead: %s.", type(module).__name__, reason)


StrategyRegistry.register(
    TinkerStrategy.strategy_name, TinkerStrategy, "Trains a model on a server over the Tinker API"
)
checks.register_elsewhere(TinkerStrategy.strategy_name)
