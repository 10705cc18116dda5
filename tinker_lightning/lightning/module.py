"""A remote model as a `LightningModule`: override `loss`, and `Trainer.fit` trains it."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from tinker_lightning.client.files.peft_folder import export_adapter
from tinker_lightning.errors import InvalidInput, check_choice
from tinker_lightning.lightning import _compat, checks, deferred_metrics, hooks, hyperparameters, routes
from tinker_lightning.lightning.checkpoint import contents
from tinker_lightning.lightning.checkpoint.format import read_window
from tinker_lightning.lightning.deferred_metrics import LOSS, TOTAL, LoggingModule, combined
from tinker_lightning.lightning.evaluation import Evaluation
from tinker_lightning.lightning.hyperparameters import PredictOptions, Secret
from tinker_lightning.losses.batch import target_weights, total_weight
from tinker_lightning.losses.likelihood import likelihood_metrics
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.metrics.scores import Scores
from tinker_lightning.remote.lm import RemoteHandle, dropping
from tinker_lightning.remote.optimizers import OptimizerName, Schedule, check_schedule, new_optimizer, scheduled
from tinker_lightning.rows.batches import as_list, datums_of
from tinker_lightning.rows.formats import RowFormat
from tinker_lightning.types import AdamParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from pathlib import Path
    from typing import Never

    from torch import Tensor
    from torch.optim import Optimizer

    from tinker_lightning.lightning.routes import Reduction, Route, RouteName
    from tinker_lightning.losses.regularizers.composition import Regularizer


# Serializes trainer attachment.
_ATTACHING = threading.RLock()


class RemoteModule(LoggingModule):
    """A language model on a server that `Trainer.fit` trains with any loss.

    The session with the server starts at the first use and outlives a fit, so that `validate` and `predict` see the
    trained model. It ends with `close()`, with a `with` block, or when the module is garbage-collected.

    See `__init__` for the arguments.
    """

    loss_config: Mapping[str, float | str] = MappingProxyType({})
    """Settings of a loss that is given by name or from the library, for example `{"clip_low_threshold": 0.9}`."""

    reduction: Reduction = "mean"
    """The reduction of losses by name or from the library over tokens: `mean` divides by the sum of the micro-batch's
    weights, or by its number of action tokens for policy losses; `sum` does not divide."""

    route: RouteName = "auto"
    """The route of the loss: `builtin`, `server`, `retained` or `two-pass`; `auto` chooses the cheapest exact route."""

    regularizers: Sequence[Regularizer | Mapping[str, Any]] = ()
    """Terms added to the loss, each with its own weight and telemetry; with `loss = None` they are the loss."""

    grad_norms: bool = True
    """Whether to log the gradient norm of each regularizer; costs a backward through the term, not the model."""

    regularizer_timeout: float | None = None
    """The number of seconds that regularizers that are async or run on other threads may take."""

    trained_samples: Sequence[Mapping[str, Any]] = ()
    """The samples of the last training batch, if a recipe trains on samples: `prompt`, `text`, `stop_reason` and
    `reward` of each."""

    _api_keys: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Any = None,
        *,
        rank: int = 32,
        learning_rate: float = 1e-4,
        schedule: Schedule = "constant",
        warmup: float = 0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        optimizer: OptimizerName = "adamw",
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        max_steps_in_flight: int = 8,
        predict: PredictOptions | None = None,
        base_url: str | None = None,
        api_key: Secret | str | None = None,
        **unknown: Never,
    ) -> None:
        """Sets up a model, which is created on the server at its first use.

        Args:
            model: The name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
            rank: The LoRA rank.
            learning_rate: The learning rate of the default optimizer; with a schedule, its highest one.
            schedule: How the learning rate falls to 0 until the end of a fit: not at all, in a line, in a half cosine,
                or in a line over the last fifth of the steps (`wsd`).
            warmup: The steps in which the learning rate rises; below 1 a share of all steps, from 1 on their number.
            betas: The betas of the default optimizer.
            eps: The epsilon of the default optimizer.
            weight_decay: The weight decay of the default optimizer.
            optimizer: The default optimizer, for which the model is created; `dimuon` where the server offers it.
            seed: The seed of the LoRA weights.
            train_mlp: Whether the MLP layers get an adapter.
            train_attn: Whether the attention layers get an adapter.
            train_unembed: Whether the output matrix gets an adapter.
            max_steps_in_flight: The maximum number of steps in flight if the loss runs on the server.
            predict: How `predict` samples: `max_tokens` (default: 64), `temperature`, `top_p`, `top_k`, `num_samples`,
                `seed` and `stop`.
            base_url: The URL of the server; see `connect`.
            api_key: The API key of the server.
            **unknown: Raises `InvalidInput`, with advice for names that other libraries have.
        """
        hyperparameters.check_unknown(self, unknown)
        check_schedule(schedule, warmup)
        check_choice("optimizer", optimizer, get_args(OptimizerName))
        if max_steps_in_flight < 1:
            raise InvalidInput(f"max_steps_in_flight must be at least 1, got {max_steps_in_flight}")
        hyperparameters.check_optimizer(optimizer, AdamParams(learning_rate, *betas, eps, weight_decay))
        api_key = None if api_key is None else Secret(api_key)
        adapter = {
            "rank": rank,
            "seed": seed,
            "train_mlp": train_mlp,
            "train_attn": train_attn,
            "train_unembed": train_unembed,
            "optimizer": optimizer,
        }
        super().__init__(model, adapter, base_url, api_key)
        self.save_hyperparameters()
        self._fixed_arguments = hyperparameters.fixed_arguments(self)
        self.learning_rate = learning_rate  # set by Lightning's LearningRateFinder
        self.schedule = schedule
        self.warmup = warmup
        self.set_predict_options(predict or {})
        self._optimizer = optimizer
        self._adam = (betas[0], betas[1]), eps, weight_decay
        self.lm.handle.remote.max_steps_in_flight = max_steps_in_flight
        self._scores = Scores()
        self._evaluation = Evaluation(self)
        self._may_defer = False  # whether nobody reads the value of a loss before its step is sent
        self._last_route: tuple[Any, Route] | None = None  # with the settings that it was chosen for
        self._loaded_window: dict[str, Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if routes.is_plain_function(vars(cls).get("loss")):
            cls.loss = staticmethod(vars(cls)["loss"])  # type: ignore[method-assign]

    # Methods to override.

    def loss(self, data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]] | Tensor:
        """Returns the loss of a batch, a scalar tensor, and metrics to log. Override it; the default is cross-entropy.

        The default is computed by the server in the pass of its gradient, so that its value is deferred: it is NaN in
        the `outputs` of callbacks, and logged when it arrives. With `route = "retained"` or `"two-pass"` it is
        computed here, before the step.

        `loss` may also be the name of a built-in loss (`loss = "cross_entropy"`) or of one registered with
        `custom_loss`, or a function of the library (`loss = losses.dpo`), with its settings in `loss_config`. A loss
        that runs on the server takes one pass instead of two; its value is logged when it arrives.
        """
        weights = torch.cat([target_weights(datum).flatten() for datum in data])
        logp = torch.cat([each.flatten() for each in logprobs])
        total = 1.0 if self.reduction == "sum" else total_weight(data)
        return -(logp * weights).sum() / total, likelihood_metrics(logp, weights)

    def datums(self, batch: Any) -> list[Any]:
        """Returns the datums of a batch, as any iterable. Override it for loaders that yield something else.

        A batch is a list of datums, texts, chats (lists of messages), or dicts with `messages`, with `prompt` and
        `completion`, or with `text`. It is called once per batch; look-ahead may call it before others are trained.
        """
        return datums_of(batch, lambda: RowFormat(self.tokenizer))

    def loss_fn_inputs(self, batch: Any) -> Mapping[str, Any]:
        """Returns inputs of the loss for a whole batch by name; none by default. Override it.

        An input has one row per datum, which is cut to the datum's length, for example a `[B, T]` tensor of
        `advantages`. A loss registered with `custom_loss` gets the tensor unchanged.
        """
        del batch
        return {}

    @override
    def configure_optimizers(self) -> Any:
        """Returns the optimizer of the constructor, with the schedule if there is one. Override it for another one."""
        optimizer = new_optimizer(self._optimizer, self.parameters(), self.learning_rate, *self._adam)
        if self.schedule == "constant" and not self.warmup:
            return optimizer
        scheduler = scheduled(optimizer, self.schedule, self.warmup, checks.count_steps(self))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Steps.

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Evaluates the loss on a forward pass, or returns a deferred loss that is sent with the optimizer step.

        Metrics are logged as means over the accumulation window so far.
        """
        data = as_list(self.datums(batch))
        route = self.chosen_route()
        inputs = self.loss_fn_inputs(batch)
        if not route.needs_logprobs:
            return self._server_loss(data, route, inputs)
        logprobs = self.lm(data)  # of the datums that look-ahead has sent
        with dropping(self):
            loss, metrics = composition.evaluate(
                route.with_inputs(data, inputs) if inputs else data,
                logprobs,
                route.loss if route.runs_locally else None,
                self.regularizers,
                step=self.global_step,
                grad_norms=self.grad_norms,
                timeout=self.regularizer_timeout,
            )
        if route.runs_locally:
            own = composition.flatten(metrics) if route.regularized else deferred_metrics.loss_metrics(metrics)
            logged = own | {LOSS: loss.item()}
        else:
            added = metrics.pop(TOTAL)  # the regularizers alone; the total is logged when the base loss arrives
            loss = loss + self._server_loss(data, route, inputs, added)
            logged = composition.flatten(metrics)
        self._batch_metrics = (logged, len(data))  # added to the window with the gradient
        self._log_present(combined([*self._window_metrics, self._batch_metrics]), len(data))
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `val_loss`, the module's loss with its metrics, and `val_nll` and `val_perplexity` by token."""
        self._evaluation.step("val", batch, batch_idx, dataloader_idx)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `test_loss`, the module's loss with its metrics, and `test_nll` and `test_perplexity` by token."""
        self._evaluation.step("test", batch, batch_idx, dataloader_idx)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Makes the server clip the gradient norm of a remote model; local gradients are clipped locally."""
        if not any(isinstance(one, RemoteHandle) for group in optimizer.param_groups for one in group["params"]):
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if gradient_clip_val:
            inner = getattr(optimizer, "optimizer", optimizer)
            checks.clipping_optimizer(inner, gradient_clip_algorithm).clip(float(gradient_clip_val))

    def chosen_route(self) -> Route:
        """Returns where the loss runs and how it is averaged.

        The first call of a fit decides, and the first one after a change of the backend, the loss or its settings.
        """
        loss: Any = self._modules.get("loss", self.loss)  # a loss that is an nn.Module
        regularized = bool(self.regularizers)
        own = (loss, self.route, self.reduction, repr(self.loss_config), regularized)
        settings = (*own, self.lm.handle.remote.given, self._may_defer)
        if self._last_route is None or self._last_route[0] != settings:
            self._last_route = (settings, self._choose_route(loss))
        return self._last_route[1]

    def _choose_route(self, loss: Any) -> Route:
        if routes.is_plain_function(getattr(loss, "__func__", None)):
            loss = loss.__func__  # a plain function bound by the class
        is_default = getattr(loss, "__func__", None) is RemoteModule.loss
        route = routes.choose(
            loss,
            self.loss_config,
            self.route,
            lambda: self.lm.backend,
            regularized=bool(self.regularizers),
            reduction=self.reduction,
            equals="cross_entropy" if is_default else None,
            may_defer=self._may_defer,
        )
        self.lm.handle.remote.loss_name = routes.loss_name(loss)
        self.lm.retain = route.route != "two-pass"
        if not is_default:
            return route
        count = None if self.reduction == "sum" else total_weight
        return replace(route, tokens=count, weight=count or routes.one_per_batch, is_of_library=True)

    def _server_loss(
        self,
        data: list[Any],
        route: Route,
        inputs: Mapping[str, Any],
        added: float | None = None,
        about: Any = None,
    ) -> Tensor:
        """Returns the deferred value of a loss that runs on the server, divided by its tokens if it is a mean."""
        data, inputs = route.with_inputs(data, inputs), {} if route.local is not None else inputs
        tokens = 1.0 if route.tokens is None else route.tokens(data)
        added = None if added is None else added * tokens  # it is scaled with the loss, but not divided
        loss = self.lm.server_loss(data, route.loss, route.config, inputs=inputs, added=added, about=about)
        return loss / tokens

    # The trainer.

    def _attach(self, trainer: pl.Trainer | None) -> None:
        """Attaches a trainer; a second one while the first is running raises an error."""
        with _ATTACHING:
            checks.check_free(self, trainer)
            pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
            self._last_route = None
            self.decide_deferral()
            if trainer is not None and trainer.lightning_module is self:
                hooks.attach(trainer, self)
                _compat.keep_datums(trainer.precision_plugin)
                checks.check(trainer, self)

    # Keeps Lightning's own getter, which is called for every hook.
    trainer: pl.Trainer = pl.LightningModule.trainer.setter(_attach)  # type: ignore[attr-defined, override]

    def decide_deferral(self) -> None:
        """Decides whether only this class reads the value of the loss, and a trainer logs it when it arrives."""
        is_own_step = not is_overridden("training_step", self, RemoteModule)
        self._may_defer = self.has_trainer and is_own_step and not checks.reads_losses(self.trainer)

    # Files.

    @override
    def save_hyperparameters(
        self, *args: Any, ignore: Sequence[str] | str | None = None, frame: Any = None, logger: bool = True
    ) -> None:
        """Saves plain data only. Clients, callables and API keys must be passed again on load."""
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        frame = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        ignored += hyperparameters.arguments_left_out(self)
        super().save_hyperparameters(*args, ignore=ignored, frame=frame, logger=logger)
        self._api_keys |= hyperparameters.api_keys(self)
        for name in (_compat.HPARAMS, _compat.HPARAMS_INITIAL):
            hparams = name.get(self)
            hparams.update(hyperparameters.hide_keys(hparams, self._api_keys))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the accumulation window. The state dict names the remote states."""
        contents.add_section(checkpoint, self)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the remote states that a checkpoint names; a model that does not exist is created at its first use.

        Raises:
            InvalidInput: If the checkpoint has another base model, rank or format.
            NotFound: If a state is not on the server.
        """
        self._loaded_window = read_window(checkpoint, self.checkpoint_file)
        contents.load_states(checkpoint, self)
        self.restore_window()

    def restore_window(self) -> None:
        """Restores the accumulation window of the last checkpoint loaded."""
        if self._loaded_window is not None:
            contents.restore_window(self._loaded_window, self)

    def export_adapter(self, path: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """Downloads the trained adapter as a PEFT folder, which transformers and vLLM load, and returns its path."""
        self.drain()
        return export_adapter(self.lm.backend, path, overwrite=overwrite)


def _check_launch(trainer: pl.Trainer, module: Any) -> None:
    if isinstance(module, RemoteModule):
        checks.check_processes(trainer)


_compat.before_launch(_check_launch)
