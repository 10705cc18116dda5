"""With a staleness of 0, each sample is from the weights that it trains; with k, at most k steps older."""  # R5.9

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest

from tests.helpers.rollouts import PROMPTS, Stream, code_points, record, rollouts
from tests.helpers.soaking import diagonal, first_only
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import RemoteModule, SamplingParams
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.recipes import GRPO

if TYPE_CHECKING:
    import torch

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.rl import RolloutLoader

pytestmark = SMALL

# One group of two answers in each batch, of which none is dropped.
SMALLEST: dict[str, Any] = {
    "batch_size": 1,
    "group_size": 2,
    "rewards": code_points,
    "sampling_params": SamplingParams(max_tokens=2),
}


class Watching(GRPO):
    """Notes of each group when it was sampled and trained, and how far the trainer is from the sampler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"reference": None, **kwargs})
        self.trained: list[tuple[int, int, int]] = []
        self.gaps: list[float] = []

    def group_loss(self, trained: Any, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        group, step = trained.group, self.lm.handle.remote.steps
        assert all(turn.completion.version == group.version for one in group.trajectories for turn in one.turns)
        self.trained.append((step, group.version, group.task.number))
        for datum, own in zip(data, logprobs, strict=True):
            mask = datum.loss_fn_inputs["mask"].to_torch() != 0
            self.gaps.append(float((own.detach() - datum.loss_fn_inputs["logprobs"].to_torch())[mask].abs().max()))
        return super().group_loss(trained, data, logprobs)


def per_step(events: list[str]) -> list[int]:
    """How often was sampled before each step."""
    return [len(part) for part in "".join("s" if each == "sample" else "|" for each in events).split("|")]


@pytest.mark.parametrize(("sized", "strategy", "accumulate"), diagonal([True, False], ["auto", "tinker"], [1, 4]))
def test_on_policy(
    strategy: str, sized: bool, accumulate: int, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = new(service, Watching)
    # With N = 4, the last window of an epoch is short.
    prompts = PROMPTS[: 2 * accumulate - (accumulate > 1)]
    loader = rollouts(prompts if sized else Stream(prompts), **SMALLEST)
    events = record(monkeypatch)
    options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "accumulate_grad_batches": accumulate}
    quiet(**options, max_steps=2).fit(module, loader)
    # Nothing is sampled for a step before the step before it was submitted, and nothing too much.
    assert per_step(events) == ([1, 1, 0] if accumulate == 1 else [4, 3, 0])
    assert all(step == version for step, version, _ in module.trained)
    assert sorted({step for step, _, _ in module.trained}) == [0, 1]
    # The weights are the same: so are the log-probabilities, up to rounding.
    assert max(module.gaps) < 1e-4


@pytest.mark.parametrize("sized", first_only([True, False]))
def test_sampling_ahead(sized: bool, service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    module = new(service, Watching)
    events = record(monkeypatch)
    loader = rollouts(PROMPTS[:4] if sized else Stream(PROMPTS), staleness=2, **SMALLEST)
    quiet(max_steps=5).fit(module, loader)
    # Three batches before the first step, then one after each step, but none that would not be trained.
    sampled = per_step(events)
    assert sum(sampled) == 5
    assert all(sum(sampled[: i + 1]) <= 2 + i + 1 for i in range(6))
    assert sampled[0] >= 3
    assert {step - version for step, version, _ in module.trained} <= {0, 1, 2}
    assert [number for _, _, number in module.trained] == sorted({number for _, _, number in module.trained})
    assert max(module.gaps) > 1e-3  # the samples are of older weights


def test_epochs_and_minibatches_train_the_same_samples_again(service: ServiceClient) -> None:
    module = new(service, Watching)
    quiet(max_steps=8).fit(module, rollouts(epochs=2, minibatches=2, **{**SMALLEST, "batch_size": 2}))
    steps = [(version, number) for _, version, number in module.trained]
    assert steps == [(0, 0), (0, 1), (0, 0), (0, 1), (4, 2), (4, 3), (4, 2), (4, 3)]


def test_a_model_that_is_changed_in_between_raises(service: ServiceClient) -> None:
    class Meddling(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == 1 and trainer.fit_loop.batch_idx % 2:
                module.lm.handle.remote.steps += 1  # as a step of another optimizer does

    with pytest.raises(InvalidInput, match=r"prompt . was sampled after 1 optimizer steps, but is trained after 2"):
        quiet(accumulate_grad_batches=2, callbacks=[Meddling()]).fit(new(service, Watching), rollouts(**SMALLEST))


def other_loader(loader: RolloutLoader) -> dict[str, Any]:
    return {"rollouts": loader, "others": [1, 2]}


def test_set_ups_that_cannot_be_on_policy_raise(service: ServiceClient) -> None:
    class Manual(GRPO):
        automatic_optimization = False

    with pytest.raises(InvalidInput, match="Pass RolloutData, or a RolloutLoader and no other loader with it"):
        quiet().fit(new(service, GRPO), other_loader(rollouts()))
    with pytest.raises(InvalidInput, match="manual optimization"):
        quiet().fit(new(service, Manual), rollouts())
    with pytest.raises(InvalidInput, match="accumulate_grad_batches=2 would mix"):
        quiet(accumulate_grad_batches=2).fit(new(service, GRPO), rollouts(epochs=2))
    with pytest.raises(InvalidInput, match="a batch must be a list of datums"):
        quiet().fit(new(service, RemoteModule), rollouts())


def test_a_server_that_cannot_sample_old_weights(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_named("embedded").but(samples_old_weights=False)
    monkeypatch.setattr(TrainingClient, "dialect", dialect)
    with pytest.raises(Unsupported, match="staleness=1 samples from weights that are no longer in training"):
        quiet().fit(new(service, GRPO), rollouts(staleness=1))
