"""Callbacks that sample from the model while it is trained: their base class, and scores of the completions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, did_you_mean
from tinker_lightning.lightning.checkpoint.loaders import isolated_rng
from tinker_lightning.lightning.deferred_metrics import LogStep, log_at
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.lightning.reports import ReportingCallback
from tinker_lightning.rows.formats import is_chat, is_row
from tinker_lightning.types import SamplingParams
from tinker_lightning.types.chat import messages_to_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class GeneratingCallback(pl.Callback, ABC):
    """Samples continuations of prompts every few steps, or after each validation, and calls `on_samples`.

    Args:
        prompts: Texts, chats, dicts with `prompt` or `messages`, model inputs or lists of tokens.
        every_n_steps: The number of optimizer steps between two samplings; None samples after each validation, or after
            each epoch of training if there is no validation.
        sampling_params: How tokens are chosen; by default greedily, up to 64.
        num_samples: The number of continuations of each prompt, sampled in one request.
    """

    name: str

    def __init__(
        self,
        prompts: Iterable[Any],
        *,
        every_n_steps: int | None = None,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
    ) -> None:
        name = type(self).__name__
        self.rows = [prompts] if is_row(prompts) else list(prompts)
        if not self.rows:
            raise InvalidInput(f"{name}: prompts is empty")
        if every_n_steps is not None and every_n_steps < 1:
            raise InvalidInput(f"{name}: every_n_steps must be at least 1, or None, got {every_n_steps}")
        if num_samples < 1:
            raise InvalidInput(f"{name}: num_samples must be at least 1, got {num_samples}")
        self.every_n_steps = every_n_steps
        self.sampling_params = sampling_params or SamplingParams(max_tokens=64, temperature=0)
        self.num_samples = num_samples
        self._last_step = -1

    @property
    @override
    def state_key(self) -> str:
        """Distinguishes callbacks of one class by name in checkpoints."""
        return f"{type(self).__qualname__}({self.name!r})"

    @abstractmethod
    def on_samples(
        self, trainer: pl.Trainer, module: RemoteModule, samples: list[list[dict[str, Any]]], *, in_epoch: bool
    ) -> None:
        """Handles the samples of each prompt: dicts with `tokens`, `logprobs`, `stop_reason` and usually `text`.

        `in_epoch` is true between the batches of an epoch, where `module.log` would repeat a value at later steps.
        """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raises `InvalidInput` if the module is not a remote one."""
        del trainer, stage  # which Lightning passes by name
        require_remote(self, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Samples if enough steps were taken."""
        step = trainer.global_step
        # A micro-batch that takes no step leaves the count where it was.
        if self.every_n_steps and step and step % self.every_n_steps == 0 and step != self._last_step:
            self._sample(trainer, pl_module, in_epoch=True)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples, unless an interval is set; `Trainer.validate` always samples."""
        if not trainer.sanity_checking and (self.every_n_steps is None or trainer.state.fn == TrainerFn.VALIDATING):
            self._sample(trainer, pl_module, in_epoch=False)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples if there is no validation and no interval."""
        if self.every_n_steps is None and not trainer.enable_validation:
            self._sample(trainer, pl_module, in_epoch=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the last step that was sampled at, so that a resumed run does not sample there again."""
        return {"last_step": self._last_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the last step that was sampled at."""
        self._last_step = state_dict["last_step"]

    def _sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, in_epoch: bool) -> None:
        module = require_remote(self, pl_module)
        predictions = module._prompt_sampler.sample(self.rows, self.sampling_params, self.num_samples)
        self.on_samples(trainer, module, [one.get("samples", [one]) for one in predictions], in_epoch=in_epoch)
        self._last_step = trainer.global_step


def require_remote(callback: pl.Callback, module: pl.LightningModule) -> RemoteModule:
    """Returns a remote module; raises `InvalidInput` for any other."""
    if not isinstance(module, RemoteModule):
        raise InvalidInput(
            f"{type(callback).__name__} needs a RemoteModule, but the trainer runs a {type(module).__name__}"
        )
    return module


def logged_step(trainer: pl.Trainer) -> int:
    """Returns the step under which Lightning logs metrics of the step that was taken last."""
    return max(trainer.global_step - 1, 0)


def prompt_text(row: Any) -> str:
    """Returns the text of a prompt as a reader would like to see it: of a chat, the message that is answered.

    >>> prompt_text({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]})
    '2 + 2?'
    >>> prompt_text([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}])
    '2 + 2?'
    """
    value = row.get("prompt", row.get("messages", row)) if isinstance(row, Mapping) else row
    return str(messages_to_answer(value)[-1]["content"]) if is_chat(value) else str(value)


class GenerationEval(GeneratingCallback, ReportingCallback):
    """Logs the mean score of completions, a metric that `ModelCheckpoint` and `EarlyStopping` can monitor.

    The report at the end of a fit shows the last one.

    Args:
        score: Called as `score(text, row)` with a completion and its prompt's row; returns a number, or a dict of
            numbers, which are logged as `<name>/<key>`.
        prompts: Texts, chats, or dicts with `prompt` or `messages` and any columns that the score needs.
        name: The name of the metric.
        every_n_steps: The number of optimizer steps between two evaluations; None evaluates in each validation, or
            after each epoch of training if there is no validation.
        sampling_params: How tokens are chosen; by default greedily, up to 64.
        num_samples: The number of continuations of each prompt to score.
    """

    def __init__(
        self,
        score: Callable[[str, Any], float | Mapping[str, float]],
        prompts: Iterable[Any],
        *,
        name: str = "score",
        every_n_steps: int | None = None,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
    ) -> None:
        super().__init__(prompts, every_n_steps=every_n_steps, sampling_params=sampling_params, num_samples=num_samples)
        if not callable(score):
            raise InvalidInput(f"GenerationEval: score must be a function of text and row, got {score!r}")
        self.score = score
        self.name = name
        self._last: dict[str, str] = {}

    @override
    def end_lines(self) -> dict[str, str]:
        """Returns the last score of each name."""
        return self._last

    @override
    def on_samples(
        self, trainer: pl.Trainer, module: RemoteModule, samples: list[list[dict[str, Any]]], *, in_epoch: bool
    ) -> None:
        """Scores the samples and logs the means."""
        scores: dict[str, list[float]] = {}
        with isolated_rng():  # a score that draws random numbers must not change what training draws
            for i, (row, completions) in enumerate(zip(self.rows, samples, strict=True)):
                for one in completions:
                    for name, value in self._scores(i, row, one).items():
                        scores.setdefault(name, []).append(value)
        metrics = {name: math.fsum(values) / len(values) for name, values in scores.items()}
        count = sum(map(len, samples))
        self._last = {name: f"{value:.4g} on average over {count:,} completions" for name, value in metrics.items()}
        if not in_epoch:
            for name, value in metrics.items():
                module.log(name, value, batch_size=len(self.rows), prog_bar=True)
            return
        log_at(trainer, metrics, LogStep(logged_step(trainer), trainer.current_epoch, is_logged=True))
        trainer.progress_bar_metrics.update(metrics)

    def _scores(self, index: int, row: Any, sample: dict[str, Any]) -> dict[str, float]:
        if "text" not in sample:
            raise InvalidInput(
                "GenerationEval scores texts, but the server names no tokenizer to decode with. Override the module's "
                "`tokenizer` property."
            )
        try:
            result = self.score(sample["text"], row)
        except KeyError as error:
            key = error.args[0] if error.args else None
            if not isinstance(row, Mapping) or key in row:  # of another dict
                raise
            hint = did_you_mean(str(key), map(str, row))
            raise InvalidInput(
                f"prompt {index}: the score {self.name!r} reads {key!r}, but the row has {', '.join(map(str, row))}. "
                f"{hint or 'Add it to the rows.'}"
            ) from error
        by_name: dict[str, Any] = {self.name: result}
        if isinstance(result, Mapping):
            by_name = {f"{self.name}/{key}": value for key, value in result.items()}
        try:
            scores = {name: float(value) for name, value in by_name.items()}
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"prompt {index}: the score of {self.name!r} must be a number or a dict of numbers, got {result!r}"
            ) from error
        if bad := [name for name, value in scores.items() if not math.isfinite(value)]:
            raise InvalidInput(f"prompt {index}: the score {bad[0]!r} of {sample['text']!r} is {scores[bad[0]]}")
        return scores
