"""`GenerationEval` logs the mean score of completions, and Lightning's callbacks can monitor it."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, OnServer, loader, new, quiet
from tinker_lightning import RemoteModule, SamplingParams
from tinker_lightning.callbacks import GenerationEval
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

ROWS = [{"prompt": f"{i} + {i}?", "answer": i} for i in range(2)]
SHORT = SamplingParams(max_tokens=2, temperature=0)


def evaluation(score: Any = None, **kwargs: Any) -> GenerationEval:
    """Scores each row by its answer, so that the mean is 0.5."""
    return GenerationEval(score or (lambda _, row: row["answer"]), ROWS, sampling_params=SHORT, **kwargs)


@pytest.mark.parametrize("strategy", first_only(["tinker", "auto"]))
def test_early_stopping_and_checkpoints_monitor_it_in_validation(
    service: ServiceClient, tmp_path: Path, strategy: str
) -> None:
    scores = iter([0.25, 0.25, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5])  # two rows in each of four epochs
    files = ModelCheckpoint(tmp_path, "{step}", monitor="accuracy", mode="max")
    stopping = EarlyStopping("accuracy", mode="max", patience=1)  # before the evaluation in the list
    callbacks = [stopping, evaluation(lambda *_: next(scores), name="accuracy"), files]
    trainer = quiet(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=5,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    module = new(service, RemoteModule)
    trainer.fit(module, loader(8), loader(2, 2))
    assert trainer.current_epoch == 3
    assert stopping.best_score == files.best_model_score == 1.0
    assert files.best_model_path.endswith("step=2.ckpt")
    (scored,) = trainer.validate(module, loader(2, 2), verbose=False)
    assert scored["accuracy"] == 0.5


def test_it_is_monitored_every_few_steps(service: ServiceClient, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    files = ModelCheckpoint(tmp_path, "{step}", monitor="score", save_top_k=-1, every_n_train_steps=2)
    callbacks = [files, evaluation(every_n_steps=2, num_samples=2)]
    trainer = quiet(max_steps=5, callbacks=callbacks, enable_checkpointing=True, logger=logger)
    trainer.fit(new(service, OnServer), loader())
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = {int(row["step"]): float(row["score"]) for row in csv.DictReader(file) if row["score"]}
    assert logged == {1: 0.5, 3: 0.5}  # not repeated at the steps between
    assert [float(score) for score in files.best_k_models.values()] == [0.5, 0.5]


def test_without_validation_it_is_monitored_at_epoch_ends(service: ServiceClient) -> None:
    stopping = EarlyStopping("parts/answer", patience=1)
    scored = evaluation(lambda text, row: {"length": len(text), "answer": row["answer"]}, name="parts")
    trainer = quiet(max_epochs=4, callbacks=[stopping, scored])
    trainer.fit(new(service, RemoteModule), loader(8))
    assert trainer.current_epoch == 2
    assert trainer.callback_metrics["parts/answer"] == 0.5
    assert "parts/length" in trainer.callback_metrics


def test_the_report_of_a_fit_shows_the_last_scores(service: ServiceClient, caplog: pytest.LogCaptureFixture) -> None:
    scores = GenerationEval(lambda _, row: {"one": 1, "length": len(row)}, ["a", "abc"], name="right", num_samples=2)
    with caplog.at_level("INFO", "tinker_lightning"):
        quiet(max_epochs=1, callbacks=[scores]).fit(new(service, RemoteModule), loader())
    report = caplog.messages[-1]
    assert report.startswith("Finished")
    assert report.endswith(
        "right/one     1 on average over 4 completions\nright/length  2 on average over 4 completions"
    )


def test_a_score_does_not_change_what_training_draws(service: ServiceClient) -> None:
    drawn = []
    for callbacks in ([], [evaluation(lambda *_: torch.rand(()), every_n_steps=1)]):
        torch.manual_seed(1)
        quiet(max_steps=1, callbacks=callbacks).fit(new(service, RemoteModule), loader())
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]


def test_mistakes_have_clear_errors(service: ServiceClient) -> None:
    with pytest.raises(InvalidInput, match="score must be a function of text and row, got 'bleu'"):
        GenerationEval("bleu", ROWS)  # type: ignore[arg-type]
    for given, message in ((None, "must be a number or a dict of numbers, got None"), (float("nan"), "is nan")):
        trainer = quiet(max_steps=1, callbacks=[evaluation(lambda *_, given=given: given, every_n_steps=1)])
        with pytest.raises(InvalidInput, match=f"prompt 0: .*{message}"):
            trainer.fit(new(service, RemoteModule), loader())
