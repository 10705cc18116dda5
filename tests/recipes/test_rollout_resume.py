"""The position in the rollouts is part of a checkpoint: a resumed run ends in the same bits."""  # R5.3, R5.9

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.rollouts import PROMPTS, Stream, code_points, rollouts
from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, logprobs_of, new, quiet
from tinker_lightning import SamplingParams
from tinker_lightning.errors import InvalidInput
from tinker_lightning.recipes import GRPO

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


class Noting(GRPO):
    """Notes which prompts are trained, batch by batch, and what was said."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, reference=None, **kwargs)
        self.trained: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        job = batch.loader.job(batch.job)
        groups = [job.groups[slot] for slot in sorted(job.groups)]
        self.trained[batch.id] = [(group.task.number, [each.text for each in group.trajectories]) for group in groups]
        return loss


class Saving(pl.Callback):
    """Saves after some batches, also in the middle of windows."""

    def __init__(self, folder: Path, *batches: int) -> None:
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if (batch := trainer.fit_loop.epoch_loop.total_batch_idx) in self.batches:
            trainer.save_checkpoint(self.folder / f"{batch}.ckpt")


def some(prompt: str, completion: str) -> float:
    """Drops the groups of every third prompt."""
    return code_points(prompt, completion) if prompt not in PROMPTS[::3] else 0.0


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "one step per batch": ({}, 1),
    "windows of two batches": ({}, 2),
    "two epochs of two minibatches": ({"epochs": 2, "minibatches": 2}, 1),
    "a stream": ({"prompts": Stream(PROMPTS)}, 1),
    "refilled": ({"refill": 1}, 1),
}


@pytest.mark.parametrize("case", mostly_soak(CASES, but=["two epochs of two minibatches"]))
def test_a_resumed_run_ends_in_the_same_bits(case: str, service: ServiceClient, tmp_path: Path) -> None:
    settings, accumulate = CASES[case]
    settings = {"rewards": some, "group_size": 2, "sampling_params": SamplingParams(max_tokens=2), **settings}
    options = {"max_steps": 2 if accumulate > 1 else 5, "accumulate_grad_batches": accumulate}
    batches = (0, 1) if accumulate > 1 else (2,)
    whole = new(service, Noting)
    trainer = quiet(**options, callbacks=[Saving(tmp_path, *batches)])
    trainer.fit(whole, rollouts(**settings))
    for batch in batches:
        resumed = new(service, Noting)
        resumed_loader = rollouts(**settings)
        quiet(**options).fit(resumed, resumed_loader, ckpt_path=str(tmp_path / f"{batch}.ckpt"))
        assert resumed.trained == {rollout_id: whole.trained[rollout_id] for rollout_id in resumed.trained}
        assert list(resumed.trained) == list(range(batch + 1, len(whole.trained)))
        assert torch.equal(logprobs_of(resumed), logprobs_of(whole))


@pytest.mark.parametrize("batch", mostly_soak([2, 3], but=[2]))  # at the end of the first epoch, and after it
def test_epochs_visit_each_prompt_as_often_and_resume_across_their_boundary(  # R5.3, R5.9
    batch: int, service: ServiceClient, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "rewards": code_points,
        "group_size": 2,
        "sampling_params": SamplingParams(max_tokens=2),
    }
    prompts = {"prompts": PROMPTS[:5], "num_epochs": 2, "staleness": 1}
    whole = new(service, Noting)
    trainer = quiet(max_epochs=-1, callbacks=[Saving(tmp_path, batch)])
    trainer.fit(whole, rollouts(**prompts, **settings))
    assert (trainer.current_epoch, trainer.global_step) == (2, 6)
    assert [len(groups) for groups in whole.trained.values()] == [2, 2, 1, 2, 2, 1]
    assert [number for groups in whole.trained.values() for number, _ in groups] == list(range(10))
    resumed = new(service, Noting)
    trainer = quiet(max_epochs=-1)
    trainer.fit(resumed, rollouts(**prompts, **settings), ckpt_path=str(tmp_path / f"{batch}.ckpt"))
    assert (trainer.current_epoch, list(resumed.trained)) == (2, list(range(batch + 1, 6)))
    numbers = [[number for number, _ in groups] for groups in whole.trained.values()]
    assert [[number for number, _ in groups] for groups in resumed.trained.values()] == numbers[batch + 1 :]
    unlimited, file = rollouts(PROMPTS[:5], staleness=1, **settings), str(tmp_path / f"{batch}.ckpt")
    with pytest.raises(InvalidInput, match="saved with num_epochs=2, but this RolloutLoader has num_epochs=None"):
        quiet().fit(new(service, Noting), unlimited, ckpt_path=file)


@pytest.mark.parametrize("strategy", mostly_soak(["tinker", "auto"], but=["tinker"]))
def test_sampling_ahead_neither_repeats_nor_skips(strategy: str, service: ServiceClient, tmp_path: Path) -> None:
    """Nor if it is resumed with the other strategy."""
    options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "max_steps": 5}
    settings: dict[str, Any] = {"staleness": 2, "group_size": 2, "batch_size": 1, "rewards": code_points}
    whole = new(service, Noting)
    trainer = quiet(**options, callbacks=[Saving(tmp_path, 1)])
    trainer.fit(whole, rollouts(**settings))
    resumed = new(service, Noting)
    options["strategy"] = "auto" if strategy == "tinker" else "tinker"
    quiet(**options).fit(resumed, rollouts(**settings), ckpt_path=str(tmp_path / "1.ckpt"))
    numbers = [[number for number, _ in whole.trained[rollout_id]] for rollout_id in range(5)]
    assert numbers == [[number] for number in range(5)]
    assert {rollout_id: [number for number, _ in groups] for rollout_id, groups in resumed.trained.items()} == {
        rollout_id: numbers[rollout_id] for rollout_id in range(2, 5)
    }
