"""Servers that cannot sample from the model in training are named, and never trained on."""  # R5.8, R5.9

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.imitations import imitate
from tests.helpers.rollouts import code_points, group_of, rollouts
from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import ServiceClient
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.recipes import GRPO
from tinker_lightning.recipes.group_loss import TrainedGroup
from tinker_lightning.recipes.rollout_metrics import ScoredGroup
from tinker_lightning.recipes.rollout_module import SamplerCheck
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.imitations import Imitation

pytestmark = SMALL


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("samplers"))
    yield trainer
    trainer.close()


@contextlib.contextmanager
def module_on(trainer: EmbeddedTrainer, **changes: Any) -> Iterator[tuple[GRPO, Imitation]]:
    """A module on an imitated TuFT, whose built-in losses run on the server."""
    with imitate("tuft", trainer=trainer, **changes) as server:
        key = server.behavior.api_key
        with ServiceClient(base_url="http://imitated", api_key=key, transport=server.transport) as service:
            client = service.create_lora_training_client("tiny", rank=4, seed=1)
            yield GRPO(client, learning_rate=5e-2, reference=None), server


@pytest.mark.parametrize("samples_base", first_only([True, False]))
def test_a_sampler_without_the_adapter_raises(
    samples_base: bool, trainer: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A sampler without seeds is reported, and trained on."""
    with module_on(trainer, samples_base=samples_base, ignores_sampling_seed=not samples_base) as (module, _):
        raises = pytest.raises(Unsupported, match=r"http://imitated: .* this server samples without the adapter")
        with raises if samples_base else contextlib.nullcontext():
            quiet(max_steps=3).fit(module, rollouts(group_size=2, rewards=code_points))
    reported = [record for record in caplog.records if "samples of the same prompt and seed differ" in record.message]
    assert len(reported) == (not samples_base)
    if not samples_base:
        assert float(module.trainer.callback_metrics["policy/kl_sampler"]) < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lacks": {"save_weights_for_sampler", "forward", "finish"}},
            "GRPO samples from the model that it trains, but http://imitated cannot: save_weights_for_sampler",
        ),
        ({"lacks_sample_logprobs": True}, "no log-probabilities with its samples"),
    ],
    ids=["no sampler", "no log-probabilities"],
)
def test_a_server_without_samplers_raises_before_anything_is_trained(
    changes: dict[str, Any], message: str, trainer: EmbeddedTrainer
) -> None:
    with module_on(trainer, **changes) as (module, server):
        with pytest.raises(Unsupported, match=message):
            quiet().fit(module, rollouts())
        assert not server.ran["forward_backward"] + server.ran["optim_step"]


def test_a_difference_that_is_not_the_base_model(service: ServiceClient) -> None:
    """It is reported once if the weights are the same, and expected if they are not."""
    module = new(service, GRPO)
    data = TrainedGroup(group_of((1.0, 3), (0.0, 2)), [1.0, -1.0]).data
    logprobs = [datum.loss_fn_inputs["logprobs"].to_torch() + 1.0 for datum in data]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version, age in ((0, 0), (1, 1), (3, 1), (7, 2)):
            SamplerCheck(module.lm, "GRPO").observe([ScoredGroup.from_logprobs(data, logprobs, version, age)])
    check = SamplerCheck(module.lm, "GRPO")
    with pytest.warns(UserWarning, match="differ by 1 on average, after 2 optimizer steps, though") as found:
        check.observe([ScoredGroup.from_logprobs(data, logprobs, 2, 0)] * 2)
    assert len(found) == 1


def test_predictions_of_rollouts_raise(service: ServiceClient, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a RolloutLoader is for fit, validate and test"):
        quiet(default_root_dir=tmp_path).predict(new(service, GRPO), rollouts())
