"""Another engine behind the interface: a bigram model, adapters of one vector, and a sampler that decodes in batches.

Its log-probabilities are `log_softmax(table[token] + bias)`, so every number of a pass is known in closed form.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from torch import Tensor

from tests.helpers.api import Api
from tinker_lightning import AdamParams, Datum, ModelInput, SamplingParams
from tinker_lightning.errors import InvalidInput, ModelNotFound
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.engine.interface import AdapterWeights, SamplingMemory, SamplingRequest
from tinker_lightning.server.trainer import fair_queue
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import ForwardBackwardOutput, SampledSequence, SampleResponse, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from tinker_lightning.client import ServiceClient, TrainingClient
    from tinker_lightning.server.engine.interface import BaseModel, PeftConfig
    from tinker_lightning.types import LoraConfig

TABLE = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


class BiasAdapter:
    """Weights of one tensor, which steps change by plain gradient descent."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.weights = weights
        self.gradient = {"bias": torch.zeros(6)}
        self.token_budget: int | None = None
        self.steps = 0

    def step(self, params: AdamParams) -> dict[str, float]:
        self.weights.tensors["bias"].sub_(params.learning_rate * self.gradient["bias"])
        self.gradient = {"bias": torch.zeros(6)}
        self.steps += 1
        return {"learning_rate": params.learning_rate}

    def training_state(self) -> dict[str, Tensor]:
        return self.gradient

    def load(self, weights: AdapterWeights, training_state: Mapping[str, Tensor] | None) -> None:
        self.weights.tensors["bias"].copy_(weights.tensors["bias"])
        self.gradient = {"bias": torch.zeros(6), **(training_state or {})}


class BatchSampler:
    """Decodes all admitted requests together, whichever it is asked to advance."""

    def __init__(self) -> None:
        self._admitted: dict[str, tuple[SamplingRequest, list[int]]] = {}
        self.batches: list[int] = []  # the number of rows of each step
        self.may_step = threading.Event()
        self.may_step.set()

    def memory(self, *_: Any) -> SamplingMemory:
        return SamplingMemory(prompt=0, sequence=1)

    def admit(self, request: SamplingRequest) -> None:
        if request.prompt.to_ints()[-1] >= 6:
            raise InvalidInput("prompt: not in the vocabulary")
        self._admitted[request.request_id] = request, []

    def step(self, *_: Any) -> dict[str, SampleResponse | Exception]:
        rows = list(self._admitted.values())
        self.batches.append(len(rows))
        assert self.may_step.wait(30)
        last_R = torch.tensor([(tokens or request.prompt.to_ints())[-1] for request, tokens in rows])
        bias_RV = torch.stack([bias_of(request.weights) for request, _ in rows])
        ended: dict[str, SampleResponse | Exception] = {}
        for (request, tokens), token in zip(rows, (TABLE[last_R] + bias_RV).argmax(-1).tolist(), strict=True):
            tokens.append(token)
            if len(tokens) == request.params.max_tokens:
                ended[request.request_id] = SampleResponse([SampledSequence(tokens, None, "length")])
                self.cancel(request.request_id)
        return ended

    def cancel(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)


class Bigram:
    """A model whose logits depend on the last token and on the bias of the adapter."""

    arch, tokenizer, vocab_size, max_context_length, nbytes = "bigram", None, 6, 32, TABLE.nbytes

    def __init__(self, name: str) -> None:
        self.name = self.tokenizer_id = name
        self.sampler = BatchSampler()
        self.lora = self  # the format of its adapters, too

    def weights_bytes(self, _: LoraConfig) -> int:
        return TABLE[0].nbytes

    def check(self, weights: AdapterWeights) -> None:
        assert list(weights.tensors) == ["bias"]

    def import_weights(self, *_: Any) -> AdapterWeights:
        raise InvalidInput("adapters of peft do not fit")

    def peft_config(self, config: LoraConfig) -> PeftConfig:
        return peft.LoraConfig(r=config.rank)

    def new_adapter(self, config: LoraConfig) -> BiasAdapter:
        return BiasAdapter(AdapterWeights(config, {"bias": torch.zeros(6)}))

    def new_sampler(self) -> BatchSampler:
        return self.sampler

    def pass_bytes(self, lengths: Sequence[int], **_: Any) -> int:
        return TABLE[0].nbytes * sum(lengths)

    def kept_bytes(self, *_: Any, **__: Any) -> int:
        return 0

    def start_pass(
        self, adapter: BiasAdapter, data: Sequence[Datum], *_: Any, **options: Any
    ) -> Generator[None, None, ForwardBackwardOutput]:
        outputs, total = [], 0.0
        yield from ()
        for datum in data:
            logprobs, gradient = closed_form(bias_of(adapter.weights), datum)
            outputs.append({"logprobs": TensorData(logprobs)})
            total -= float(weights_of(datum) @ logprobs)
            if not options.get("forward_only"):
                adapter.gradient["bias"] += gradient
        return ForwardBackwardOutput(outputs, {"loss:sum": total})

    def run_batch_pass(self, *_: Any, **__: Any) -> ForwardBackwardOutput:
        raise InvalidInput("only losses of each datum are supported")


