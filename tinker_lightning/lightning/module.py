"""A remote model as a `LightningModule`: override `loss`, and `Trainer.fit` trains it."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import _compat, checks, deferred_metrics, evaluation, hooks
from tinker_lightning.lightning.base import RemoteBase
from tinker_lightning.lightning.checkpoint import rng
from tinker_lightning.lightning.deferred_metrics import LOSS, TOTAL, combined
from tinker_lightning.losses.reduction import target_weights
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.remote.optimizers import RemoteAdamW, RemoteOptimizer
from tinker_lightning.rows.batches import as_list
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from tinker_lightning.lightning.routes import Route


# Serializes trainer attachment.
_ATTACHING = threading.RLock()


class RemoteModule(RemoteBase):
    """A language model on a server that `Trainer.fit` trains with any loss.

    The session with the server starts at the first use and outlives a fit, so that `validate` and `predict` see the
    trained model. It ends with `close()`, with a `with` block, or when the module is garbage-collected.

    The arguments are those of `__init__`.
    """

    @property
    def trainer(self) -> pl.Trainer:
        """The attached trainer. Attaching a second one while the first is running raises an error."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        with _ATTACHING:
            checks.check_free(self, trainer)
            pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
            if trainer is not None and trainer.lightning_module is self:
                hooks.attach(trainer, self)
                _compat.keep_datums(trainer.precision_plugin)
                checks.check(trainer, self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002
        """Evaluates the loss on a forward pass, or returns a deferred loss that is sent with the optimizer step.

        Metrics are logged as means over the accumulation window so far.
        """
        data = as_list(self.datums(batch))
        chosen = self.chosen_route()
        inputs = self.loss_fn_inputs(batch)
        if not chosen.needs_logprobs:
            return self._server_loss(data, chosen, inputs)
        logprobs = self.lm(data)  # of the datums that look-ahead has sent
        with self._dropping():
            loss, metrics = composition.evaluate(
                chosen.with_inputs(data, inputs),
                logprobs,
                chosen.loss if chosen.runs_locally else None,
                self.regularizers,
                step=self.global_step,
                grad_norms=self.grad_norms,
                timeout=self.regularizer_timeout,
            )
        if chosen.runs_locally:
            own = deferred_metrics.of_loss(composition.flatten(metrics), is_of_library=chosen.is_of_library)
            logged = own | {LOSS: loss.item()}
        else:
            added = metrics.pop(TOTAL)  # the regularizers alone; the total is logged when the base loss arrives
            loss = loss + self._server_loss(data, chosen, inputs, added)
            logged = composition.flatten(metrics)
        self._batch_metrics = (logged, len(data))  # added to the window with the gradient
        self._log_present(combined([*self._window_metrics, self._batch_metrics]), len(data))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `val_loss`, the module's loss with its metrics, and `val_nll` and `val_perplexity` by token."""
        self._evaluate("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `test_loss`, the module's loss with its metrics, and `test_nll` and `test_perplexity` by token."""
        self._evaluate("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Samples a continuation of each prompt (text, chat, dict, datum, input or tokens) from the current weights.

        Returns one dict per prompt with `tokens`, `logprobs`, `stop_reason` and `text`; if `num_samples` is above 1,
        those of the first sample, and a list of all under `samples`.
        """
        del batch_idx, dataloader_idx
        return self._samples.of(batch, self.sampling_params(), self.num_samples)

    def sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters of `predict_step`. Override it to change them."""
        return SamplingParams(max_tokens=64)

    def configure_optimizers(self) -> Any:
        """Returns `RemoteAdamW` with the settings of the constructor. Override it to add a scheduler."""
        return RemoteAdamW(self.parameters(), lr=self.learning_rate, **self._adam)

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
        if not gradient_clip_val:
            return
        if str(gradient_clip_algorithm or "norm").rsplit(".", 1)[-1].lower() != "norm":
            raise InvalidInput(
                "gradient_clip_algorithm='value' is not supported: the gradient of a remote model is on the server, "
                "which only clips by norm. Use gradient_clip_algorithm='norm'."
            )
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, RemoteOptimizer):
            raise InvalidInput(
                "gradient_clip_val requires an optimizer that steps on the server, such as RemoteAdamW, but this one "
                f"is {type(inner).__name__}"
            )
        inner.clip(float(gradient_clip_val))

    @property
    def _may_defer(self) -> bool:
        """Whether only this class reads the value of the loss, and a trainer is there to log it when it arrives."""
        if not self.has_trainer or is_overridden("training_step", self, RemoteModule):
            return False
        return not checks.finds_learning_rate(self.trainer)

    def _server_loss(
        self,
        data: list[Any],
        chosen: Route,
        inputs: Mapping[str, Any],
        added: float | None = None,
        about: Any = None,
    ) -> Tensor:
        """Returns the deferred value of a loss that runs on the server, divided by its tokens if it is a mean."""
        data, inputs = chosen.with_inputs(data, inputs), {} if chosen.local is not None else inputs
        tokens = 1.0 if chosen.tokens is None else chosen.tokens(data)
        added = None if added is None else added * tokens  # it is scaled with the loss, but not divided
        loss = self.lm.server_loss(data, chosen.loss, chosen.config, inputs=inputs, added=added, about=about)
        return loss / tokens

    def _log_present(self, metrics: Mapping[str, float], batch_size: int) -> None:
        """Logs the metrics of a step and drops those it lacks, whose last values Lightning would repeat."""
        if dropped := self._logged - metrics.keys():
            _compat.drop_logged(self.trainer, "training_step", dropped)
        self._logged = set(metrics)
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == LOSS, batch_size=batch_size)

    def _evaluate(self, stage: str, batch: Any, batch_idx: int, loader: int) -> None:
        data = as_list(self.datums(batch))
        logprobs = self.lm(data)
        scores = self._scores.updated(stage, loader, zip(logprobs, map(target_weights, data), strict=True))
        _compat.METRIC_ATTRIBUTES.set(self, None)  # makes Lightning look up the names of new metrics
        for name, metric in scores.items():
            self.log(f"{stage}_{name}", metric, batch_size=len(data))
        if batch_idx == 0:
            self._evaluated[stage, loader] = set()
        logged = self._evaluated.get((stage, loader))
        if logged is None:
            return  # an earlier batch lacks an input of the loss
        try:
            with rng.kept():  # a validation that is repeated after a resume must not change what training draws
                value, metrics, weight = evaluation.own_loss(self, batch, data, logprobs)
        except evaluation.LossUnavailable as error:
            self._drop_loss(stage, loader, logged, str(error))
            return
        for name, number in {"loss": value, **metrics}.items():
            reduce = deferred_metrics.reduction(name)
            if not weight and reduce == "mean":
                continue  # a policy loss on a batch without actions
            logged.add(name)
            self.log(f"{stage}_{name}", number, prog_bar=name == "loss", batch_size=weight, reduce_fx=reduce)

    def _drop_loss(self, stage: str, loader: int, logged: set[str], reason: str) -> None:
        """Removes the loss from the scores of a loader, because a mean of the other batches would be misleading."""
        self._evaluated[stage, loader] = None
        step = "validation_step" if stage == "val" else "test_step"
        names = [f"{stage}_{name}" for name in {"loss", *logged}]
        by_loader = _compat.drop_logged(self.trainer, step, names, loader)
        for name in names:
            self.trainer.callback_metrics.pop(name + (f"/dataloader_idx_{loader}" if by_loader else ""), None)
        if stage not in self._warned:
            self._warned.add(stage)
            warnings.warn(
                f"{stage}_loss is not logged, because the loss cannot be evaluated on this data: {reason}. "
                f"{stage}_nll is logged.",
                stacklevel=2,
            )


def _check_launch(trainer: pl.Trainer, module: Any) -> None:
    if isinstance(module, RemoteModule):
        checks.check_processes(trainer)


_compat.before_launch(_check_launch)
