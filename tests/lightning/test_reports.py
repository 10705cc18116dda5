"""A fit reports what it is about to train, and what came of it."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.rollouts import PROMPTS, code_points, rollouts
from tests.helpers.trainers import SMALL, OnServer, loader, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.callbacks import CostMonitor, ExportAdapter
from tinker_lightning.data import ChatData
from tinker_lightning.lightning import hooks
from tinker_lightning.lightning.deferred_metrics import LossWatch
from tinker_lightning.lightning.progress import StepBar
from tinker_lightning.recipes import GRPO, SFT

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

PRICES = {"*": {"train": 1e6, "prefill": 0.0, "sample": 0.0}}
CHATS = [{"prompt": f"{i} + 1?", "completion": str(i + 1)} for i in range(4)]


def lines(text: str, first: str) -> dict[str, str]:
    """The report that begins with a name, by the names of its lines."""
    rows = [each.split(maxsplit=1) for each in text[text.index(f"{first} ") :].splitlines()]
    names = ("Model", "Adapter", "Loss", "Data", "Steps", "Cost", "Finished", "Scores", "Best", "Last", "Exported")
    found: dict[str, str] = {}
    for name, line in (row for row in rows if len(row) == 2 and row[0] in names):
        found.setdefault(name, line)
    return found


def test_a_fit_reports_what_it_trains_and_what_came_of_it(
    service: ServiceClient, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    cost = CostMonitor(PRICES)
    callbacks = [
        ModelCheckpoint("files", "best", monitor="val_loss", save_last=True),
        cost,
        ExportAdapter("adapter", base_model="an/example"),
    ]
    trainer = quiet(max_epochs=2, callbacks=callbacks, enable_progress_bar=True, enable_checkpointing=True)
    data, module = ChatData(CHATS, CHATS[:1], batch_size=2), new(service, SFT)
    (before,) = trainer.validate(module, data)
    trainer.fit(module, data)
    shown = capsys.readouterr().out
    start, end = lines(shown, "Model"), lines(shown, "Finished")
    assert start["Model"].startswith("tiny on ")
    assert "LoRA of rank 4" in start["Adapter"]
    assert start["Loss"] == "cross_entropy, computed on the server in one pass (route 'builtin')"
    counts = data.report["train"]
    tokens = f"{counts['tokens']:,} tokens, {counts['trained_tokens']:,} of them trained, 0 dropped, 0 skipped"
    assert start["Data"] == f"4 rows with {tokens}; 1 to validate"
    assert start["Steps"] == "4 in 2 epochs of 2 batches"
    trained = 2 * counts["tokens"]  # the numbers at the start and at the end agree
    assert start["Cost"] == f"about ${trained:.4g} for training, without validation and reference models"
    assert re.fullmatch(rf"4 steps in \d\d:\d\d, {trained:,} tokens \([\d,]+ tok/s\)", end["Finished"])
    assert f"val_loss {before['val_loss']:.4g} → {trainer.callback_metrics['val_loss']:.4g}" in end["Scores"]
    assert re.fullmatch(r"files/best.*\.ckpt \(val_loss [\d.e+]+\)", end["Best"])
    assert end["Last"] == "files/last.ckpt"
    assert end["Exported"] == "adapter"
    assert end["Cost"].startswith(f"${trained:.4g}: {trained:,} tokens trained")
    assert all(Path(end[name].split(" (")[0]).exists() for name in ("Best", "Last", "Exported"))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    again = capsys.readouterr().out
    assert lines(again, "Model")["Steps"] == "6, from step 4 on, in 3 epochs of 2 batches"
    assert f"val_loss {end['Scores'].split('→ ')[1].split(',')[0]} →" in again  # the fit before has validated it


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # without a ModelCheckpoint
@pytest.mark.parametrize(("error", "name"), [(KeyboardInterrupt, "Ctrl-C"), (ValueError, "ValueError")])
def test_a_fit_that_fails_reports_what_it_has_trained_and_how_to_resume(
    service: ServiceClient,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    name: str,
) -> None:  # R5.14
    monkeypatch.chdir(tmp_path)

    class Fails(RemoteModule):
        def datums(self, batch: Any) -> list[Any]:
            if self.global_step == 3:
                raise error
            return super().datums(batch)

    def failure(ckpt_path: Path | None, *callbacks: pl.Callback) -> dict[str, str]:
        handler = signal.getsignal(signal.SIGINT)  # which Lightning replaces after a Ctrl-C
        caplog.clear()
        trainer = quiet(max_steps=4, callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
        with caplog.at_level(logging.INFO, "tinker_lightning"), pytest.raises((error, SystemExit)):
            trainer.fit(new(service, Fails), loader(), ckpt_path=ckpt_path)
        signal.signal(signal.SIGINT, handler)
        _, report = [each.message for each in caplog.records if each.message.startswith(("Model", "Stopped"))]
        assert "Finished" not in caplog.text
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in report.splitlines()}

    file = tmp_path / "epoch=0-step=2.ckpt"
    report = failure(None, ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1))
    assert re.fullmatch(
        rf"by {name} after step 3 of 4: 3 steps in \d\d:\d\d, \d+ tokens \(.* tok/s\)", report["Stopped"]
    )
    assert report["Resume"] == f"with ckpt_path {file.name}, from step 2; 1 later step will be repeated"
    weights = ModelCheckpoint(tmp_path / "weights", every_n_train_steps=2, save_weights_only=True)
    for resume in (failure(None)["Resume"], failure(None, weights)["Resume"]):
        assert resume.startswith("not possible: no checkpoint was written that has more than weights. ModelCheckpoint(")
    again = failure(file)
    assert again["Stopped"].startswith(f"by {name} after step 3 of 4: 1 step in ")
    assert again["Resume"] == f"with ckpt_path {file.name} again: no checkpoint was written since"


def test_a_report_that_cannot_be_shown_does_not_hide_the_error(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(StepBar):
        def _draw(self, *_: Any, **__: Any) -> None:
            pass

        def print(self, *texts: Any, **_: Any) -> None:
            if "Stopped" in texts[0]:
                raise OSError("no space left on device")

    class Fails(RemoteModule):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError("the reason")

    with pytest.raises(ZeroDivisionError, match="the reason"):
        quiet(callbacks=[FullDisk()], enable_progress_bar=True).fit(new(service, Fails), loader())
    assert "could not be reported" in caplog.text
    assert "no space left on device" in caplog.text


def test_a_local_parameter_is_counted_and_no_summary_counts_the_handle(
    service: ServiceClient,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")

    class Warm(SFT):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = torch.nn.Parameter(torch.ones(1))

    with caplog.at_level(logging.INFO):
        quiet(max_steps=1, enable_model_summary=True).fit(new(service, Warm), loader())
    shown = "".join(capsys.readouterr()) + caplog.text
    assert "on the server; 1 parameter trained here" in shown
    assert "Trainable params" not in shown


def test_rollouts_are_reported_by_prompts_and_skipped_steps_are_counted(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    def later(prompt: str, completion: str) -> float:
        return code_points(prompt, completion) if prompt == PROMPTS[0] else 0.0

    data = rollouts(PROMPTS[:2], rewards=later, batch_size=1, group_size=2, shuffle=False)
    with caplog.at_level(logging.INFO, "tinker_lightning"):
        quiet(max_steps=2).fit(new(service, GRPO, reference=None), data)
    reports = [each.message for each in caplog.records if each.message.startswith(("Model", "Finished"))]
    assert lines(reports[0], "Model")["Data"] == "2 prompts, 1 in a batch with 2 answers each"
    assert lines(reports[0], "Model")["Steps"] == "2"
    assert re.search(r"2 steps in .* sampled, 1 of the steps skipped", reports[1])


def test_a_loss_that_explodes_is_warned_about_once_with_the_learning_rate(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:  # R4.5
    class Explodes(RemoteModule):
        def loss(self, _: Any, logprobs: Any) -> Any:
            return -torch.cat(logprobs).mean() * 4000.0 ** (self.global_step > 1)

    with caplog.at_level(logging.WARNING, "tinker_lightning"):
        quiet(max_steps=4).fit(new(service, Explodes, learning_rate=1e-5), loader())
    (warning,) = [each.message for each in caplog.records if "diverges" in each.message]
    assert re.match(r"the loss of step 2 is .*, after .* at the first step.*The learning rate is 1e-05;", warning)


def test_the_value_of_a_loss_on_the_server_is_watched_too(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(LossWatch, "observe", lambda *arguments: seen.append(arguments[-1]))
    quiet().fit(new(service, OnServer), loader())
    assert seen == [0, 1, 2]


def test_a_first_loss_near_zero_is_no_measure(caplog: pytest.LogCaptureFixture) -> None:
    watch, trainer = LossWatch(), quiet()
    caplog.clear()
    for loss in (1e-9, 0.5, -9.0, float("nan")):  # as of policy gradients
        watch.observe(loss, trainer, 0)
    assert not caplog.records
    watch.observe(11.0, trainer, 0)
    assert len(caplog.records) == 1


def test_the_csv_file_can_be_read_during_the_fit(
    service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_FLUSH_SECONDS", 0.0)
    rows: list[int] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            file = Path(trainer.logger.log_dir, "metrics.csv")
            rows.append(file.read_text().count("\n") - 1 if file.exists() else 0)

    class Local(RemoteModule):
        route = "two-pass"

    quiet(max_steps=4, logger=CSVLogger(tmp_path), callbacks=[Reads()]).fit(new(service, Local), loader())
    assert rows[0] == 0 < rows[1] < rows[2] < rows[3]  # Lightning logs a step after the hook
