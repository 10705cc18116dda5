"""GRPO: the arithmetic of its advantages, losses and corrections, and its settings."""  # R4.3, R5.9

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.rollouts import group_of, rollouts
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import ModelInput, losses
from tinker_lightning.errors import InvalidInput, RolloutFailed
from tinker_lightning.recipes import GRPO
from tinker_lightning.recipes.group_loss import TrainedGroup
from tinker_lightning.recipes.rollout_metrics import ScoredGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.rl import Group

pytestmark = SMALL


def loss_of(module: GRPO, group: Group, seed: int = 1) -> tuple[float, list[torch.Tensor], dict[str, Any]]:
    """The loss of a group, its gradients at log-probabilities near the sampler's, and its metrics."""
    trained = TrainedGroup(group, module.advantages(group))
    generator = torch.Generator().manual_seed(seed)
    logprobs = [
        (
            datum.loss_fn_inputs["logprobs"].to_torch()
            + 0.2 * torch.randn(len(datum.model_input.to_ints()), generator=generator)
        )
        .clone()
        .requires_grad_()
        for datum in trained.data
    ]
    data = module.with_inputs(trained)
    loss, metrics = module.group_loss(trained, data, logprobs)
    gradients = torch.autograd.grad(loss, logprobs)
    found = {name: float(value) for name, value in metrics.items()}
    return (
        loss.item(),
        list(gradients),
        found | module.policy_metrics([ScoredGroup.from_logprobs(data, logprobs, 0, 0)]),
    )


def mean_of(group: Group, terms: list[torch.Tensor], normalize: str) -> torch.Tensor:
    """Terms of sampled tokens, reduced by hand."""
    del group
    if normalize == "sum":
        return torch.cat(terms).sum()
    if normalize == "token":
        return torch.cat(terms).mean()
    return torch.stack([each.mean() for each in terms]).mean()


@pytest.mark.parametrize("normalize", ["token", "sequence", "sum"])
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_the_loss_is_reduced_as_asked(loss: str, normalize: Any, service: ServiceClient) -> None:
    module = new(service, GRPO, loss=loss, normalize=normalize, scale_rewards=False)
    group = group_of((1.0, 2), (0.0, 3), (0.5, 4))
    value, gradients, _ = loss_of(module, group)
    generator = torch.Generator().manual_seed(1)
    terms = []
    for each, advantage in zip(group.trajectories, [0.5, -0.5, 0.0], strict=True):
        q = torch.from_numpy(each.turns[0].completion.logprobs)
        p = q + 0.2 * torch.randn(len(q) + 2, generator=generator)[2:]
        ratio, a = (p - q).exp(), torch.tensor(advantage)
        if loss == "importance_sampling":
            terms.append(-ratio * a)
        elif loss == "cispo":
            terms.append(-ratio.clamp(0.8, 1.2) * p * a)
        elif loss == "dro":
            terms.append(-(p * a - 0.05 / 2 * (p - q) ** 2))
        else:
            ratio = ratio if loss == "ppo" else (p - q).mean().exp().expand(len(p))
            terms.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    assert value == pytest.approx(mean_of(group, terms, normalize).item(), rel=1e-4, abs=1e-6)
    for gradient in gradients:
        assert not gradient[:2].any()  # the prompt is not trained


def test_advantages(service: ServiceClient) -> None:
    rewards = [1.0, 0.0, 0.5]
    group = group_of(*((reward, 2) for reward in rewards))

    def found(**settings: Any) -> Any:
        return pytest.approx(new(service, GRPO, **settings).advantages(group), abs=1e-3)

    assert found(scale_rewards=False) == [0.5, -0.5, 0.0]
    assert found() == [1.0, -1.0, 0.0]
    assert found(baseline="leave_one_out", scale_rewards=False) == [0.75, -0.75, 0.0]
    assert found(baseline=0.25, scale_rewards=False) == [0.75, -0.25, 0.25]
    assert new(service, GRPO).advantages(group_of((1.0, 2), (1.0, 3))) is None


