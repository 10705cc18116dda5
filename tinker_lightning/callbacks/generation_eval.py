"""Scores what the model generates for held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.callbacks.generating import GeneratingCallback, logged_step
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.checkpoint import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import lightning.pytorch as pl

    from tinker_lightning.lightning.base import RemoteBase
    from tinker_lightning.types import SamplingParams


class GenerationEval(GeneratingCallback):
    """Logs the mean score of completions, a metric that `ModelCheckpoint` and `EarlyStopping` can monitor.

    Args:
        score: Called as `score(text, row)` with a completion and its prompt's row; returns a number, or a dict of
            numbers, which are logged as `<name>/<key>`.
        prompts: Texts, chats, or dicts with `prompt` or `messages` and any columns that the score needs.
        name: The name of the metric.
        every_n_steps: How many optimizer steps lie between two evaluations; None evaluates in each validation, or after
            each epoch of training if there is no validation.
        sampling_params: How tokens are chosen; by default greedily, up to 64.
        num_samples: How many continuations of each prompt to score.
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

    @property
    def state_key(self) -> str:
        """Distinguishes evaluations by name in checkpoints."""
        return f"{type(self).__qualname__}({self.name!r})"

    def on_samples(
        self, trainer: pl.Trainer, module: RemoteBase, samples: list[list[dict[str, Any]]], *, in_epoch: bool
    ) -> None:
        """Scores the samples and logs the means."""
        found: dict[str, list[float]] = {}
        with rng.kept():  # a score that draws random numbers must not change what training draws
            for i, (row, given) in enumerate(zip(self.rows, samples, strict=True)):
                for one in given:
                    for name, value in self._scores(i, row, one).items():
                        found.setdefault(name, []).append(value)
        metrics = {name: math.fsum(values) / len(values) for name, values in found.items()}
        if not in_epoch:
            for name, value in metrics.items():
                module.log(name, value, batch_size=len(self.rows), prog_bar=True)
            return
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, **metrics}, step=logged_step(trainer))
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        trainer.progress_bar_metrics.update(metrics)

    def _scores(self, index: int, row: Any, sample: dict[str, Any]) -> dict[str, float]:
        if "text" not in sample:
            raise InvalidInput(
                "GenerationEval scores texts, but the server names no tokenizer to decode with. Override the module's "
                "`tokenizer` property."
            )
        given = self.score(sample["text"], row)
        named: dict[str, Any] = {self.name: given}
        if isinstance(given, Mapping):
            named = {f"{self.name}/{key}": value for key, value in given.items()}
        try:
            scores = {name: float(value) for name, value in named.items()}
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"prompt {index}: the score of {self.name!r} must be a number or a dict of numbers, got {given!r}"
            ) from error
        if bad := [name for name, value in scores.items() if not math.isfinite(value)]:
            raise InvalidInput(f"prompt {index}: the score {bad[0]!r} of {sample['text']!r} is {scores[bad[0]]}")
        return scores
