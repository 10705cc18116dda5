"""Shows completions of prompts while the model is trained."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from typing_extensions import override

from tinker_lightning.callbacks.generation import GeneratingCallback, logged_step, prompt_text, require_remote
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.loggers import keep_copy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    import lightning.pytorch as pl

    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.types import SamplingParams

_COLUMNS = ["step", "prompt", "completion", "stop_reason"]
_REWARD = "reward"


class SampleTable(GeneratingCallback):
    """Writes completions to the console, to tables of W&B, to texts of TensorBoard and to a CSV file.

    Args:
        prompts: Texts, chats, dicts with `prompt` or `messages`, model inputs or lists of tokens. None for the samples
            of the last training batch, with rewards, if the module trains on rollouts.
        name: The name of the table in loggers, and of the file.
        every_n_steps: The number of optimizer steps between two tables; None writes one after each validation, or after
            each epoch of training if there is no validation.
        sampling_params: How tokens are chosen; by default greedily, up to 64.
        num_samples: The number of continuations of each prompt to sample.
        path: The CSV file; by default `<name>.csv` in the folder of the `CSVLogger`, if there is one. A resumed run
            removes the rows of steps that it takes again, and keeps a copy of the file.
        console: Whether to print the completions.
    """

    def __init__(
        self,
        prompts: Iterable[Any] | None = None,
        *,
        name: str = "samples",
        every_n_steps: int | None = None,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        path: str | PathLike[str] | None = None,
        console: bool = True,
    ) -> None:
        self.shows_rollouts = prompts is None
        prompts = [""] if prompts is None else prompts
        super().__init__(prompts, every_n_steps=every_n_steps, sampling_params=sampling_params, num_samples=num_samples)
        self.name = name
        self.path = path
        self.console = console
        self._columns = [*_COLUMNS, _REWARD] if self.shows_rollouts else _COLUMNS
        self._started: set[Path] = set()

    @override
    def on_fit_start(self, *_: Any) -> None:
        """Makes the first write of a fit remove the rows of steps that are taken again."""
        self._started.clear()

    @override
    def on_samples(
        self, trainer: pl.Trainer, module: RemoteModule, samples: list[list[dict[str, Any]]], *, in_epoch: bool
    ) -> None:
        """Writes a table."""
        del in_epoch
        step = trainer.global_step
        rows = [
            [step, prompt_text(row), one.get("text", str(one["tokens"])), one["stop_reason"]]
            for row, completions in zip(self.rows, samples, strict=True)
            for one in completions
        ]
        self._write(trainer, module, rows)

    @override
    def _sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, in_epoch: bool) -> None:
        if not self.shows_rollouts:
            super()._sample(trainer, pl_module, in_epoch=in_epoch)
            return
        module, step = require_remote(self, pl_module), trainer.global_step
        names = ("prompt", "text", "stop_reason", _REWARD)
        rows = [[step, *(one[name] for name in names)] for one in module.trained_samples]
        if not rows:
            raise InvalidInput(
                f"SampleTable: {type(module).__name__} does not train on rollouts, so there are no samples to show. "
                "Pass prompts."
            )
        self._write(trainer, module, rows)
        self._last_step = step

    def _write(self, trainer: pl.Trainer, module: RemoteModule, rows: list[list[Any]]) -> None:
        step = trainer.global_step
        if self.console:
            lines = [f"  {row[1]!r} → {row[2]!r}" + "".join(f"  {reward:g}" for reward in row[4:]) for row in rows]
            module.print("\n".join([f"{self.name} after step {step}:", *lines]))
        if self.path is not None:
            self._append(Path(self.path), rows)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(self.name, columns=self._columns, data=rows, step=logged_step(trainer))
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(self.name, _markdown(self._columns, rows), logged_step(trainer))
            elif isinstance(logger, CSVLogger) and self.path is None:
                self._append(Path(logger.log_dir, f"{self.name}.csv"), rows)

    def _append(self, path: Path, rows: list[list[Any]]) -> None:
        if path not in self._started:
            rows = [*self._earlier(path, rows[0][0]), *rows]
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if path in self._started else "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if path not in self._started:
                writer.writerow(self._columns)
            writer.writerows(rows)
        self._started.add(path)

    def _earlier(self, path: Path, step: int) -> list[list[Any]]:
        """Returns the rows of a file that a resumed run continues at a step."""
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        earlier = [row for row in rows if int(row[0]) <= self._last_step and int(row[0]) < step]
        if 0 < len(earlier) < len(rows):  # otherwise nothing is dropped, or the fit is not resumed
            keep_copy(str(path), self._last_step)
        return earlier


def _markdown(columns: list[str], rows: list[list[Any]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *cells])