def test_truncated_answers_are_masked_or_penalized(service: ServiceClient) -> None:
    group = group_of((1.0, 2), (0.0, 2), (0.5, 2))
    group.trajectories[0].truncated = True
    masked = new(service, GRPO, truncated="mask", scale_rewards=False).advantages(group)
    assert masked is not None
    assert np.isnan(masked[0])
    assert masked[1:] == pytest.approx([-0.5, 0.0])
    penalized = new(service, GRPO, truncated="penalize", truncation_penalty=1.0, scale_rewards=False)
    assert penalized.advantages(group) == pytest.approx([-1 / 6, -1 / 6, 1 / 3])


def test_an_episode_whose_reward_failed_is_left_out(service: ServiceClient) -> None:
    group = group_of((1.0, 2), (float("nan"), 2), (0.0, 2))
    module = new(service, GRPO, scale_rewards=False)
    advantages = module.advantages(group)
    assert advantages is not None
    assert np.isnan(advantages[1])
    assert TrainedGroup(group, advantages).episodes == [0, 2]
    nothing = group_of((float("nan"), 2), (float("nan"), 2))
    for baseline in ("mean", 0.0):
        assert new(service, GRPO, baseline=baseline, scale_rewards=False).advantages(nothing) is None


@pytest.mark.parametrize("kl_in", ["loss", "advantage"])
def test_the_divergence_from_the_base_model(kl_in: Any, service: ServiceClient) -> None:
    group, beta = group_of((1.0, 2), (0.0, 3)), 0.3
    module = new(service, GRPO, kl_coefficient=beta, kl_in=kl_in, scale_rewards=False)
    plain = new(service, GRPO, scale_rewards=False)
    value, gradients, metrics = loss_of(module, group)
    without, without_gradients, _ = loss_of(plain, group)
    trained = TrainedGroup(group, module.advantages(group))
    sampler = service.create_sampling_client(base_model="tiny")
    references = [
        sampler.compute_logprobs(ModelInput.from_ints(each.turns[0].tokens)).result()[1:] for each in group.trajectories
    ]
    assert metrics["policy/kl_reference"] > 0
    for datum, reference in zip(module.with_inputs(trained), references, strict=True):
        assert datum.loss_fn_inputs["reference_logprobs"].to_numpy() == pytest.approx(np.array(reference), abs=1e-4)
    if kl_in == "loss":
        assert value - without == pytest.approx(beta * metrics["policy/kl_reference"], rel=1e-3)
    for new_gradient, old, datum in zip(gradients, without_gradients, trained.data, strict=True):
        mask = datum.loss_fn_inputs["mask"].to_torch() != 0
        assert (new_gradient - old)[~mask].abs().max() == 0
        assert (new_gradient - old)[mask].abs().max() > 0


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": lambda p, r: p - r,
    "k2": lambda p, r: (p - r) ** 2 / 2,
    "k3": lambda p, r: torch.exp(r) / torch.exp(p) - 1 - r + p,
}


