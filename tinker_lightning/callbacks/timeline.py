"""A timeline of training steps, as a Chrome trace and as a picture."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.transport.recording import OperationRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Span = tuple[float, float]

KINDS = {
    "forward": "forward",
    "forward_backward": "backward",
    "optim_step": "optim",
    "sample": "sample",
    "compute_logprobs": "sample",
}
OTHER = "other"
LANES = (*dict.fromkeys(KINDS.values()), OTHER)
_COLORS = {"forward": "#3b75af", "backward": "#d1702a", "optim": "#3f8f4f", "sample": "#8a5fb0", OTHER: "#6f6f6f"}
_TRAINING, _SERVER = 1, 2  # the processes of the trace


@dataclass(slots=True)
class StepRecord:
    """A step from the end of the one before to its own end.

    Args:
        step: The step under which loggers write it.
        start: When the step before ended.
        end: When the step ended here; its requests may still have been in flight.
        operations: What was submitted during the step.
        waits: When the training thread waited for results.
        validations: When validation ran, which does not count.
        tokens: The number of tokens trained.
        earlier: What was submitted before the step and in flight when it began.
    """

    step: int
    start: float
    end: float
    operations: list[OperationRecord]
    waits: list[Span]
    validations: list[Span] = field(default_factory=list)
    tokens: int = 0
    earlier: list[OperationRecord] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all results have arrived."""
        return all(each.ended is not None for each in self.operations)

    @property
    def left_in_flight(self) -> list[OperationRecord]:
        """The operations, of this step or before it, whose results arrived after its end."""
        return [each for each in (*self.earlier, *self.operations) if _end(each) > self.end]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a complete step."""
        seconds = max(self.end - self.start - _length(self.validations), 1e-9)
        own = [each for each in self.operations if not _within(each.begun, self.validations)]
        queues = queue_times([*self.earlier, *self.operations])
        metrics = {"step_s": seconds, "tokens_per_s": self.tokens / seconds}
        for kind in dict.fromkeys(KINDS.values()):
            metrics |= _mean(f"{kind}_s", [_latency(each) for each in own if kind_of(each) == kind])
        metrics |= _mean("queue_s", [queues[id(each)] for each in own])
        waited = _length(wait for wait in self.waits if not _within(wait[0], self.validations))
        metrics["wait_share"] = waited / seconds
        measured = [each for each in own if each.ran is not None]
        if total := math.fsum(map(_latency, measured)):
            network = math.fsum(_latency(each) - queues[id(each)] - (each.ran or 0.0) for each in measured)
            metrics["network_share"] = metrics["wait_share"] * max(network, 0.0) / total
        spans = [(max(each.begun, self.start), min(_end(each), self.end)) for each in (*self.earlier, *own)]
        metrics["in_flight"] = _length(span for span in spans if span[0] < span[1]) / seconds
        metrics["bytes_sent"] = float(sum(each.bytes_sent for each in own))
        metrics["bytes_received"] = float(sum(each.bytes_received for each in own))
        return {f"remote/{name}": value for name, value in metrics.items()}


def kind_of(operation: OperationRecord) -> str:
    """Returns the lane of an operation: forward, backward, optim, sample or other."""
    return KINDS.get(operation.name, OTHER)


def queue_times(operations: Sequence[OperationRecord]) -> dict[int, float]:
    """Returns how many seconds each operation waited for its turn, by the id of its record.

    A server that does not report it runs the operations of a model in order: until the result of the one before
    arrives, an operation waits.
    """
    times: dict[int, float] = {}
    before: dict[str | None, float] = {}
    for each in operations:
        posted, ended = each.posted or each.begun, _end(each)
        queued = each.queued
        if queued is None:
            queued = max(0.0, min(before.get(each.subject, posted), ended) - posted)
        times[id(each)] = posted - each.begun + queued
        before[each.subject] = ended
    return times


def _latency(operation: OperationRecord) -> float:
    return _end(operation) - operation.begun


def _end(operation: OperationRecord) -> float:
    return operation.begun if operation.ended is None else operation.ended


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values)} if values else {}


def _length(spans: Iterable[Span]) -> float:
    return math.fsum(end - start for start, end in spans)


def _within(time: float, spans: Iterable[Span]) -> bool:
    return any(start <= time < end for start, end in spans)


def operations_of(steps: Sequence[StepRecord]) -> list[OperationRecord]:
    """Returns the operations that were in flight during steps, in the order of their submission."""
    return [*steps[0].earlier, *(one for each in steps for one in each.operations)]


def rows_of(operations: Sequence[OperationRecord]) -> dict[str, list[list[OperationRecord]]]:
    """Returns the operations of each lane in rows, so that operations of one row do not overlap."""
    lanes: dict[str, list[list[OperationRecord]]] = {}
    for each in sorted(operations, key=lambda one: one.begun):
        rows = lanes.setdefault(kind_of(each), [])
        free = next((row for row in rows if (row[-1].ended or 0.0) <= each.begun), None)
        if free is None:
            rows.append([each])
        else:
            free.append(each)
    return {kind: lanes[kind] for kind in LANES if kind in lanes}


def phases(operation: OperationRecord, queue: float) -> dict[str, Span]:
    """Returns when an operation was queued and when it ran, if the server reports it.

    A server reports durations. What remains of the latency, the way there and back, is divided evenly.
    """
    if operation.ran is None or operation.ended is None:
        return {}
    way = max(0.0, operation.ended - operation.begun - queue - operation.ran) / 2
    start = operation.begun + way + queue
    return {"queued": (start - queue, start), "running": (start, min(start + operation.ran, operation.ended))}


def write_json(steps: Sequence[StepRecord], path: Path) -> None:
    """Writes a trace that https://ui.perfetto.dev and `chrome://tracing` open."""
    events = list(_events(steps))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(steps: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    operations = operations_of(steps)
    zero = min([steps[0].start, *(one.begun for one in operations)])

    def span(name: str, pid: int, tid: int, times: Span, **args: Any) -> dict[str, Any]:
        start, end = (round(1e6 * (each - zero), 1) for each in times)
        return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": max(end - start, 0), "args": args}

    def named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}

    yield named("process_name", _TRAINING, 0, "training")
    yield named("process_name", _SERVER, 0, "requests")
    yield named("thread_name", _TRAINING, 1, "training thread")
    for each in steps:
        metrics = {name: round(value, 6) for name, value in each.metrics().items()}
        yield span(f"step {each.step}", _TRAINING, 1, (each.start, each.end), **metrics)
        for validation in each.validations:
            yield span("validation", _TRAINING, 1, validation)
        for wait in each.waits:
            yield span("waiting", _TRAINING, 1, wait)
    queues = queue_times(operations)
    for tid, (kind, row) in enumerate(((kind, row) for kind, rows in rows_of(operations).items() for row in rows), 1):
        yield named("thread_name", _SERVER, tid, kind)
        for one in row:
            args = {"subject": one.subject, "requests": one.requests}
            args |= {"bytes_sent": one.bytes_sent, "bytes_received": one.bytes_received}
            yield span(one.name, _SERVER, tid, (one.begun, one.ended or one.begun), **args)
            for name, times in phases(one, queues[id(one)]).items():
                yield span(name, _SERVER, tid, times)
    changes = sorted([(one.begun, 1) for one in operations] + [(one.ended or one.begun, -1) for one in operations])
    in_flight = 0
    for time, change in changes:
        in_flight += change
        event = {"name": "in flight", "ph": "C", "pid": _SERVER, "ts": round(1e6 * (time - zero), 1)}
        yield {**event, "args": {"operations": in_flight}}


