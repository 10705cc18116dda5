"""Forwards whose activations the server keeps: the same bits as two passes, whatever is evicted in between."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.client_data import DATA
from tests.helpers.reference import bits
from tinker_lightning import AdamParams, Datum, ModelInput, RemoteAdamW, RemoteLM, TensorData
from tinker_lightning.errors import InvalidInput, MemoryLimitExceeded, NotRetained
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.server.trainer import passes
from tinker_lightning.server.trainer.sizes import dense_bytes
from tinker_lightning.testing import embedded_service
from tinker_lightning.types.requests import ForwardBackwardRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from tests.helpers.backends import Recorded
    from tinker_lightning.client import ServiceClient, TrainingClient
    from tinker_lightning.server import EmbeddedTrainer

FAST = AdamParams(learning_rate=1e-2)
WINDOW = [DATA, DATA[:1], DATA[1:] * 3]


def squares(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    return torch.cat(logprobs).square().mean(), {}


@pytest.fixture
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


def model(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def trained(service: ServiceClient, *, retain: bool = True, between: Callable[[], None] = lambda: None) -> str:
    """Trains a model through `RemoteLM` for three windows; `between` is called between forwards and backwards."""
    client = model(service)
    lm = RemoteLM(client)
    lm.retain = retain
    optimizer = RemoteAdamW(lm.parameters(), lr=1e-2)
    for _ in range(3):
        passes = [lm.send(data) for data in WINDOW]
        for each in passes:
            squares([], lm(each))[0].backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
    client.get_info()
    client.forward(DATA, "cross_entropy").result()
    return client.model_id


def custom(client: TrainingClient) -> str:
    """Trains a model by `forward_backward_custom` on the same windows."""
    for _ in range(3):
        futures = [client.forward_backward_custom(data, squares) for data in WINDOW]
        client.optim_step(FAST).result()
        assert all(
            len(future.result().loss_fn_outputs) == len(data) for future, data in zip(futures, WINDOW, strict=True)
        )
    return client.model_id


def test_retained_and_two_passes_are_equal_to_the_bit(trainer: EmbeddedTrainer, service: ServiceClient) -> None:  # R5.6
    expected = bits(trainer, trained(service, retain=False))
    assert bits(trainer, trained(service)) == expected
    assert bits(trainer, custom(model(service))) == expected


def test_a_backward_sends_the_gradient_only_and_runs_no_second_forward(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.6
    client = model(recorded.service)
    ran: list[int] = []
    hidden_states = CausalLM.hidden_states

    def counted(base: CausalLM, tokens_BT: Tensor) -> Tensor:
        ran.append(len(tokens_BT))
        return hidden_states(base, tokens_BT)

    monkeypatch.setattr(CausalLM, "hidden_states", counted)
    client.forward_backward_custom(DATA, squares)
    client.optim_step(FAST).result()
    assert len(ran) == 1
    by_path = {each.path.rsplit("/", 1)[1]: each for each in recorded.record.requests if each.is_pass}
    assert by_path.keys() == {"retained_forward", "retained_backward"}
    assert all(not datum.model_input.length for datum in by_path["retained_backward"].message.data)
    assert len(by_path["retained_backward"].body) < 0.6 * len(by_path["retained_forward"].body)


def test_evicted_activations_change_no_bit(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    expected = bits(trainer, trained(service))
    draw = random.Random(0)  # noqa: S311

    def evict() -> None:
        for forward in trainer.retained._forwards.values():
            if draw.random() < 0.5:
                forward.take()

    assert bits(trainer, trained(service, between=evict)) == expected
    trainer.retained.limit = 0
    assert bits(trainer, trained(service)) == expected


def test_a_forward_that_the_server_has_forgotten_is_sent_again_under_the_same_number(
    trainer: EmbeddedTrainer, service: ServiceClient
) -> None:
    expected = bits(trainer, trained(service))

    def forget() -> None:
        trainer.retained._forwards.clear()

    assert bits(trainer, trained(service, between=forget)) == expected


def test_a_server_without_the_extension_gets_two_passes(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    expected = bits(trainer, trained(service))
    with embedded_service(trainer, extended=False) as plain:
        assert not model(plain).retains
        assert bits(trainer, trained(plain)) == expected


def test_activations_are_freed_by_a_step_a_load_and_the_end_of_the_session(trainer: EmbeddedTrainer) -> None:
    def kept() -> int:
        return len(trainer.retained._forwards)

    with embedded_service(trainer) as service:
        client = model(service)
        path = client.save_state("start").result().path
        lm = RemoteLM(client)
        lm(DATA)
        assert kept() == 1
        client.optim_step(FAST).result()
        assert kept() == 0
        lm(DATA)
        client.load_state(path).result()
        assert kept() == 0
        with torch.no_grad():
            lm(DATA)
        assert kept() == 0
        lm(DATA)
        assert kept() == 1
    finish = trainer.scheduler.find(f"{client.model_id.partition(':')[0]}:finish")
    finish.future.result(60)
    assert kept() == 0


def test_the_number_of_forwards_without_a_step_is_bounded(
    trainer: EmbeddedTrainer, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MAX_FORWARDS", 3)
    client = model(service)
    lm = RemoteLM(client)
    first = lm.send(DATA)
    for _ in range(3):
        last = lm.send(DATA[:1])
    last.future.result()
    assert len(trainer.retained._forwards) == 3
    squares([], lm(first))[0].backward()
    RemoteAdamW(lm.parameters(), lr=1e-2).step()
    assert client.forward(DATA, "cross_entropy").result()


def test_other_weights_keep_their_own_activations(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    """Models of one shape share the layers of the base model, and their passes alternate."""
    expected = bits(trainer, trained(service))
    other = model(service)
    other.forward_backward(DATA, "cross_entropy").result()
    other.optim_step(AdamParams(learning_rate=0.1)).result()

    def train_other() -> None:
        custom(other)

    assert bits(trainer, trained(service, between=train_other)) == expected


@pytest.mark.parametrize(
    ("config", "count", "said"),
    [
        ({}, 1, "forward must be the number"),
        ({"forward": math.nan}, 1, "forward must be the number .* got nan"),
        ({"forward": math.inf}, 1, "forward must be the number .* got inf"),
        ({"forward": 1.5}, 1, "forward must be the number .* got 1.5"),
        ({"forward": 1.0}, 2, "has 1 datums, got 2"),
    ],
    ids=["no forward", "NaN", "infinite", "a half", "other datums"],
)
def test_a_wrong_backward_raises_and_uses_its_number_up(
    trainer: EmbeddedTrainer, service: ServiceClient, config: dict[str, float], count: int, said: str
) -> None:
    client = model(service)
    RemoteLM(client)(DATA[:1])
    bare = [Datum(ModelInput([]), {"gradient": [1.0]})] * count
    with pytest.raises(InvalidInput, match=said):
        trainer.passes.retained_backward(
            ForwardBackwardRequest(client.model_id, 2, bare, "cross_entropy", dict(config))
        )


def test_a_gradient_of_another_shape_raises(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    client = model(service)
    RemoteLM(client)(DATA[:1])
    sparse = TensorData([1.0], "float32", [1, 1 << 28], [0, 1], [5])  # a gigabyte, if it were made dense
    for inputs, said in (
        ({"gradient": [1.0]}, "datum 0: gradient has 1 entries but target_tokens has"),
        ({"gradient": sparse}, "datum 0: gradient has 268435456 entries"),
        ({}, "datum 0: gradient: missing"),
    ):
        bare = [Datum(ModelInput([]), inputs)]
        with pytest.raises(InvalidInput, match=said):
            trainer.passes.retained_backward(
                ForwardBackwardRequest(client.model_id, 2, bare, "cross_entropy", {"forward": 1.0})
            )


def test_sparse_tensors_are_charged_before_they_are_made_dense(
    trainer: EmbeddedTrainer, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes can declare a gigabyte of targets or gradients."""
    client = model(service)
    targets = TensorData([1], "int64", [1, 1 << 28], [0, 1], [5])
    request = ForwardBackwardRequest(
        client.model_id, 1, [Datum(ModelInput.from_ints([1]), {"target_tokens": targets})], "cross_entropy"
    )
    dense: list[int] = []
    wrap = TensorData.wrap

    def counted(values: Any) -> TensorData:
        dense.append(values.size)
        return wrap(values)

    monkeypatch.setattr(TensorData, "wrap", counted)
    monkeypatch.setattr(trainer.memory, "limit", 1 << 30)
    with pytest.raises(MemoryLimitExceeded, match="the request and its result would take 1 GiB of memory"):
        trainer.passes.retained_forward(request)
    assert not [size for size in dense if size > 1000]


def test_the_weights_that_a_forward_creates_are_charged() -> None:
    bare = Datum(ModelInput.from_ints([1] * 1000), {"target_tokens": [1] * 1000})
    assert dense_bytes([bare]) == dense_bytes([bare.with_inputs(weights=[0.0] * 1000)])


def test_a_repeated_backward_is_answered_from_the_record(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    """The record lasts after the forward was freed, and the gradient is not added twice."""
    client = model(service)
    RemoteLM(client)(DATA[:1])
    length = DATA[0].model_input.length
    bare = [Datum(ModelInput([]), {"gradient": [0.5] * length})]
    request = ForwardBackwardRequest(client.model_id, 2, bare, "cross_entropy", {"forward": 1.0})
    first = trainer.passes.retained_backward(request)
    first.future.result(60)
    trainer.retained.drop(client.model_id)
    assert trainer.passes.retained_backward(request) is first
    with pytest.raises(NotRetained, match=r"forward 1 of .* is not retained"):
        trainer.passes.retained_backward(replace(request, seq_id=3))
