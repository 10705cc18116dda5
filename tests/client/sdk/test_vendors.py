"""Training clients of other vendors and of other versions of the SDK train through `as_backend`.

The stand-ins have the signatures and the futures of the real clients, and train on the embedded trainer: Together 3.1.1
(`together.post_training.tinker`), Fireworks 1.2.30 (`fireworks.training.sdk`), and the SDK from 0.38 on.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch.utils.data import DataLoader

from tests.helpers.client_data import DATA
from tests.helpers.trainers import quiet
from tinker_lightning import RemoteModule
from tinker_lightning.client import as_backend
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.sdk import convert
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.types import AdamParams, collate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from tests.helpers.backends import Backend, BackendName
    from tinker_lightning.client import TrainingClient

FAST = AdamParams(learning_rate=1e-2)


class OperationFuture:
    """A future with `result` and `await`, and nothing else."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self._result = result

    def result(self, timeout: float | None = None) -> Any:
        del timeout
        return self._result()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self._result).__await__()


class Together:
    """Together's client: `forward` masks log-probabilities by weight, and weights are only zero or not."""

    def __init__(self, inner: TrainingClient) -> None:
        self._inner = inner

    def forward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: dict[str, float] | None = None,
        *,
        return_loss_fn_outputs: bool = True,
    ) -> OperationFuture:
        assert return_loss_fn_outputs
        future = self._inner.forward(data, loss_fn, loss_fn_config)

        def masked() -> types.ForwardBackwardOutput:
            outputs = []
            for datum, output in zip(data, future.result().loss_fn_outputs, strict=True):
                kept = output["logprobs"].to_numpy() * (datum.loss_fn_inputs["weights"].to_numpy() != 0)
                outputs.append({"logprobs": types.TensorData.from_numpy(kept.astype(np.float32))})
            return types.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={})

        return OperationFuture(masked)

    def forward_backward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: dict[str, float] | None = None,
        *,
        return_loss_fn_outputs: bool | None = None,
    ) -> OperationFuture:
        del data, loss_fn, loss_fn_config, return_loss_fn_outputs
        raise AssertionError("its weights are only zero or not, so no gradient can be sent by it")

    def forward_backward_custom(
        self, data: list[types.Datum], loss_fn: Any, *, loss_type_input: Literal["logprobs"] = "logprobs"
    ) -> OperationFuture:
        future = self._inner.forward_backward_custom(data, loss_fn, loss_type_input)

        def without_values() -> types.ForwardBackwardOutput:
            future.result()
            return types.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[], metrics={})

        return OperationFuture(without_values)

    def optim_step(self, adam_params: types.AdamParams) -> OperationFuture:
        future = self._inner.optim_step(adam_params)
        return OperationFuture(lambda: future.result() and types.OptimStepResponse())

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> OperationFuture:
        future = self._inner.save_state(name, ttl_seconds, overwrite)
        return OperationFuture(lambda: types.SaveWeightsResponse(path=future.result().path))


class Fireworks(Together):
    """Fireworks' client, whose step and save have arguments of their own."""

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: Any,
        *,
        loss_type_input: Literal["logprobs"] = "logprobs",
        output: Literal["logprobs", "embedding"] = "logprobs",
        pooling: Literal["mean", "last"] = "mean",
        precomputed_forward: types.ForwardBackwardOutput | None = None,
    ) -> OperationFuture:
        assert (output, pooling, precomputed_forward) == ("logprobs", "mean", None)
        return super().forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    def optim_step(
        self,
        adam_params: types.AdamParams,
        grad_accumulation_normalization: str | None = None,
        emit_grad_norm_metrics: bool | str | None = None,
    ) -> OperationFuture:
        assert grad_accumulation_normalization is emit_grad_norm_metrics is None
        return super().optim_step(adam_params)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        *,
        timeout: float | None = None,
    ) -> OperationFuture:
        assert timeout is None
        return super().save_state(name, ttl_seconds, overwrite)


Together.__module__, Fireworks.__module__ = "together.post_training.tinker", "fireworks.training.sdk"


class Newer:
    """A client of the SDK whose every method, `_async` or not, returns one awaitable future."""

    def __init__(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self.model_id = client.model_id
        self.holder = client.holder

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **settings: Any) -> OperationFuture:
            returned = method(*args, **settings)
            return OperationFuture(returned.result if hasattr(returned, "result") else lambda: returned)

        return call


Newer.__module__, Newer.__name__ = "tinker.lib.public_interfaces.training_client", "TrainingClient"


