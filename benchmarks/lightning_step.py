"""Round trips and CPU time of a `Trainer.fit` step: `strategy="tinker"`, a plain trainer, and loops without Lightning.

Round trips are counted as in `benchmarks.latency`, by the slope of a step's time over the latency of a proxy, where the
latency is longer than the server's work. The overhead of the trainer is the processor time of this process; the server
trains in another.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import latency, report
from benchmarks.latency import IDS, KEY, loss_fn
from benchmarks.processes import process, serve_trainer
from benchmarks.proxy import serve_delays
from tinker_lightning import RemoteAdamW, RemoteLM, RemoteModule, collate
from tinker_lightning.client import connect
from tinker_lightning.types import AdamParams, Datum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.latency import Measure

WARM_UP = 2
OVERHEAD_N = 4


class Module(RemoteModule):
    """The same loss as in the other loops."""

    def loss(self, data: list[Any], logprobs: list[Tensor]) -> Any:
        return loss_fn(data, logprobs)


class OnServer(RemoteModule):
    """A loss that runs on the server."""

    loss = "cross_entropy"  # type: ignore[assignment]


class Local(pl.LightningModule):
    """A model of one number, so that the time of a step is Lightning's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, _: Any) -> Tensor:
        loss = self.weight * 1.0
        self.log("train_loss", loss.detach(), batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Clock(pl.Callback):
    """Records when each step ended."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.ends: list[float] = []
        self._now = now

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.ends.append(self._now())


def fit(module: pl.LightningModule, strategy: str, n: int, steps: int, now: Callable[[], float]) -> list[float]:
    """Returns when each step of a fit ended."""
    clock = Clock(now)
    data = [Datum.from_tokens(IDS)] * (n * (WARM_UP + steps))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=WARM_UP + steps,
        accumulate_grad_batches=n,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(module, DataLoader(data, 1, collate_fn=collate))  # type: ignore[arg-type]
    return clock.ends


def with_trainer(
    strategy: str, url: str, n: int, steps: int, now: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Fits a new remote model."""
    with connect(url, api_key=KEY) as service:
        module = Module(service.create_lora_training_client("tiny", rank=4))
        return _laps(fit(module, strategy, n, steps, now))


def with_server_loss(url: str, n: int, steps: int) -> list[float]:
    """Returns the mean over a fit with a server-side loss, including the wait at its end."""
    with connect(url, api_key=KEY) as service:
        module = OnServer(service.create_lora_training_client("tiny", rank=4))
        ends = fit(module, "tinker", n, steps, time.perf_counter)
        return [(time.perf_counter() - ends[WARM_UP - 1]) / steps]


def with_lightning_alone(_: str, n: int, steps: int, now: Callable[[], float]) -> list[float]:
    """Fits the local model."""
    return _laps(fit(Local(), "auto", n, steps, now))


def with_client(url: str, n: int, steps: int, now: Callable[[], float]) -> list[float]:
    """A loop over the client's calls, reading the results of a step after sending the next one."""
    data, ends = [Datum.from_tokens(IDS)], []
    before: list[Any] = []
    with connect(url, api_key=KEY) as service:
        client = service.create_lora_training_client("tiny", rank=4)
        for _ in range(WARM_UP + steps):
            futures: list[Any] = [client.forward_backward_custom(data, loss_fn) for _ in range(n)]
            futures.append(client.optim_step(AdamParams(learning_rate=1e-4)))
            for future in before:
                future.result()
            before = futures
            ends.append(now())
    return _laps(ends)


def with_torch(url: str, n: int, steps: int, now: Callable[[], float]) -> list[float]:
    """A plain torch loop that sends the forward passes together and then computes the losses."""
    data, ends = [Datum.from_tokens(IDS)], []
    with connect(url, api_key=KEY) as service:
        model = RemoteLM(service.create_lora_training_client("tiny", rank=4))
        optimizer = RemoteAdamW(model.parameters())
        for _ in range(WARM_UP + steps):
            for sent in [model.send(data) for _ in range(n)]:
                loss, _metrics = loss_fn(data, model(sent))
                (loss / n).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(now())
    return _laps(ends)


def _laps(ends: list[float]) -> list[float]:
    """Returns the duration of each step after the warm-up."""
    return [end - start for start, end in pairwise(ends)][WARM_UP - 1 :]


def journeys(urls: dict[bool, dict[float, str]], n: int, steps: int) -> list[dict[str, Any]]:
    """Returns round trips and milliseconds per step of `n` micro-batches for each loop."""
    tinker, plain = partial(with_trainer, "tinker"), partial(with_trainer, "auto")
    ways: list[tuple[str, Measure, bool, int]] = [
        ('Trainer(strategy="tinker")', tinker, True, steps),
        ("Trainer()", plain, True, steps // 2),
        ('Trainer(strategy="tinker"), no extensions', tinker, False, steps),
        ("Trainer(), no extensions", plain, False, steps // 2),
        ("official SDK, best loop", latency.sdk_best, False, 2),
        ("official SDK, simple loop", latency.sdk_simple, False, 2),
        ('Trainer(strategy="tinker"), server\'s loss', with_server_loss, True, 4 * steps),
    ]
    rows = []
    for name, measure, extended, repetitions in ways:
        medians = {rtt: statistics.median(measure(url, n, repetitions)) for rtt, url in urls[extended].items()}
        *_, shorter, longer = medians
        trips = (medians[longer] - medians[shorter]) / (longer - shorter)
        times = {f"{rtt * 1000:.0f} ms": round(seconds * 1000) for rtt, seconds in medians.items()}
        rows.append({"loop": name, "N": n, "round trips": trips, **times})
    return rows


def overhead(url: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Returns the CPU milliseconds per step of this process, and their ratio to the client's own loop."""
    ways: dict[str, Callable[..., list[float]]] = {
        "client": with_client,
        "RemoteLM, plain torch": with_torch,
        "Trainer()": partial(with_trainer, "auto"),
        'Trainer(strategy="tinker")': partial(with_trainer, "tinker"),
        "Trainer(), a local model of one number": with_lightning_alone,
    }
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):  # interleaved, so that noise affects all of them alike
        for name, measure in ways.items():
            measured[name].append(statistics.fmean(measure(url, OVERHEAD_N, steps, now=time.process_time)) * 1000)
    medians = {name: statistics.median(times) for name, times in measured.items()}
    return [
        {"loop": name, "ms of processor time": median, "of the client's": f"{median / medians['client']:.0%}"}
        for name, median in medians.items()
    ]


def quiet() -> None:
    """Silences Lightning, and limits torch to one thread."""
    warnings.simplefilter("ignore")  # Lightning warns about very short runs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # idle threads of a pool would spin and be counted


def main() -> None:
    options = report.arguments(__doc__)
    quiet()
    rtts = [0.0, 0.1, 0.4] if options.quick else [0.0, 0.1, 0.3, 0.6]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls: dict[bool, dict[float, str]] = {}
        for extended in (True, False):
            address = urlsplit(stack.enter_context(process(serve_trainer, f"{folder}/{extended}", extended)))
            delays = [rtt / 2 for rtt in rtts]
            proxies = stack.enter_context(process(serve_delays, address.hostname, address.port, delays))
            urls[extended] = dict(zip(rtts, proxies, strict=True))
        rows = []
        for n in [4] if options.quick else [1, 4, 16]:
            print(f"A step of {n} micro-batches; milliseconds by round-trip time:", flush=True)
            group = journeys(urls, n, 6 if options.quick else 12)
            report.show(group)
            report.lines(options.plots, f"lightning_step_{n}", f"milliseconds per step, N = {n}", group, "loop")
            rows += group
        print(f"A step of {OVERHEAD_N} micro-batches without delay; processor time of this process:")
        costs = overhead(urls[True][0.0], 3 if options.quick else 7, 20 if options.quick else 40)
        report.show(costs)
        report.write(options.json, {"fits": rows, "overhead": costs})


if __name__ == "__main__":
    main()
