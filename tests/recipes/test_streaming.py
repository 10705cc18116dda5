"""Groups are sent as they arrive, and add up to one exact step."""  # R5.9

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.optimization.automatic import Closure

from tests.helpers.rollouts import PROMPTS, Stream, Windows, code_points, constant, lower, record, rollouts
from tests.helpers.trainers import SMALL, logprobs_of, new, quiet
from tinker_lightning.errors import LossWithoutGradient
from tinker_lightning.losses import custom
from tinker_lightning.recipes import GRPO

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


class Arrivals:
    """A reward that differs for all answers; the answers to one prompt get theirs after all others of their batch."""

    def __init__(self, last: str | None, group: int, others: int) -> None:
        self.last, self.group, self.others = last, group, others
        self._scored = {True: 0, False: 0}  # answers to the last prompt, and to others
        self._changed = threading.Condition()

    def __call__(self, prompt: str, completion: str) -> float:
        is_last = prompt == self.last
        with self._changed:
            self._scored[is_last] += 1
            self._changed.notify_all()
            if is_last:
                batches = -(-self._scored[True] // self.group)
                assert self._changed.wait_for(lambda: self._scored[False] >= batches * self.others, timeout=60)
        return code_points(prompt, completion)


def test_bits_do_not_depend_on_the_order_of_arrival(service: ServiceClient) -> None:
    """The first prompt's rewards wait for the others', or the last one's do."""
    found = []
    for straggler in (None, PROMPTS[0], PROMPTS[2]):
        module = new(service, Windows)
        given = rollouts(PROMPTS[:3], rewards=Arrivals(straggler, 2, 2 * 2), batch_size=3, group_size=2, shuffle=False)
        quiet(max_steps=2).fit(module, given)
        assert module.sent == 2 * 3  # a forward for each group
        found.append((module.windows, logprobs_of(module)))
    windows, logprobs = found[0]
    prompts = [bytes(token for token in tokens if token < 256)[:8] for tokens, _ in windows[0]]
    assert prompts == sorted(prompts)  # gradients are sent in the order of the prompts
    for others_windows, others_logprobs in found[1:]:
        assert torch.equal(others_logprobs, logprobs)
        for window, expected in zip(others_windows, windows, strict=True):
            assert [tokens for tokens, _ in window] == [tokens for tokens, _ in expected]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(window, expected, strict=True))


def test_dropped_groups_count_as_zero(service: ServiceClient) -> None:
    def some(prompt: str, completion: str) -> float:
        return lower(prompt, completion) if prompt in PROMPTS[:2] else 1.0

    all_four, two = new(service, Windows), new(service, Windows)
    trainer = quiet(max_steps=1)
    trainer.fit(all_four, rollouts(PROMPTS[:4], rewards=some, batch_size=4, shuffle=False))
    assert trainer.callback_metrics["groups/zero_variance"] == 0.5
    assert trainer.callback_metrics["groups/dropped"] == 0.5
    quiet(max_steps=1).fit(two, rollouts(PROMPTS[:2], rewards=some, batch_size=2, shuffle=False))
    (four_window,), (two_window,) = all_four.windows, two.windows
    assert len(four_window) == len(two_window) == 8
    for (tokens, own), (same, whole) in zip(four_window, two_window, strict=True):
        assert tokens == same
        assert torch.equal(2 * own, whole)


def test_refill_replaces_dropped_groups(service: ServiceClient) -> None:
    def some(prompt: str, completion: str) -> float:
        return lower(prompt, completion) if prompt in PROMPTS[2:4] else 1.0

    module, trainer = new(service, Windows), quiet(max_steps=1)
    trainer.fit(module, rollouts(PROMPTS[:6], rewards=some, shuffle=False, refill=2))
    assert len(module.windows[0]) == 8  # both groups that are trained are of the refill
    assert trainer.callback_metrics["groups/dropped"] == 0.5


def test_refilling_may_use_up_a_stream(service: ServiceClient) -> None:
    """Lightning has drawn the second batch by then, whose prompts are gone; the next pass is complete."""
    given, trainer = rollouts(Stream(PROMPTS[:4]), rewards=constant, refill=1), quiet(max_steps=-1, max_epochs=2)
    with pytest.raises(LossWithoutGradient, match="the fit has ended without an optimizer step"):
        trainer.fit(new(service, GRPO), given)
    assert trainer.global_step == 4
    assert given.state_dict()["tasks"]["number"] == 8