@pytest.mark.parametrize("normalize", ["token", "sequence", "sum"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_have_the_gradient_of_the_divergence(
    estimator: Any, normalize: Any, service: ServiceClient
) -> None:
    module = new(service, GRPO, kl_coefficient=0.3, kl_estimator=estimator, normalize=normalize)
    group = group_of((1.0, 2), (1.0, 3), (1.0, 4))
    trained = TrainedGroup(group, module.advantages(group))
    data = module.with_inputs(trained)
    logprobs, terms = [], []
    for datum in data:
        inputs = {name: tensor.to_torch().double() for name, tensor in datum.loss_fn_inputs.items()}
        mask = inputs["mask"] != 0
        logprobs.append((inputs["logprobs"] + 0.1 * torch.arange(len(mask))).requires_grad_())
        terms.append(ESTIMATORS[estimator](logprobs[-1][mask], inputs["reference_logprobs"][mask]))
    loss = module.group_loss(trained, data, logprobs)[0]
    expected = 0.3 * mean_of(group, terms, normalize)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for own, by_hand in zip(torch.autograd.grad(loss, logprobs), torch.autograd.grad(expected, logprobs), strict=True):
        assert by_hand.any()
        torch.testing.assert_close(own, by_hand, rtol=1e-9, atol=0.0)


def test_equal_rewards_have_the_advantages_of_the_penalty(service: ServiceClient) -> None:
    group, settings = group_of((1.0, 2), (1.0, 3)), {"kl_in": "advantage", "kl_coefficient": 0.3}
    module = new(service, GRPO, **settings)
    data = module.with_inputs(TrainedGroup(group, module.advantages(group)))
    inputs = [{name: tensor.to_torch().double() for name, tensor in datum.loss_fn_inputs.items()} for datum in data]
    gaps = [(own["logprobs"] - own["reference_logprobs"])[own["mask"] != 0] for own in inputs]
    for own, gap in zip(inputs, gaps, strict=True):
        expected = -0.3 * (gap - torch.cat(gaps).mean())
        torch.testing.assert_close(own["advantages"][own["mask"] != 0], expected, rtol=1e-5, atol=1e-6)
        assert not own["advantages"][own["mask"] == 0].any()


@pytest.mark.parametrize("kl_in", ["loss", "advantage"])
def test_equal_rewards_of_a_group_in_which_answers_are_left_out(kl_in: Any, service: ServiceClient) -> None:
    group = group_of((1.0, 2), (float("nan"), 2), (1.0, 2), (1.0, 2))
    group.trajectories[2].truncated = True
    module = new(service, GRPO, kl_in=kl_in, kl_coefficient=0.3, truncated="mask")
    assert TrainedGroup(group, module.advantages(group)).episodes == [0, 3]
    with pytest.raises(InvalidInput, match="a group of one has nothing to compare with"):
        module.advantages(group_of((1.0, 2)))


def test_a_sampler_that_differs_is_corrected(service: ServiceClient) -> None:
    group = group_of((1.0, 4), (0.0, 4))
    module = new(service, GRPO, max_ratio=1.05, scale_rewards=False, normalize="sum")
    _, gradients, metrics = loss_of(module, group)
    trained = TrainedGroup(group, module.advantages(group))
    shares = []
    for datum, gradient, old, advantage in zip(
        trained.data, gradients, group.old_logprobs or [], [0.5, -0.5], strict=True
    ):
        mask = datum.loss_fn_inputs["mask"].to_torch() != 0
        ratio = (old - datum.loss_fn_inputs["logprobs"].to_torch())[mask].exp()
        shares.append(ratio > 1.05)
        # The ratio of the loss is 1 when a group is first trained, and the weight at most 1.05.
        assert gradient[mask] == pytest.approx(-advantage * ratio.clamp(max=1.05), rel=1e-4)
    assert metrics["policy/truncated_ratios"] == pytest.approx(torch.cat(shares).float().mean().item())

    bounded = new(service, GRPO, ratio_bounds=(0.9999, 1.0001))
    _, gradients, metrics = loss_of(bounded, group_of((1.0, 4), (0.0, 4)))
    assert metrics["policy/masked_sequences"] == 1
    assert all(not gradient.any() for gradient in gradients)


def test_a_loss_of_ones_own(service: ServiceClient) -> None:
    def clipped(data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        loss, metrics = losses.ppo(data, logprobs, clip_high_threshold=1.1)
        return loss / len(data), {**metrics, "own": torch.ones(())}

    trainer = quiet(max_steps=1)
    trainer.fit(new(service, GRPO, loss=clipped), rollouts())
    assert trainer.callback_metrics["own"] == 1


def test_bad_settings(service: ServiceClient) -> None:
    for settings, message in (
        ({"normalize": "tokens"}, "normalize must be"),
        ({"kl_in": "reward"}, "kl_in must be one of loss, advantage"),
        ({"max_ratio": 0.5}, "max_ratio must be at least 1"),
        ({"ratio_bounds": (1.5, 2.0)}, "ratio_bounds must be"),
        ({"truncated": "drop"}, "truncated must be one of"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be at least 0"),
        ({"kl_coefficient": 0.1, "reference": None}, "kl_coefficient needs a reference"),
        ({"baseline": "median"}, "baseline must be"),
        ({"baseline": 0.0}, "Pass scale_rewards=False"),
    ):
        with pytest.raises(InvalidInput, match=message):
            GRPO("tiny", **settings)
    with pytest.raises(InvalidInput, match="a group of one has nothing to compare with"):
        quiet().fit(new(service, GRPO), rollouts(group_size=1))
    with pytest.raises(RolloutFailed, match="raised ValueError: no such word"):
        quiet().fit(new(service, GRPO), rollouts(rewards=_failing))


def _failing(prompt: str, completion: str) -> float:
    raise ValueError(f"no such word in {len(prompt + completion)} letters")
