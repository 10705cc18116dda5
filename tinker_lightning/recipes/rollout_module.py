"""What recipes that train on rollouts have in common: GRPO, and distillation on the student's own samples."""

from __future__ import annotations

import functools
import math
import time
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.lightning import metric_names, routes
from tinker_lightning.lightning.deferred_metrics import combined
from tinker_lightning.lightning.metric_names import LOSS
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.losses import dro
from tinker_lightning.losses.library import TOKEN_COUNTS, is_of_library, unwrapped
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.recipes import rollout_metrics
from tinker_lightning.recipes.trained_group import TrainedGroup
from tinker_lightning.rl.admission import Window
from tinker_lightning.rl.rollouts import RolloutBatch
from tinker_lightning.rl.units import PolicySource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from tinker_lightning.lightning.routes import Route
    from tinker_lightning.rl.groups import Group
    from tinker_lightning.rl.rollouts import RolloutLoader
    from tinker_lightning.rl.units import Unit
    from tinker_lightning.types import Datum

Normalize: TypeAlias = Literal["token", "sequence", "sum"]

# The inputs of built-in policy losses; some servers reject others.
_INPUTS = ("target_tokens", "logprobs", "advantages")


class RolloutModule(RemoteModule):
    """Trains on the groups of a `RolloutLoader`. See `GRPO` for the arguments.

    Override `advantages` to weigh episodes, `with_inputs` to give tokens their own advantages, and `loss` to train with
    another loss of datums that have `advantages` and `logprobs`.

    The forward pass of a group is sent as soon as the group has arrived, while others are still being sampled. The loss
    of a batch is the mean over its planned groups, in which dropped groups count as 0. Gradients are sent in the order
    of the prompts, so the result does not depend on the order of arrival.
    """

    reduction = "sum"

    def __init__(
        self,
        model: Any = None,
        *,
        loss: Any = "importance_sampling",
        loss_config: Mapping[str, float | str] | None = None,
        normalize: Normalize = "token",
        **settings: Any,
    ) -> None:
        super().__init__(model, **settings)
        if normalize not in ("token", "sequence", "sum"):
            raise InvalidInput(f"normalize must be 'token', 'sequence' or 'sum', got {normalize!r}")
        if type(self).loss is RolloutModule.loss:
            self.loss = loss  # type: ignore[method-assign]
        self.loss_config = dict(loss_config or {})
        self.normalize = normalize
        self._source: tuple[int, PolicySource] | None = None
        self._last_start: float | None = None
        self._last_wait = 0.0

    # Methods to override.

    def advantages(self, group: Group) -> Sequence[float] | None:
        """Returns the advantage of each episode of a group, NaN to leave it out, or None to drop the group."""
        raise NotImplementedError

    def request(self, group: Group, data: list[Datum]) -> None:
        """Requests what `with_inputs` needs from other models; called as soon as the group has arrived."""

    def with_inputs(self, trained: TrainedGroup) -> list[Datum]:
        """Returns the datums of a group with their `advantages`, one for each token."""
        return [
            datum.with_inputs(advantages=datum.loss_fn_inputs["mask"].to_numpy() * trained.advantages[episode])
            for datum, episode in zip(trained.data, trained.episodes, strict=True)
        ]

    # Training.

    def on_fit_start(self) -> None:
        """Lets a batch without a gradient pass, which is counted in `groups/skipped_steps`."""
        warnings.filterwarnings("ignore", ".training_step. returned .None.")
        self._last_start = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        """Waits for the groups of a batch and returns their loss; None if all were dropped."""
        began = time.monotonic()
        self._check(batch)
        loader = batch.loader
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        loader.follow(batch.ticket, lambda: batches.processed)
        loader.admit(self._window(loader, batch.ticket, batch_idx).limit(loader.staleness), self._policy)
        unit = loader.unit(batch.unit)
        if not unit.planned:
            return None
        found = self._receive(batch, unit, batch.places(unit))
        for _ in range(loader.refill):
            missing = unit.planned - sum(not one.dropped for one in found.values())
            if not missing or not (orders := loader.more(unit, missing, self._policy)):
                break
            found |= self._receive(batch, unit, orders)
        waited = time.monotonic() - began
        groups = [found[order] for order in sorted(found)]
        trained = [one for one in groups if not one.dropped]
        loss = self._loss(trained, len(batch.places(unit))) if trained else None
        if loss is None and self._ends_window(batch_idx) and not self.lm.handle.remote.window:
            loader.skipped_steps += 1
        self._log_batch(batch, groups, waited, began)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Starts the rollouts that the optimizer step has made due, if sampling may run ahead."""
        del outputs
        if isinstance(batch, RolloutBatch) and batch.loader.staleness and not self.trainer.should_stop:
            window = self._window(batch.loader, batch.ticket + 1, batch_idx + 1)
            if window.steps != 0 and window.epochs != 0:
                batch.loader.admit(window.limit(batch.loader.staleness), self._policy)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Samples a batch of validation prompts and logs `val_reward`, and the mean of each reward."""
        self._evaluate_rollouts("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Samples a batch of test prompts and logs `test_reward`, and the mean of each reward."""
        self._evaluate_rollouts("test", batch, batch_idx, dataloader_idx)

    def _evaluate_rollouts(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if not isinstance(batch, RolloutBatch):
            self._evaluate(stage, batch, batch_idx, dataloader_idx)
            return
        unit = batch.loader.evaluation(batch_idx, self._policy())
        arrived = dict(unit.arriving(range(unit.planned), self.lm.handle.remote.while_waiting))
        groups = [arrived[order] for order in sorted(arrived)]
        rollout_metrics.count_tokens(groups, self.lm.handle.remote.tokens)
        for name, (value, count) in rollout_metrics.of_rewards(groups).items():
            self.log(f"{stage}_{name}", value, batch_size=count, prog_bar=name == "reward")

    def _check(self, batch: Any) -> None:
        name = type(self).__name__
        if not isinstance(batch, RolloutBatch):
            raise InvalidInput(
                f"{name} trains on rollouts, but the loader yields {type(batch).__name__}. Pass a RolloutLoader, and "
                "no other loader with it."
            )
        if not self.automatic_optimization:
            raise InvalidInput(f"{name} cannot tell what a sample trains with manual optimization")
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

    def _window(self, loader: RolloutLoader, ticket: int, batch_idx: int) -> Window:
        """Returns where training is before a batch."""
        trainer, steps = self.trainer, loader.steps_per_batch
        unit, part = divmod(ticket, steps)
        position, length, epochs, left = batch_idx // steps, None, None, None
        if trainer.max_epochs not in (None, -1):
            epochs = trainer.max_epochs - trainer.current_epoch
        if trainer.max_steps != -1:
            left = math.ceil((trainer.max_steps - trainer.global_step + part) / steps)
        if math.isfinite(trainer.num_training_batches):
            length = math.ceil(trainer.num_training_batches / steps)
            if position >= length:
                position, epochs = 0, None if epochs is None else epochs - 1
        return Window(unit, position, trainer.accumulate_grad_batches, length, epochs, left)

    def _ends_window(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch

    def _policy(self) -> PolicySource:
        """Returns the current weights as a policy; they reach the sampler after the optimizer steps sent so far."""
        remote = self.lm.handle.remote
        if self._source is None or self._source[0] != remote.version:
            source = PolicySource(remote.steps, self.lm.backend.submit_sampling_client(), self.tokenizer)
            self._source = remote.version, source
        return self._source[1]

    def _receive(self, batch: RolloutBatch, unit: Unit, orders: Iterable[int]) -> dict[int, TrainedGroup]:
        """Waits for groups, and sends the forward pass of each as soon as it has arrived."""
        remote, found = self.lm.handle.remote, {}
        for order, group in unit.arriving(orders, remote.while_waiting):
            self._check_version(batch, group)
            if batch.part < batch.loader.minibatches:  # in its first epoch
                rollout_metrics.count_tokens([group], remote.tokens)
            advantages = None if group.failed else self.advantages(group)
            reason = group.failed or ("its rewards are equal" if advantages is None else "")
            one = found[order] = TrainedGroup(group, advantages, reason)
            if not one.dropped:
                self.request(group, one.data)
                if self._needs_logprobs:
                    one.sent = self.lm.send(one.data)
        return found

    def _check_version(self, batch: RolloutBatch, group: Group) -> None:
        loader, age = batch.loader, self.lm.handle.remote.steps - group.version
        if not 0 <= age <= loader.staleness * loader.steps_per_batch + batch.part:
            raise InvalidInput(
                f"prompt {group.task.index} was sampled after {group.version} optimizer steps, but is trained after "
                f"{self.lm.handle.remote.steps}, which staleness={loader.staleness} does not allow: something other "
                "than this fit has changed the weights. Step and load the model outside of fit only."
            )

    @property
    def can_defer(self) -> bool:
        """Whether the loss of a group is `loss` alone, so that a server can compute it in one pass."""
        is_own = type(self).group_loss is not RolloutModule.group_loss
        return self.normalize != "sequence" and not (is_own or self._holds_all_tokens)

    @property
    def _needs_logprobs(self) -> bool:
        """Whether the loss runs here; a server that keeps forward passes needs no second one for the gradient."""
        chosen = self.chosen_route()
        if chosen.needs_logprobs:
            return True
        if self.can_defer:
            return self.route == "auto" and chosen.local is not None and self.lm.backend.retains
        if self.route != "auto" or chosen.local is None:
            raise InvalidInput(
                f"{type(self).__name__} adds to its loss, or divides it, in ways that the server-side loss "
                f"{routes.loss_name(self.loss)} does not know. Leave route at 'auto', with a loss of the library."
            )
        return True

    def _loss(self, trained: list[TrainedGroup], planned: int) -> Tensor:
        """Returns the mean loss over the planned groups."""
        if not self._needs_logprobs:
            return self._deferred_loss(trained, planned)
        # Autograd runs backward passes in the reverse order of the forward ones: those of the first prompt come first.
        for one in reversed(trained):
            assert one.sent is not None  # noqa: S101 for the type checker
            one.logprobs = self.lm(one.sent)
        losses, metrics = [], []
        with self._dropping():
            for one in trained:
                data = self.with_inputs(one)
                loss, own = composition.evaluate(
                    data,
                    one.logprobs,
                    functools.partial(self.group_loss, one),
                    self.regularizers,
                    step=self.global_step,
                    grad_norms=self.grad_norms,
                    timeout=self.regularizer_timeout,
                )
                losses.append(loss)
                metrics.append((composition.flatten(own), max(1, round(one.tokens))))
        total = torch.stack(losses).sum() / (1 if self.normalize == "sum" else planned)
        own = metric_names.of_loss(combined(metrics), is_of_library=self.chosen_route().is_of_library)
        self._batch_metrics = ({**own, LOSS: total.item()}, sum(count for _, count in metrics))
        return total

    def group_loss(
        self, trained: TrainedGroup, data: list[Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Returns the loss of a group: `loss`, divided by tokens as `normalize` says if it is a sum over tokens."""
        loss: Any = self.chosen_route().local
        if self._holds_all_tokens:
            data = [_with_own_logprobs(datum, p) for datum, p in zip(data, logprobs, strict=True)]
        if not self._sums_tokens or self.normalize == "sum":
            return loss(data, logprobs)  # type: ignore[no-any-return]
        if self.normalize == "token":
            value, metrics = loss(data, logprobs)
            return value / trained.tokens, metrics
        values, found = [], []
        for datum, p, share in zip(data, logprobs, self.shares(trained), strict=True):
            value, metrics = loss([datum], [p])
            values.append(share * value)
            tokens = rollout_metrics.sampled_tokens([datum])
            found.append(({name: float(number) for name, number in metrics.items()}, tokens))
        return torch.stack(values).sum(), combined(found)

    def shares(self, trained: TrainedGroup) -> list[float]:
        """Returns the factor of each datum's sum over tokens in the loss of its group."""
        if self.normalize != "sequence":
            return [1 / trained.tokens if self.normalize == "token" else 1.0] * len(trained.data)
        tokens: dict[int, int] = {}
        for datum, episode in zip(trained.data, trained.episodes, strict=True):
            tokens[episode] = tokens.get(episode, 0) + rollout_metrics.sampled_tokens([datum])
        return [1 / (len(tokens) * tokens[episode]) for episode in trained.episodes]

    @property
    def _holds_all_tokens(self) -> bool:
        """Whether the loss holds tokens of the prompt close to their `logprobs`, too, of which the sampler has none."""
        function, _ = unwrapped(self.chosen_route().local)
        return function is dro

    @property
    def _sums_tokens(self) -> bool:
        """Whether the loss is one of the library that sums over tokens."""
        function, _ = unwrapped(self.chosen_route().local)
        return is_of_library(function) and function.__name__ in TOKEN_COUNTS

    def _deferred_loss(self, trained: list[TrainedGroup], planned: int) -> Tensor:
        """Returns the loss of a server-side pass, which is sent with the optimizer step."""
        chosen, total = self.chosen_route(), []
        for one in reversed(trained):  # see `_loss`
            data = self.with_inputs(one)
            if chosen.route == "builtin":
                data = [datum.with_only_inputs(_inputs_of(chosen.loss, datum)) for datum in data]
            factor = 1.0 if self.normalize == "sum" else 1 / (planned * (one.tokens if self._sums_tokens else 1))
            total.append(self._server_loss(data, chosen, {}) * factor)
        self._batch_metrics = ({}, sum(len(one.data) for one in trained))
        return sum(total[1:], total[0])

    def used_route(self) -> Route:
        """Returns the route of the next training step: losses of groups run here where that is as cheap."""
        chosen = self.chosen_route()
        if chosen.needs_logprobs or not self._needs_logprobs:
            return chosen.route
        return "retained" if self.lm.backend.retains else "two-pass"

    def _log_batch(self, batch: RolloutBatch, groups: list[TrainedGroup], waited: float, began: float) -> None:
        """Logs what was sampled and trained."""
        self.trained_samples = rollout_metrics.samples_of([one.group for one in groups], self.tokenizer)
        steps = self.lm.handle.remote.steps
        metrics = rollout_metrics.of_batch(groups, steps)
        metrics |= {"groups/skipped_steps": float(batch.loader.skipped_steps), "seconds/waiting": waited}
        if self._last_start is not None:
            metrics["seconds/training"] = max(0.0, began - self._last_start - self._last_wait)
        self._last_start, self._last_wait = began, waited
        count = max(1, self._batch_metrics[1])
        self._batch_metrics = ({**self._batch_metrics[0], **metrics}, count)
        self._log_present(combined([*self._window_metrics, self._batch_metrics]), count)


def _inputs_of(loss: str, datum: Datum) -> dict[str, Any]:
    names = (*_INPUTS, "sequence_ratio_mask") if loss == "gspo" else _INPUTS
    return {name: datum.loss_fn_inputs[name] for name in names}


def _with_own_logprobs(datum: Datum, logprobs: Tensor) -> Datum:
    """Returns a datum with the model's own log-probabilities of tokens that were not sampled."""
    mask, sampled = (datum.loss_fn_inputs[name].to_torch() for name in ("mask", "logprobs"))
    return datum.with_inputs(logprobs=torch.where(mask != 0, sampled, logprobs.detach()))
