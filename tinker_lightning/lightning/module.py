"""A remote model as a `LightningModule`: override `loss`, and `Trainer.fit` trains it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import checks, hooks, metric_names
from tinker_lightning.lightning.base import RemoteBase
from tinker_lightning.lightning.batches import as_list, weights_of
from tinker_lightning.lightning.metric_names import LOSS
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.remote.adamw import RemoteAdamW
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


# Of two trainers on two threads one is the first.
_ATTACHING = threading.RLock()


class RemoteModule(RemoteBase):
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
            if trainer is not None and trainer.lightning_module is self:
                hooks.attach(trainer, self)
                checks.check(trainer, self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A forward pass, the loss, and its metrics; or the server's loss, sent at the step."""
        del batch_idx
        data = as_list(self.datums(batch))
        chosen = self.chosen_route()
        if not chosen.runs_locally and not self.regularizers:
            return self.lm.server_loss(data, chosen.loss, chosen.config)
        base = chosen.loss if chosen.runs_locally else None
        with self._dropping():
            loss, metrics = composition.evaluate(
                data,
                self.lm(data),
                base,
                self.regularizers,
                step=self.global_step,
                grad_norms=self.grad_norms,
                timeout=self.regularizer_timeout,
            )
            metric_names.check(metrics)
        if chosen.runs_locally:
            self.log(LOSS, loss.detach(), prog_bar=True, batch_size=len(data))
        else:
            added = metrics.pop("loss_total")  # without the base loss; the whole is logged when the server has told it
            loss = loss + self.lm.server_loss(data, chosen.loss, chosen.config, added=added)
        if metrics:
            self.log_dict(composition.flatten(metrics), batch_size=len(data))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Negative log-likelihood and perplexity, by token."""
        del batch_idx
        self._score("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The same on the test set."""
        del batch_idx
        self._score("test", batch, dataloader_idx)

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

    def _score(self, stage: str, batch: Any, loader: int) -> None:
        data = as_list(self.datums(batch))
        metrics = self._scores.updated(stage, loader, zip(self.lm(data), map(weights_of, data), strict=True))
        self._metric_attributes = None  # where Lightning keeps the names of those it has seen
        for name, metric in metrics.items():
            self.log(f"{stage}_{name}", metric, prog_bar=name == "loss", batch_size=len(data))
