"""Counts tokens, converts them to dollars, and stops a run at a limit."""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from tinker_lightning.callbacks.generation import require_remote
from tinker_lightning.errors import InvalidInput, did_you_mean
from tinker_lightning.lightning.checkpoint.loaders import PositionedLoader, TrainedPosition, isolated_rng
from tinker_lightning.lightning.reports import ReportingCallback
from tinker_lightning.remote.calls import TokenCount, tokens_of
from tinker_lightning.remote.lm import remotes_of
from tinker_lightning.rows.batches import as_list
from tinker_lightning.types.datum import to_datums

if TYPE_CHECKING:
    from os import PathLike

    import lightning.pytorch as pl

    from tinker_lightning.lightning.module import RemoteModule

logger = logging.getLogger("tinker_lightning")

_KEYS = ("train", "prefill", "sample")
_CACHED = "cached_prefill"
# The number of rows of the training data that the estimate looks at.
_ROWS = 32


class CostMonitor(ReportingCallback):
    """Logs the tokens trained, prefilled and sampled, and what they cost.

    The report at the start of a fit shows an estimate, `estimate`, from a few rows of the data: what the training
    passes will cost, without validation and reference models. For rollouts of prompts, it is what they cost with the
    longest answers. A resumed run continues the count.

    Args:
        prices: A JSON or TOML file, or a dict: by the name of a base model, the dollars per million tokens as `train`,
            `prefill` and `sample`, and as `cached_prefill` if tokens of prompts that the server still has in its cache
            cost less. The name `*` applies to all other models.
        max_usd: Stops training and saves a checkpoint, `saved`, before the next step could exceed this many dollars.
        path: The checkpoint to save at the limit; by default `max_usd.ckpt` in the trainer's `default_root_dir`.
    """

    def __init__(
        self,
        prices: Mapping[str, Mapping[str, float]] | str | PathLike[str],
        *,
        max_usd: float | None = None,
        path: str | PathLike[str] | None = None,
    ) -> None:
        if max_usd is not None and not (math.isfinite(max_usd) and max_usd > 0):
            raise InvalidInput(f"CostMonitor: max_usd must be above 0, got {max_usd}")
        self._table = _check_table(prices, "prices") if isinstance(prices, Mapping) else _read_table(Path(prices))
        self.max_usd = max_usd
        self.path = path
        self.tokens = TokenCount()
        self.estimate: float | None = None
        self.saved: Path | None = None
        self._prices: Mapping[str, float] = {}
        self._seen = TokenCount()
        self._step = 0
        self._largest_step = 0.0

    @property
    def usd(self) -> float:
        """The cost of the run so far."""
        return self._usd(self.tokens)

    @override
    def on_fit_start(self, _: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks up the prices of the model."""
        module = require_remote(self, pl_module)
        self._prices = self._look_up(module.lm.backend.get_info().model_data.model_name or "")
        self._seen = _count_tokens(module)

    @override
    def start_lines(self, trainer: pl.Trainer, module: RemoteModule) -> dict[str, str]:
        """Returns what the training passes that are left will cost."""
        self._step, self._largest_step, self.saved, self.estimate = trainer.global_step, 0.0, None, None
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total):
            return {"Cost": "no estimate, because the length of the training is not known"}
        per_batch = _tokens_per_batch(trainer, module)
        if isinstance(per_batch, str):
            return {"Cost": f"no estimate, because {per_batch}"}
        batches = max(total - trainer.global_step, 0) * trainer.accumulate_grad_batches
        self.estimate = batches * self._usd(per_batch)
        is_bound = per_batch.sampled > 0
        text = (
            f"at most ${self.estimate:.4g} for rollouts and training"
            if is_bound
            else f"about ${self.estimate:.4g} for training"
        )
        if self.max_usd is not None and self.usd + self.estimate > self.max_usd:
            logger.warning(
                "CostMonitor: training %s stop early: it costs %s, and $%.4g were spent before, but max_usd=%g",
                "may" if is_bound else "will",
                text,
                self.usd,
                self.max_usd,
            )
        return {"Cost": f"{text}, without validation and reference models"}

    @override
    def end_lines(self) -> dict[str, str]:
        """Returns what the run has cost so far."""
        tokens = self.tokens
        counts = asdict(tokens)
        text = ", ".join(f"{number:,} tokens {name}" for name, number in counts.items() if number)
        return {"Cost": f"${self.usd:.4g}" + (f": {text}" if text else "")}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Logs tokens and dollars; stops and saves if the next step could exceed the limit."""
        if trainer.global_step == self._step:
            return  # in the middle of an accumulation window
        self._step = trainer.global_step
        before = self.usd
        self._update(require_remote(self, pl_module))
        counts = {**asdict(self.tokens), "uncached": self.tokens.uncached}
        pl_module.log_dict({f"cost/tokens_{name}": float(number) for name, number in counts.items()}, batch_size=1)
        pl_module.log("usd", self.usd, prog_bar=True, batch_size=1)
        self._largest_step = max(self._largest_step, self.usd - before)
        if self.max_usd is None or self.usd + self._largest_step <= self.max_usd:
            return
        trainer.should_stop = True
        if self.saved is None:
            self.saved = Path(self.path or Path(trainer.default_root_dir, "max_usd.ckpt"))
            trainer.save_checkpoint(self.saved)
            logger.warning(
                "CostMonitor: $%.4g were spent and the next step could exceed max_usd=%g. Training stops; resume from "
                "%s with a higher limit.",
                self.usd,
                self.max_usd,
                self.saved,
            )

    @override
    def on_fit_end(self, _: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counts what was sent after the last step."""
        self._update(require_remote(self, pl_module))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the tokens counted so far."""
        return asdict(self.tokens)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the tokens counted before the checkpoint was saved."""
        self.tokens = TokenCount(**state_dict)

    def _update(self, module: RemoteModule) -> None:
        now = _count_tokens(module)
        self.tokens, self._seen = self.tokens + (now - self._seen), now

    def _usd(self, tokens: TokenCount) -> float:
        numbers = (tokens.trained, tokens.uncached, tokens.sampled)
        usd = sum(number * self._prices.get(key, 0.0) for key, number in zip(_KEYS, numbers, strict=True))
        return (usd + tokens.cached * self._prices.get(_CACHED, self._prices.get("prefill", 0.0))) / 1e6

    def _look_up(self, model: str) -> Mapping[str, float]:
        prices = self._table.get(model, self._table.get("*"))
        if prices is None:
            raise InvalidInput(
                f"CostMonitor: the price table has no model {model!r}. {did_you_mean(model, self._table)} It has "
                f"{', '.join(self._table)}. Add the model, or prices for all other models under '*'."
            )
        return prices


def _count_tokens(module: RemoteModule) -> TokenCount:
    return sum((each.tokens for each in remotes_of(module)), start=TokenCount())


def _tokens_per_batch(trainer: pl.Trainer, module: RemoteModule) -> TokenCount | str:
    """Returns the mean tokens of a batch by some rows of the data; for data that cannot be looked at, the reason."""
    total, rollouts = 0.0, TokenCount()
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        planned = loader.loader if isinstance(loader, PositionedLoader) else loader
        if isinstance(planned, TrainedPosition):
            try:
                with isolated_rng():
                    most = planned.most_tokens(module.tokenizer)
            except Exception as error:  # of a template, or a prompt that the loader may skip
                return f"a prompt cannot be read: {error}"
            if most is None:
                return "it is not known how much the environments of a stream, or of several turns, sample"
            rollouts += most
            continue
        try:
            rows, collate, by_rows = loader.dataset, loader.collate_fn, loader.batch_sampler is not None
            # A sampler of batches may have no common size; what it draws is left to the fit.
            size = min(loader.batch_size or (loader.batch_sampler.batch_size if by_rows else 1), len(rows))
            # Whole batches, because rows may belong together, such as the two of a pair.
            starts = range(0, len(rows) - size + 1, size * max(1, len(rows) // max(_ROWS, size)))
            with isolated_rng():
                batches = [
                    collate([rows[i] for i in range(start, start + size)] if by_rows else rows[start])
                    for start in starts
                ]
                counts = [tokens_of(to_datums(as_list(module.datums(batch)))) for batch in batches]
        except (AttributeError, TypeError, NotImplementedError, InvalidInput):  # streams and loaders of other kinds
            return "the length of the data, of its batches or of its rows is not known"
        total += sum(counts) / len(counts)
    tokens = rollouts + TokenCount(trained=round(total))
    # A loss of log-probabilities takes a forward pass of its own.
    return tokens + TokenCount(prefilled=tokens.trained if module.chosen_route().needs_logprobs else 0)


def _read_table(path: Path) -> Mapping[str, Mapping[str, float]]:
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InvalidInput(f"CostMonitor: the price table {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"CostMonitor: the price table {path} is not valid: {error}") from error
    return _check_table(table, str(path))


def _check_table(table: Any, where: str) -> Mapping[str, Mapping[str, float]]:
    if not isinstance(table, Mapping) or not table:
        raise InvalidInput(f"CostMonitor: {where} must map names of models to prices, got {table!r}")
    for model, prices in table.items():
        is_valid = isinstance(prices, Mapping) and set(prices) - {_CACHED} == set(_KEYS)
        if not is_valid or not all(isinstance(each, int | float) and each >= 0 for each in prices.values()):
            raise InvalidInput(
                f"CostMonitor: {where}: the prices of {model!r} must be numbers named {', '.join(_KEYS)}, and "
                f"{_CACHED} if it differs, in dollars per million tokens, got {prices!r}"
            )
    return table
