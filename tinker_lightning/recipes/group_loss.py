"""Losses of groups of episodes, computed here from log-probabilities or by the server.

`TrainedGroup` has the datums and advantages of a group. `GroupLossModule` computes the mean loss over groups from
forward passes that were sent as the groups arrived, or lets the server compute it in one pass.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, OperationFailed, check_choice
from tinker_lightning.lightning import deferred_metrics, routes
from tinker_lightning.lightning.deferred_metrics import LOSS, combined
from tinker_lightning.lightning.hyperparameters import ModelSettings
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.losses import custom, dro
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.losses.library import TOKEN_COUNTS, is_of_library, unwrap_partial
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.recipes import rollout_metrics
from tinker_lightning.recipes.rollout_metrics import ScoredGroup
from tinker_lightning.remote.lm import dropping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tinker_lightning.lightning.deferred_metrics import FinishedPass
    from tinker_lightning.lightning.hyperparameters import Unpack
    from tinker_lightning.lightning.routes import Route
    from tinker_lightning.remote.calls import Pass
    from tinker_lightning.rl.trajectory import Group
    from tinker_lightning.types import Datum

Normalize: TypeAlias = Literal["token", "sequence", "sum"]


class GroupSettings(ModelSettings, total=False):
    """The arguments of `GroupLossModule` that recipes share; see `GRPO`."""

    loss: Any
    loss_config: Mapping[str, float | str] | None
    normalize: Normalize


class TrainedGroup:
    """A group whose forward pass was sent, or that is dropped because it has nothing to train on.

    Args:
        group: The group.
        advantages: The advantage of each episode; None if the group is dropped.
        steps: The number of optimizer steps that the trained weights have taken; by default the sampler's.
    """

    def __init__(self, group: Group, advantages: Sequence[float] | None, steps: int | None = None) -> None:
        self.group = group
        self.steps = group.version if steps is None else steps
        self.data: list[Datum] = []
        self.episodes: list[int] = []  # of each datum
        self.advantages = list(advantages or ())
        for i, (trajectory, advantage) in enumerate(zip(group.trajectories, self.advantages, strict=False)):
            if trajectory.is_scored and not math.isnan(advantage):
                own = trajectory.datums()
                self.data += own
                self.episodes += [i] * len(own)
        self.sent: Pass | None = None
        self.logprobs: list[Tensor] = []

    @property
    def dropped(self) -> bool:
        """Whether the group has nothing to train on."""
        return not self.data

    @property
    def tokens(self) -> int:
        """The number of sampled tokens that are trained."""
        return rollout_metrics.sampled_tokens(self.data)


class GroupLossModule(RemoteModule):
    """A module whose loss is a mean over groups of episodes. See `GRPO` for the arguments."""

    reduction = "sum"

    def __init__(
        self,
        model: Any = None,
        *,
        loss: Any = "importance_sampling",
        loss_config: Mapping[str, float | str] | None = None,
        normalize: Normalize = "token",
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(model, **settings)
        check_choice("normalize", normalize, get_args(Normalize))
        if type(self).loss is GroupLossModule.loss:
            self.loss = loss  # type: ignore[method-assign]
        self.loss_config = dict(loss_config or {})
        self.normalize = normalize

    def with_inputs(self, trained: TrainedGroup) -> list[Datum]:
        """Returns the datums of a group with their `advantages`, one for each token."""
        return [
            datum.with_inputs(advantages=datum.loss_fn_inputs["mask"].to_numpy() * trained.advantages[episode])
            for datum, episode in zip(trained.data, trained.episodes, strict=True)
        ]

    def group_loss(
        self, trained: TrainedGroup, data: list[Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Returns the loss of a group: `loss`, normalized if it is a sum over tokens."""
        loss: Any = self.chosen_route().local
        if self._holds_all_tokens:
            data = [_with_own_logprobs(datum, p) for datum, p in zip(data, logprobs, strict=True)]
        if not self._sums_tokens or self.normalize == "sum":
            return loss(data, logprobs)  # type: ignore[no-any-return]
        if self.normalize == "token":
            value, metrics = loss(data, logprobs)
            return value / trained.tokens, metrics
        values, weighted = [], []
        for datum, p, share in zip(data, logprobs, self.shares(trained), strict=True):
            value, metrics = loss([datum], [p])
            values.append(share * value)
            tokens = rollout_metrics.sampled_tokens([datum])
            weighted.append(({name: float(number) for name, number in metrics.items()}, tokens))
        return torch.stack(values).sum(), combined(weighted)

    def shares(self, trained: TrainedGroup) -> list[float]:
        """Returns the factor of each datum's sum over tokens in the loss of its group."""
        if self.normalize != "sequence":
            return [1 / trained.tokens if self.normalize == "token" else 1.0] * len(trained.data)
        tokens: dict[int, int] = {}
        for datum, episode in zip(trained.data, trained.episodes, strict=True):
            tokens[episode] = tokens.get(episode, 0) + rollout_metrics.sampled_tokens([datum])
        return [1 / (len(tokens) * tokens[episode]) for episode in trained.episodes]

    @property
    def can_defer(self) -> bool:
        """Whether the loss of a group is `loss` alone, so that a server can compute it in one pass."""
        is_own = type(self).group_loss is not GroupLossModule.group_loss
        return self.normalize != "sequence" and not (is_own or self._holds_all_tokens)

    def policy_metrics(self, scores: Sequence[ScoredGroup]) -> dict[str, float]:
        """Returns the metrics that compare the log-probabilities of sampled tokens."""
        return rollout_metrics.policy_metrics(scores)

    @override
    def chosen_route(self) -> Route:
        """Returns where the loss of a group runs: here, where that is as cheap, or where it is more than `loss`.

        A server that keeps forward passes needs no second one for the gradient.
        """
        chosen = super().chosen_route()
        if chosen.needs_logprobs:
            return chosen
        has_local = self.route == "auto" and chosen.local is not None
        retains = self.lm.backend.retains
        if self.can_defer and not (has_local and retains):
            return chosen
        if not has_local:
            raise InvalidInput(
                f"{type(self).__name__} adds to its loss, or divides it, in ways that the server-side loss "
                f"{routes.loss_name(self.loss)} does not know. Leave route at 'auto', with a loss of the library."
            )
        return replace(chosen, route="retained" if retains else "two-pass", loss=chosen.local, config={})

    def _loss(self, trained: list[TrainedGroup], planned: int) -> Tensor:
        """Returns the mean loss over the planned groups."""
        if not self.chosen_route().needs_logprobs:
            return self._deferred_loss(trained, planned)
        # Autograd runs backward passes in the reverse order of the forward passes: the first prompt's come first.
        for one in reversed(trained):
            assert one.sent is not None  # noqa: S101 for the type checker
            one.logprobs = self.lm(one.sent)
        losses, metrics, scores = [], [], []
        with dropping(self):
            for one in trained:
                data = self.with_inputs(one)
                scores.append(self._score(one, data, one.logprobs))
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
                metrics.append((composition.flatten(own), max(1, one.tokens)))
        total = torch.stack(losses).sum() / (1 if self.normalize == "sum" else planned)
        own = combined(metrics) if self.regularizers else deferred_metrics.loss_metrics(combined(metrics))
        batch_metrics = {**self.policy_metrics(scores), **own, LOSS: total.item()}
        self._batch_metrics = (batch_metrics, sum(count for _, count in metrics))
        return total

    def _score(self, trained: TrainedGroup, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> ScoredGroup:
        version = trained.group.version
        return ScoredGroup.from_logprobs(data, logprobs, version, trained.steps - version)

    def _deferred_loss(self, trained: list[TrainedGroup], planned: int) -> Tensor:
        """Returns the deferred loss of a server-side pass, which is sent with the optimizer step."""
        chosen, total = self.chosen_route(), []
        for one in reversed(trained):  # see `_loss`
            data = sent = self.with_inputs(one)
            if chosen.route == "builtin":
                sent = [datum.with_only_inputs(_builtin_inputs(chosen.loss, datum)) for datum in data]
            factor = 1.0 if self.normalize == "sum" else 1 / (planned * (one.tokens if self._sums_tokens else 1))
            total.append(self._server_loss(sent, chosen, {}, about=(one, data)) * factor)
        self._batch_metrics = ({}, sum(len(one.data) for one in trained))
        return sum(total[1:], total[0])

    @override
    def server_metrics(self, passes: Sequence[FinishedPass]) -> dict[str, float]:
        """Returns the policy metrics of server-side passes, if the server returns log-probabilities."""
        scores = []
        for output, call in passes:
            if call.about is not None:
                trained, data = call.about
                try:
                    logprobs = custom.logprob_leaves(output, data)
                except (InvalidInput, OperationFailed):  # the server returns none
                    continue
                scores.append(self._score(trained, data, [each.detach() for each in logprobs]))
        return self.policy_metrics(scores)

    @property
    def _holds_all_tokens(self) -> bool:
        """Whether the loss also holds prompt tokens close to their `logprobs`, which the sampler does not return."""
        return self._function is dro

    @property
    def _sums_tokens(self) -> bool:
        """Whether the loss is one of the library that sums over tokens."""
        return is_of_library(self._function) and self._function.__name__ in TOKEN_COUNTS

    @property
    def _function(self) -> Any:
        """The loss as a function, without its settings."""
        return unwrap_partial(super().chosen_route().local)[0]


def _builtin_inputs(loss: str, datum: Datum) -> dict[str, Any]:
    """Returns the inputs of a built-in loss; some servers reject others."""
    names = ("target_tokens", *LOSSES[loss].inputs)
    return {name: datum.loss_fn_inputs[name] for name in names if name in datum.loss_fn_inputs}


def _with_own_logprobs(datum: Datum, logprobs: Tensor) -> Datum:
    """Returns a datum with the model's own log-probabilities of tokens that were not sampled."""
    mask, sampled = (datum.loss_fn_inputs[name].to_torch() for name in ("mask", "logprobs"))
    return datum.with_inputs(logprobs=torch.where(mask != 0, sampled, logprobs.detach()))
