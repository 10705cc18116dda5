"""GRPO: advantages, losses, corrections and what is logged."""  # R4.3, R5.9

from __future__ import annotations

import csv
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.backends import reach
from tests.helpers.rollouts import PROMPTS, Stream, code_points, lower, record, rollouts
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import ModelInput, RemoteModule, losses
from tinker_lightning.errors import InvalidInput, RolloutFailed
from tinker_lightning.lightning.callbacks import SampleTable
from tinker_lightning.recipes import GRPO
from tinker_lightning.recipes.trained_group import TrainedGroup
from tinker_lightning.rl import Completion, Group, PromptEnvironment, Trajectory, Turn
from tinker_lightning.rl.tasks import Task

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

pytestmark = SMALL


def group_of(*episodes: tuple[float, int], **settings: Any) -> Group:
    """A group of episodes with a reward and a number of sampled tokens each, after a prompt of three tokens."""
    task = Task(0, 0, 0, PromptEnvironment("prompt", lower))
    draw = np.random.default_rng(0)
    trajectories = [
        Trajectory(
            [
                Turn(
                    [1, 2, 3],
                    Completion(
                        [7 + i] * tokens, draw.normal(-2, 0.5, tokens).astype(np.float32), "stop", f"answer {i}", 0
                    ),
                )
            ],
            reward,
            **settings,
        )
        for i, (reward, tokens) in enumerate(episodes)
    ]
    return Group(task, trajectories, 0)


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
    loss, metrics = module.group_loss(trained, module.with_inputs(trained), logprobs)
    gradients = torch.autograd.grad(loss, logprobs)
    return loss.item(), list(gradients), {name: float(value) for name, value in metrics.items()}


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


class Windows(GRPO):
    """Keeps the gradients of each step, by the last token of the prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.windows: list[list[tuple[list[int], torch.Tensor]]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        del optimizer
        calls = self.lm.handle.remote.window
        self.windows.append(
            [
                (datum.model_input.to_ints(), own)
                for call in calls
                for datum, own in zip(call.datums, call.gradients or (), strict=True)
            ]
        )


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


class Sends(Windows):
    """Counts the groups whose forward pass is sent."""

    sent = 0

    def request(self, *args: Any) -> None:
        self.sent += 1
        super().request(*args)


def test_bits_do_not_depend_on_the_order_of_arrival(service: ServiceClient) -> None:
    """The first prompt's rewards wait for the others', or the last one's do."""
    found = []
    for straggler in (None, PROMPTS[0], PROMPTS[3]):
        module = new(service, Sends)
        given = rollouts(PROMPTS[:4], rewards=Arrivals(straggler, 4, 3 * 4), batch_size=4, shuffle=False)
        quiet(max_steps=2).fit(module, given)
        assert module.sent == 8  # a forward for each group
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
    given, trainer = rollouts(Stream(PROMPTS[:4]), rewards=_constant, refill=1), quiet(max_steps=-1, max_epochs=2)
    trainer.fit(new(service, GRPO), given)
    assert trainer.global_step == 4
    assert given.state_dict()["tasks"]["number"] == 8


