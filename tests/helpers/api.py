"""The protocol without a network: requests to the app of a trainer."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx

from tests.helpers.reference import bits
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from tinker_lightning.server.keys import Keys

T = TypeVar("T")


class Served(NamedTuple):
    """A server that is reached over TCP."""

    url: str
    data_dir: Path


class Api:
    """Speaks the protocol to a trainer's app, without a network; each model's numbers are the caller's business."""

    def __init__(self, trainer: EmbeddedTrainer, api_key: str | Keys | None = None, sent: str = "") -> None:
        self.trainer = trainer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        transport = httpx.ASGITransport(create_app(trainer, api_key=api_key))
        headers = {"x-api-key": sent} if sent else {}
        self._http = httpx.AsyncClient(transport=transport, base_url="http://embedded/api/v1/", headers=headers)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request; fails the test where no answer comes."""
        return self._wait(self._http.request(method, path, **options))

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A JSON body to an endpoint."""
        return self.request("POST", path, json=body, **options)

    def together(self, *posts: tuple[str, Any]) -> list[httpx.Response]:
        """JSON bodies to endpoints, all at the same time."""

        async def gather() -> list[httpx.Response]:
            return list(await asyncio.gather(*(self._http.post(path, json=body) for path, body in posts)))

        return self._wait(gather())

    def submit(self, path: str, body: Any) -> str:
        """The id under which the result will be found."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    def result(self, request_id: str) -> Any:
        """A result, or the error of an operation that failed."""
        response = self.post("retrieve_future", {"request_id": request_id})
        assert response.status_code == 200, response.text
        return response.json()

    def run(self, path: str, body: Any) -> Any:
        """A result from its request."""
        return self.result(self.submit(path, body))

    def session(self) -> str:
        """A new session."""
        return str(self.post("create_session", {}).json()["session_id"])

    def model(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        """A new model on `tiny`."""
        body = {"session_id": session or self.session(), "model_seq_id": number, "base_model": "tiny"}
        return str(self.run("create_model", {**body, "lora_config": {"rank": 4, **lora}})["model_id"])

    def train(self, model: str, seq: int, text: str = "hello world") -> dict[str, Any]:
        """The body of a forward_backward over one datum."""
        ids = list(text.encode())
        inputs = {
            "target_tokens": {"data": ids[1:], "dtype": "int64", "shape": [len(ids) - 1]},
            "weights": {"data": [1.0] * (len(ids) - 1), "dtype": "float32", "shape": [len(ids) - 1]},
        }
        chunks = [{"type": "encoded_text", "tokens": ids[:-1]}]
        data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
        passes = {"data": data, "loss_fn": "cross_entropy"}
        return {"forward_backward_input": passes, "model_id": model, "seq_id": seq}

    def step(self, model: str, seq: int, **params: float) -> dict[str, Any]:
        """The body of an optim_step."""
        return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01, **params}}

    def sampler(self, session: str | None = None, number: int = 0) -> str:
        """A new sampler on `tiny`."""
        body = {"session_id": session or self.session(), "sampling_session_seq_id": number, "base_model": "tiny"}
        return str(self.post("create_sampling_session", body).json()["sampling_session_id"])

    def sample(self, sampler: str, seq: int, **params: Any) -> dict[str, Any]:
        """The body of an asample."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        options = {"max_tokens": 4, "stop": [], **params}
        return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": options}

    def state(self, model: str) -> dict[str, bytes]:
        """The bits of all that training changes: weights, gathered gradient, moments."""
        return bits(self.trainer, model)

    def close(self) -> None:
        self._wait(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)