def draw(steps: Sequence[StepRecord], path: Path) -> None:
    """Draws the timeline with matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    operations, zero = operations_of(steps), steps[0].start
    end = max([steps[-1].end, *(one.ended or one.begun for one in operations)])
    unit, factor = ("s", 1.0) if end - zero > 10 else ("ms", 1000.0)
    queues = queue_times(operations)
    rows = rows_of(operations)
    height = {kind: max(1.0, 0.4 * len(rows[kind])) for kind in rows}
    figure = Figure(figsize=(12, 1.9 + 0.55 * (1 + sum(height.values()))), layout="constrained")
    axes = figure.subplots()

    def bar(times: Span, y: float, thickness: float, **style: Any) -> None:
        start, stop = (factor * (each - zero) for each in times)
        axes.barh(y, stop - start, thickness, start, **style)

    top = 0.0
    ticks, labels = [top], ["training\nthread"]
    for each in steps:
        bar((each.start, each.end), top, 0.7, color="#dcdcdc", edgecolor="white", linewidth=0.5)
        for validation in each.validations:
            bar(validation, top, 0.7, color="#b9c7a5")
        for wait in each.waits:
            bar(wait, top, 0.7, color="#c44e52", alpha=0.75)
            axes.axvspan(*(factor * (each - zero) for each in wait), color="#c44e52", alpha=0.07, linewidth=0)
        axes.axvline(factor * (each.end - zero), color="#9a9a9a", linewidth=0.6, linestyle=":")
        share = (each.end - each.start) / (end - zero)
        label = f"step {each.step}" if share > 0.05 else str(each.step) if share > 0.02 else ""
        middle = factor * ((each.start + each.end) / 2 - zero)
        axes.annotate(label, (middle, top - 0.45), ha="center", va="bottom", fontsize=8, color="#444444")
    y = top + 0.5
    for kind, lane in rows.items():
        color, thickness = _COLORS[kind], 0.8 * height[kind] / len(lane)
        for i, row in enumerate(lane):
            middle = y + 0.1 * height[kind] + thickness * (i + 0.5)
            for one in row:
                parts = phases(one, queues[id(one)])
                whole = (one.begun, one.ended or one.begun)
                bar(whole, middle, 0.88 * thickness, color=color, alpha=0.28 if parts else 0.6, linewidth=0)
                if parts:
                    style = {"facecolor": "white", "edgecolor": color, "hatch": "/////", "linewidth": 0}
                    bar(parts["queued"], middle, 0.88 * thickness, **style)
                    bar(parts["running"], middle, 0.88 * thickness, color=color, linewidth=0)
        ticks.append(y + height[kind] / 2)
        labels.append(kind)
        y += height[kind]
    axes.set_xlim(0, factor * (end - zero))
    axes.set_ylim(y + 0.1, top - 0.9)
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    axes.spines[["top", "right", "left"]].set_visible(False)
    waited = sum(each.metrics()["remote/wait_share"] * (each.end - each.start) for each in steps)
    share = waited / (steps[-1].end - zero)
    axes.set_title(
        f"Steps {steps[0].step} to {steps[-1].step}: {share:.0%} of the time waiting", loc="left", fontsize=11
    )
    handles = [
        Patch(color="#dcdcdc", label="training thread works"),
        Patch(color="#c44e52", alpha=0.75, label="training thread waits"),
        Patch(color="#555555", alpha=0.28, label="request on its way"),
        Patch(facecolor="white", edgecolor="#555555", hatch="/////", label="queued"),
        Patch(color="#555555", label="running on the server"),
    ]
    if any(each.validations for each in steps):
        handles.insert(2, Patch(color="#b9c7a5", label="validation"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
