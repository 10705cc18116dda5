"""A client that drives imitated servers with plain HTTP requests, as any client would send them."""

from __future__ import annotations

import itertools
import ssl
from typing import TYPE_CHECKING, Any, get_args

import httpx
import torch

from tests.helpers.engine_passes import run_pass
from tests.helpers.imitations.serving import Kind
from tinker_lightning import Datum
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.helpers.imitations import Imitation
    from tinker_lightning.server import EmbeddedTrainer

KINDS = get_args(Kind)
PROTOBUF = "application/x-protobuf"
# With these, a step subtracts the gradient from the weights.
SUBTRACT = {"learning_rate": 1e12, "beta1": 0.0, "beta2": 0.0, "eps": 1e12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_TLS = ssl.create_default_context()  # which takes longer to make than a request
TEXTS = (b"hello world", b"a longer sentence", b"short")


def datum(text: bytes = b"hello world", weights: Sequence[float] | None = None, **inputs: Sequence[float]) -> Datum:
    """A datum over the bytes of a text; without weights it has none, unless it is for cross-entropy."""
    named: dict[str, Any] = {name: list(values) for name, values in inputs.items()}
    if weights is not None or not inputs:
        named["weights"] = [1.0] * (len(text) - 1) if weights is None else list(weights)
    return Datum.from_targets(list(text[:-1]), list(text[1:]), **named)


def ramp(text: bytes, start: float = -0.5) -> list[float]:
    """Weights of both signs whose sum is not 0."""
    return [start + 0.3 * i for i in range(len(text) - 1)]


class Peer:
    """A client that speaks to an imitation in its dialect, one request at a time."""

    def __init__(self, server: Imitation, trainer: EmbeddedTrainer) -> None:
        self.server = server
        self.kind = server.behavior.name
        # Connections are not used again, because servers close them when they crash.
        limits = httpx.Limits(max_keepalive_connections=0)
        key = {"X-API-Key": "tml-test-key"}
        self.http = httpx.Client(base_url=server.url, headers=key, timeout=30, limits=limits, verify=_TLS)
        self._trainer = trainer
        self._models = itertools.count()
        self.numbers = itertools.count(1)  # of the only model that a test trains
        session: dict[str, Any] = {"tags": [], "sdk_version": "0", "user_metadata": None}
        self.session = self.post("create_session", session).json()["session_id"]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body, **options)

    def poll(self, request_id: str, accept: str = "application/json") -> httpx.Response:
        return self.post("retrieve_future", {"request_id": request_id}, headers={"Accept": accept})

    def result(self, request_id: str) -> Any:
        """The result of an operation that succeeds."""
        while (response := self.poll(request_id)).status_code == 408 or response.json().get("type") == "try_again":
            pass
        assert response.status_code == 200, response.text
        assert "error" not in response.json(), response.text
        return response.json()

    def submit(self, path: str, body: Any) -> str:
        response = self.post(path, body)
        assert response.is_success, response.text
        return str(response.json()["request_id"])

    def run(self, path: str, body: Any) -> Any:
        """The result of a submission."""
        return self.result(self.submit(path, body))

    def create(self, base_model: str = "tiny", **lora: Any) -> str:
        body = {"session_id": self.session, "model_seq_id": next(self._models), "base_model": base_model}
        return str(self.run("create_model", {**body, "lora_config": {"rank": 4, "seed": 7, **lora}})["model_id"])

    def send(
        self,
        model: str,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        *,
        forward_only: bool = False,
        number: int | None = None,
        encoding: str | None = None,
        **config: float | str,
    ) -> httpx.Response:
        """The answer to the submission of a pass."""
        request = ForwardBackwardRequest(
            model, next(self.numbers) if number is None else number, list(data), loss_fn, config, forward_only
        )
        encoding = encoding or self.server.behavior.encoding
        path = "/api/v1/forward" if forward_only and encoding == "json" else "/api/v1/forward_backward"
        if encoding == "protobuf":
            body = protobuf.encode_forward_backward(request)
            return self.http.post(path, content=body, headers={"Content-Type": PROTOBUF})
        body = wire_json.forward_backward_body(request)
        return self.http.post(path, content=body, headers={"Content-Type": "application/json"})

    def train(self, model: str, data: Sequence[Datum], loss_fn: str = "cross_entropy", **options: Any) -> Any:
        """The result of a pass."""
        answer = self.send(model, data, loss_fn, **options)
        assert answer.is_success, answer.text
        return self.result(answer.json()["request_id"])

    def step(self, model: str, **params: float) -> Any:
        body = {"model_id": model, "seq_id": next(self.numbers), "adam_params": {**SUBTRACT, **params}}
        return self.run("optim_step", body)

    def save(self, model: str, name: str = "state") -> str:
        return str(self.run("save_weights", {"model_id": model, "seq_id": next(self.numbers), "path": name})["path"])

    def load(self, model: str, path: str, *, optimizer: bool = False) -> None:
        body = {"model_id": model, "seq_id": next(self.numbers), "path": path, "optimizer": optimizer}
        self.run("load_weights", body)

    def sampler(self, model: str, name: str) -> tuple[str, str]:
        """The path of new sampler weights, and a sampler on them."""
        body = {"model_id": model, "seq_id": next(self.numbers), "path": name}
        path = str(self.run("save_weights_for_sampler", body)["path"])
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "model_path": path}
        return path, str(self.post("create_sampling_session", body).json()["sampling_session_id"])

    def sample(self, sampler: str, number: int = 0, **params: Any) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [104, 101, 108, 108]}]}
        body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "prompt_logprobs": True}
        return self.run("asample", {**body, "sampling_params": {"max_tokens": 3, "temperature": 0.0, **params}})

    def weights(self) -> torch.Tensor:
        """The weights of the newest model, read from the trainer."""
        _, adapter = self._trainer.registry.models()[-1].ready()
        return torch.cat([tensor.detach().flatten() for tensor in adapter.weights.tensors.values()]).clone()

    def plain(self, *data: Datum, loss_fn: str = "cross_entropy") -> torch.Tensor:
        """The gradient of a plain sum for the newest model, by the trainer's own pass."""
        base, adapter = self._trainer.registry.models()[-1].ready()
        copy = LoraAdapter(adapter.weights.copy())
        run_pass(base, copy, data, loss_fn, {})
        return torch.cat([copy.gradient[name].flatten() for name in copy.weights.tensors])

    def logprobs(self, data: Datum) -> list[float]:
        """The log-probabilities of a datum for the newest model, by the trainer's own pass."""
        base, adapter = self._trainer.registry.models()[-1].ready()
        output = run_pass(base, adapter, [data], "cross_entropy", {}, forward_only=True)
        values: list[float] = output.loss_fn_outputs[0]["logprobs"].tolist()
        return values

    def applied(self, model: str, *calls: tuple[Sequence[Datum], str], **params: float) -> torch.Tensor:
        """The gradient that a step after these passes uses."""
        before = self.weights()
        for data, loss_fn in calls:
            self.train(model, data, loss_fn)
        self.step(model, **params)
        return before - self.weights()

    def surrogate(self, text: bytes, gradient: Sequence[float] | None = None) -> Datum:
        """A datum for importance sampling at ratio 1."""
        advantages = ramp(text) if gradient is None else gradient
        return datum(text, advantages=advantages, logprobs=self.logprobs(datum(text)))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two gradients are the same up to rounding."""
    return bool((found - expected).norm() <= 1e-5 * expected.norm())
