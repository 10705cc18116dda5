"""All private names of Lightning that this package uses.

Names are looked up on every use, so a Lightning release that renames one raises an error instead of training wrongly.
To support such a release, change the path here.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from lightning import __version__
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.io import wrapper as plugin_wrappers
from lightning.pytorch.strategies import launchers
from lightning.pytorch.trainer.connectors import callback_connector
from packaging.version import Version
from torch import Tensor

from tinker_lightning.errors import IncompatibleLightning
from tinker_lightning.lightning.checkpoint.format import LOG_ARGUMENTS
from tinker_lightning.rows.batches import except_datums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.plugins import Precision


@dataclass(frozen=True, slots=True)
class Private:
    """A private attribute of Lightning.

    Args:
        owner: The class that the path starts from.
        path: The path of the attribute, for example `fit_loop._data_fetcher` from a `Trainer`.
        since: The first Lightning release that has it; `set` does nothing in earlier ones.
    """

    owner: str
    path: str
    since: str = "0"

    def get(self, root: Any) -> Any:
        """Returns the value of the attribute; raises `IncompatibleLightning` if it does not exist."""
        try:
            return attrgetter(self.path)(root)
        except AttributeError as error:
            raise IncompatibleLightning(
                f"Lightning {__version__} has no {type(root).__name__}.{self.path}, which tinker_lightning needs. "
                "Install a Lightning release that tinker_lightning supports, or a newer tinker_lightning."
            ) from error

    def set(self, root: Any, value: Any) -> None:
        """Sets the attribute; raises `IncompatibleLightning` if it does not exist."""
        if Version(__version__) < Version(self.since):
            return
        self.get(root)
        owner, _, name = self.path.rpartition(".")
        setattr(attrgetter(owner)(root) if owner else root, name, value)


# The first three look public, but are set by connectors and not declared.
CALLBACKS = Private("Trainer", "callbacks")
FAST_DEV_RUN = Private("Trainer", "fast_dev_run")
LOG_EVERY_N_STEPS = Private("Trainer", "log_every_n_steps")
CURRENT_RESULTS = Private("Trainer", "_results")
ACCELERATOR_FLAG = Private("Trainer", "_accelerator_connector._accelerator_flag")
CLUSTER_ENVIRONMENT = Private("Trainer", "_accelerator_connector.cluster_environment")
NUM_NODES_FLAG = Private("Trainer", "_accelerator_connector._num_nodes_flag")
PARALLEL_DEVICES = Private("Trainer", "_accelerator_connector._parallel_devices")
SELECT_CHECKPOINT = Private("Trainer", "_checkpoint_connector._select_ckpt_path")
LOADED_CHECKPOINT = Private("Trainer", "_checkpoint_connector._loaded_checkpoint")
STRATEGY_MODULE = Private("Trainer", "strategy._lightning_module")

CALLBACK_METRICS = Private("Trainer", "_logger_connector._callback_metrics")
FIRST_LOOP_ITER = Private("Trainer", "_logger_connector._first_loop_iter")
LOG_METRICS = Private("Trainer", "_logger_connector.log_metrics")
LOGGED_METRICS = Private("Trainer", "_logger_connector.metrics")
SHOULD_UPDATE_LOGS = Private("Trainer", "_logger_connector.should_update_logs")

TRAIN_SOURCE = Private("Trainer", "fit_loop._data_source.instance")
VAL_SOURCE = Private("Trainer", "fit_loop.epoch_loop.val_loop._data_source.instance")
VALIDATE_SOURCE = Private("Trainer", "validate_loop._data_source.instance")
TEST_SOURCE = Private("Trainer", "test_loop._data_source.instance")
PREDICT_SOURCE = Private("Trainer", "predict_loop._data_source.instance")
TRAIN_LOADER = Private("Trainer", "fit_loop._combined_loader")
DATA_FETCHER = Private("Trainer", "fit_loop._data_fetcher")
FIT_RESTARTING = Private("Trainer", "fit_loop._restarting")
FIT_RESTART_STAGE = Private("Trainer", "fit_loop._restart_stage")
FIT_RESUMING = Private("Trainer", "fit_loop._resuming_from_checkpoint", since="2.5.3")
TRAIN_RELOAD_EPOCH = Private("Trainer", "fit_loop._last_train_dl_reload_epoch")
BATCHES_THAT_STEPPED = Private("Trainer", "fit_loop.epoch_loop._batches_that_stepped")
EPOCH_RESTARTING = Private("Trainer", "fit_loop.epoch_loop._restarting")
EPOCH_RESTART_STAGE = Private("Trainer", "fit_loop.epoch_loop._restart_stage")
IS_LAST_READY = Private("Trainer", "fit_loop.epoch_loop._num_ready_batches_reached")
IS_TRAINING_DONE = Private("Trainer", "fit_loop.epoch_loop._is_training_done")
SHOULD_ACCUMULATE = Private("Trainer", "fit_loop.epoch_loop._should_accumulate")
SKIP_NEXT_VAL = Private("Trainer", "fit_loop.epoch_loop._skip_next_val")
TRAIN_RESULTS = Private("Trainer", "fit_loop.epoch_loop._results")
VAL_LOGGED_OUTPUTS = Private("Trainer", "fit_loop.epoch_loop.val_loop._logged_outputs")
VAL_RELOAD_EPOCH = Private("Trainer", "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch")
VAL_RESULTS = Private("Trainer", "fit_loop.epoch_loop.val_loop._results")

ATTACHED_TRAINER = Private("LightningModule", "_trainer")
COMPILER_CONTEXT = Private("LightningModule", "_compiler_ctx")
METRIC_ATTRIBUTES = Private("LightningModule", "_metric_attributes")
CALL_BATCH_HOOK = Private("LightningModule", "_call_batch_hook")
HPARAMS = Private("LightningModule", "_hparams")
HPARAMS_INITIAL = Private("LightningModule", "_hparams_initial")

WANDB_INIT = Private("WandbLogger", "_wandb_init")
ENDS_AFTER_SEARCH = Private("LearningRateFinder", "_early_exit")
SETS_RATE = Private("LearningRateFinder", "_update_attr")
SUMMARY_DEPTH = Private("ModelSummary", "_max_depth")

EVERY_N_TRAIN_STEPS = Private("ModelCheckpoint", "_every_n_train_steps")
TRAIN_TIME_INTERVAL = Private("ModelCheckpoint", "_train_time_interval")
UPDATE_COUNT = Private("Metric", "_update_count")

# The logged values of a loop, and one of them. The names look public, but the classes are private.
RESULTS_BATCH = Private("_ResultCollection", "batch")
RESULTS_BATCH_SIZE = Private("_ResultCollection", "batch_size")
RESULTS_LOADER = Private("_ResultCollection", "dataloader_idx")
RESULTS_LOG = Private("_ResultCollection", "log")
LOGGED_HOOK = Private("_ResultMetric", "meta.fx")
LOGGED_NAME = Private("_ResultMetric", "meta.name")
LOGGED_LOADER = Private("_ResultMetric", "meta.dataloader_idx")
LOGGED_ATTRIBUTE = Private("_ResultMetric", "meta.metric_attribute")
LOGGED_REDUCTION = Private("_ResultMetric", "meta.reduce_fx")
LOGGED_BY_EPOCH = Private("_ResultMetric", "meta.on_epoch")
FORKED_NAME = Private("_ResultMetric", "meta.forked_name")
IS_MEAN = Private("_ResultMetric", "meta.is_mean_reduction")
IS_TENSOR = Private("_ResultMetric", "is_tensor")
HAS_RESET = Private("_ResultMetric", "has_reset")
LOGGED_VALUE = Private("_ResultMetric", "value")
CUMULATED_BATCH_SIZE = Private("_ResultMetric", "cumulated_batch_size")
FORWARD_CACHE = Private("_ResultMetric", "_forward_cache")

CONFIGURE_BAR = Private("callback_connector", "_CallbackConnector._configure_progress_bar")
TRAIN_DESCRIPTION = Private("RichProgressBar", "_get_train_description")
UPDATE_METRICS = Private("RichProgressBar", "_update_metrics")

WRAPPING_PLUGIN = Private("plugin_wrappers", "_WrappingCheckpointIO")
WRAPPED_PLUGIN = Private("_WrappingCheckpointIO", "_checkpoint_io")

PRINTED_WARNINGS = Private("Closure", "warning_cache")

LAUNCH_SCRIPT = Private("launchers", "_SubprocessScriptLauncher.launch")
LAUNCH_FUNCTION = Private("launchers", "_MultiProcessingLauncher.launch")


def ignore_own_warnings(module: pl.LightningModule) -> None:
    """Silences warnings about what the user did not write.

    One is about Lightning's own use of torch's `LeafSpec` in every fit, the other about a `validation_step` without
    data, if the module inherits the step.
    """
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", module=r"lightning\.pytorch\.utilities\._pytree")
    if type(module).validation_step.__module__.startswith("tinker_lightning."):
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")


def hide_unlimited_epochs(trainer: pl.Trainer) -> None:
    """Keeps a Rich bar from showing `Epoch 3/-2` in a fit without a limit of epochs."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar):
        describe = functools.partial(TRAIN_DESCRIPTION.get(type(bar)), bar)
        TRAIN_DESCRIPTION.set(bar, lambda epoch: describe(epoch).replace("/-2", "   "))


