"""A remote model as a `LightningModule`: override `loss`, and `Trainer.fit` trains it."""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from torch import Tensor

from tinker_lightning import custom_loss
from tinker_lightning.client import connect
from tinker_lightning.client.official import to_model_input
from tinker_lightning.errors import InvalidDatum, InvalidInput, LossWithoutGradient
from tinker_lightning.late_metrics import LateMetrics
from tinker_lightning.metrics import TokenNLL, TokenPerplexity
from tinker_lightning.optim import RemoteAdamW
from tinker_lightning.remote import Call, RemoteLM
from tinker_lightning.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from torch.optim import Optimizer

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.remote import Step

# Where a checkpoint file names the state on the server.
STATE_KEY = "tinker"


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
        base_url: Where the server is; see `connect`.
        api_key: What it wants to see.
    """

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
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__()
        # Clients, functions and keys have no place in a file; they are given again when it is loaded.
        self.save_hyperparameters(ignore=["api_key", *_arguments_that_are_not_plain(self)])
        self._api_key = api_key
        self._service: ServiceClient | None = None
        self._resume_from: str | None = None
        self._saved: tuple[int, str] | None = None
        # Empty for a client that was given: then the model is the client's, whatever the environment names.
        named = os.environ.get("TINKER_BASE_MODEL", "") if model is None else model
        self._base_model = named if isinstance(named, str) else ""
        self._settings: dict[str, Any] = {
            "rank": rank,
            "seed": seed,
            "train_mlp": train_mlp,
            "train_attn": train_attn,
            "train_unembed": train_unembed,
        }
        self._base_url = base_url
        self._adam: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.lm = RemoteLM(self._connect if model is None or isinstance(model, str) else model)
        self.val_nll, self.val_perplexity = TokenNLL(), TokenPerplexity()
        self.test_nll, self.test_perplexity = TokenNLL(), TokenPerplexity()
        self._late = LateMetrics()
        self.lm.handle.remote.on_step = self._stepped
        self._sampler: Any = None
        self._tokenizer: Any = None

    # What to override.

    def loss(self, data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]] | Tensor:
        """The loss of a batch: a scalar tensor, and metrics to log. The mean over weighted tokens if not overridden."""
        weights = torch.cat([_weights(datum).flatten() for datum in data])
        return -(torch.cat([p.flatten() for p in logprobs]) * weights).sum() / weights.sum(), {}

    def datums(self, batch: Any) -> list[Any]:
        """The datums of a batch; a list of them as it is. Override it for loaders that give something else.

        Raises:
            InvalidDatum: If the batch is empty or no list of datums.
        """
        if _is_datum(batch):
            return [batch]
        if not isinstance(batch, Sequence) or not all(_is_datum(datum) for datum in batch):
            raise InvalidDatum(
                f"a batch must be a list of datums, got {type(batch).__name__}. Give the DataLoader "
                "collate_fn=tinker_lightning.collate, or override datums(self, batch) to build them."
            )
        if not batch:
            raise InvalidDatum("the batch has no datums; drop empty batches in the loader")
        return list(batch)

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        """Refuses more than one process.

        Raises:
            InvalidInput: If there are several: each would train a model of its own on a part of the data.
        """
        del stage
        if self.trainer.world_size > 1:
            raise InvalidInput(
                f"this trainer runs {self.trainer.world_size} processes, and each would train a model of its own. "
                "The passes run on the server: use Trainer(accelerator='cpu', devices=1)."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A forward pass, the loss, and its metrics."""
        del batch_idx
        data = self.datums(batch)
        loss, metrics = custom_loss.loss_and_metrics(self.loss(data, self.lm(data)))
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(data))
        if metrics:
            self.log_dict(metrics, batch_size=len(data))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Negative log-likelihood and perplexity, by token."""
        del batch_idx
        self._score("val", batch, self.val_nll, self.val_perplexity)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """The same on the test set."""
        del batch_idx
        self._score("test", batch, self.test_nll, self.test_perplexity)

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        """Samples a continuation of each prompt of a batch: inputs, datums, strings or lists of tokens.

        Each is a dict of `tokens`, `logprobs`, `stop_reason` and `text`, for Lightning takes predictions apart.
        """
        del batch_idx
        tokenizer = self._tokenizer
        prompts = [_prompt(item, tokenizer) for item in (batch if isinstance(batch, Sequence) else [batch])]
        futures = [self._sampler.sample(prompt, 1, self.sampling_params()) for prompt in prompts]
        sequences = [future.result().sequences[0] for future in futures]
        return [
            {
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "stop_reason": sequence.stop_reason,
                "text": tokenizer.decode(sequence.tokens, skip_special_tokens=True),
            }
            for sequence in sequences
        ]

    def sampling_params(self) -> SamplingParams:
        """How `predict_step` samples; override it."""
        return SamplingParams(max_tokens=64)

    def configure_optimizers(self) -> Any:
        """AdamW with the settings given; override it for a scheduler."""
        return RemoteAdamW(self.parameters(), **self._adam)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lets the server clip the norm; the gradient is there."""
        if not gradient_clip_val:
            return
        if str(gradient_clip_algorithm or "norm").rsplit(".", 1)[-1].lower() != "norm":
            raise InvalidInput(
                "gradient_clip_algorithm='value' cannot be had: the gradient of a remote model is on the server, which "
                "clips its norm only. Use gradient_clip_algorithm='norm'."
            )
        for group in optimizer.param_groups:
            group["grad_clip_norm"] = float(gradient_clip_val)

    def on_after_backward(self) -> None:
        """Refuses a loss that would silently train nothing."""
        if self.automatic_optimization and self.lm.handle.grad is None:
            raise LossWithoutGradient(custom_loss.WITHOUT_GRADIENT)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs what has come back from the server, under the steps it belongs to."""
        del outputs, batch, batch_idx
        self._late.log(wait=False)

    def on_train_end(self) -> None:
        """Waits for the last steps, and logs them."""
        self.drain()

    def on_predict_start(self) -> None:
        """Samples come from the model as it is now."""
        self._sampler = self.lm.backend.save_weights_and_get_sampling_client()  # type: ignore[attr-defined]
        self._tokenizer = self.lm.backend.get_tokenizer()

    def teardown(self, stage: str) -> None:
        """Waits for what is under way; the session stays, for the next stage must see the same model."""
        del stage
        self.drain()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the model on the server and keeps the path of it in the file, with gradients that wait for a step."""
        remote = self.lm.handle.remote
        if not remote.is_made:
            return
        self.drain()
        if self._saved is None or self._saved[0] != remote.steps:
            name = f"step-{remote.steps:06d}-{uuid.uuid4().hex[:8]}"
            self._saved = (remote.steps, remote.backend.save_state(name).result().path)
        info = remote.backend.get_info()
        checkpoint[STATE_KEY] = {
            "path": self._saved[1],
            "base_model": info.model_data.model_name,
            "rank": info.lora_rank,
            "window": [_call_state(call) for call in remote.window],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on from the state that a file names; it is fetched at the first use.

        Raises:
            InvalidInput: If the file is of another base model or rank, or not of a remote model.
        """
        state = checkpoint.get(STATE_KEY)
        if state is None:
            raise InvalidInput("this checkpoint names no remote state; it was not written by a RemoteModule")
        if self._base_model and state["base_model"] != self._base_model:
            raise InvalidInput(f"the checkpoint is of {state['base_model']}, but this module of {self._base_model}")
        if self._base_model and state["rank"] != self._settings["rank"]:
            raise InvalidInput(f"the checkpoint has rank {state['rank']}, but this module {self._settings['rank']}")
        remote = self.lm.handle.remote
        if self._base_model:
            self._resume_from = state["path"]
            remote.point_to(self._connect)
        else:
            remote.backend.load_state_with_optimizer(state["path"]).result()  # type: ignore[attr-defined]
        remote.drop()
        remote.window = [_call_from(call) for call in state["window"]]
        self._saved = (remote.steps, state["path"])

    # The session.

    def drain(self) -> None:
        """Waits for everything that was sent, logs it, and raises the first failure that nobody has read."""
        self._late.log(wait=True)
        self.lm.handle.remote.unread.wait()
        self.lm.handle.remote.unread.raise_first()

    def close(self) -> None:
        """Ends the session with the server, if this module has opened it."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> Any:
        if self._service is None:
            self._service = connect(self._base_url, api_key=self._api_key)
        if self._resume_from is not None:
            return self._service.create_training_client_from_state_with_optimizer(self._resume_from)
        return self._service.create_lora_training_client(self._base_model or None, **self._settings)

    def _score(self, stage: str, batch: Any, nll: TokenNLL, perplexity: TokenPerplexity) -> None:
        data = self.datums(batch)
        for datum, logprobs in zip(data, self.lm(data), strict=True):
            for metric in (nll, perplexity):
                metric.update(logprobs, _weights(datum))
        self.log(f"{stage}_loss", nll, prog_bar=True, batch_size=len(data))
        self.log(f"{stage}_perplexity", perplexity, batch_size=len(data))

    def _stepped(self, sent: Step) -> None:
        if self._trainer is not None:
            self._late.add(sent, self.trainer)


def _arguments_that_are_not_plain(module: RemoteModule) -> list[str]:
    """What the constructors of a module, subclasses' included, were given that is no plain data."""
    names: list[str] = []
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module:
            for name, value in frame.f_locals.items():
                given = value.items() if isinstance(value, Mapping) else [(name, value)]
                names += [key for key, item in given if not _is_plain(item)]
    return names


def _weights(datum: Any) -> Tensor:
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        return torch.ones(datum.loss_fn_inputs["target_tokens"].shape)
    tensor: Tensor = weights.to_torch()
    return tensor


def _is_datum(value: Any) -> bool:
    return hasattr(value, "model_input") and hasattr(value, "loss_fn_inputs")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def _prompt(item: Any, tokenizer: Any) -> ModelInput:
    if _is_datum(item):
        return to_model_input(item.model_input)
    if isinstance(item, str):
        return ModelInput.from_ints(tokenizer.encode(item))
    return to_model_input(item) if hasattr(item, "chunks") else ModelInput.from_ints(item)


def _call_state(call: Call) -> list[dict[str, Tensor]]:
    """A call and its gradient as tensors, which load without running code."""
    return [
        {
            "tokens": torch.from_numpy(datum.model_input.tokens().copy()),
            "target_tokens": datum.loss_fn_inputs["target_tokens"].to_torch().clone(),
            "gradient": gradient,
        }
        for datum, gradient in zip(call.datums, call.gradients or [], strict=True)
    ]


def _call_from(state: list[dict[str, Tensor]]) -> Call:
    datums = [Datum.from_targets(entry["tokens"], entry["target_tokens"]) for entry in state]
    return Call(datums, [entry["gradient"] for entry in state])
