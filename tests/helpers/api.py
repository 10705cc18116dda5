"""The protocol without a network: requests to the app of a trainer."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx
from typing_extensions import override

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


class Calls:
    """The requests of the protocol; each model's numbers are the caller's business."""

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request; fails the test where no answer comes."""
        raise NotImplementedError

    def last_number(self, model: str) -> int:
        """The highest number that the model has run."""
        raise NotImplementedError

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A JSON body to an endpoint."""
        return self.request("POST", path, json=body, **options)

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


class Api(Calls):
    """Speaks the protocol to a trainer's app, without a network."""

    def __init__(self, trainer: EmbeddedTrainer, api_key: str | Keys | None = None, sent: str = "") -> None:
        self.trainer = trainer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        transport = httpx.ASGITransport(create_app(trainer, api_key=api_key))
        headers = {"x-api-key": sent} if sent else {}
        self._http = httpx.AsyncClient(transport=transport, base_url="http://embedded/api/v1/", headers=headers)

    @override
    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._wait(self._http.request(method, path, **options))

    def together(self, *posts: tuple[str, Any]) -> list[httpx.Response]:
        """JSON bodies to endpoints, all at the same time."""

        async def gather() -> list[httpx.Response]:
            return list(await asyncio.gather(*(self._http.post(path, json=body) for path, body in posts)))

        return self._wait(gather())

    @override
    def last_number(self, model: str) -> int:
        queue = self.trainer.scheduler._queues.get(model)
        return queue.last if queue is not None else 10**9

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


class TcpApi(Calls):
    """The same to a server elsewhere; what a model has run is known from the submissions that were accepted."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", timeout=120)
        self._numbers: dict[str, int] = {}

    @override
    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._http.request(method, path, **options)
        if response.status_code == 200 and b'"request_id"' in response.content:
            model, _, number = str(response.json()["request_id"]).rpartition(":")
            if number.isdecimal():
                self._numbers[model] = max(int(number), self._numbers.get(model, 0))
        return response

    @override
    def last_number(self, model: str) -> int:
        return self._numbers.get(model, 0)

    @override
    def result(self, request_id: str) -> Any:
        body = {"request_id": request_id}
        while (response := self.post("retrieve_future", body)).status_code == 408:
            pass
        return response.json()

    def close(self) -> None:
        self._http.close()
