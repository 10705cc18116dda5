"""Cycles per training step on a server that works in clock cycles: ours and the official SDK.

The server runs what was queued when a cycle starts; whatever arrives later waits for the next cycle, as on a shared
cluster. A cycle is longer than the work of a step, so the time of a step divided by the length of a cycle is the number
of cycles that it takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import latency, lightning_step, report
from benchmarks.processes import process, serve_app, tiny_trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.latency import Measure

CYCLE = 3.0


def serve_cycles(folder: str, extended: bool, seconds: float, ready: Callable[[str], None]) -> None:
    """Serves `tiny` in cycles of this many seconds."""
    from tinker_lightning.server import create_app
    from tinker_lightning.server.trainer.jobs import Job

    trainer = tiny_trainer(folder)
    start = time.monotonic()

    def pause(cycle: int) -> None:
        """Occupies the worker until a cycle starts. The next pause queues up behind what has arrived by then."""
        time.sleep(max(0.0, start + cycle * seconds - time.monotonic()))
        following = max(cycle + 1, int((time.monotonic() - start) / seconds) + 1)  # a cycle that took too long
        trainer.scheduler.submit(Job(f"cycle {following}", "cycle", partial(pause, following)))

    trainer.scheduler.submit(Job("cycle 1", "cycle", partial(pause, 1)))
    serve_app(create_app(trainer, extended=extended), ready)


def main() -> None:
    options = report.arguments(__doc__)
    lightning_step.quiet()
    steps = 3 if options.quick else 6
    counts = [1, 8] if options.quick else [1, 4, 8, 16]
    tinker: Measure = partial(lightning_step.with_trainer, "tinker")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = {
            extended: stack.enter_context(process(serve_cycles, f"{folder}/{extended}", extended, CYCLE))
            for extended in (True, False)
        }
        ways: list[tuple[str, Measure, bool, int]] = [
            ('Trainer(strategy="tinker")', tinker, True, steps),
            ('Trainer(strategy="tinker"), no extensions', tinker, False, steps),
            ("client", latency.ours, True, steps),
            ("client, no extensions", latency.ours, False, steps),
            ("official SDK, best loop", latency.sdk_best, False, 2),
            ("official SDK, simple loop", latency.sdk_simple, False, 2),
        ]
        rows: list[dict[str, Any]] = []
        for name, measure, extended, repetitions in ways:
            cycles = {f"N = {n}": statistics.fmean(measure(urls[extended], n, repetitions)) / CYCLE for n in counts}
            rows.append({"loop": name, **cycles})
        print("Cycles per step of N micro-batches with a custom loss:")
        report.show(rows)
        report.write(options.json, {"cycles": rows})
        report.bars(options.plots, "clock_cycles", "cycles per step", rows)


if __name__ == "__main__":
    main()