def test_a_window_in_which_everything_was_dropped_takes_no_step(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record(monkeypatch)
    module, constant, trainer = new(service, GRPO), rollouts(rewards=_constant), quiet(max_steps=2)
    before = logprobs_of(module)
    trainer.fit(module, constant)
    assert "step" not in events
    assert torch.equal(logprobs_of(module), before)
    assert constant.skipped_steps == trainer.callback_metrics["groups/skipped_steps"] == 2
    assert trainer.callback_metrics["groups/zero_variance"] == 1


def test_what_is_logged(service: ServiceClient) -> None:
    def bonus(prompt: str, completion: str) -> float:
        return float(len(prompt) + len(completion) > 0)

    module, trainer = new(service, GRPO, loss="ppo", kl_coefficient=0.01), quiet(max_steps=2)
    trainer.fit(module, rollouts(rewards=[lower, bonus]))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {
        *("reward", "reward/std", "reward/max", "reward/lower", "reward/bonus", "groups/zero_variance"),
        *("completions/length", "completions/stop_length", "completions/truncated", "policy/entropy"),
        *("policy/kl_reference", "policy/kl_sampler", "clip_fraction", "policy/staleness", "tokens/sampled"),
        *("tokens/trained", "seconds/sampling", "seconds/waiting", "seconds/training", "train_loss", "grad_norm"),
    } <= set(logged)
    assert logged["reward"] == pytest.approx(logged["reward/lower"] + logged["reward/bonus"])
    assert 8 <= logged["tokens/trained"] <= logged["tokens/sampled"] <= 2 * 4 * 4
    assert 4 < logged["policy/entropy"] < 7  # tiny is close to uniform over 261 tokens
    assert logged["tokens/sampled"] < module.lm.handle.remote.tokens.sampled <= 2 * 2 * 4 * 4


def test_a_table_of_answers_with_rewards(service: ServiceClient, tmp_path: Path) -> None:
    table = SampleTable(every_n_steps=2, path=tmp_path / "answers.csv", console=False)
    quiet(max_steps=2, callbacks=[table]).fit(new(service, GRPO), rollouts())
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["prompt"] in PROMPTS
        assert float(row["reward"]) == lower("", row["completion"])
    with pytest.raises(InvalidInput, match="does not train on rollouts"):
        quiet(callbacks=[SampleTable(every_n_steps=1)]).fit(new(service, RemoteModule), loader())


def test_validation_samples_held_out_prompts(service: ServiceClient) -> None:
    module, trainer = new(service, GRPO), quiet(max_steps=2, val_check_interval=2)
    held_out = rollouts(PROMPTS[:3], shuffle=False, group_size=1)
    trained = rollouts(PROMPTS[:4], group_size=2, epochs=2)
    trainer.fit(module, trained, held_out)
    assert {"val_reward", "val_reward/lower", "val_completions/length"} <= trainer.callback_metrics.keys()
    first = trainer.validate(module, rollouts(PROMPTS[:3], shuffle=False, group_size=1), verbose=False)
    assert first[0]["val_reward"] == pytest.approx(float(trainer.callback_metrics["val_reward"]))
    assert "val_reward" in trainer.validate(module, trained, verbose=False)[0]  # though its position is not the start


def test_a_loss_of_ones_own(service: ServiceClient) -> None:
    def clipped(data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        loss, metrics = losses.ppo(data, logprobs, clip_high_threshold=1.1)
        return loss / len(data), {**metrics, "own": torch.ones(())}

    trainer = quiet(max_steps=1)
    trainer.fit(new(service, GRPO, loss=clipped), rollouts())
    assert trainer.callback_metrics["own"] == 1


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo"])
def test_other_servers_compute_a_built_in_loss_in_one_pass(
    loss: str, trainer: EmbeddedTrainer, running: Any, service: ServiceClient
) -> None:
    """The pass is sent with the step; what a server cannot add to its loss is computed here, in two passes."""
    with reach("tcp without extensions", trainer, running) as backend:
        settings: dict[str, Any] = {"loss": loss, "learning_rate": 1e-2}
        model = backend.model()
        module = GRPO(model, **settings)
        quiet(max_steps=2).fit(module, rollouts(group_size=2, rewards=code_points))
        assert [kind for kind in backend.kinds(model) if kind.startswith("forward")] == ["forward_backward"] * 4
        here = new(service, GRPO, **settings)
        quiet(max_steps=2).fit(here, rollouts(group_size=2, rewards=code_points))
        assert logprobs_of(module) == pytest.approx(logprobs_of(here), abs=1e-3)
        if loss == "gspo":
            return
        model = backend.model()
        regularized = GRPO(model, kl_coefficient=0.1, **settings)
        fitted = quiet(max_steps=1)
        fitted.fit(regularized, rollouts())
        assert "forward" in backend.kinds(model)
        assert "policy/kl_reference" in fitted.callback_metrics
        with pytest.raises(InvalidInput, match="adds to its loss, or divides it"):
            quiet(max_steps=1).fit(_on_server(backend.model(), kl_coefficient=0.1), rollouts())


def _on_server(client: Any, **settings: Any) -> GRPO:
    module = GRPO(client, **settings)
    module.route = "builtin"
    return module


def test_bad_settings(service: ServiceClient) -> None:
    for settings, message in (
        ({"normalize": "tokens"}, "normalize must be"),
        ({"kl_in": "reward"}, "kl_in must be one of loss, advantage"),
        ({"max_ratio": 0.5}, "max_ratio must be at least 1"),
        ({"ratio_bounds": (1.5, 2.0)}, "ratio_bounds must be"),
        ({"truncated": "drop"}, "truncated must be one of"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be at least 0"),
        ({"baseline": "median"}, "baseline must be"),
        ({"baseline": 0.0}, "Pass scale_rewards=False"),
    ):
        with pytest.raises(InvalidInput, match=message):
            GRPO("tiny", **settings)
    with pytest.raises(InvalidInput, match="a group of one has nothing to compare with"):
        quiet().fit(new(service, GRPO), rollouts(group_size=1))
    with pytest.raises(RolloutFailed, match="raised ValueError: no such word"):
        quiet().fit(new(service, GRPO), rollouts(rewards=_failing))


def _constant(*_: str) -> float:
    return 1.0


def _failing(prompt: str, completion: str) -> float:
    raise ValueError(f"no such word in {len(prompt + completion)} letters")