class Bigrams:
    """A catalog of one model."""

    def __init__(self, names: Sequence[str] | None, *, on_load: Callable[[BaseModel], object], **_: Any) -> None:
        (name,) = self.names = list(names or ())
        self.model = Bigram(name)
        on_load(self.model)

    def loaded(self, _: str) -> Bigram:
        return self.model

    def resolve(self, name: str) -> str:
        if name not in self.names:
            raise ModelNotFound(name)
        return name

    def get(self, _: str) -> Bigram:
        return self.model


def bias_of(weights: AdapterWeights | None) -> Tensor:
    return torch.zeros(6) if weights is None else weights.tensors["bias"]


def weights_of(datum: Datum) -> Tensor:
    return datum.loss_fn_inputs["weights"].to_torch()


def closed_form(bias: Tensor, datum: Datum) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the targets, and the gradient of `-sum(weights * logprobs)`: softmax minus one-hot."""
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    logprobs_TV = (TABLE[torch.tensor(datum.model_input.to_ints())] + bias).log_softmax(-1)
    gradient_V = weights_of(datum) @ (logprobs_TV.exp() - torch.nn.functional.one_hot(targets, 6))
    return logprobs_TV.gather(-1, targets[:, None])[:, 0], gradient_V


def chain(token: int, bias: Tensor, length: int) -> list[int]:
    """The most likely continuation of a token."""
    tokens = [token]
    for _ in range(length):
        tokens.append(int((TABLE[tokens[-1]] + bias).argmax()))
    return tokens[1:]


DATA = [Datum.from_tokens([0, 1, 2, 3, 4], [0.0, 1.0, 0.5, 1.0, 2.0]), Datum.from_tokens([5, 5, 0])]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer("bigram", data_dir=tmp_path, engine=Bigrams)
    yield trainer
    trainer.close()


@pytest.fixture
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


def bias(trainer: EmbeddedTrainer, client: TrainingClient) -> Tensor:
    _, adapter = trainer.registry.model(client.model_id).ready()
    return adapter.weights.tensors["bias"]


def test_passes_and_steps_have_the_numbers_of_the_engine(service: ServiceClient, trainer: EmbeddedTrainer) -> None:
    client = service.create_lora_training_client("bigram", rank=1)
    expected = [closed_form(torch.zeros(6), datum) for datum in DATA]
    for call in (client.forward, client.forward_backward):
        for tensors, (logprobs, _) in zip(call(DATA, "cross_entropy").result().loss_fn_outputs, expected, strict=True):
            torch.testing.assert_close(tensors["logprobs"].to_torch(), logprobs)

    def loss(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        return -torch.stack([weights_of(d) @ each for d, each in zip(data, logprobs, strict=True)]).sum()

    client.forward_backward_custom(DATA, loss).result()  # by a retained forward, of which this engine keeps nothing
    assert client.optim_step(AdamParams(learning_rate=0.1)).result().metrics == {"learning_rate": 0.1}
    gradient = torch.stack([gradient for _, gradient in expected]).sum(0)
    torch.testing.assert_close(bias(trainer, client), -0.2 * gradient)


def test_a_state_is_saved_and_loaded(service: ServiceClient, trainer: EmbeddedTrainer) -> None:
    client = service.create_lora_training_client("bigram", rank=1)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.5)).result()
    path = client.save_state("here").result().path
    other = service.create_training_client_from_state_with_optimizer(path)
    other.forward(DATA, "cross_entropy").result()
    assert torch.equal(bias(trainer, other), bias(trainer, client))


def test_samples_follow_the_weights_of_their_requests(service: ServiceClient, trainer: EmbeddedTrainer) -> None:
    client = service.create_lora_training_client("bigram", rank=1)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=2.0)).result()
    trained, base = client.save_weights_and_get_sampling_client(), service.create_sampling_client(base_model="bigram")
    expected = [chain(2, bias(trainer, client), 5), chain(2, torch.zeros(6), 5)]
    for sampler, tokens in zip((trained, base), expected, strict=True):
        assert sampler.sample(ModelInput.from_ints([2]), 1, GREEDY).result().sequences[0].tokens == tokens
    assert expected[0] != expected[1]


def test_requests_of_two_sessions_decode_together(trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MIN_SLICE", 0.0)
    model, api = trainer.catalog.get("bigram"), Api(trainer)
    assert isinstance(model, Bigram)
    model.sampler.may_step.clear()
    ids = []
    for token in (2, 3):
        create = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "bigram"}
        sampler = api.post("create_sampling_session", create).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [token]}]}
        body = {**api.sample(sampler, 0, max_tokens=9, temperature=0.0), "prompt": prompt}
        ids.append(api.submit("asample", body))
        while not model.sampler.batches:  # until the first one waits in its first step
            time.sleep(0.001)
    model.sampler.may_step.set()
    drawn = [api.result(request_id)["sequences"][0]["tokens"] for request_id in ids]
    api.close()
    assert drawn == [chain(token, torch.zeros(6), 9) for token in (2, 3)]
    assert max(model.sampler.batches) == 2
    assert len(model.sampler.batches) < 18  # fewer than one after the other


def test_an_invalid_request_is_not_admitted(service: ServiceClient) -> None:
    base = service.create_sampling_client(base_model="bigram")
    with pytest.raises(InvalidInput, match="not in the vocabulary"):
        base.sample(ModelInput.from_ints([9]), 1, GREEDY).result()
