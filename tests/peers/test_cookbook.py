"""Datums and losses of `tinker-cookbook` give the same numbers through our client as through the official one.

Its code is called as it is installed: its dataset builders and renderer make the datums, its `do_update` makes a step
of DPO with the loss that lives inside it, its helpers compute the metrics. Run it with `tox -e cookbook`.
"""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker_cookbook.distillation.sdft import reverse_kl_custom_loss
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.common import compute_bpb, compute_mean_nll
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

from tests.helpers.cookbook import GOOD, KEY, common, comparisons, conversations, created, write_rows
from tinker_lightning.client import as_backend, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

STEPS = 6
OTHERS = pytest.mark.parametrize("other", ["ours", "as_backend"])
# Nothing at its default, so that a setting which does not arrive shows.
ADAM = tinker.AdamParams(learning_rate=1e-2, beta1=0.85, beta2=0.98, eps=1e-6, weight_decay=0.01, grad_clip_norm=5.0)


class Trained(NamedTuple):
    """All that a client gives: the metrics of each step, and log-probabilities and weights after the last one."""

    history: list[dict[str, Any]]
    logprobs: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


class Clients:
    """Trains models of the same seed on the same server through each of the clients."""

    def __init__(self, data_dir: Path, official: tinker.ServiceClient, ours: ServiceClient) -> None:
        model: dict[str, Any] = {"base_model": "tiny", "rank": 8, "seed": 5}
        self.kinds: dict[str, Callable[[], Any]] = {
            "official": lambda: created(official.create_lora_training_client(**model)),
            "as_backend": lambda: as_backend(official.create_lora_training_client(**model)),
            "ours": lambda: ours.create_lora_training_client(**model),
        }
        self._data_dir = data_dir

    def train(self, steps: Callable[[Any], list[dict[str, Any]]], data: list[tinker.Datum]) -> dict[str, Trained]:
        """What each client makes of the same steps; `data` is looked at afterwards."""
        trained = {}
        for kind, new in self.kinds.items():
            client = new()
            history = steps(client)
            outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
            logprobs = [output["logprobs"].to_torch() for output in outputs]
            trained[kind] = Trained(history, logprobs, self._weights(client.save_state("end").result().path))
        return trained

    def _weights(self, path: str) -> dict[str, torch.Tensor]:
        (summary,) = (
            file for file in self._data_dir.rglob("checkpoint.json") if f'"tinker_path": "{path}"' in file.read_text()
        )
        return {
            f"{file}/{name}": tensor
            for file in ("adapter_model.safetensors", "optimizer.safetensors")
            for name, tensor in load_file(summary.parent / file).items()
        }


@pytest.fixture(scope="module")
def clients(served: Any) -> Iterator[Clients]:
    with tinker.ServiceClient(base_url=served.url, api_key=KEY) as official, connect(served.url, api_key=KEY) as ours:
        tokenizer = ours.create_lora_training_client("tiny", rank=1).get_tokenizer()
        register_tokenizer("tiny", lambda: tokenizer)  # any other name is looked for on the hub
        yield Clients(served.data_dir, official, ours)
        unregister_tokenizer("tiny")


def assert_same(trained: dict[str, Trained], other: str) -> None:
    """Bit for bit: the server is deterministic, so any difference is in what the clients sent or made of the answer."""
    expected, got = trained["official"], trained[other]
    assert got.history == expected.history
    assert [t.tolist() for t in got.logprobs] == [t.tolist() for t in expected.logprobs]
    assert got.weights.keys() == expected.weights.keys()
    assert all(torch.equal(got.weights[name], tensor) for name, tensor in expected.weights.items())


