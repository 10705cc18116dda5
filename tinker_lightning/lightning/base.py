"""The parts of a `RemoteModule` other than its steps: the model, its session, its loss and its data."""

from __future__ import annotations

import contextlib
import functools
import inspect
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from tinker_lightning.client.files.export import export_adapter
from tinker_lightning.errors import InvalidInput, InvalidLoss, TinkerLightningError
from tinker_lightning.lightning import _compat, routes, wandb_runs
from tinker_lightning.lightning.checkpoint import contents
from tinker_lightning.lightning.deferred_metrics import DeferredMetrics
from tinker_lightning.lightning.hyperparameters import Secret, api_keys, fixed, for_files, left_out
from tinker_lightning.lightning.lazy_client import LazyClient
from tinker_lightning.lightning.predict import Samples
from tinker_lightning.losses.likelihood import likelihood_metrics
from tinker_lightning.losses.reduction import target_weights, total_weight
from tinker_lightning.metrics.scores import Scores
from tinker_lightning.remote import group
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.rows.batches import count_datums, datums_of, except_datums
from tinker_lightning.rows.formats import RowFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike
    from pathlib import Path
    from types import TracebackType

    from tinker_lightning.lightning.deferred_metrics import FinishedPass
    from tinker_lightning.lightning.routes import Reduction, Route, RouteName
    from tinker_lightning.losses.regularizers.composition import Regularizer
    from tinker_lightning.remote.calls import Pass, Step
    from tinker_lightning.remote.window import RemoteModel

# How many seconds a run that is ending waits for the server.
LAST_WAIT = 5.0