def test_a_window_in_which_everything_was_dropped_takes_no_step(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = record(monkeypatch)
    monkeypatch.setattr(Closure, "warning_cache", type(Closure.warning_cache)())  # of this test alone
    module, given, trainer = new(service, GRPO), rollouts(rewards=constant), quiet(max_steps=2)
    before = logprobs_of(module)
    reason = r"all answers to a prompt got the same reward \(prompts: 2 of 2, rewards: 1\)"
    with pytest.raises(LossWithoutGradient, match=f"without an optimizer step, and the model is unchanged: {reason}"):
        trainer.fit(module, given)
    assert caplog.text.count("a step was skipped") == 1
    assert "step" not in events
    assert not [each for each in Closure.warning_cache if "returned `None`" in each]  # other modules are still warned
    assert torch.equal(logprobs_of(module), before)
    assert given.skipped_steps == trainer.callback_metrics["groups/skipped_steps"] == 2
    assert trainer.callback_metrics["groups/zero_variance"] == 1


def test_a_run_that_has_taken_steps_may_end_with_skipped_ones(service: ServiceClient, tmp_path: Path) -> None:
    def first_batch(prompt: str, completion: str) -> float:
        return code_points(prompt, completion) if prompt in PROMPTS[:2] else 1.0

    module, file = new(service, GRPO), tmp_path / "first.ckpt"
    given, trainer = rollouts(PROMPTS[:4], rewards=first_batch, shuffle=False), quiet(max_steps=1)
    trainer.fit(module, given)
    trainer.save_checkpoint(file)
    resumed = rollouts(PROMPTS[:4], rewards=first_batch, shuffle=False)
    quiet(max_steps=2).fit(new(service, GRPO), resumed, ckpt_path=file)
    assert resumed.skipped_steps == 1
    quiet(fast_dev_run=True).fit(module, rollouts(rewards=constant))


@pytest.mark.parametrize("kl_in", ["loss", "advantage"])
def test_equal_rewards_are_trained_with_a_penalty(
    kl_in: Any, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither dropped nor refilled; the model returns towards the reference."""
    module = new(service, GRPO)
    quiet(max_steps=3).fit(module, rollouts(rewards=code_points))
    pulled = GRPO(module.lm.backend, learning_rate=1e-2, kl_coefficient=1.0, kl_in=kl_in)
    distances = []

    class Distances(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            distances.append(float(trainer.callback_metrics["policy/kl_reference"]))

    events, trainer = record(monkeypatch), quiet(max_steps=5, callbacks=[Distances()])
    trainer.fit(pulled, rollouts(rewards=constant, refill=2))
    assert events.count("sample") == 2 * events.count("step") == 10
    shares = {name: float(trainer.callback_metrics[f"groups/{name}"]) for name in ("zero_variance", "dropped")}
    assert shares == {"zero_variance": 1.0, "dropped": 0.0}
    if kl_in == "loss":  # the other one is a noisy estimate
        assert distances[-1] < 0.7 * distances[0]


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_the_bar_shows_the_reward(
    bar: Any, service: ServiceClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    options = {"enable_progress_bar": True, "callbacks": [bar()]}
    quiet(max_steps=2, **options).fit(new(service, GRPO), rollouts(PROMPTS[:2], rewards=code_points))
    shown = "".join(capsys.readouterr())
    assert re.search(r"Epoch 1.*reward[:=] ?\d", shown)
    assert "/-2" not in shown


def test_a_group_without_a_gradient_is_no_warning_while_others_have_one(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first the model is its reference, so that the divergence of a group with equal rewards has no gradient."""
    monkeypatch.setattr(custom, "_WARNED_OF_ZERO", set())

    def some(prompt: str, completion: str) -> float:
        return code_points(prompt, completion) if prompt == PROMPTS[0] else 1.0

    quiet(max_steps=1).fit(new(service, GRPO, kl_coefficient=0.1), rollouts(PROMPTS[:2], rewards=some))  # pytest raises