@pytest.fixture(scope="module")
def sft(clients: Clients, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Supervised training as the cookbook's loop does it: its datums, its metrics, its evaluator."""
    file = write_rows(tmp_path_factory.mktemp("sft") / "conversations.jsonl", conversations())
    builder = FromConversationFileBuilder(file_path=file, common_config=common(batch_size=2))
    dataset, _ = builder()
    everything = [datum for i in range(len(dataset)) for datum in dataset.get_batch(i)]

    def steps(client: Any) -> list[dict[str, Any]]:
        history = []
        for step in range(STEPS):
            data = dataset.get_batch(step % len(dataset))
            passed = client.forward_backward(data, loss_fn="cross_entropy")
            stepped = client.optim_step(ADAM).result()
            logprobs = [output["logprobs"] for output in passed.result().loss_fn_outputs]
            weights, targets = ([d.loss_fn_inputs[name] for d in data] for name in ("weights", "target_tokens"))
            nll = {
                "train_mean_nll": compute_mean_nll(logprobs, weights),
                "train_mean_bpb": compute_bpb(logprobs, weights, targets, builder.tokenizer),
            }
            history.append({**passed.result().metrics, **stepped.metrics, **nll})
        evaluator = SamplerNLLEvaluator(everything, tokenizer=builder.tokenizer)
        history.append(asyncio.run(evaluator(created(client.save_weights_and_get_sampling_client()))))
        return history

    return clients.train(steps, everything)


@OTHERS
def test_supervised_training_gives_the_same_numbers(sft: dict[str, Trained], other: str) -> None:  # R5.4
    assert_same(sft, other)


def test_supervised_training_learns(sft: dict[str, Trained]) -> None:
    *history, evaluation = sft["ours"].history
    assert history[-1]["train_mean_nll"] < history[0]["train_mean_nll"] - 0.5
    assert evaluation["test/nll"] < history[0]["train_mean_nll"]


@pytest.fixture(scope="module")
def dpo(clients: Clients, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Preference training by the cookbook's own step, which makes its loss and hands it to the client."""
    folder = tmp_path_factory.mktemp("dpo")
    builder = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=write_rows(folder / "pairs.jsonl", comparisons())),
        common_config=common(batch_size=2),
    )
    dataset, _ = builder()
    config = train_dpo.Config(
        log_path=str(folder),
        model_name="tiny",
        recipe_name="dpo",
        dataset_builder=builder,
        learning_rate=1e-2,
        adam_beta1=ADAM.beta1,
        adam_beta2=ADAM.beta2,
        adam_eps=ADAM.eps,
        eval_every=0,
        infrequent_eval_every=0,
    )

    def steps(client: Any) -> list[dict[str, Any]]:
        history: list[dict[str, Any]] = []
        reference = created(client.save_weights_and_get_sampling_client())
        logger = SimpleNamespace(store=None, log_metrics=lambda metrics, **_: history.append(metrics))
        for step in range(STEPS):
            epoch, batch = divmod(step, len(dataset))
            train_dpo.do_update(
                epoch,
                batch,
                len(dataset),
                STEPS,
                config,
                client,
                reference,
                evaluators=[],
                infrequent_evaluators=[],
                dataset=dataset,
                ml_logger=logger,
                log_path=str(folder),
                tokenizer=builder.tokenizer,
            )
        return [{name: value for name, value in step.items() if "time" not in name} for step in history]

    return clients.train(steps, dataset.get_batch(0))


@OTHERS
def test_dpo_gives_the_same_numbers(dpo: dict[str, Trained], other: str) -> None:  # R5.4
    assert_same(dpo, other)


def test_dpo_learns_the_preference(dpo: dict[str, Trained]) -> None:
    history = dpo["ours"].history
    assert len(history) == STEPS
    assert history[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-4)  # the model is its own reference at first
    assert history[0]["loss:sum"] == history[0]["dpo_loss"]
    last_epoch = history[-2:]
    assert all(step["accuracy"] == 1 and step["dpo_loss"] < history[0]["dpo_loss"] - 0.1 for step in last_epoch)


@pytest.fixture(scope="module")
def reverse_kl(clients: Clients) -> dict[str, Trained]:
    """Distillation with the cookbook's loss over a teacher's K likeliest tokens, so logprobs are `[N, K]`."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for text in GOOD:
        ids = list(text.encode())
        targets_NK = torch.randint(256, (len(ids) - 1, 4), generator=generator)
        weights_NK = torch.rand(targets_NK.shape, generator=generator).softmax(-1)
        weights_NK[:3] = 0  # positions that the cookbook leaves out
        inputs: dict[str, Any] = {"target_tokens": targets_NK, "weights": weights_NK}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))

    def steps(client: Any) -> list[dict[str, Any]]:
        history = []
        for _ in range(STEPS):
            history.append(client.forward_backward_custom(data, reverse_kl_custom_loss).result().metrics)
            client.optim_step(ADAM).result()
        return history

    return clients.train(steps, data)


@OTHERS
def test_a_loss_over_several_targets_gives_the_same_numbers(reverse_kl: dict[str, Trained], other: str) -> None:  # R5.4
    assert_same(reverse_kl, other)


def test_distillation_learns(reverse_kl: dict[str, Trained]) -> None:
    history = reverse_kl["ours"].history
    assert history[-1]["sdft/reverse_kl_mean"] < history[0]["sdft/reverse_kl_mean"]