class RemoteBase(pl.LightningModule):
    """A remote model with its session, loss and data."""

    loss_config: Mapping[str, float | str] = MappingProxyType({})
    """Settings of a loss that is given by name or from the library, for example `{"clip_low_threshold": 0.9}`."""

    reduction: Reduction = "mean"
    """How losses by name or from the library are reduced over tokens: `mean` divides by the sum of the micro-batch's
    weights, or by its number of action tokens for policy losses; `sum` does not divide."""

    route: RouteName = "auto"
    """Where the loss runs: `builtin`, `server`, `retained` or `two-pass`; `auto` chooses the cheapest exact route."""

    regularizers: Sequence[Regularizer | Mapping[str, Any]] = ()
    """Terms added to the loss, each with its own weight and telemetry; with `loss = None` they are the loss."""

    grad_norms: bool = True
    """Whether to log the gradient norm of each regularizer; costs a backward through the term, not the model."""

    num_samples: int = 1
    """How many continuations `predict_step` samples of each prompt."""

    regularizer_timeout: float | None = None
    """The number of seconds that regularizers that are async or run on other threads may take."""

    trained_samples: Sequence[Mapping[str, Any]] = ()
    """What was sampled for the last training batch, if a recipe trains on samples: `prompt`, `text`, `stop_reason` and
    `reward` of each."""

    _api_keys: frozenset[str] = frozenset()

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
        api_key: Secret | str | None = None,
    ) -> None:
        """Sets up a model, which is created on the server at its first use.

        Args:
            model: The name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
            rank: The LoRA rank.
            learning_rate: The learning rate of the default optimizer.
            betas: The betas of the default optimizer.
            eps: The epsilon of the default optimizer.
            weight_decay: The weight decay of the default optimizer.
            seed: The seed of the LoRA weights.
            train_mlp: Whether the MLP layers get an adapter.
            train_attn: Whether the attention layers get an adapter.
            train_unembed: Whether the output matrix gets an adapter.
            max_steps_in_flight: The maximum number of steps in flight if the loss runs on the server.
            base_url: The URL of the server; see `connect`.
            api_key: The API key of the server.
        """
        super().__init__()
        if max_steps_in_flight < 1:
            raise InvalidInput(f"max_steps_in_flight must be at least 1, got {max_steps_in_flight}")
        api_key = None if api_key is None else Secret(api_key)
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
        self.learning_rate = learning_rate  # set by Lightning's LearningRateFinder
        self._adam: dict[str, Any] = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self.lm = RemoteLM(self._session.client if model is None or isinstance(model, str) else model)
        self._scores = Scores()
        remote = self.lm.handle.remote
        self._deferred = DeferredMetrics(remote.wait_for_end, self.server_metrics)
        remote.on_step = self._stepped
        remote.max_steps_in_flight = max_steps_in_flight
        remote.load_state = functools.partial(self._session.load, remote)
        self._chosen: tuple[Any, Route] | None = None
        # The metrics of the micro-batches whose gradients are in the window, and of the current one.
        self._window_metrics: list[tuple[dict[str, float], int]] = []
        self._batch_metrics: tuple[dict[str, float], int] = ({}, 0)
        self._logged: set[str] = set()
        self._warned: set[str] = set()
        # The metrics of the loss that each stage and loader has logged in this epoch; None if the data lack an input.
        self._evaluated: dict[tuple[str, int], set[str] | None] = {}
        self._loaded_window: dict[str, Any] | None = None
        self._shown: dict[str, Any] = {}  # what the last fit has shown about the model
        self._tokenizer: Any = None
        self._samples = Samples(self.lm, lambda: RowFormat(self.tokenizer))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if routes.is_plain_function(vars(cls).get("loss")):
            cls.loss = staticmethod(vars(cls)["loss"])  # type: ignore[method-assign]

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer is attached."""
        return _compat.ATTACHED_TRAINER.get(self) is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, from the server; raises `ModelNotFound` if the server does not name one."""
        if self._tokenizer is None:
            self.check_open()
            self._tokenizer = self.lm.backend.get_tokenizer()
        return self._tokenizer

    @property
    def checkpoint_file(self) -> object:
        """The name of the file that the trainer loads, for errors."""
        return (self.trainer.ckpt_path if self.has_trainer else None) or "the checkpoint"

    def save_hyperparameters(
        self, *args: Any, ignore: Sequence[str] | str | None = None, frame: Any = None, logger: bool = True
    ) -> None:
        """Saves plain data only. Clients, callables and API keys must be passed again on load."""
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        frame = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        super().save_hyperparameters(*args, ignore=[*ignored, *left_out(self)], frame=frame, logger=logger)
        self._api_keys |= api_keys(self)
        for name in (_compat.HPARAMS, _compat.HPARAMS_INITIAL):
            hparams = name.get(self)
            hparams.update(for_files(hparams, self._api_keys))

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs a value as `LightningModule.log` does, with the number of datums as the default batch size."""
        if self.has_trainer:
            _compat.set_default_batch_size(self.trainer, count_datums)
        super().log(*args, **kwargs)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves tensors to a device, but not datums and prompts, which are sent to the server."""
        move = super().transfer_batch_to_device
        return except_datums(batch, lambda part: move(part, device, dataloader_idx))

    # Lightning must not count it as an override: it warns about those if there is a data module.
    transfer_batch_to_device.__wrapped__ = pl.LightningModule.transfer_batch_to_device  # type: ignore[attr-defined]

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
        `completion`, or with `text`.
        It is called once per batch; look-ahead may call it before earlier batches are trained.
        """
        return datums_of(batch, lambda: RowFormat(self.tokenizer))

    def loss_fn_inputs(self, batch: Any) -> Mapping[str, Any]:
        """Returns inputs of the loss for a whole batch by name; none by default. Override it.

        An input has one row per datum, which is cut to the datum's length, for example a `[B, T]` tensor of
        `advantages`. A loss registered with `custom_loss` gets the tensor unchanged.
        """
        del batch
        return {}

    def server_metrics(self, ran: Sequence[FinishedPass]) -> Mapping[str, float]:
        """Returns metrics of losses that ran on the server, in addition to their own; none by default."""
        del ran
        return {}

    # Checkpoints.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the model on the server and returns a state dict that names the saved state.

        While a trainer runs, a model that was not used yet is created, so that the run can resume from it.
        """
        trainer = self.trainer if self.has_trainer else None
        if trainer and trainer.lightning_module is self and trainer.state.status == TrainerStatus.RUNNING:
            _ = self.lm.backend
        return super().state_dict(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the accumulation window. The state dict names the remote states."""
        if contents.SECTION in checkpoint:
            return  # already added by the hooks
        hparams = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)
        if isinstance(hparams, dict) and "_instantiator" not in hparams:  # which `LightningCLI` adds
            given = {name: value for name, value in hparams.items() if name not in self._fixed}
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = given
        self.drain()
        contents.section_of(checkpoint).update(
            windows=contents.windows(self),
            local_gradients=self.local_gradients(),
            window_metrics=list(self._window_metrics),
            strategy=None,  # which `TinkerStrategy` fills in
            **({wandb_runs.KEY: wandb_runs.describe(self.trainer)} if self.has_trainer else {}),
        )

    def restore_window(self) -> None:
        """Restores the accumulation window of the last checkpoint loaded."""
        if self._loaded_window is not None:
            contents.restore_gradients(self._loaded_window, self)
            self._window_metrics = list(self._loaded_window["window_metrics"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the remote states that a checkpoint names; a model that does not exist is created at its first use.

        Raises:
            InvalidInput: If the checkpoint has another base model, rank or format.
            NotFound: If a state is not on the server.
        """
        self._loaded_window = contents.read_window(checkpoint, self.checkpoint_file)
        contents.load_states(checkpoint, self)
        self.restore_window()

    # The session.

    def drain(self) -> None:
        """Waits for all requests of the module's remote models, logs them, and raises unread failures as one error."""
        if self.has_trainer and self.trainer.received_sigterm:
            group.wait_for_all(self, LAST_WAIT)
            self._deferred.log(wait=False)
        else:
            self._deferred.log(wait=True)
            group.wait_for_all(self)
        group.raise_first(self)

    def export_adapter(self, path: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """Downloads the trained adapter as a PEFT folder, which transformers and vLLM load, and returns its path."""
        self.drain()
        return export_adapter(self.lm.backend, path, overwrite=overwrite)

    def local_gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of local parameters that wait for an optimizer step, by name."""
        waits = any(remote.window for remote in group.remotes_of(self))
        if not waits and self.lm.handle.requires_grad and self.automatic_optimization:
            return {}  # only gradients of the last step are left
        return contents.local_gradients(self)

    def chosen_route(self) -> Route:
        """Returns where the loss runs and how it is averaged.

        The first call decides, and the first one after a change of the loss or its settings.
        """
        loss: Any = self._modules.get("loss", self.loss)  # a loss that is an nn.Module
        regularized = bool(self.regularizers)
        if routes.is_plain_function(getattr(loss, "__func__", None)):
            loss = loss.__func__  # a plain function bound by the class
        is_default = getattr(loss, "__func__", None) is RemoteBase.loss
        may_defer = self._may_defer
        key = (loss, self.route, self.reduction, repr(self.loss_config), regularized, may_defer)
        if self._chosen is None or self._chosen[0] != key:
            chosen = routes.choose(
                loss,
                self.loss_config,
                self.route,
                lambda: self.lm.backend,
                regularized=regularized,
                reduction=self.reduction,
                equals="cross_entropy" if is_default else None,
                may_defer=may_defer,
            )
            if is_default:
                count = None if self.reduction == "sum" else total_weight
                chosen = replace(chosen, tokens=count, weight=count or routes.once, is_of_library=True)
            self._chosen = (key, chosen)
            self._prepare_model(loss, chosen)
        return self._chosen[1]

    def _prepare_model(self, loss: Any, chosen: Route) -> None:
        """Makes forward passes ask the server to keep their activations if the route needs it."""
        self.lm.handle.remote.loss_name = routes.loss_name(loss)
        self.lm.retain = chosen.route != "two-pass"

    @property
    def _may_defer(self) -> bool:
        """Whether nobody reads the value of a loss before its step is sent."""
        return False

    def settle(self, timeout: float, error: BaseException) -> None:
        """Waits a while for requests sent before an error, logs them, and adds their failures to the error as notes."""
        group.settle(self, timeout, error)
        with contextlib.suppress(TinkerLightningError):
            self._deferred.log(wait=False)

    def delete_state(self, path: str) -> None:
        """Deletes a saved state on the server, if it exists."""
        group.delete_state(self, path)

    @contextmanager
    def using_pass(self, trained: Any, data: list[Any], sent: Pass | None) -> Iterator[RemoteModel]:
        """Makes `datums(trained)` return `data`, whose forward pass was already sent, inside the `with` block."""
        remote, datums, own = self.lm.handle.remote, self.datums, vars(self).get("datums")
        remote.expected, remote.missed = sent, False
        self.datums = lambda batch: data if batch is trained else datums(batch)  # type: ignore[method-assign]
        try:
            yield remote
        finally:
            remote.expected = None
            del self.datums
            if own is not None:
                self.datums = own  # type: ignore[method-assign]

    def close(self) -> None:
        """Ends the session with the server if this module has opened it."""
        self._session.close()

    def check_open(self) -> None:
        """Raises `ClientClosed` after `close()` has ended the session."""
        self._session.check_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.close(kind, error, traceback)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drops the accumulation window if a loss inside the `with` block is rejected."""
        try:
            yield
        except InvalidLoss:
            for remote in group.remotes_of(self):
                remote.drop()
            raise

    def _stepped(self, sent: Step) -> None:
        if self.has_trainer and self.trainer.lightning_module is self:  # otherwise no hooks log
            trained = max(1, len(self._window_metrics))
            share = self.trainer.accumulate_grad_batches / trained if self.automatic_optimization else 1.0
            self._deferred.add(sent, self.trainer, share)
