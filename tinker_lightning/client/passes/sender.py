"""Sends passes and other requests of one model: numbered, encoded and posted in their order."""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinker_lightning.client import models
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.passes import preparation
from tinker_lightning.client.passes.request import parts
from tinker_lightning.client.transport.operations import Operation, encode, perform, recorded, renumbered, with_ids
from tinker_lightning.errors import AnswerLost, Unsupported
from tinker_lightning.types import ForwardBackwardOutput, LoadWeightsResponse, SaveWeightsResponse
from tinker_lightning.types import requests as rq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.passes.live_weights import LiveWeights
    from tinker_lightning.client.passes.request import Parts, ServerPass
    from tinker_lightning.client.sdk.sender import SdkSender
    from tinker_lightning.client.server_losses import Losses
    from tinker_lightning.client.transport.channel import Channel
    from tinker_lightning.client.transport.retries import Pause
    from tinker_lightning.client.transport.session import Session

    # The way from one training client to its server, in the Tinker protocol or through a client of another library.
    Sender: TypeAlias = "ProtocolSender | SdkSender"

T = TypeVar("T")


class SubmitOrder:
    """Posts requests one after another, for servers that do not order them by number.

    Where numbers are strict, the next request reuses the number of a rejected one. Nothing that changes the model is
    sent after a lost answer, because its gradient is unknown.
    """

    def __init__(self, saved: str | None = None) -> None:
        self.rejected = 0
        self.saved = saved  # the last state that was saved
        self.lost: AnswerLost | None = None
        self._last: asyncio.Event | None = None

    def next(self) -> tuple[asyncio.Event | None, asyncio.Event]:
        """Returns the event to wait for before posting, and the one to set afterwards."""
        before, self._last = self._last, asyncio.Event()
        return before, self._last


# Not a method: the traceback of a failure that is kept for the user would also keep the client alive.
async def perform_all(
    session: Session,
    order: SubmitOrder,
    operations: list[Operation[T]],
    combine: Callable[[list[T]], T],
    after: Sequence[TinkerFuture[Any]] = (),
) -> T:
    """Runs operations, in parallel or one after another as the server requires; returns the combined result.

    They are posted when the futures in `after` are done, and what was submitted later is not run before them.
    """
    if session.is_concurrent:
        for other in after:
            await other.wait_async()
        return combine(list(await asyncio.gather(*(perform(session, operation) for operation in operations))))
    # There is no await before this line, so that operations queue up in the order of submission.
    results = [
        asyncio.create_task(_in_turn(session, order, operation, *order.next(), after)) for operation in operations
    ]
    return combine(list(await asyncio.gather(*results)))


async def _in_turn(
    session: Session,
    order: SubmitOrder,
    operation: Operation[T],
    previous: asyncio.Event | None,
    posted: asyncio.Event,
    after: Sequence[TinkerFuture[Any]],
) -> T:
    if previous is not None:
        await previous.wait()
    for other in after:
        await other.wait_async()
    if order.lost is not None and operation.name != "forward":
        posted.set()
        reason = f"{operation.name}: not sent, because of an earlier failure: {order.lost}"
        raise with_ids(AnswerLost(reason), operation) from order.lost
    if order.rejected and operation.seq_id is not None:
        operation = renumbered(session.dialect, operation, operation.seq_id - order.rejected)

    def submitted(taken: bool) -> None:
        if not taken and session.dialect.numbers == "strict":
            order.rejected += 1
        posted.set()

    try:
        result = await perform(session, operation, on_submitted=submitted)
    except AnswerLost as error:
        resume = f"Resume from {order.saved}, in a new client." if order.saved else "No state was saved before it."
        order.lost = with_ids(AnswerLost(f"{error} {resume}"), operation, error.request_id)
        raise order.lost from error
    if isinstance(result, SaveWeightsResponse):
        order.saved = result.path
    return result


