"""A remote model as a `LightningModule`: override `loss`, and `Trainer.fit` trains it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tinker_lightning.client.export import export_adapter
from tinker_lightning.errors import (
    InvalidInput,
    InvalidLoss,
    LossNotFinite,
    LossWithoutGradient,
    TinkerLightningError,
)
from tinker_lightning.lightning import checks, evaluation, metric_names, routes
from tinker_lightning.lightning.batches import as_list, count_datums, datums_of
from tinker_lightning.lightning.checkpoint import contents
from tinker_lightning.lightning.checkpoint.contents import STATE_KEY
from tinker_lightning.lightning.deferred_metrics import DeferredMetrics, combined, window_size
from tinker_lightning.lightning.essential import complete, essential
from tinker_lightning.lightning.hyperparameters import fixed, not_plain
from tinker_lightning.lightning.lazy_client import LazyClient
from tinker_lightning.lightning.metric_names import LOSS, TOTAL
from tinker_lightning.lightning.metrics import Scores
from tinker_lightning.lightning.predict import Samples
from tinker_lightning.lightning.step_end import StepEnd
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.likelihood import likelihood_metrics
from tinker_lightning.losses.reduction import total_weight, weights_of
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.regularizer import as_regularizers
from tinker_lightning.remote import group
from tinker_lightning.remote.adamw import RemoteAdamW
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.remote.lm import RemoteLM, holds_server_loss
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike
    from pathlib import Path
    from types import TracebackType

    from torch.optim import Optimizer

    from tinker_lightning.lightning.routes import Chosen, Reduction, Route
    from tinker_lightning.losses.regularizers.regularizer import Regularizer
    from tinker_lightning.remote.calls import Pass, Step
    from tinker_lightning.remote.window import Remote


# How long something that was told to end waits for the server, in seconds.
LAST_WAIT = 5.0

# Of two trainers on two threads one is the first.
_ATTACHING = threading.RLock()


class RemoteModule(pl.LightningModule):
    """A language model on a server, trained by `Trainer.fit` with a loss of your own.

    The session with the server begins at the first use and lasts beyond a fit, so that `validate` and `predict` see the
    trained model; `close()`, a `with` block or the garbage collector ends it.

    Args:
        model: The name of a base model, or a training client, ours or the official SDK's. `TINKER_BASE_MODEL` if not
            given.
        rank: The LoRA rank.
        learning_rate: For the default optimizer.
        betas: The same.
        eps: The same.
        weight_decay: The same.
        seed: Of the LoRA weights.
        train_mlp: Whether the MLP layers get an adapter.
        train_attn: Whether the attention layers do.
        train_unembed: Whether the output matrix does.
        max_steps_in_flight: How many steps may be under way at once where the loss runs on the server.
        base_url: Where the server is; see `connect`.
        api_key: What it wants to see.
    """

    loss_config: Mapping[str, float | str] = MappingProxyType({})
    """The settings of a loss that is the server's, for example `{"clip_low_threshold": 0.9}`."""

    reduction: Reduction = "mean"
    """How losses that sum over tokens, by name or from the library, are reduced: `mean` divides by the sum of the
    micro-batch's weights, or by its action tokens for policy losses; `sum` leaves them as they are."""

    route: Route = "auto"
    """Where the loss runs: `builtin`, `server` or `two-pass`, or the best of them that is exact."""

    regularizers: Sequence[Regularizer | Mapping[str, Any]] = ()
    """Terms added to the loss, each with a weight and telemetry of its own; with `loss = None` only they count."""

    grad_norms: bool = True
    """Whether telemetry tells how hard each regularizer pulls; costs a backward through it, none of the model."""

    regularizer_timeout: float | None = None
    """How many seconds regularizers that do not run on this thread may take."""

    def __init__(
        self,
        model: Any = None,
        *,
        rank: int = 32,
        learning_rate: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        max_steps_in_flight: int = 8,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__()
        self._hooks_run: set[str] = set()
        if max_steps_in_flight < 1:
            raise InvalidInput(f"max_steps_in_flight must be at least 1, got {max_steps_in_flight}")
        self.save_hyperparameters()
        self._fixed = fixed(self)
        adapter = {
            "rank": rank,
            "seed": seed,
            "train_mlp": train_mlp,
            "train_attn": train_attn,
            "train_unembed": train_unembed,
        }
        self._session = LazyClient(model, adapter, base_url, api_key)
        self.learning_rate = learning_rate  # where Lightning's LearningRateFinder puts what it has found
        self._adam: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.lm = RemoteLM(self._session.client if model is None or isinstance(model, str) else model)
        self._scores = Scores()
        remote = self.lm.handle.remote
        self._late = DeferredMetrics(remote.wait_for_end)
        remote.on_step = self._stepped
        remote.max_steps_in_flight = max_steps_in_flight
        self._ahead: tuple[Any, list[Any]] | None = None
        self._terminated: float | None = None
        self._chosen: tuple[Any, Chosen] | None = None
        self._window_metrics: list[tuple[dict[str, float], int]] = []
        self._logged: set[str] = set()
        self._warned: set[str] = set()
        self._received = 0
        self._waiting: dict[str, Any] | None = None
        self._samples = Samples(self.lm)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if routes.is_plain_function(vars(cls).get("loss")):
            cls.loss = staticmethod(vars(cls)["loss"])  # type: ignore[method-assign]
        if cls.datums is not RemoteModule.datums and getattr(cls.datums, _ONCE, None) is not cls.datums:
            cls.datums = _once(cls.datums)  # type: ignore[method-assign,assignment]
        complete(cls, RemoteModule)

    def save_hyperparameters(
        self, *args: Any, ignore: Sequence[str] | str | None = None, frame: Any = None, logger: bool = True
    ) -> None:
        """Keeps what is plain data. Clients, functions and keys have no place in a file; they are given again."""
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        frame = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        super().save_hyperparameters(*args, ignore=[*ignored, "api_key", *not_plain(self)], frame=frame, logger=logger)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs a value as `LightningModule.log` does; the batch size is the number of its datums if not given.

        Lightning can count tensors only. Where a batch has no datums, the number is left to it.
        """
        results = None if self._trainer is None else self.trainer._results
        if results is not None and results.batch_size is None:
            results.batch_size = count_datums(results.batch) or None
        super().log(*args, **kwargs)

    # What to override.

    def loss(self, data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]] | Tensor:
        """Returns the loss of a batch, a scalar tensor, and metrics to log. Override it; the default is cross-entropy.

        It may also be the name of a loss that servers know, `loss = "cross_entropy"`, one that `custom_loss` has
        registered, or a function of the library, `loss = losses.dpo`; with `loss_config` for its settings. A loss that
        runs on the server takes one pass instead of two and is not waited for; its value is logged when it arrives.
        """
        weights = torch.cat([weights_of(datum).flatten() for datum in data])
        logp = torch.cat([each.flatten() for each in logprobs])
        total = 1.0 if self.reduction == "sum" else total_weight(data)
        return -(logp * weights).sum() / total, likelihood_metrics(logp, weights)

    def datums(self, batch: Any) -> list[Any]:
        """The datums of a batch; a list of them as it is. Override it for loaders that give something else.

        It is called once per batch, by look-ahead possibly before the steps of earlier batches. An override may give
        them in any iterable, a generator too; callers get a list.

        Raises:
            InvalidDatum: If the batch is empty or no list of datums.
        """
        return datums_of(batch)

    # What Lightning calls.

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of this module. Another is refused while it is at work, before that has changed anything."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        with _ATTACHING:
            checks.check_free(self, trainer)
            pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    def configure_callbacks(self) -> list[pl.Callback]:
        """None; but the first hook of all, so that what cannot work is refused before it does harm.

        Raises:
            InvalidInput: If there are several processes, or a scaled loss.
        """
        checks.check(self.trainer, self)
        return []

    @essential
    def setup(self, stage: str) -> None:
        """Refuses the same, for `configure_callbacks` is easily overridden; and regularizers that are none."""
        checks.check(self.trainer, self)
        if stage == "fit":
            as_regularizers(self.regularizers)  # those of each step are looked at again
        step_end = StepEnd(self._wait_if_monitored)
        step_end.attach(self.trainer)
        for remote in group.remotes_of(self):
            remote.while_waiting = self._look_up
            remote.on_sent = step_end.begin if self.automatic_optimization else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Runs a forward pass and evaluates the loss; a loss that runs on the server is sent with the optimizer step.

        Metrics that are known here are logged as means over the accumulation window so far.
        """
        data = self.datums(batch)
        chosen = self.chosen_route()
        if not chosen.needs_logprobs:
            return self._server_loss(data, chosen)
        with self._dropping():
            loss, metrics = composition.evaluate(
                data,
                self.lm(data),
                chosen.loss if chosen.runs_locally else None,
                self.regularizers,
                step=self.global_step,
                grad_norms=self.grad_norms,
                timeout=self.regularizer_timeout,
            )
        if chosen.runs_locally:
            logged = metric_names.of_step(composition.flatten(metrics)) | {LOSS: loss.item()}
        else:
            added = metrics.pop(TOTAL)  # without the base loss; the total is logged when the server has computed that
            loss = loss + self._server_loss(data, chosen, added)
            logged = composition.flatten(metrics)
        if batch_idx % window_size(self.trainer) == 0:
            self._window_metrics = []
        self._window_metrics.append((logged, len(data)))
        self._log_present(combined(self._window_metrics), len(data))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `val_loss`, the module's loss with its metrics, and `val_nll` and `val_perplexity` by token."""
        del batch_idx
        self._evaluate("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `test_loss`, the module's loss with its metrics, and `test_nll` and `test_perplexity` by token."""
        del batch_idx
        self._evaluate("test", batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Samples a continuation of each prompt of a batch: inputs, datums, strings or rows of tokens.

        Each is a dict of `tokens`, `logprobs`, `stop_reason` and `text`, for Lightning takes predictions apart. Called
        in another step or by hand, it samples from the model as it is then.
        """
        del batch_idx, dataloader_idx
        return self._samples.of(batch, self.sampling_params())

    def sampling_params(self) -> SamplingParams:
        """How `predict_step` samples; override it."""
        return SamplingParams(max_tokens=64)

    def configure_optimizers(self) -> Any:
        """AdamW with the settings given; override it for a scheduler."""
        return RemoteAdamW(self.parameters(), lr=self.learning_rate, **self._adam)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lets the server clip the norm; the gradient is there."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """The same, for manual optimization; an optimizer of local parameters is clipped here.

        Raises:
            InvalidInput: If the server cannot clip so.
        """
        if not any(isinstance(one, RemoteHandle) for group in optimizer.param_groups for one in group["params"]):
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if not gradient_clip_val:
            return
        if str(gradient_clip_algorithm or "norm").rsplit(".", 1)[-1].lower() != "norm":
            raise InvalidInput(
                "gradient_clip_algorithm='value' cannot be had: the gradient of a remote model is on the server, which "
                "clips its norm only. Use gradient_clip_algorithm='norm'."
            )
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, RemoteAdamW):
            raise InvalidInput(f"gradient_clip_val needs RemoteAdamW, but the optimizer is {type(inner).__name__}")
        inner.clip(float(gradient_clip_val))

    @essential
    def on_before_backward(self, loss: Tensor) -> None:
        """Refuses a loss that has no gradient, or none that could be stepped on; what waited is dropped.

        Raises:
            InvalidLoss: Says which, and how to mend it.
        """
        with self._dropping():
            surrogate.check_scalar(loss)
            surrogate.check_differentiable(loss)
            if not torch.isfinite(loss) and not holds_server_loss(loss):
                surrogate.check_finite(loss)

    @essential
    def on_after_backward(self) -> None:
        """Refuses a loss that would silently train nothing."""
        received, self._received = self._received, self.lm.handle.remote.received
        if self.automatic_optimization and self.lm.handle.requires_grad and received == self._received:
            with self._dropping():
                raise LossWithoutGradient(surrogate.without_gradient())

    @essential
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs what has come back from the server, under the steps it belongs to."""
        del outputs, batch, batch_idx
        self._late.log(wait=False)

    @essential
    def on_validation_epoch_end(self) -> None:
        """Waits for the metrics of the last step where callbacks or schedulers look at them."""
        self._late.log(wait=self._late.are_monitored(self.trainer))

    @essential
    def on_train_epoch_end(self) -> None:
        """The same."""
        self._late.log(wait=self._late.are_monitored(self.trainer))

    @essential
    def on_train_start(self) -> None:
        """Takes up the windows of a checkpoint; Lightning has zeroed the gradients since it was loaded.

        Raises:
            InvalidInput: If nothing would train the remote model.
        """
        checks.check_optimizers(self.trainer, self)
        if self._waiting is not None and self.trainer.ckpt_path is not None:
            contents.put_back(self._waiting, self)
        self._waiting = None

    @essential
    def on_train_end(self) -> None:
        """Waits for the last steps, and logs them."""
        self.drain()

    @essential
    def on_predict_start(self) -> None:
        """Samples come from the model as it is now."""
        self._samples.forget()

    @essential
    def teardown(self, stage: str) -> None:
        """Waits for what is under way; the session stays, for the next stage must see the same model."""
        del stage
        StepEnd.detach(self.trainer)
        self.drain()

    @essential
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the model on the server and keeps the path of it in the file, with gradients that wait for a step."""
        kept = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)
        if isinstance(kept, dict) and "_instantiator" not in kept:  # those of a command line are its own
            given = {name: value for name, value in kept.items() if name not in self._fixed}
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = given
        remote = self.lm.handle.remote
        running = self._trainer is not None and self.trainer.state.status == TrainerStatus.RUNNING
        if not remote.has_weights and not running:
            return  # nothing was trained, and nothing is about to be
        self.drain()
        # Only TinkerStrategy deletes states; elsewhere the state dict has saved one already, and shares it.
        is_counted = self._trainer is not None and hasattr(self.trainer.strategy, "release_states")
        with group.saved_for_file(self) if is_counted else contextlib.nullcontext():
            gradients = {"windows": contents.windows(self), "local_gradients": self.local_gradients()}
            gradients["window_metrics"] = self._window_metrics
            checkpoint[STATE_KEY] = {**contents.saved(remote), **gradients}
        contents.leave_to_file(checkpoint)

    @essential
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on from the state that a file names; where there is no model yet, it is made at the first use.

        Raises:
            InvalidInput: If the file is of another base model or rank, or not of a remote model.
        """
        remote = self.lm.handle.remote
        state = contents.read(checkpoint, *self._session.expected(remote))
        self._session.resume(remote, state["path"], state["base_model"] or "")
        self._waiting = state
        # The next file gets a state of its own: this one belongs to the files that name it, wherever they lie.
        remote.goes_on(state["steps"])
        contents.put_back(state, self)
        self._window_metrics = state["window_metrics"]
        contents.mark_loaded(checkpoint)

    # The session.

    def drain(self) -> None:
        """Waits for everything that was sent, logs it, and raises what has failed and nobody has read, as one error.

        Of all remote models of the module, for it may have more than `lm`.
        """
        if self._trainer is not None and self.trainer.received_sigterm:
            group.wait_for_all(self, LAST_WAIT)
            self._late.log(wait=False)
        else:
            self._late.log(wait=True)
            group.wait_for_all(self)
        group.raise_first(self)

    def export_adapter(self, path: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """The trained adapter as a PEFT folder on this machine, as transformers and vLLM load it."""
        self.drain()
        return export_adapter(self.lm.backend, path, overwrite=overwrite)

    def local_gradients(self) -> dict[str, Tensor]:
        """The gradients of local parameters that wait for a step, by name."""
        waits = any(remote.window for remote in group.remotes_of(self))
        if not waits and self.lm.handle.requires_grad and self.automatic_optimization:
            return {}  # those that are left over from the last step
        return contents.local_gradients(self)

    def chosen_route(self) -> Chosen:
        """Returns where the loss runs and how it is averaged; decided once for each loss."""
        loss: Any = self._modules.get("loss", self.loss)  # torch keeps a module where the method hides it
        regularized = bool(self.regularizers)
        if routes.is_plain_function(getattr(loss, "__func__", None)):
            loss = loss.__func__  # a function, which the class has made a method of
        key = (loss, self.route, self.reduction, repr(self.loss_config), regularized)
        if self._chosen is None or self._chosen[0] != key:
            chosen = routes.choose(
                loss,
                self.loss_config,
                self.route,
                lambda: self.lm.backend,
                regularized=regularized,
                reduction=self.reduction,
            )
            if getattr(loss, "__func__", None) is RemoteModule.loss:
                weight = routes.once if self.reduction == "sum" else total_weight
                chosen = replace(chosen, weight=weight, is_of_library=True)
            self._chosen = (key, chosen)
        return self._chosen[1]

    def settle(self, timeout: float, error: BaseException) -> None:
        """Waits a while for what was sent before an error, and logs it; the error's notes tell what has failed."""
        group.settle(self, timeout, error)
        with contextlib.suppress(TinkerLightningError):
            self._late.log(wait=False)

    def delete_state(self, path: str) -> None:
        """Deletes a state that was saved on the server; one that is gone already is no error."""
        group.delete_state(self, path)

    @contextmanager
    def asked_ahead(self, batch: Any, data: list[Any], asked: Pass | None) -> Iterator[Remote]:
        """For the step inside: `datums(batch)` is `data`, and its forward pass has been asked for already."""
        remote = self.lm.handle.remote
        self._ahead, remote.expected, remote.missed = (batch, data), asked, False
        try:
            yield remote
        finally:
            self._ahead, remote.expected = None, None

    def close(self) -> None:
        """Ends the session with the server, if this module has opened it."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, traceback)

    def _look_up(self) -> None:
        """Ends a wait that outlasts a SIGTERM by some seconds; Lightning looks only between batches."""
        if self._trainer is None or not self.trainer.received_sigterm:
            self._terminated = None
        elif self._terminated is None:
            self._terminated = time.monotonic()
        elif time.monotonic() - self._terminated > LAST_WAIT:
            raise SIGTERMException

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """A loss that is refused takes the window with it, which could not be stepped on without it."""
        try:
            yield
        except InvalidLoss:
            for remote in group.remotes_of(self):
                remote.drop()
            raise

    def _server_loss(self, data: list[Any], chosen: Chosen, added: float | None = None) -> Tensor:
        """Returns the deferred value of a loss that runs on the server, divided by its tokens if it is a mean."""
        tokens = 1.0 if chosen.tokens is None else chosen.tokens(data)
        # What is added here is scaled with the loss, but not divided.
        return self.lm.server_loss(data, chosen.loss, chosen.config, added=added and added * tokens) / tokens

    def _log_present(self, metrics: Mapping[str, float], batch_size: int) -> None:
        """Logs metrics of a step. Lightning would log the last value again of those that this step does not have."""
        for name in self._logged - metrics.keys():
            self.trainer._results.pop(f"training_step.{name}", None)  # type: ignore[union-attr]  # set during a step
        self._logged = set(metrics)
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == LOSS, batch_size=batch_size)

    def _evaluate(self, stage: str, batch: Any, loader: int) -> None:
        data = self.datums(batch)
        logprobs = self.lm(data)
        scores = self._scores.updated(stage, loader, zip(logprobs, map(weights_of, data), strict=True))
        self._metric_attributes = None  # where Lightning keeps the names of the metrics that it has seen
        for name, metric in scores.items():
            self.log(f"{stage}_{name}", metric, batch_size=len(data))
        try:
            value, metrics = evaluation.own_loss(self, data, logprobs)
        except LossNotFinite:
            raise
        except evaluation.NOT_HERE as error:
            if stage not in self._warned:
                self._warned.add(stage)
                warnings.warn(
                    f"{stage}_loss leaves out batches on which the loss cannot be evaluated, here because of "
                    f"{type(error).__name__}: {error}. {stage}_nll counts them.",
                    stacklevel=2,
                )
            return
        weight = self.chosen_route().weight(data)
        for name, number in {"loss": value, **metrics}.items():
            self.log(f"{stage}_{name}", number, prog_bar=name == "loss", batch_size=weight)

    def _stepped(self, sent: Step) -> None:
        if self._trainer is not None and self.trainer.lightning_module is self:  # within another it has no hooks to log
            self._late.add(sent, self.trainer)

    def _wait_if_monitored(self) -> None:
        if self._trainer is not None and self._late.are_monitored(self.trainer, by_step=True):
            self._late.log(wait=True)
            group.raise_first(self)  # who looks would miss the metric, and say no more than that


# The attribute by which a function that `_once` has made knows itself: decorators around it copy it, but are others.
_ONCE = "__is_asked_once__"


def _once(datums: Callable[[Any, Any], Any]) -> Callable[[Any, Any], list[Any]]:
    """A `datums` that gives a list, and is not called again for a batch whose datums were asked for ahead."""

    @functools.wraps(datums)
    def of(self: RemoteModule, batch: Any) -> list[Any]:
        ahead = self._ahead
        return ahead[1] if ahead is not None and ahead[0] is batch else as_list(datums(self, batch))

    setattr(of, _ONCE, of)
    return of
