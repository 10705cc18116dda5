"""The settings of papers in docs/rl.md: each row trains, and its loss is the formula of the paper."""  # R4.3, R5.9

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.rollouts import code_points, group_of, rollouts
from tests.helpers.trainers import SMALL, logprobs_of, new, quiet
from tinker_lightning import SamplingParams
from tinker_lightning.recipes import GRPO
from tinker_lightning.recipes.group_loss import TrainedGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

ROW = r"^\| \[(.+)\]\(https://arxiv\.org/abs/[\d.]+\) \| `(.+)` \| `(.+)` \|$"
PAGE = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
PAPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (eval(f"dict({module})"), eval(f"dict({loader})"))  # noqa: S307
    for name, module, loader in re.findall(ROW, PAGE, re.MULTILINE)
}

# Answers of 2, 3, 5 and 4 tokens; the third was cut. The arguments are the log-probabilities of model, sampler and
# reference, and the rewards.
REWARDS = [1.0, 0.0, 0.25, 0.5]
CUT = 2


def clipped(p: Tensor, q: Tensor, advantage: Tensor, high: float = 1.2) -> Tensor:
    ratio = (p - q).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)


def standardized(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def grpo(p: list[Tensor], q: list[Tensor], ref: list[Tensor], rewards: Tensor) -> Tensor:
    kl = [(r - each).exp() - (r - each) - 1 for each, r in zip(p, ref, strict=True)]
    terms = [clipped(*each) for each in zip(p, q, standardized(rewards), strict=True)]
    return -torch.stack([(each - 0.04 * own).mean() for each, own in zip(terms, kl, strict=True)]).mean()


def dr_grpo(p: list[Tensor], q: list[Tensor], _: list[Tensor], rewards: Tensor) -> Tensor:
    return -torch.cat([clipped(*each) for each in zip(p, q, rewards - rewards.mean(), strict=True)]).sum()


def dapo(p: list[Tensor], q: list[Tensor], _: list[Tensor], rewards: Tensor) -> Tensor:
    terms = [clipped(*each, 1.28) for each in zip(p, q, standardized(rewards), strict=True)]
    return -torch.cat([each for i, each in enumerate(terms) if i != CUT]).mean()


def gspo(p: list[Tensor], q: list[Tensor], _: list[Tensor], rewards: Tensor) -> Tensor:
    ratio = torch.stack([(each - old).mean().exp() for each, old in zip(p, q, strict=True)])
    advantages = standardized(rewards)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages).mean()


def cispo(p: list[Tensor], q: list[Tensor], _: list[Tensor], rewards: Tensor) -> Tensor:
    triples = zip(p, q, standardized(rewards), strict=True)
    return -torch.cat([(each - old).exp().clamp(max=5.0).detach() * a * each for each, old, a in triples]).mean()


def rloo(p: list[Tensor], q: list[Tensor], _: list[Tensor], rewards: Tensor) -> Tensor:
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    weights = [(each - old).sum().exp().detach() for each, old in zip(p, q, strict=True)]  # 1 on-policy
    triples = zip(p, weights, rewards - others, strict=True)
    return -torch.stack([weight * a * each.sum() for each, weight, a in triples]).sum()


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "GRPO": grpo,
    "Dr. GRPO": dr_grpo,
    "DAPO": dapo,
    "GSPO": gspo,
    "CISPO": cispo,
    "RLOO": rloo,
}


def test_each_row_has_a_formula() -> None:
    assert PAPERS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("paper", FORMULAS)
def test_a_row_trains(paper: str, service: ServiceClient) -> None:
    module, loader = PAPERS[paper]
    some_end = SamplingParams(max_tokens=4, stop=[chr(i) for i in range(32, 127)])
    small = {"rewards": code_points, "group_size": 4, "batch_size": 4, "sampling_params": some_end}
    model, trainer = new(service, GRPO, **module), quiet(max_steps=2)
    before = logprobs_of(model)
    trainer.fit(model, rollouts(**{**loader, **small}))
    assert model.lm.handle.remote.steps == 2
    assert (logprobs_of(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("paper", FORMULAS)
@pytest.mark.parametrize("seed", [0, 2, 3])  # with 1, GSPO clips every answer
def test_a_row_has_the_gradient_of_the_paper(paper: str, seed: int, service: ServiceClient) -> None:
    module = new(service, GRPO, **PAPERS[paper][0])
    group = group_of(*zip(REWARDS, (2, 3, 5, 4), strict=True))
    group.trajectories[CUT].truncated = True
    trained = TrainedGroup(group, module.advantages(group))
    data = module.with_inputs(trained)
    generator = torch.Generator().manual_seed(seed)
    spread = 0.0 if paper == "RLOO" else 0.3  # the paper samples from the model in training
    logprobs = []
    for datum in data:
        sampled = datum.loss_fn_inputs["logprobs"].to_torch().double()
        noise = torch.randn(len(sampled), generator=generator, dtype=torch.float64)
        logprobs.append((sampled + spread * noise).requires_grad_())
    p: list[Any] = [torch.zeros(1, dtype=torch.float64)] * len(REWARDS)  # of answers that are left out
    q, ref = list(p), list(p)
    for episode, datum, each in zip(trained.episodes, data, logprobs, strict=True):
        inputs = {name: tensor.to_torch().double() for name, tensor in datum.loss_fn_inputs.items()}
        mask = inputs["mask"] != 0
        p[episode], q[episode] = each[mask], inputs["logprobs"][mask]
        ref[episode] = inputs.get("reference_logprobs", inputs["logprobs"])[mask]
    expected = FORMULAS[paper](p, q, ref, torch.tensor(REWARDS, dtype=torch.float64))
    loss = module.group_loss(trained, data, logprobs)[0]
    if paper != "RLOO":  # its value is not the loss of importance sampling, only its gradient
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    found = torch.cat(torch.autograd.grad(loss, logprobs))
    by_hand = torch.cat(torch.autograd.grad(expected, logprobs))
    assert by_hand.any()
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-7)
