"""Metrics of training on rollouts, on every route, and the sampled texts that are kept for callbacks."""  # R5.9

from __future__ import annotations

import csv
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.backends import reach
from tests.helpers.rollouts import PROMPTS, code_points, group_of, lower, rollouts
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import Regularizer, RemoteModule
from tinker_lightning.callbacks import SampleTable
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.losses.regularizers import sparsity
from tinker_lightning.recipes import GRPO
from tinker_lightning.recipes.group_loss import TrainedGroup
from tinker_lightning.remote.calls import ServerCall
from tinker_lightning.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

pytestmark = SMALL


def test_what_is_logged(service: ServiceClient, tmp_path: Path) -> None:
    def bonus(prompt: str, completion: str) -> float:
        return float(len(prompt) + len(completion) > 0)

    table = SampleTable(every_n_steps=2, path=tmp_path / "answers.csv", console=False)
    module, trainer = new(service, GRPO, loss="ppo"), quiet(max_steps=2, callbacks=[table])
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
    assert logged["policy/kl_reference"] > 1e-5  # a step away from the base model
    assert logged["tokens/sampled"] < module.lm.handle.remote.tokens.sampled <= 2 * 2 * 4 * 4
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["prompt"] in PROMPTS
        assert float(row["reward"]) == lower("", row["completion"]) + 1
    with pytest.raises(InvalidInput, match="does not train on rollouts"):
        quiet(callbacks=[SampleTable(every_n_steps=1)]).fit(new(service, RemoteModule), loader())


def test_a_reference_that_is_only_logged(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in steps that are logged, and its failure does not end the fit."""
    asked = []

    def unknown(*_: Any) -> Any:
        asked.append(1)
        raise NotFound("no such base model")

    monkeypatch.setattr(TrainingClient, "create_base_sampling_client", unknown)
    quiet(max_steps=1, log_every_n_steps=2).fit(new(service, GRPO), rollouts())
    assert not asked
    trainer = quiet(max_steps=2)
    with pytest.warns(UserWarning, match=r"policy/kl_reference is not logged, .* no such base model"):
        trainer.fit(new(service, GRPO), rollouts())
    assert len(asked) == 1
    assert "policy/kl_reference" not in trainer.callback_metrics
    with pytest.raises(NotFound, match="no such base model"):
        quiet(max_steps=1).fit(new(service, GRPO, kl_coefficient=0.1), rollouts())


def test_validation_samples_held_out_prompts(service: ServiceClient) -> None:
    module, trainer = new(service, GRPO), quiet(max_steps=2, val_check_interval=2)
    held_out = rollouts(PROMPTS[:3], shuffle=False, group_size=1)
    trained = rollouts(PROMPTS[:4], rewards=code_points, group_size=2, epochs=2)
    trainer.fit(module, trained, held_out)
    assert {"val_reward", "val_reward/lower", "val_completions/length"} <= trainer.callback_metrics.keys()
    first = trainer.validate(module, rollouts(PROMPTS[:3], shuffle=False, group_size=1), verbose=False)
    assert first[0]["val_reward"] == pytest.approx(float(trainer.callback_metrics["val_reward"]))
    assert "val_reward" in trainer.validate(module, trained, verbose=False)[0]  # though its position is not the start


def test_other_servers_compute_a_built_in_loss_in_one_pass(
    trainer: EmbeddedTrainer, running: Any, service: ServiceClient
) -> None:
    """The pass is sent with the step; what a server cannot add to its loss is computed here, in two passes."""
    small: dict[str, Any] = {"batch_size": 1, "group_size": 2, "rewards": code_points}
    with reach("tcp without extensions", trainer, running) as backend:
        for steps, loss in ((2, "importance_sampling"), (1, "gspo")):
            settings: dict[str, Any] = {"loss": loss, "learning_rate": 1e-2}
            model, fits = backend.model(), [quiet(max_steps=steps), quiet(max_steps=steps)]
            module, here = GRPO(model, **settings), new(service, GRPO, **settings)
            for fit, one in zip(fits, (module, here), strict=True):
                fit.fit(one, rollouts(**small))
            kinds = [kind for kind in backend.kinds(model) if kind.startswith("forward")]
            assert kinds == ["forward_backward"] * steps
            assert logprobs_of(module) == pytest.approx(logprobs_of(here), abs=1e-3)
            there, local = (
                {name: float(value) for name, value in each.callback_metrics.items() if name.startswith("policy/")}
                for each in fits
            )
            assert {"policy/entropy", "policy/kl_sampler", "policy/kl_reference"} <= there.keys() == local.keys()
            assert there == pytest.approx(local, rel=1e-2, abs=1e-4)
        model, fit = backend.model(), quiet(max_steps=1)
        fit.fit(GRPO(model, kl_coefficient=0.1), rollouts(**small))
        assert "forward" in backend.kinds(model)
        on_server = GRPO(backend.model(), kl_coefficient=0.1)
        on_server.route = "builtin"
        with pytest.raises(InvalidInput, match="adds to its loss, or divides it"):
            quiet(max_steps=1).fit(on_server, rollouts())


def test_log_probabilities_that_a_server_leaves_out(service: ServiceClient) -> None:
    """Our trainer returns 0 where the advantage is 0; such tokens are in no mean, and there is none without tokens."""
    module, trainer = new(service, GRPO), quiet(max_steps=1)
    module.route = "builtin"
    trainer.fit(module, rollouts(group_size=3, rewards=_ranked()))
    assert 4 < float(trainer.callback_metrics["policy/entropy"]) < 7
    assert float(trainer.callback_metrics["policy/kl_sampler"]) < 1e-4
    assert module.server_metrics([(ForwardBackwardOutput([], {}), _call(module))]) == {}


def _ranked() -> Any:
    """Rewards of 0, 1 and 2 in turn: the advantage of the middle one is 0."""
    count = itertools.count()
    return lambda _prompt, _completion: float(next(count) % 3)


def _call(module: GRPO) -> ServerCall:
    trained = TrainedGroup(group_of((1.0, 2), (0.0, 2)), [1.0, -1.0])
    data = module.with_inputs(trained)
    return ServerCall(data, "importance_sampling", {}, about=(trained, data))


@pytest.mark.parametrize("regularized", [False, True])
def test_metrics_of_the_loss_and_of_regularizers_keep_their_names(service: ServiceClient, regularized: bool) -> None:
    def own(_: Any, logprobs: Any) -> Any:
        return torch.cat(logprobs).mean(), {"nll": 7.0, "loss_total": 8.0}

    module = new(service, GRPO, loss=own)
    module.regularizers = [Regularizer(sparsity, 0.1, "sparsity")] if regularized else []
    trainer = quiet(max_steps=1)
    trainer.fit(module, rollouts())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if regularized:
        assert (metrics["base_loss/nll"], metrics["base_loss/loss_total"]) == (7.0, 8.0)
        assert metrics["loss_total"] == pytest.approx(metrics["train_loss"])
    else:
        assert (metrics["nll"], metrics["loss/loss_total"]) == (7.0, 8.0)