def preference(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss whose gradient has both signs."""
    margin = logprobs[0].mean() - logprobs[1].mean()
    return -torch.nn.functional.logsigmoid(margin), {"margin": margin.item()}


def train(model: Any) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(model.forward_backward_custom(DATA, preference).result().metrics["margin"])
        model.optim_step(FAST).result()
    return losses


@pytest.fixture
def way(ways: Callable[[BackendName], Backend]) -> Backend:
    return ways("in process")


@pytest.mark.parametrize("vendor", [Together, Fireworks])
def test_a_vendors_client_trains_a_custom_loss_exactly(way: Backend, vendor: Any) -> None:  # R5.4, R5.8
    ours, inner = way.model(), way.model()
    assert train(as_backend(vendor(inner))) == train(ours)
    assert way.bits(inner) == way.bits(ours)


def test_a_vendors_client_says_what_it_cannot_do(way: Backend) -> None:  # R5.8
    model = as_backend(Together(way.model()))
    with pytest.raises(Unsupported, match=r"Use a custom loss: tinker_lightning.losses.cross_entropy"):
        model.forward_backward(DATA, "cross_entropy")
    path = model.save_state("here").result().path
    with pytest.raises(Unsupported, match="stays on the server: Together does not delete checkpoints"):
        model.delete_checkpoint(path, missing_ok=True)
    assert not model.can_expire
    with pytest.raises(Unsupported, match="Together does not change when a checkpoint expires"):
        model.set_checkpoint_ttl(path, None)
    with pytest.raises(Unsupported, match="Together does not list checkpoints"):
        model.list_checkpoints()
    settings: dict[str, Any] = {"user_metadata": {"a": "b"}}
    with pytest.raises(Unsupported, match="save_state of this client has no user_metadata"):
        model.save_state("there", **settings).result()


def test_a_client_whose_methods_all_return_one_future(ways: Callable[[BackendName], Backend]) -> None:  # R5.4
    way = ways("official SDK")
    clients = [way.service.create_lora_training_client("tiny", 4, 1).result() for _ in range(2)]
    newer, today = as_backend(Newer(clients[0])), as_backend(clients[1])
    assert train(newer) == train(today)
    assert way.bits(newer) == way.bits(today)
    assert newer.get_info().lora_rank == 4
    assert newer.get_tokenizer()
    assert newer.checkpoint_exists(newer.save_state("one").result().path)
    sampler = newer.save_weights_and_get_sampling_client()
    assert sampler.get_base_model()


class OldParams:
    """AdamW's settings in a version that has no weight decay."""

    def __init__(self, *, learning_rate: float = 1e-4, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8):
        self.values = learning_rate, beta1, beta2, eps


def test_fields_that_a_version_does_not_know_are_left_out_or_raise() -> None:
    assert convert.settings(OldParams, AdamParams(learning_rate=0.5)).values == (0.5, 0.9, 0.95, 1e-12)
    with pytest.raises(Unsupported, match="OldParams of this client has no weight_decay"):
        convert.settings(OldParams, AdamParams(weight_decay=0.1))


class Logging:
    """A wrapper of a user, which hands on what it knows."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def forward(self, *args: Any) -> Any:
        return self._inner.forward(*args)

    def forward_backward(self, *args: Any) -> Any:
        self.calls.append("forward_backward")
        return self._inner.forward_backward(*args)

    def forward_backward_custom(self, *args: Any) -> Any:
        return self._inner.forward_backward_custom(*args)

    def optim_step(self, *args: Any) -> Any:
        return self._inner.optim_step(*args)

    def save_state(self, name: str) -> Any:
        return self._inner.save_state(name)


def test_the_server_behind_a_wrapped_client_is_detected(ways: Callable[[BackendName], Backend]) -> None:  # R5.4
    way = ways("official SDK")
    clients = [way.service.create_lora_training_client("tiny", 4, 1).result() for _ in range(2)]
    logged = Logging(clients[0])
    wrapped = as_backend(Logging(logged))
    assert wrapped.dialect.name == "embedded"
    assert train(wrapped) == train(as_backend(clients[1]))
    assert logged.calls == ["forward_backward"] * 2
    assert wrapped.checkpoint_exists(wrapped.save_state("wrapped").result().path)


def test_an_unknown_client_needs_the_dialect_of_its_server(way: Backend, tmp_path: Path) -> None:  # R5.4
    ours, inner = way.model(), way.model()
    for unknown in (None, "auto"):
        with pytest.raises(Unsupported, match=r"Logging has the methods .* as_backend\(client, dialect=...\)"):
            as_backend(Logging(inner), dialect=unknown)
    measured = tmp_path / "measured.json"  # as `tinker-lightning doctor --save` writes it
    measured.write_text(json.dumps({"dialect": dialect_named("together").but(name="mine").to_dict()}))
    for file in (measured, str(measured)):
        assert as_backend(Logging(inner), dialect=file).dialect.name == "mine"
    assert train(as_backend(Logging(inner), dialect="together")) == train(ours)
    assert way.bits(inner) == way.bits(ours)


def test_something_else_is_no_client() -> None:
    with pytest.raises(InvalidInput, match="object cannot be trained: it has no"):
        as_backend(object())


def test_our_clients_know_their_dialect(way: Backend) -> None:
    with pytest.raises(InvalidInput, match=r"dialect: not supported for a TrainingClient\. Pass it to connect"):
        as_backend(way.model(), dialect="together")
    model = way.model()
    assert as_backend(model, dialect="auto") is model


class Prefers(RemoteModule):
    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return preference(data, logprobs)


@pytest.mark.filterwarnings("default")  # Lightning has advice for loaders as small as this
def test_a_vendors_client_trains_in_lightning(way: Backend) -> None:  # R0.2, R5.4
    trained = []
    for wrap in (Together, lambda model: model):
        inner = way.model()
        loader: Any = DataLoader([*DATA, DATA[0]][:4], 2, collate_fn=collate)  # type: ignore[arg-type]
        trainer = quiet(max_steps=2, accumulate_grad_batches=2, max_epochs=2)
        trainer.fit(Prefers(wrap(inner), learning_rate=1e-2), loader)
        trained.append(way.bits(inner))
    assert trained[0] == trained[1]
