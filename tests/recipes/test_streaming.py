"""Groups are sent as they arrive, and add up to one exact step."""  # R5.9

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.loops.optimization.automatic import Closure

from tests.helpers.rollouts import PROMPTS, Stream, Windows, code_points, constant, lower, record, rollouts
from tests.helpers.trainers import SMALL, logprobs_of, new, quiet
from tinker_lightning.recipes import GRPO

if TYPE_CHECKING:
    import pytest

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
    trainer.fit(new(service, GRPO), given)
    assert trainer.global_step == 4
    assert given.state_dict()["tasks"]["number"] == 8


def test_a_window_in_which_everything_was_dropped_takes_no_step(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record(monkeypatch)
    module, given, trainer = new(service, GRPO), rollouts(rewards=constant), quiet(max_steps=2)
    before = logprobs_of(module)
    trainer.fit(module, given)
    assert "step" not in events
    assert not [each for each in Closure.warning_cache if "returned `None`" in each]  # other modules are still warned
    assert torch.equal(logprobs_of(module), before)
    assert given.skipped_steps == trainer.callback_metrics["groups/skipped_steps"] == 2
    assert trainer.callback_metrics["groups/zero_variance"] == 1
