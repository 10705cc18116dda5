"""`CostMonitor` counts what is sent, estimates before the fit, and stops before its limit."""

from __future__ import annotations

import csv
import json
import logging
import re
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.helpers.rollouts import PROMPTS, Stream, code_points, constant, rollouts
from tests.helpers.trainers import DATA, SMALL, OnServer, loader, new, quiet
from tinker_lightning import Datum, RemoteModule, SamplingParams, collate
from tinker_lightning.callbacks import CostMonitor, SampleTable
from tinker_lightning.errors import InvalidInput, LossWithoutGradient
from tinker_lightning.recipes import DPO, GRPO
from tinker_lightning.remote.calls import TokenCount
from tinker_lightning.rl import PromptEnvironment, RolloutLoader, Trajectory
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.types import SampleResponse

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


@pytest.mark.parametrize("kind", ["batch_sampler", "whole batches", "a sampler of unknown size"])
def test_batches_of_other_loaders_are_estimated_as_they_are(service: ServiceClient, kind: str) -> None:
    sampler: Any = BatchSampler(SequentialSampler(DATA), 2, drop_last=False)
    data: Any = DataLoader(DATA, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    if kind == "whole batches":
        data = DataLoader([DATA[:2], DATA[2:4]], batch_size=None)  # type: ignore[arg-type]
    elif kind == "a sampler of unknown size":
        data = DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]], collate_fn=collate)  # type: ignore[arg-type]
    cost = CostMonitor(PRICES)
    quiet(max_epochs=1, callbacks=[cost]).fit(new(service, RemoteModule), data)
    assert cost.tokens.trained >= 2 * PER_STEP
    assert cost.estimate == (None if kind == "a sampler of unknown size" else cost.tokens.trained)


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


def rollout_module(service: ServiceClient, kind: type[GRPO] = GRPO, **settings: Any) -> GRPO:
    return new(service, kind, reference=None, **settings)


