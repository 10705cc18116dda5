"""`CostMonitor` counts what is sent, estimates before the fit, and stops before its limit."""

from __future__ import annotations

import csv
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers.trainers import DATA, SMALL, loader, new, quiet
from tinker_lightning import Datum, RemoteModule, SamplingParams, collate
from tinker_lightning.callbacks import CostMonitor, SampleTable
from tinker_lightning.errors import InvalidInput
from tinker_lightning.recipes import DPO
from tinker_lightning.remote.calls import TokenCount

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

PRICES = {"tiny": {"train": 1e6, "prefill": 1e5, "sample": 1e4}}  # a dollar per token trained
PER_STEP = sum(datum.model_input.length for datum in DATA[:2])  # all datums have the same length


@pytest.mark.parametrize("strategy", ["tinker", "auto"])
def test_tokens_and_dollars_are_logged(service: ServiceClient, tmp_path: Path, strategy: str) -> None:
    (tmp_path / "prices.json").write_text(json.dumps(PRICES))
    logger = CSVLogger(tmp_path)
    cost = CostMonitor(tmp_path / "prices.json")
    table = SampleTable(
        [[5, 6, 7]], every_n_steps=2, sampling_params=SamplingParams(max_tokens=4, stop=[]), console=False
    )
    trainer = quiet(strategy=strategy, accelerator="cpu", devices=1, logger=logger, callbacks=[table, cost])
    module = new(service, RemoteModule)
    module.route = "two-pass"
    trainer.fit(module, loader())
    assert cost.tokens == TokenCount(3 * PER_STEP, 3 * PER_STEP + 3, 4)
    assert cost.usd == pytest.approx(3 * PER_STEP + 0.1 * (3 * PER_STEP + 3) + 0.01 * 4)
    assert cost.estimate == pytest.approx(3 * PER_STEP * 1.1)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["usd"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert [float(row["cost/tokens_trained"]) for row in rows] == [PER_STEP, 2 * PER_STEP, 3 * PER_STEP]


def test_a_loss_on_the_server_takes_one_pass(service: ServiceClient) -> None:
    cost = CostMonitor({"*": PRICES["tiny"]})
    quiet(accumulate_grad_batches=2, max_steps=2, callbacks=[cost]).fit(new(service, RemoteModule), loader())
    assert cost.tokens == TokenCount(4 * PER_STEP, 0, 0)
    assert cost.estimate == pytest.approx(cost.usd) == 4 * PER_STEP


def test_rows_that_belong_together_are_counted_together(service: ServiceClient) -> None:
    cost = CostMonitor(PRICES)
    pairs = [Datum.from_tokens([5, 6, 7 + i, 8], weights=[0, 0, 1, 1]) for i in range(6)]  # chosen, rejected, ...
    data: Any = DataLoader(pairs, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    module = DPO(service.create_lora_training_client("tiny", rank=4))
    quiet(max_epochs=1, callbacks=[cost]).fit(module, data)
    assert cost.tokens.trained == 3 * 2 * 3
    assert cost.estimate == pytest.approx(cost.tokens.trained * 1.1)


def test_the_limit_stops_and_saves_and_a_resumed_run_continues_the_count(  # R4.3
    service: ServiceClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(steps: float, **kwargs: Any) -> tuple[CostMonitor, int]:
        cost = CostMonitor(PRICES, max_usd=steps * PER_STEP, path=tmp_path / "stopped.ckpt")
        trainer = quiet(max_steps=6, callbacks=[cost])
        trainer.fit(new(service, RemoteModule), loader(), **kwargs)
        return cost, trainer.global_step

    with caplog.at_level(logging.WARNING):
        first, steps = fit(2.5)
    assert steps == 2
    assert first.usd == 2 * PER_STEP
    assert first.saved == tmp_path / "stopped.ckpt"
    assert "training will stop early" in caplog.text
    second, steps = fit(100, ckpt_path=tmp_path / "stopped.ckpt")
    assert steps == 6
    assert second.usd == 6 * PER_STEP
    assert second.estimate == 4 * PER_STEP
    assert second.saved is None


def test_mistakes_have_clear_errors(service: ServiceClient, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="max_usd must be above 0, got 0"):
        CostMonitor(PRICES, max_usd=0)
    with pytest.raises(InvalidInput, match="prices of 'tiny' must be numbers named train, prefill, sample"):
        CostMonitor({"tiny": {"train": 1.0}})
    with pytest.raises(InvalidInput, match=r"none\.json cannot be read: No such file"):
        CostMonitor(tmp_path / "none.json")
    (tmp_path / "prices.toml").write_text("[tiny")
    with pytest.raises(InvalidInput, match=r"prices\.toml is not valid"):
        CostMonitor(tmp_path / "prices.toml")
    with pytest.raises(InvalidInput, match="no model 'tiny'; did you mean 'tinny'"):
        quiet(callbacks=[CostMonitor({"tinny": PRICES["tiny"]})]).fit(new(service, RemoteModule), loader())
