"""What a training step cost on the network and on the server, by the operations and waits of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinker_lightning.client.transport.recording import OperationRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Span = tuple[float, float]

KINDS = {
    "forward": "forward",
    "forward_backward": "backward",
    "optim_step": "optim",
    "sample": "sample",
    "compute_logprobs": "sample",
}
OTHER = "other"


@dataclass(slots=True)
class StepRecord:
    """A step from the end of the one before to its own end.

    Args:
        step: The step under which loggers write it.
        epoch: The epoch.
        start: When the step before ended.
        end: When the step ended here; its requests may still have been in flight.
        operations: What was submitted during the step.
        waits: When the training thread waited for results.
        validations: When validation ran, which does not count.
        tokens: The number of tokens trained.
        earlier: What was submitted before the step and in flight when it began.
    """

    step: int
    epoch: int
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
        found = {"step_s": seconds, "tokens_per_s": self.tokens / seconds}
        for kind in dict.fromkeys(KINDS.values()):
            found |= _mean(f"{kind}_s", [_latency(each) for each in own if kind_of(each) == kind])
        found |= _mean("queue_s", [queues[id(each)] for each in own])
        waited = _length(wait for wait in self.waits if not _within(wait[0], self.validations))
        found["wait_share"] = waited / seconds
        measured = [each for each in own if each.ran is not None]
        if total := math.fsum(map(_latency, measured)):
            network = math.fsum(_latency(each) - queues[id(each)] - (each.ran or 0.0) for each in measured)
            found["network_share"] = found["wait_share"] * max(network, 0.0) / total
        spans = [(max(each.begun, self.start), min(_end(each), self.end)) for each in (*self.earlier, *own)]
        found["in_flight"] = _length(span for span in spans if span[0] < span[1]) / seconds
        found["bytes_sent"] = float(sum(each.bytes_sent for each in own))
        found["bytes_received"] = float(sum(each.bytes_received for each in own))
        return {f"remote/{name}": value for name, value in found.items()}


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