def test_cached_prompts_have_a_price_of_their_own(  # R5.12
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = protobuf.encode_sample

    def encode_as_cached(response: SampleResponse) -> bytes:
        return encode(replace(response, prompt_cache_hit_tokens=2))

    def cost_of(prices: dict[str, float], module: RemoteModule, data: Any) -> CostMonitor:
        cost = CostMonitor({"tiny": prices})
        table = SampleTable([[5, 6, 7], [5]], every_n_steps=1, sampling_params=params, console=False)
        trainer = quiet(max_steps=1, callbacks=[table, cost])
        trainer.fit(module, data)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert logged["cost/tokens_cached"] == cost.tokens.cached
        assert logged["cost/tokens_uncached"] == cost.tokens.prefilled - cost.tokens.cached
        return cost

    monkeypatch.setattr(protobuf, "encode_sample", encode_as_cached)
    params = SamplingParams(max_tokens=2, stop=[])
    only_prompts = {"train": 0.0, "prefill": 1e6, "sample": 0.0}
    module = new(service, OnServer)
    assert cost_of(only_prompts, module, loader()).tokens == TokenCount(PER_STEP, 4, 4, cached=3)
    assert cost_of({**only_prompts, "cached_prefill": 1e5}, module, loader()).usd == pytest.approx(1 + 3 * 0.1)
    rewarded = rollouts(rewards=code_points, batch_size=1, group_size=3)  # a request for all samples of a prompt
    assert cost_of(only_prompts, rollout_module(service), rewarded).tokens.cached == 2 + 3


def test_samples_that_are_not_trained_are_discarded(service: ServiceClient) -> None:  # R5.9, R5.12
    def only_some(prompt: str, completion: str) -> float:
        return code_points(prompt, completion) if prompt in PROMPTS[:2] else 0.0

    cost = CostMonitor(PRICES)
    params = SamplingParams(max_tokens=4, stop=[])
    data = rollouts(PROMPTS[:4], rewards=only_some, batch_size=4, group_size=2, sampling_params=params)
    trainer = quiet(max_steps=1, callbacks=[cost])
    trainer.fit(rollout_module(service), data)
    assert (cost.tokens.sampled, cost.tokens.discarded) == (4 * 2 * 4, 2 * 2 * 4)
    assert trainer.callback_metrics["cost/tokens_discarded"] == 2 * 2 * 4
    skipped = CostMonitor(PRICES)  # no step is taken
    data = rollouts(PROMPTS[:2], rewards=constant, sampling_params=params)
    with pytest.raises(LossWithoutGradient, match="without an optimizer step"):
        quiet(max_epochs=1, callbacks=[skipped]).fit(rollout_module(service), data)
    assert skipped.tokens.discarded == skipped.tokens.sampled == 2 * 4 * 4
    assert skipped.tokens.trained == 0


def test_rollouts_ahead_of_a_stop_are_discarded(service: ServiceClient) -> None:
    class Stopping(GRPO):
        def on_before_optimizer_step(self, *_: Any) -> None:
            jobs = self._loader._jobs  # type: ignore[union-attr]
            wait([future for job in jobs.values() for future in job._running.values()])
            self.trainer.should_stop = True

    cost = CostMonitor(PRICES)
    params = SamplingParams(max_tokens=4, stop=[])
    data = rollouts(rewards=code_points, staleness=1, sampling_params=params)
    quiet(max_steps=4, callbacks=[cost]).fit(rollout_module(service, Stopping), data)
    assert (cost.tokens.sampled, cost.tokens.discarded) == (2 * 2 * 4 * 4, 2 * 4 * 4)


def test_samples_of_prompts_that_fail_are_counted(service: ServiceClient) -> None:
    class Failing(PromptEnvironment):
        async def group(self, policies: Any) -> list[Trajectory]:
            await super().group(policies)
            raise ValueError("no score")

    cost = CostMonitor(PRICES)
    params = SamplingParams(max_tokens=4, stop=[])
    tasks = [Failing(PROMPTS[0], code_points, as_text=True), PromptEnvironment(PROMPTS[1], code_points, as_text=True)]
    data = RolloutLoader(tasks, batch_size=2, group_size=2, sampling_params=params, on_error="skip")
    quiet(max_steps=1, callbacks=[cost]).fit(rollout_module(service), data)
    assert (cost.tokens.sampled, cost.tokens.discarded) == (2 * 2 * 4, 2 * 4)


def test_the_estimate_of_rollouts_is_an_upper_bound(service: ServiceClient, caplog: pytest.LogCaptureFixture) -> None:
    params, cost = SamplingParams(max_tokens=4, stop=[]), CostMonitor(PRICES)
    data = rollouts(PROMPTS[:4], rewards=code_points, group_size=2, sampling_params=params, num_epochs=2)
    with caplog.at_level(logging.INFO, "tinker_lightning"):
        quiet(max_epochs=-1, callbacks=[cost]).fit(rollout_module(service), data)
    assert cost.tokens.discarded == 0
    assert cost.estimate == pytest.approx(cost.usd, rel=1e-3)  # because every answer is as long as it may be
    short = CostMonitor(PRICES)
    uneven = rollouts(PROMPTS[:3], rewards=code_points, group_size=2, sampling_params=params, num_epochs=1)
    quiet(max_steps=1, max_epochs=-1, callbacks=[short]).fit(rollout_module(service), uneven)
    assert (short.estimate or 0) >= 0.999 * short.usd > 0  # also where the run ends before the short batch
    assert re.search(r"Cost .*at most \$\S+ for rollouts and training", caplog.text)
    unknown = CostMonitor(PRICES)
    with caplog.at_level(logging.INFO, "tinker_lightning"):
        quiet(max_steps=1, callbacks=[unknown]).fit(rollout_module(service), rollouts(Stream(PROMPTS)))
    assert unknown.estimate is None
    assert "no estimate, because it is not known how much the environments of a stream" in caplog.text


def test_no_metric_changes_the_count(service: ServiceClient) -> None:
    class Lying(GRPO):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            names = ("tokens/sampled", "tokens/trained", "cost/tokens", "train_loss")
            self.log_dict(dict.fromkeys(names, -1e9))

    params = SamplingParams(max_tokens=4, stop=[])
    counts = []
    for kind in (GRPO, Lying):
        cost = CostMonitor(PRICES, max_usd=1e9)
        trainer = quiet(max_steps=2, callbacks=[cost])
        trainer.fit(rollout_module(service, kind), rollouts(rewards=code_points, sampling_params=params))
        assert trainer.global_step == 2
        counts.append((cost.tokens, cost.usd, cost.estimate))
    assert counts[0] == counts[1]


def test_the_limit_stops_rollouts_and_a_resumed_run_continues(service: ServiceClient, tmp_path: Path) -> None:  # R5.12
    def fit(max_usd: float, **kwargs: Any) -> tuple[CostMonitor, int]:
        params = SamplingParams(max_tokens=4, stop=[])
        data = rollouts(rewards=code_points, batch_size=1, sampling_params=params, staleness=1)
        cost = CostMonitor(PRICES, max_usd=max_usd, path=tmp_path / "stopped.ckpt")
        trainer = quiet(max_steps=4, callbacks=[cost])
        trainer.fit(rollout_module(service), data, **kwargs)
        return cost, trainer.global_step

    whole, steps = fit(1e9)
    assert (steps, whole.tokens.discarded) == (4, 0)
    stopped, steps = fit(0.6 * whole.usd)
    assert steps in (1, 2)
    assert stopped.saved == tmp_path / "stopped.ckpt"
    resumed, steps = fit(1e9, ckpt_path=tmp_path / "stopped.ckpt")
    assert steps == 4
    assert resumed.tokens == whole.tokens


def test_mistakes_have_clear_errors(service: ServiceClient, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="max_usd must be above 0, got 0"):
        CostMonitor(PRICES, max_usd=0)
    with pytest.raises(InvalidInput, match="prices of 'tiny' must be numbers named train, prefill, sample, and"):
        CostMonitor({"tiny": {"train": 1.0}})
    with pytest.raises(InvalidInput, match=r"none\.json cannot be read: No such file"):
        CostMonitor(tmp_path / "none.json")
    (tmp_path / "prices.toml").write_text("[tiny")
    with pytest.raises(InvalidInput, match=r"prices\.toml is not valid"):
        CostMonitor(tmp_path / "prices.toml")
    with pytest.raises(InvalidInput, match=r"no model 'tiny'\. Did you mean 'tinny'"):
        quiet(callbacks=[CostMonitor({"tinny": PRICES["tiny"]})]).fit(new(service, RemoteModule), loader())


@pytest.mark.parametrize("prices", [PRICES, "prices.json"])
def test_a_configuration_file_has_prices_or_names_their_file(prices: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CostMonitor, "cost")
    assert parser.parse_object({"cost": {"prices": prices}}).cost.prices == prices
