"""Checks of the order of requests, and of requests that are repeated or rejected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinker_lightning.client.dialects import measure
from tinker_lightning.client.passes.request import ServerPass, as_forward
from tinker_lightning.doctor.probe import Check, Finding, NotOffered, reason
from tinker_lightning.errors import InvalidInput, TinkerLightningError
from tinker_lightning.types import ForwardBackwardOutput, OptimStepResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.measure import Scratch
    from tinker_lightning.client.training import TrainingClient
    from tinker_lightning.doctor.probe import Probe

# The time that a request may take whose number the server may not expect.
_SECONDS = 60.0
# The time by which a request is posted before the one with the previous number.
_AHEAD_SECONDS = 0.2
_CALL = measure.at_token(0, 1)


def _order(probe: Probe) -> Finding:
    client = probe.model()
    scratch = probe.measured(client)
    expected = scratch.response([_CALL])
    if not probe.service.session.config.parallel_fwdbwd_chunks:
        data = scratch.datums(_CALL)
        change = scratch.change(lambda: client.forward_backward(data, "cross_entropy"))
        fault = (
            "a step that was posted after a pass runs without its gradient"
            if measure.differs(change, expected)
            else None
        )
        return Finding(fault, "the server announces no concurrent requests, so they were posted one after another")
    client.load_state_with_optimizer(scratch.start).result()
    before = scratch.flat()
    number = _draw(client, 2)
    step = rq.OptimStepRequest(client.model_id, number + 1, scratch.step())
    stepped = probe.post("optim_step", step, OptimStepResponse)
    time.sleep(_AHEAD_SECONDS)
    probe.post("forward_backward", _pass(client, scratch, number), ForwardBackwardOutput).result(_SECONDS)
    stepped.result(_SECONDS)
    if not measure.differs(scratch.flat() - before, expected):
        return Finding()
    return Finding(
        "a step that arrives before the pass with the number before it does not wait for it",
        dialect={"concurrent": False},
    )


def _repeats(probe: Probe) -> Finding:
    client = probe.model()
    scratch = probe.measured(client)
    lost = ""

    def accumulate() -> None:
        nonlocal lost
        request = _pass(client, scratch, _draw(client))
        probe.post("forward_backward", request, ForwardBackwardOutput).result(_SECONDS)
        try:
            probe.post("forward_backward", request, ForwardBackwardOutput).result(_SECONDS)
        except (TinkerLightningError, TimeoutError) as error:
            lost = reason(error)
        client.forward_backward(scratch.datums(other), "cross_entropy").result()

    # With another pass, because the mean over the passes of a step does not change if all of them are repeated.
    other = measure.at_token(1, 6)
    expected = scratch.response([_CALL, other])
    change = scratch.change(accumulate)
    if measure.differs(change, expected):
        return Finding("a repeated pass runs again, and doubles its gradient", dialect={"deduplicates": False})
    if lost:
        return Finding(f"a repeated pass is rejected: {lost}", dialect={"deduplicates": False})
    return Finding(dialect={"deduplicates": True})


def _refused(probe: Probe) -> Finding:
    client = probe.model()
    scratch = probe.measured(client)
    number = _draw(client)
    body = wire_json.dumps({"model_id": client.model_id, "seq_id": number, "adam_params": "malformed"})
    connection = probe.service.session.connection
    try:
        probe.service._channel.wait(connection.send("POST", "/api/v1/optim_step", body, seconds=0))
    except InvalidInput:
        pass
    else:
        raise NotOffered("the server accepts even a malformed request")
    try:
        request = _forward(client, scratch, number)
        probe.post("forward_backward", request, ForwardBackwardOutput).result(_SECONDS)
    except (TinkerLightningError, TimeoutError) as error:
        fault = f"the number of a rejected request cannot be used again: {reason(error)}"
        return Finding(fault, dialect={"numbers": "order"})
    return Finding()


def _draw(client: TrainingClient, count: int = 1) -> int:
    """Returns the next number of a model, and takes it from its client."""
    return client.sender.take_numbers(count)


def _pass(client: TrainingClient, scratch: Scratch, number: int) -> rq.ForwardBackwardRequest:
    return rq.ForwardBackwardRequest(client.model_id, number, scratch.datums(_CALL), "cross_entropy", {})


def _forward(client: TrainingClient, scratch: Scratch, number: int) -> rq.ForwardBackwardRequest:
    sent = as_forward(client.dialect, ServerPass(scratch.datums(_CALL), "cross_entropy"))
    return rq.ForwardBackwardRequest(client.model_id, number, sent.data, sent.loss, sent.config, forward_only=True)


ORDER = Check(
    "order",
    "requests run in the order of their numbers if the server announces concurrency, else of arrival",
    "This client posts the requests of a model one after another if the saved dialect is passed to connect(). The "
    "server should not announce parallel_fwdbwd_chunks.",
    _order,
)
REPEATS = Check(
    "repeats",
    "a repeated request is answered from the record",
    "After a lost answer, this client raises AnswerLost instead of repeating the request. Save states often.",
    _repeats,
)
REFUSED = Check(
    "rejected numbers",
    "the number of a rejected request can be used again",
    "This client continues with the next number. If that fails too, create a new client after a rejected request.",
    _refused,
)