class ProtocolSender:
    """Sends the requests of one model in the Tinker protocol.

    Args:
        channel: The connection and session.
        losses: The losses of the session that run on the server.
        model_id: The model.
        model: The request that has created it, or one with the same settings.
        find_fault: Measures why the server's `cross_entropy` is not a plain sum; None if it is one.
    """

    waits_for_samples = False

    def __init__(
        self,
        channel: Channel,
        losses: Losses,
        model_id: str,
        model: rq.CreateModelRequest,
        find_fault: Callable[[str], str | None],
    ) -> None:
        self.channel = channel
        self.losses = losses
        self.session = channel.session  # which exists, because the model does
        # Checks a pass and converts it into a request; raises `InvalidInput` if it is invalid.
        self.prepare = partial(preparation.prepare, self.session, losses)
        self.model_id = model_id
        self.model = model
        self._lock = threading.Lock()
        self._last_number = 0
        self._order = SubmitOrder()
        self._in_flight: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._find_fault = find_fault

    @property
    def dialect(self) -> Dialect:
        """The dialect of the server."""
        return self.session.dialect

    @property
    def replaces_model(self) -> bool:
        """Whether a state is loaded into a new model, which takes the place of this one."""
        return self.dialect.loads_first

    @property
    def server(self) -> str:
        """The server's URL, or the embedded trainer."""
        return "the embedded trainer" if self.channel.target.in_process is not None else self.channel.url

    @property
    def storage(self) -> str:
        """Where saved states are: the folder of an embedded trainer, or the server."""
        return self.channel.target.storage

    @property
    def live(self) -> LiveWeights:
        """The models in training on the server, by all clients of this process."""
        return self.channel.live

    @property
    def pause(self) -> Pause | None:
        """What the requests of the session wait for."""
        return self.session.connection.waits.pause

    @property
    def retains(self) -> bool:
        """Whether the server can keep a forward pass until its gradient arrives."""
        return self.session.extensions.retained_forwards

    def check(self) -> None:
        """Raises if the client can no longer be used."""
        self.channel.check_usable()

    def surrogate(self) -> Surrogate:
        """Returns the built-in loss that carries custom losses; measured once on a server of an unknown kind."""
        session = self.session
        if session.dialect.surrogate is None:
            if (fault := self._find_fault(self.model_id)) is not None:
                raise Unsupported(
                    f"custom losses would train wrong on {self.channel.url}: {fault}. Run `tinker-lightning doctor "
                    f"{self.channel.url}` for the details, and pass what it saves to connect(dialect=...)."
                )
            session.dialect = session.dialect.but(surrogate=Surrogate())
        return session.dialect.surrogate or Surrogate()

    def post(
        self, requests: Sequence[ServerPass], *, forward_only: bool = False
    ) -> list[TinkerFuture[ForwardBackwardOutput]]:
        """Sends passes: all of them, or none if one cannot be encoded."""
        return self._start(
            [parts(self.session, self.model_id, request, forward_only=forward_only) for request in requests]
        )

    def load(
        self, name: str, path: str, token: str | None, after: Sequence[TinkerFuture[Any]]
    ) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights into the model, when the futures in `after` are done.

        Where the server loads only first, a model with the weights takes its place when the result arrives.
        """
        if self.replaces_model and self._last_number:
            model = replace(self.model, model_seq_id=self.channel.count("model"))
            with self._lock:
                in_flight = [TinkerFuture(each, "") for each in self._in_flight]
            created = self.channel.run(models.create_again(self.session, model, path, name, token, in_flight))
            return TinkerFuture(created, f"{name} of {self.model_id}").then(partial(self._point_to, path))
        settings = path, name == "load_state_with_optimizer", token
        return self.submit(name, "load_weights", LoadWeightsResponse, rq.LoadWeightsRequest, *settings, after=after)

    def submit(
        self,
        name: str,
        endpoint: str,
        result: type[T],
        request: Callable[..., rq.ModelRequest],
        *args: Any,
        after: Sequence[TinkerFuture[Any]] = (),
        **kw: Any,
    ) -> TinkerFuture[T]:
        """Sends one request; the arguments belong to the request, after its number."""
        dialect = self.dialect

        def operations(number: int) -> list[Operation[T]]:
            return [encode(dialect, endpoint, request(self.model_id, number, *args, **kw), result, name)]

        (future,) = self._start([(operations, lambda results: results[0])], after)
        return future

    def take_numbers(self, count: int) -> int:
        """Takes numbers that the caller uses for requests of its own; returns the first one."""
        with self._lock:
            self._last_number += count
            return self._last_number - count + 1

    def _point_to(self, path: str, created: tuple[str, int]) -> LoadWeightsResponse:
        """Continues with a model that was created from a state, and unloads the earlier one, which is idle."""
        with self._lock:
            earlier = self.model_id
            self.model_id, self._last_number = created
            self._order = SubmitOrder(path)
        self.channel.run(models.unload(self.session, earlier))
        return LoadWeightsResponse(path, self.model_id)

    def _start(self, requests: list[Parts[T]], after: Sequence[TinkerFuture[Any]] = ()) -> list[TinkerFuture[T]]:
        """Numbers, encodes and starts requests under the lock, so that none is lost or overtaken.

        Nothing is sent if one of them cannot be encoded. They are posted when the futures in `after` are done.
        """
        session = self.session
        with self._lock:
            encoded: list[list[Operation[T]]] = []
            last = self._last_number
            for operations, _ in requests:
                encoded.append(recorded(session, operations(last + 1)))
                last += len(encoded[-1])
            self._last_number = last
            futures = [
                TinkerFuture(self.channel.run(perform_all(session, self._order, each, combine, after)), str(each[0]))
                for each, (_, combine) in zip(encoded, requests, strict=True)
            ]
            self._in_flight.update(future._source for future in futures)
            return futures
