"""Distillation: exact gradients from the teacher's probabilities, on and off policy; the divergence falls."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.reference import gathered, lora_model
from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import AdamParams, Datum, SamplingParams, collate, losses
from tinker_lightning.errors import InvalidInput
from tinker_lightning.recipes import Distill
from tinker_lightning.recipes.distill import _leave_one_out_means
from tinker_lightning.rl import RolloutLoader, no_reward
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient, TrainingClient
    from tinker_lightning.recipes.group_loss import TrainedGroup

pytestmark = SMALL

TEXTS = ["an owl sees", "an elk eats", "an ant sits"]


@pytest.fixture(scope="module")
def trainer64(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("distill"), dtype=torch.float64)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def service64(trainer64: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer64) as service:
        yield service


def taught(service: ServiceClient, steps: int = 3) -> TrainingClient:
    """A model that writes the texts."""
    client = service.create_lora_training_client("tiny", rank=4, seed=9)
    data = [Datum.from_tokens(list(text.encode())) for text in TEXTS]
    for _ in range(steps):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=5e-2))
    return client


@pytest.fixture(scope="module")
def teacher(service64: ServiceClient) -> tuple[str, str]:
    client = taught(service64)
    return str(client.save_weights_for_sampler("teacher").result().path), client.model_id


@contextlib.contextmanager
def log_softmax_of(trainer: EmbeddedTrainer, model_id: str, data: list[Datum]) -> Iterator[tuple[list[Tensor], Any]]:
    """What plain torch computes at each position with an adapter, which a gradient needs to be in use."""
    base, adapter = lora_model(trainer, model_id)
    with base.lora.use(adapter.weights) as parameters:
        found = [base.model(input_ids=torch.tensor([d.model_input.to_ints()])).logits[0].log_softmax(-1) for d in data]
        yield found, parameters


def chosen(logprobs_TV: Tensor, datum: Datum) -> Tensor:
    return logprobs_TV.gather(-1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]


def compare_steps(trainer: EmbeddedTrainer, client: TrainingClient, expected: Callable[[], Tensor]) -> list[float]:
    """Returns a list to which each step adds how far its gradient is from the one that autograd computes."""
    differences: list[float] = []
    step = client.optim_step

    def compared(params: Any = None) -> Any:
        client.forward([Datum.from_tokens([1, 2])], "cross_entropy").result()  # behind what was sent before
        got, wanted = gathered(trainer, client.model_id).clone(), expected()
        differences.append(((got - wanted).norm() / wanted.norm()).item())
        return step(params)

    client.optim_step = compared  # type: ignore[method-assign, assignment]
    return differences


def gradient(loss: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(parameters.values()))])


def rollouts(**settings: Any) -> RolloutLoader:
    prompts = [text[:4] for text in TEXTS]
    defaults = {"group_size": 4, "batch_size": 3, "sampling_params": SamplingParams(max_tokens=4), "as_text": True}
    return RolloutLoader(prompts, no_reward, **{**defaults, **settings})


@pytest.mark.parametrize("baseline", ["leave_one_out", None])
def test_on_policy_gradients_are_those_of_autograd(
    trainer64: EmbeddedTrainer, service64: ServiceClient, teacher: tuple[str, str], baseline: Any
) -> None:  # R5.9
    class Recorded(Distill):
        groups: list[TrainedGroup]

        def with_inputs(self, trained: TrainedGroup) -> list[Datum]:
            self.groups.append(trained)
            return super().with_inputs(trained)

    client = service64.create_lora_training_client("tiny", rank=4, seed=1)
    module = Recorded(client, teacher=teacher[0], learning_rate=1e-2, kl_coefficient=0.5, baseline=baseline)
    module.groups = []

    def expected() -> Tensor:
        """The score function times how much less likely the teacher finds a token than the student that sampled it."""
        groups, module.groups = module.groups, []
        data = [(datum, group.tokens * len(groups)) for group in groups for datum in group.data]
        plain = [datum for datum, _ in data]
        with torch.no_grad(), log_softmax_of(trainer64, teacher[1], plain) as (by_teacher, _):
            pass
        with log_softmax_of(trainer64, client.model_id, plain) as (by_student, parameters):
            own = [chosen(p, datum) for p, datum in zip(by_student, plain, strict=True)]
            masks = [datum.loss_fn_inputs["mask"].to_torch() for datum in plain]
            pairs = zip(own, by_teacher, plain, strict=True)
            gaps = [p.detach() - chosen(t, datum) for p, t, datum in pairs]
            terms = []
            for i, (_, tokens) in enumerate(data):
                other = i ^ 1  # the other answer to the same prompt
                mean = (masks[other] * gaps[other]).sum() / masks[other].sum() if baseline else 0.0
                terms.append(0.5 * (masks[i] * (gaps[i] - mean) * own[i]).sum() / tokens)
            return gradient(torch.stack(terms).sum(), parameters)

    differences = compare_steps(trainer64, client, expected)
    quiet(max_steps=2).fit(module, rollouts(group_size=2, batch_size=2))
    assert len(differences) == 2
    assert max(differences) < 1e-5  # the protocol carries float32


@pytest.mark.parametrize("loss", [None, losses.topk_distillation], ids=["cross_entropy", "topk_distillation"])
def test_off_policy_gradients_are_those_of_autograd(
    trainer64: EmbeddedTrainer, service64: ServiceClient, teacher: tuple[str, str], loss: Any
) -> None:  # R5.9
    client = service64.create_lora_training_client("tiny", rank=4, seed=1)
    k = 259 if loss else 8  # all tokens: the full divergence
    module = Distill(client, teacher=teacher[0], top_k=k, loss=loss, learning_rate=1e-2)
    rows = [{"prompt": "Say", "completion": text} for text in TEXTS]
    assert {tuple(d.loss_fn_inputs["target_tokens"].shape[1:]) for d in module.datums(rows)} == {(k,)}
    plain = [
        Datum.from_chat([{"role": "user", "content": "Say"}, {"role": "assistant", "content": text}], module.tokenizer)
        for text in TEXTS
    ]

    def expected() -> Tensor:
        with torch.no_grad(), log_softmax_of(trainer64, teacher[1], plain) as (by_teacher, _):
            pass
        with log_softmax_of(trainer64, client.model_id, plain) as (by_student, parameters):
            terms, positions = [], 0.0
            for datum, t, p in zip(plain, by_teacher, by_student, strict=True):
                weights = datum.loss_fn_inputs["weights"].to_torch()
                top = t.topk(k)
                terms.append(-(weights[:, None] * top.values.softmax(-1) * p.gather(-1, top.indices)).sum())
                positions += float(weights.sum())
            return gradient(torch.stack(terms).sum() / positions, parameters)

    differences = compare_steps(trainer64, client, expected)
    quiet(max_steps=2).fit(module, DataLoader(rows, batch_size=3, collate_fn=collate))  # type: ignore[arg-type]
    assert len(differences) == 2
    assert max(differences) < 1e-5


class Divergence:
    """The mean divergence per sampled token of each step, as it is logged."""

    def __init__(self, service: ServiceClient, steps: int, **settings: Any) -> None:
        import lightning.pytorch as pl

        found: list[float] = []

        class Record(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                found.append(float(trainer.callback_metrics["policy/kl_teacher"]))

        self.found = found
        self.module = new(service, Distill, **settings)
        quiet(max_steps=steps, callbacks=[Record()]).fit(self.module, rollouts(group_size=8, batch_size=4))


@pytest.mark.parametrize("steps", mostly_soak([1, 60], but=[1]))
def test_the_divergence_from_a_teacher_on_another_server_falls(
    steps: int, service: ServiceClient, served: Any
) -> None:  # R5.9
    from tinker_lightning import connect

    with connect(served.url) as other:
        path = taught(other, 3).save_weights_for_sampler("teacher").result().path
        run = Divergence(service, steps, teacher=path, teacher_url=served.url, learning_rate=1e-2)
        run.module.close()
    assert run.found[0] > 0.2
    if steps > 1:
        assert sum(run.found[-10:]) < 0.75 * sum(run.found[:10]), run.found


# A new adapter changes nothing, so the student is the teacher; on some processors to the last bit.
@pytest.mark.filterwarnings("ignore:the gradient of the loss importance_sampling is zero")
def test_the_teacher_may_be_a_base_model_or_a_client(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    for teacher, route in (("tiny", "auto"), (sampler, "builtin")):
        module = new(service, Distill, teacher=teacher)
        module.route = route  # type: ignore[assignment]
        quiet(max_steps=1).fit(module, rollouts(group_size=2, batch_size=1))
        assert abs(float(module.trainer.callback_metrics["policy/kl_teacher"])) < 1e-4


def test_requests_of_a_batch_are_sent_together_and_once(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    events: list[str] = []
    sample = sampler.sample

    class Slow:
        def __init__(self, future: Any) -> None:
            self._future = future

        def result(self) -> Any:
            events.append("read")
            return self._future.result()

    def recorded(*args: Any, **options: Any) -> Any:
        events.append("sent")
        return Slow(sample(*args, **options))

    sampler.sample = recorded  # type: ignore[method-assign]
    module = new(service, Distill, teacher=sampler, top_k=4)
    module.datums(TEXTS)
    assert events == ["sent"] * 3 + ["read"] * 3
    module.datums(TEXTS)
    assert len(events) == 6


def test_mistakes(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="top_k must be at least 1"):
        Distill("tiny", teacher="tiny", top_k=0)
    with pytest.raises(InvalidInput, match="kl_coefficient must be positive"):
        Distill("tiny", teacher="tiny", kl_coefficient=0)
    with pytest.raises(InvalidInput, match="baseline must be 'leave_one_out' or None, got 'mean'"):
        Distill("tiny", teacher="tiny", baseline="mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="teacher must be the name of a base model"):
        Distill("tiny", teacher="")
    sampler = service.create_sampling_client(base_model="tiny")
    with pytest.raises(InvalidInput, match="leave teacher_url out"):
        Distill("tiny", teacher=sampler, teacher_url="http://localhost:1")
    with pytest.raises(InvalidInput, match="Distill trains on rollouts, but the loader yields list"):
        quiet(max_steps=1).fit(new(service, Distill, teacher="tiny"), DataLoader(TEXTS, collate_fn=collate))  # type: ignore[arg-type]

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    monkeypatch.setattr(sampler, "get_tokenizer", Other)
    with pytest.raises(InvalidInput, match="another vocabulary than the student"):
        new(service, Distill, teacher=sampler, top_k=2).datums(TEXTS)


def test_the_baseline_leaves_out_all_tokens_of_an_answer() -> None:
    gaps = [np.array([1.0, 2.0]), np.array([3.0]), np.array([0.0, 6.0, 0.0])]  # an answer of two datums, and another
    assert _leave_one_out_means([0, 0, 1], gaps, [2, 1, 1]) == [6.0, 6.0, 2.0]
    assert _leave_one_out_means([0, 0], gaps[:2], [2, 1]) == [0.0, 0.0]  # a group of one