_IS_WRAPPED = "_wrapped_by_tinker_lightning"

_DEFAULT_BARS: weakref.WeakSet[ProgressBar] = weakref.WeakSet()


def is_default_bar(bar: ProgressBar) -> bool:
    """Returns whether a trainer has added a progress bar by itself; Lightning keeps no record of that."""
    return bar in _DEFAULT_BARS


def note_default_bars() -> None:
    """Makes new trainers note the progress bars that they add by themselves."""
    configure = CONFIGURE_BAR.get(callback_connector)
    if getattr(configure, _IS_WRAPPED, False):
        return  # this package was imported again

    @functools.wraps(configure)
    def wrapper(connector: Any, *args: Any, **kwargs: Any) -> None:
        given = list(connector.trainer.callbacks)
        configure(connector, *args, **kwargs)
        _DEFAULT_BARS.update(connector.trainer.callbacks[len(given) :])

    setattr(wrapper, _IS_WRAPPED, True)
    CONFIGURE_BAR.set(callback_connector, wrapper)


# Printed once in a process.
_RETURNED_NONE = "`training_step` returned `None`. If this was on purpose, ignore this warning..."


def hide_warning_of_none() -> bool:
    """Keeps Lightning from warning that this batch has no loss; returns whether `show_warning_of_none` must follow."""
    printed = PRINTED_WARNINGS.get(Closure)
    hides = _RETURNED_NONE not in printed
    printed.add(_RETURNED_NONE)
    return hides


