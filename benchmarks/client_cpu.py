"""CPU time of the client for a batch of 128 datums of 1,024 tokens: ours and the official SDK.

The server is a stub in another process, the same for both, that answers with prepared bytes. The clients run in
processes of their own, by turns; what counts is their processor time, not the time that passes.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import report
from benchmarks.processes import process, serve_app

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from starlette.requests import Request
    from starlette.responses import Response

DATUMS, TOKENS = 128, 1024
KEY = "tml-benchmark"
OPERATIONS = ("forward_backward", "forward_backward_custom")


def serve_stub(extended: bool, ready: Callable[[str], None]) -> None:
    """A server that accepts everything without reading it and answers every pass with the same log-probabilities."""
    import orjson
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from tinker_lightning.server.endpoints.handshake import CLIENT_CONFIG
    from tinker_lightning.types import ForwardBackwardOutput, TensorData
    from tinker_lightning.wire import protobuf

    logprobs = TensorData(np.full(TOKENS, -1.5, np.float32))
    output = ForwardBackwardOutput([{"logprobs": logprobs}] * DATUMS, {"loss:sum": 1.0}, "ArrayRecord")
    result = protobuf.encode_output(output)
    model = {"type": "create_model", "model_id": "m", "request_id": "model"}
    answers: dict[str, Any] = {
        "client/config": CLIENT_CONFIG,
        "client/dynamic_config": {},
        "create_session": {"type": "create_session", "session_id": "s"},
        "get_server_capabilities": {
            "supported_models": [{"model_name": "tiny"}],
            "extensions": ["submit_and_wait"] if extended else [],
        },
        "telemetry": {"status": "accepted"},
        "session_heartbeat": {"type": "session_heartbeat"},
        "create_model": model,
        "get_info": {"type": "get_info", "model_id": "m", "model_data": {"model_name": "tiny"}, "lora_rank": 4},
        "forward_backward": {"request_id": "pass", "model_id": "m"},
    }

    async def answer(request: Request) -> Response:
        body = await request.body()
        name = request.path_params["name"]
        waits = name == "forward_backward" and request.url.path.startswith("/ext/")
        if waits or (name == "retrieve_future" and b"pass" in body):
            return Response(result, media_type="application/x-protobuf")
        return Response(orjson.dumps(answers.get(name, model)), media_type="application/json")

    routes = [Route(f"/{prefix}/v1/{{name:path}}", answer, methods=["GET", "POST"]) for prefix in ("api", "ext")]
    serve_app(Starlette(routes=routes), ready)


def loss_fn(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The cheapest loss that uses every log-probability."""
    import torch

    loss = -torch.cat(logprobs).mean()
    return loss, {"nll": loss.item()}


def ours(url: str, official_datums: bool, repetitions: int) -> dict[str, float]:
    """Returns the CPU milliseconds of each operation with our client."""
    from tinker_lightning.client import connect

    # The stub is not probed for what it speaks: it is to be as cheap for our client as it is for the SDK.
    with connect(url, api_key=KEY, dialect="hosted") as service:
        return _measure(
            service.create_lora_training_client("tiny", rank=4),
            _sdk_datums() if official_datums else _our_datums(),
            repetitions,
        )


def sdk(url: str, official_datums: bool, repetitions: int) -> dict[str, float]:
    """Returns the CPU milliseconds of each operation with the official SDK."""
    import tinker

    assert official_datums
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        return _measure(
            service.create_lora_training_client(base_model="tiny", rank=4).result(), _sdk_datums(), repetitions
        )


def _measure(client: Any, data: list[Any], repetitions: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)  # idle threads of a pool would spin and be counted

    def run(operation: str) -> None:
        if operation == "forward_backward":
            client.forward_backward(data, "cross_entropy").result()
        else:
            client.forward_backward_custom(data, loss_fn).result()

    medians = {}
    for operation in OPERATIONS:
        times = []
        for i in range(3 + repetitions):
            start = time.process_time()
            run(operation)
            if i >= 3:
                times.append((time.process_time() - start) * 1000)
        medians[operation] = statistics.median(times)
    return medians


def _tokens() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 150_000, TOKENS + 1) for _ in range(DATUMS)]


def _our_datums() -> list[Any]:
    from tinker_lightning.types import Datum, ModelInput

    return [
        Datum(
            ModelInput.from_ints(ids[:-1].tolist()),
            {"target_tokens": ids[1:], "weights": np.ones(TOKENS, np.float32)},
        )
        for ids in _tokens()
    ]


def _sdk_datums() -> list[Any]:
    import tinker

    weights = tinker.TensorData.from_numpy(np.ones(TOKENS, np.float32))
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(ids[1:]), "weights": weights},
        )
        for ids in _tokens()
    ]


def main() -> None:
    options = report.arguments(__doc__)
    rounds, repetitions = (1, 10) if options.quick else (5, 30)
    ways: list[tuple[str, Callable[[str, bool, int], dict[str, float]], bool, bool]] = [
        ("official SDK", sdk, True, False),
        ("ours", ours, False, False),
        ("ours, the SDK's datums", ours, True, False),
        ("ours, our server's extensions", ours, False, True),
    ]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in ways}
    with process(serve_stub, False) as plain, process(serve_stub, True) as extended:
        for _ in range(rounds):
            for name, measure, official_datums, is_extended in ways:
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    url = extended if is_extended else plain
                    measured[name].append(pool.submit(measure, url, official_datums, repetitions).result())
    medians = {
        name: {operation: statistics.median(run[operation] for run in runs) for operation in OPERATIONS}
        for name, runs in measured.items()
    }
    base = medians["official SDK"]
    rows = []
    for name, values in medians.items():
        row: dict[str, Any] = {"client": name}
        for operation in OPERATIONS:
            row[f"{operation}, ms"] = values[operation]
            row["of the SDK's" if operation == OPERATIONS[0] else "of the SDK's "] = (
                f"{values[operation] / base[operation]:.0%}"
            )
        rows.append(row)
    print(f"Processor time of the client for {DATUMS} datums of {TOKENS:,} tokens:")
    report.show(rows)
    report.write(options.json, {"milliseconds": medians})


if __name__ == "__main__":
    main()
