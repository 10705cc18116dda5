"""Round trips per training step, measured as the slope of time over latency: ours and the official SDK.

A proxy delays every byte between the client and a server whose work takes the same time whatever the delay. So the
time of a step is a constant plus the round trips on its critical path times the round-trip time. That holds where the
round trip is longer than the work: shorter ones hide behind it, so that the times with a short delay or none are shown,
but are no part of the slope.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np
import tinker
import torch

from benchmarks import report
from benchmarks.processes import process, serve_trainer
from benchmarks.proxy import serve_delays
from tinker_lightning.client import connect
from tinker_lightning.types import AdamParams, Datum

if TYPE_CHECKING:
    from collections.abc import Callable

    Measure: TypeAlias = Callable[[str, int, int], list[float]]

KEY = "tml-benchmark"
IDS = list(range(1, 33))
WARM_UP = 1
RATIO_RTT = 0.1  # at which ratios are computed


def loss_fn(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A custom loss whose value is available as soon as it is computed."""
    loss = -torch.cat(logprobs).mean()
    return loss, {"nll": loss.item()}


def ours(url: str, n: int, steps: int) -> list[float]:
    """Our client, reading the results of a step after sending the next one."""
    data = [Datum.from_tokens(IDS)]
    times = []
    with connect(url, api_key=KEY) as service:
        client = service.create_lora_training_client("tiny", rank=4)
        before: list[Any] = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            futures = [client.forward_backward_custom(data, loss_fn) for _ in range(n)]
            step = client.optim_step(AdamParams(learning_rate=1e-4))
            for future in before:
                future.result()
            before = [*futures, step]
            times.append(time.perf_counter() - start)
        for future in before:
            future.result()
    return times[WARM_UP:]


def sdk_simple(url: str, n: int, steps: int) -> list[float]:
    """The official SDK as in its documentation, waiting for each result."""
    data = [_sdk_datum()]
    times = []
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client(base_model="tiny", rank=4).result()
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            for _ in range(n):
                client.forward_backward_custom(data, loss_fn).result()
            client.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            times.append(time.perf_counter() - start)
    return times[WARM_UP:]


def sdk_best(url: str, n: int, steps: int) -> list[float]:
    """The official SDK with everything overlapped that its public interface allows."""
    data = [_sdk_datum()]
    times = []

    async def train(client: tinker.TrainingClient) -> None:
        before: list[Any] = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            futures = [client.forward_backward_custom(data, loss_fn) for _ in range(n)]
            step = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
            for future in before:
                await future
            before = [*futures, step]
            times.append(time.perf_counter() - start)
        for future in before:  # closing the client with a custom loss under way can wait for ever
            await future

    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        asyncio.run(train(service.create_lora_training_client(base_model="tiny", rank=4).result()))
    return times[WARM_UP:]


def our_start(url: str, _: int, repetitions: int) -> list[float]:
    """Returns the seconds from construction to the first trainable model."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        with connect(url, api_key=KEY) as service:
            service.create_lora_training_client("tiny", rank=4)
            times.append(time.perf_counter() - start)
    return times


def sdk_start(url: str, _: int, repetitions: int) -> list[float]:
    """Returns the seconds from construction to the first trainable model with the official SDK."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
            service.create_lora_training_client(base_model="tiny", rank=4).result()
            times.append(time.perf_counter() - start)
    return times


def round_trips(measure: Measure, urls: dict[float, str], n: int, steps: int) -> dict[str, Any]:
    """Returns the slope of the median time over the round-trip time, and the times in milliseconds."""
    medians = {rtt: statistics.median(measure(url, n, steps)) for rtt, url in urls.items()}
    delayed = [rtt for rtt in urls if rtt > 0][-3:]
    slope, _ = np.polyfit(delayed, [medians[rtt] for rtt in delayed], 1)
    return {"round trips": float(slope)} | {f"{rtt * 1000:.0f} ms": round(t * 1000) for rtt, t in medians.items()}


def ratios(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its time at `RATIO_RTT` relative to ours, and ours relative to the shortest possible.

    A loss that runs on the client needs the work of the server and one round trip.
    """
    delayed = f"{RATIO_RTT * 1000:.0f} ms"
    ours = rows[0]
    shortest = ours["0 ms"] + RATIO_RTT * 1000
    for row in rows:
        of_limit = row is ours
        row[f"at {delayed}: ratio"] = (
            f"{row[delayed] / shortest:.2f} of the limit" if of_limit else f"{row[delayed] / ours[delayed]:.1f} of ours"
        )


def main() -> None:
    options = report.arguments(__doc__)
    rtts = [0.0, RATIO_RTT, 0.4] if options.quick else [0.0, RATIO_RTT, 0.2, 0.4, 0.6]
    counts = [1, 4] if options.quick else [1, 4, 16]
    steps = 5 if options.quick else 15
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = {}
        for extended in (True, False):
            address = urlsplit(stack.enter_context(process(serve_trainer, f"{folder}/{extended}", extended)))
            delays = [rtt / 2 for rtt in rtts]
            proxies = stack.enter_context(process(serve_delays, address.hostname, address.port, delays))
            urls[extended] = dict(zip(rtts, proxies, strict=True))
        ways: list[tuple[str, Measure, bool, int]] = [
            ("ours, our server", ours, True, steps),
            ("ours, no extensions", ours, False, steps),
            ("official SDK, best loop", sdk_best, False, 2),
            ("official SDK, simple loop", sdk_simple, False, 2),
        ]
        rows = []
        for n in counts:
            print(f"A step of {n} micro-batches with a custom loss; milliseconds by round-trip time:", flush=True)
            group = [
                {"client": name, "N": n, **round_trips(measure, urls[extended], n, repetitions)}
                for name, measure, extended, repetitions in ways
            ]
            ratios(group)
            report.show(group)
            report.lines(options.plots, f"latency_{n}", f"milliseconds per step, N = {n}", group, "client")
            rows += group
        print("From construction to a model that can be trained; milliseconds by round-trip time:")
        starts = [
            {"client": name, **round_trips(measure, urls[extended], 0, 3)}
            for name, measure, extended in (
                ("ours, our server", our_start, True),
                ("ours, no extensions", our_start, False),
                ("official SDK", sdk_start, False),
            )
        ]
        report.show(starts)
        report.write(options.json, {"steps": rows, "starts": starts})


def _sdk_datum() -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)},  # type: ignore[dict-item]
    )


if __name__ == "__main__":
    main()
