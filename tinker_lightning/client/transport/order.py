"""The order in which the requests of a model are posted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_lightning.client.transport.operations import Operation, perform, renumbered, with_ids
from tinker_lightning.errors import AnswerLost
from tinker_lightning.types import SaveWeightsResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.transport.session import Session

T = TypeVar("T")


class SubmitOrder:
    """Posts requests one after another, for servers that do not order them by number.

    Where numbers are strict, the next request reuses the number of a rejected one. Nothing that changes the model is
    sent after a lost answer, because its gradient is unknown.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self.saved: str | None = None  # the last state that was saved
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