def show_warning_of_none() -> None:
    """Lets Lightning warn again."""
    PRINTED_WARNINGS.get(Closure).discard(_RETURNED_NONE)


def set_default_batch_size(trainer: pl.Trainer, count: Callable[[Any], int]) -> None:
    """Makes Lightning weight what is logged for the current batch by `count(batch)`, unless `log` gets a batch size."""
    results = CURRENT_RESULTS.get(trainer)
    if results is not None and RESULTS_BATCH_SIZE.get(results) is None:
        RESULTS_BATCH_SIZE.set(results, count(RESULTS_BATCH.get(results)) or None)


def drop_logged(trainer: pl.Trainer, hook: str, names: Iterable[str], loader: int | None = None) -> bool:
    """Removes values that a hook has logged, which Lightning would reduce or repeat.

    Returns whether the values are logged by loader; then only the values of one loader are removed.
    """
    results = CURRENT_RESULTS.get(trainer)
    by_loader = RESULTS_LOADER.get(results) is not None
    dropped = set(names)
    for key, item in list(results.items()):
        is_of_hook = LOGGED_HOOK.get(item).partition(".")[0] == hook
        if is_of_hook and LOGGED_NAME.get(item) in dropped and LOGGED_LOADER.get(item) in (None, loader):
            del results[key]
    return by_loader


