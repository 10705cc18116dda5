"""The base class of recipes that train on rollouts: GRPO, and distillation on the student's own samples.

`RolloutModule` waits for the groups of a batch and trains them; `SamplerCheck` raises on servers whose samples are not
from the model in training.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from tinker_lightning.errors import (
    InvalidInput,
    LossWithoutGradient,
    NotFound,
    OperationFailed,
    TinkerLightningError,
    Unsupported,
)
from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.deferred_metrics import combined
from tinker_lightning.recipes import rollout_metrics
from tinker_lightning.recipes.group_loss import GroupLossModule, GroupSettings, TrainedGroup
from tinker_lightning.recipes.references import REFERENCE, References
from tinker_lightning.rl.environment import SamplerPolicy
from tinker_lightning.rl.rollout_jobs import PolicySource, TrainingProgress
from tinker_lightning.rl.rollouts import RolloutBatch, RolloutLoader
from tinker_lightning.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.lightning.hyperparameters import Unpack
    from tinker_lightning.recipes.rollout_metrics import ScoredGroup
    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.rl.rollout_jobs import RolloutJob
    from tinker_lightning.rl.rollouts import RolloutId
    from tinker_lightning.rl.trajectory import Group
    from tinker_lightning.types import Datum

logger = logging.getLogger("tinker_lightning.rl")

_TARGETS = "target_tokens"
# The number of tokens of a trial sample.
_PROBED = 4
# The largest mean difference between the log-probabilities of sampler and trainer that rounding explains.
_ROUNDING = 0.1
# A sampler whose distance from the base model is below this share of the trainer's has not learned what it did.
_SHARE = 0.1
# A sampler of earlier weights may be close to the base model, unless they had taken this many times as many steps.
_TIMES = 3


class RolloutModule(GroupLossModule):
    """Trains on the groups of a `RolloutLoader`. See `GRPO` for the arguments.

    Override `advantages` to weigh episodes, `with_inputs` to give tokens their own advantages, and `loss` to train with
    another loss of datums that have `advantages` and `logprobs`.

    The forward pass of a group is sent as soon as the group has arrived, while others are still being sampled. The loss
    of a batch is the mean over its planned groups, in which dropped groups count as 0. Gradients are sent in the order
    of the prompts, so the result does not depend on the order of arrival.
    """

    def __init__(self, model: Any = None, **settings: Unpack[GroupSettings]) -> None:
        super().__init__(model, **settings)
        self._sampler_check = SamplerCheck(self.lm, type(self).__name__)
        self._source: tuple[int, PolicySource] | None = None
        self._last_start: float | None = None
        self._last_wait = 0.0
        self._hides_warning = False
        self._loader: RolloutLoader | None = None  # of the batches that are trained
        self._has_trained: bool | None = None  # whether the run has taken a step; None before the first batch of a fit
        self._skipped = ""  # why this fit last skipped a step

    # Methods to override.

    def advantages(self, group: Group) -> Sequence[float] | None:
        """Returns the advantage of each episode of a group, NaN to leave it out, or None to drop the group."""
        raise NotImplementedError

    def request(self, group: Group, data: list[Datum]) -> None:
        """Requests what `with_inputs` needs from other models; called as soon as the group has arrived."""

    # Training.

    @property
    def logs_now(self) -> bool:
        """Whether the trainer logs this step."""
        return self.has_trainer and bool(_compat.SHOULD_UPDATE_LOGS.get(self.trainer))

    @override
    def setup(self, stage: str) -> None:
        """Makes the trainer end after the epochs of a `RolloutLoader`, before schedulers ask how long training is."""
        super().setup(stage)
        source = _compat.TRAIN_SOURCE.get(self.trainer) if stage == "fit" else None
        if isinstance(source, RolloutLoader):
            source.limit_epochs(self.trainer)

    @override
    def on_fit_start(self) -> None:
        """Starts to measure the time between batches, and to watch for steps that are skipped."""
        self._last_start = None
        self._has_trained, self._skipped = None, ""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        """Waits for the groups of a batch and returns their loss; None if all were dropped."""
        began = time.monotonic()
        self._check_batch(batch)
        loader = self._loader = batch.loader
        loader.limit_epochs(self.trainer)
        if self._has_trained is None:
            self._has_trained = loader.skipped_steps < self.trainer.global_step  # before it was resumed
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        loader.follow(batch.id, lambda: batches.processed)
        loader.admit(self._progress(loader, batch.id, batch_idx).limit(loader.staleness), self._policy)
        job = loader.job(batch.job)
        if not batch.slots(job):
            self._hide_warning_of_none()
            return None
        received = self._receive(batch, job, batch.slots(job))
        for _ in range(loader.refill):
            missing = job.planned - sum(not one.dropped for one in received.values())
            if not missing or not (slots := loader.replace_dropped(job, missing, self._policy)):
                break
            received |= self._receive(batch, job, slots)
        waited = time.monotonic() - began
        groups = [received[slot] for slot in sorted(received)]
        trained = [one for one in groups if not one.dropped]
        loss = self._loss(trained, len(batch.slots(job))) if trained else None
        if loss is not None:
            self._has_trained = True
        elif self._ends_window(batch_idx) and not self.lm.handle.remote.window:
            self._skip_step(loader, groups)
        self._log_batch(batch, groups, waited, began)
        if loss is None:
            self._hide_warning_of_none()
        return loss

    def _skip_step(self, loader: RolloutLoader, groups: list[TrainedGroup]) -> None:
        """Counts a step without groups to train; warns about the first one of a fit."""
        loader.skipped_steps += 1
        reason = rollout_metrics.drop_reason(groups)
        if not self._skipped:
            logger.warning("a step was skipped, and counted in groups/skipped_steps: %s", reason)
        self._skipped = reason

    def _hide_warning_of_none(self) -> None:
        """Keeps Lightning from warning about this batch, which `groups/skipped_steps` counts."""
        self._hides_warning |= _compat.hide_warning_of_none()

    @override
    def on_train_end(self) -> None:
        """Stops sampling, and counts what was sampled ahead and is not trained, because the fit ends early.

        Raises:
            LossWithoutGradient: If the run has skipped all of its steps, and is no `fast_dev_run`.
        """
        if self._loader is not None:
            unused, self._loader = self._loader.stop(), None
            self.lm.handle.remote.tokens += replace(unused, discarded=unused.sampled)
        if self._skipped and not (self._has_trained or _compat.FAST_DEV_RUN.get(self.trainer)):
            raise LossWithoutGradient(
                f"the fit has ended without an optimizer step, and the model is unchanged: {self._skipped}"
            )

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Starts the rollouts that are due after the optimizer step, if sampling may run ahead."""
        del outputs
        if self._hides_warning:
            _compat.show_warning_of_none()
            self._hides_warning = False
        if isinstance(batch, RolloutBatch) and batch.loader.staleness and not self.trainer.should_stop:
            progress = self._progress(batch.loader, batch.id + 1, batch_idx + 1)
            if progress.steps != 0 and progress.epochs != 0:
                batch.loader.admit(progress.limit(batch.loader.staleness), self._policy)

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Samples a batch of validation prompts and logs `val_reward`, and the mean of each reward."""
        self._evaluate_rollouts("val", batch, batch_idx, dataloader_idx)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Samples a batch of test prompts and logs `test_reward`, and the mean of each reward."""
        self._evaluate_rollouts("test", batch, batch_idx, dataloader_idx)

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Samples continuations of prompts, as every `RemoteModule` does; raises `InvalidInput` for rollouts."""
        if isinstance(batch, RolloutBatch):
            raise InvalidInput(
                "trainer.predict samples from a loader of prompts, and a RolloutLoader is for fit, validate and test. "
                "Pass DataLoader(prompts, collate_fn=tinker_lightning.collate), or PromptData."
            )
        return super().predict_step(batch, batch_idx, dataloader_idx)

    @override
    def policy_metrics(self, scores: Sequence[ScoredGroup]) -> dict[str, float]:
        """Returns metrics of sampled tokens; raises `Unsupported` if the server sampled them from its base model."""
        self._sampler_check.observe(scores)
        return super().policy_metrics(scores)

    def _evaluate_rollouts(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if not isinstance(batch, RolloutBatch):
            self._evaluation.step(stage, batch, batch_idx, dataloader_idx)
            return
        job = batch.loader.evaluate(batch_idx, self._policy())
        arrived = dict(job.receive(range(job.planned), self.lm.handle.remote.while_waiting))
        groups = [arrived[slot] for slot in sorted(arrived)]
        remote = self.lm.handle.remote
        remote.tokens = sum((group.tokens for group in groups), start=remote.tokens)
        for name, (value, count) in rollout_metrics.reward_metrics(groups).items():
            self.log(f"{stage}_{name}", value, batch_size=count, prog_bar=name == "reward")

    def _check_batch(self, batch: Any) -> None:
        name = type(self).__name__
        if not isinstance(batch, RolloutBatch):
            raise InvalidInput(
                f"{name} trains on rollouts, but the loader yields {type(batch).__name__}. Pass RolloutData, or a "
                "RolloutLoader and no other loader with it."
            )
        if not self.automatic_optimization:
            raise InvalidInput(f"{name} does not support manual optimization, because it counts optimizer steps")
        if batch.loader.staleness and not self.lm.backend.dialect.samples_old_weights:
            raise Unsupported(
                f"staleness={batch.loader.staleness} samples from weights that are no longer in training, which this "
                "server cannot do. Pass staleness=0 to the RolloutLoader."
            )
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated > 1 and batch.loader.steps_per_batch > 1:
            raise InvalidInput(
                f"accumulate_grad_batches={accumulated} would mix the epochs and minibatches of several rollout "
                "batches in one optimizer step. Raise batch_size instead."
            )

    def _progress(self, loader: RolloutLoader, rollout_id: RolloutId, batch_idx: int) -> TrainingProgress:
        """Returns the progress of the fit before a batch."""
        trainer, steps = self.trainer, loader.steps_per_batch
        job, part = divmod(rollout_id, steps)
        position, length, epochs, left = batch_idx // steps, None, None, None
        if trainer.max_epochs not in (None, -1):
            epochs = trainer.max_epochs - trainer.current_epoch
        if trainer.max_steps != -1:
            left = math.ceil((trainer.max_steps - trainer.global_step + part) / steps)
        if math.isfinite(trainer.num_training_batches):
            length = math.ceil(trainer.num_training_batches / steps)
            if position >= length:
                position, epochs = 0, None if epochs is None else epochs - 1
        return TrainingProgress(job, position, trainer.accumulate_grad_batches, length, epochs, left)

    def _ends_window(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch

    def _policy(self) -> PolicySource:
        """Returns the current weights as a policy; they reach the sampler after the optimizer steps sent so far."""
        remote = self.lm.handle.remote
        if self._source is None or self._source[0] != remote.version:
            sampler = self._sampler_check.start(self.lm.backend.submit_sampling_client, lambda: self.tokenizer)
            self._source = remote.version, PolicySource(remote.steps, sampler, self.tokenizer)
        return self._source[1]

    def _receive(self, batch: RolloutBatch, job: RolloutJob, slots: Iterable[int]) -> dict[int, TrainedGroup]:
        """Waits for groups, and sends the forward pass of each as soon as it has arrived."""
        remote, received = self.lm.handle.remote, {}
        for slot, group in job.receive(slots, remote.while_waiting):
            self._check_version(batch, group)
            advantages = None if group.failed else self.advantages(group)
            one = received[slot] = TrainedGroup(group, advantages, remote.steps)
            if batch.part < batch.loader.minibatches:  # in its first epoch
                remote.tokens += replace(group.tokens, discarded=max(0, group.tokens.sampled - one.tokens))
            if not one.dropped:
                self.request(group, one.data)
                if self.chosen_route().needs_logprobs:
                    one.sent = self.lm.send(one.data)
        return received

    def _check_version(self, batch: RolloutBatch, group: Group) -> None:
        loader, age = batch.loader, self.lm.handle.remote.steps - group.version
        if not 0 <= age <= loader.staleness * loader.steps_per_batch + batch.part:
            raise InvalidInput(
                f"prompt {group.task.index} was sampled after {group.version} optimizer steps, but is trained after "
                f"{self.lm.handle.remote.steps}, which staleness={loader.staleness} does not allow: something other "
                "than this fit has changed the weights. Step and load the model outside of fit only."
            )

    def _log_batch(self, batch: RolloutBatch, groups: list[TrainedGroup], waited: float, began: float) -> None:
        """Logs the metrics of the episodes and groups of a batch."""
        self.trained_samples = rollout_metrics.episode_rows([one.group for one in groups], self.tokenizer)
        steps = self.lm.handle.remote.steps
        metrics = rollout_metrics.batch_metrics(groups, steps)
        metrics |= {"groups/skipped_steps": float(batch.loader.skipped_steps), "seconds/waiting": waited}
        if self._last_start is not None:
            metrics["seconds/training"] = max(0.0, began - self._last_start - self._last_wait)
        self._last_start, self._last_wait = began, waited
        count = max(1, self._batch_metrics[1])
        self._batch_metrics = ({**self._batch_metrics[0], **metrics}, count)
        self._log_present(combined([*self._window_metrics, self._batch_metrics]), count)
        if "reward" in metrics:
            self.trainer.progress_bar_metrics["reward"] = metrics["reward"]


class SamplerCheck:
    """Raises `Unsupported` if the server cannot sample from the model, or samples from its base model.

    Some servers create a sampler of saved weights that ignores them. Training would then silently continue on samples
    of the base model.

    Args:
        lm: The model that is trained.
        recipe: The name of the recipe in errors.
    """

    def __init__(self, lm: RemoteLM, recipe: str) -> None:
        self._lm = lm
        self._recipe = recipe
        self._has_sampled = False
        self._is_decided = False

    def start(self, submit: Callable[[], TinkerFuture[Any]], tokenizer: Callable[[], Any]) -> TinkerFuture[Any]:
        """Returns the sampler that is submitted; the first one must return tokens with their log-probabilities."""
        if self._has_sampled:
            return submit()
        remote = self._lm.handle.remote
        try:
            future = submit()
            sampler = remote.wait(future)
        except (InvalidInput, NotFound, OperationFailed) as error:
            raise Unsupported(
                f"{self._recipe} samples from the model that it trains, but {self._lm.backend.server} cannot: {error}. "
                "Train on a server with save_weights_for_sampler; `tinker-lightning doctor URL` lists what a server "
                "offers."
            ) from error
        policy = SamplerPolicy(sampler, tokenizer())
        prompt, params = ModelInput.from_ints([1]), SamplingParams(max_tokens=_PROBED, seed=0)
        answers = [sampler.sample(prompt, 1, params) for _ in range(2)]
        # Raises without log-probabilities.
        first, second = [policy.completion(remote.wait(answer).sequences[0]).tokens for answer in answers]
        if first != second:
            logger.warning(
                "%s: samples of the same prompt and seed differ, so this run cannot be repeated exactly, nor resumed "
                "with the same samples",
                self._lm.backend.server,
            )
        self._has_sampled = True
        return future

    def observe(self, scores: Sequence[ScoredGroup]) -> None:
        """Compares sampler and trainer until a difference is explained: by older weights, arithmetic or the server."""
        for scored in scores:
            is_comparable = scored.version > _TIMES * scored.age and len(scored.trainer)
            if not self._is_decided and is_comparable and _distance(scored.trainer, scored.sampler) > _ROUNDING:
                self._is_decided = True
                self._decide(scored)

    def _decide(self, scored: ScoredGroup) -> None:
        gap = _distance(scored.trainer, scored.sampler)
        differ = (
            f"{self._lm.backend.server}: sampler and trainer give the same tokens log-probabilities that differ by "
            f"{gap:.2g} on average, after {scored.version + scored.age} optimizer steps"
        )
        base = self._base_logprobs(scored)
        if base is not None and _distance(scored.sampler, base) < _SHARE * _distance(scored.trainer, base):
            raise Unsupported(
                f"{differ}, because the sampler's are those of the base model: this server samples without the adapter "
                f"that is trained. {self._recipe} would train on samples of another model. Update the server or its "
                "configuration; `tinker-lightning doctor URL` shows whether sampler and trainer agree."
            )
        if scored.age == 0:
            warnings.warn(
                f"{differ}, though both should have the same weights. Losses correct for it by the ratio of the two; "
                "bound it with max_ratio. `tinker-lightning doctor URL` shows whether sampler and trainer agree.",
                stacklevel=2,
            )

    def _base_logprobs(self, scored: ScoredGroup) -> torch.Tensor | None:
        """Returns the base model's log-probabilities of sampled tokens; None if the server does not compute them."""
        plain = [datum.with_only_inputs({_TARGETS: datum.loss_fn_inputs[_TARGETS]}) for datum in scored.data]
        try:
            data = References(self._lm, "base", None, keep=False).add_to(plain)
        except TinkerLightningError:
            return None
        pairs = zip(data, scored.masks, strict=True)
        return torch.cat([datum.loss_fn_inputs[REFERENCE].to_torch()[mask] for datum, mask in pairs])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().mean())