def logged_values(trainer: pl.Trainer) -> tuple[list[dict[str, Any]], set[str | None]]:
    """Returns the values that the current training epoch has logged so far, as tensors and plain data.

    Also returns the attribute names of the metrics that the last validation has logged.
    """
    logged = TRAIN_RESULTS.get(trainer).values()
    values = [_logged_value(item) for item in logged if LOGGED_BY_EPOCH.get(item) and not HAS_RESET.get(item)]
    return values, {LOGGED_ATTRIBUTE.get(item) for item in VAL_RESULTS.get(trainer).values()}


def _logged_value(item: Any) -> dict[str, Any]:
    last = FORWARD_CACHE.get(item)
    is_tensor = IS_TENSOR.get(item)
    return {
        **{name: Private("_ResultMetric", f"meta.{name}").get(item) for name in LOG_ARGUMENTS},
        "reduce_fx": LOGGED_REDUCTION.get(item).__name__,
        "metric_attribute": LOGGED_ATTRIBUTE.get(item),
        "value": LOGGED_VALUE.get(item).clone() if is_tensor else None,
        "weight": CUMULATED_BATCH_SIZE.get(item) if is_tensor and IS_MEAN.get(item) else None,
        "last": last if isinstance(last, Tensor) else None,
    }


def log_again(trainer: pl.Trainer, saved: dict[str, Any], value: Any) -> None:
    """Restores a value that `logged_values` has returned; `value` may also be the metric that was logged."""
    results = TRAIN_RESULTS.get(trainer)
    RESULTS_LOG.get(results)(
        **{name: saved[name] for name in LOG_ARGUMENTS},
        value=value,
        reduce_fx=getattr(torch, saved["reduce_fx"]),
        sync_dist_fn=trainer.strategy.reduce,
        metric_attribute=saved["metric_attribute"],
        batch_size=1,
    )
    item = results[f"{saved['fx']}.{saved['name']}"]
    FORWARD_CACHE.set(item, saved["last"])
    if saved["value"] is not None:
        LOGGED_VALUE.set(item, value)
    if saved["weight"] is not None:
        CUMULATED_BATCH_SIZE.set(item, saved["weight"])


def when_selected(trainer: pl.Trainer, call: Callable[[Any], None]) -> None:
    """Calls `call(path)` when a trainer has chosen its checkpoint, which is before the runs of its loggers start."""
    select = SELECT_CHECKPOINT.get(trainer)
    if isinstance(select, FunctionType):
        return  # a module is attached several times

    @functools.wraps(select)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        SELECT_CHECKPOINT.set(trainer, select)
        path = select(*args, **kwargs)
        if path is not None:
            call(path)
        return path

    SELECT_CHECKPOINT.set(trainer, wrapper)


def nested_plugins(plugin: CheckpointIO) -> list[CheckpointIO]:
    """Returns a plugin for files and the plugins that it wraps, the outermost first."""
    nested: list[Any] = [plugin]
    while isinstance(nested[-1], WRAPPING_PLUGIN.get(plugin_wrappers)):
        nested.append(nested[-1].checkpoint_io)
    return nested


def before_launch(check: Callable[[pl.Trainer, Any], None]) -> None:
    """Calls `check(trainer, module)` before Lightning starts processes, where it has no hook."""

    def checked(launch: Any) -> Any:
        @functools.wraps(launch)
        def wrapper(self: Any, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            if trainer is not None and args:
                check(trainer, args[0])
            return launch(self, function, *args, trainer=trainer, **kwargs)

        return wrapper

    for private in (LAUNCH_SCRIPT, LAUNCH_FUNCTION):
        launch = private.get(launchers)
        if getattr(launch, _IS_WRAPPED, False):
            continue  # this package was imported again, for example by `importlib.reload`
        wrapper = checked(launch)
        setattr(wrapper, _IS_WRAPPED, True)
        private.set(launchers, wrapper)


def keep_datums(plugin: Precision) -> None:
    """Makes a precision plugin leave datums and prompts unchanged."""
    convert = functools.partial(type(plugin).convert_input, plugin)
    plugin.convert_input = functools.partial(except_datums, convert=convert)  # type: ignore[method-assign]
