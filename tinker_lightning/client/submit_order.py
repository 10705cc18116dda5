"""In which order the requests of a model are posted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from tinker_lightning.client.operations import Operation, perform

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client.session import Session

T = TypeVar("T")


class SubmitOrder:
    """Where the server does not order by number, a request is posted when the one before it was answered."""

    def __init__(self) -> None:
        self._last: asyncio.Event | None = None

    def next(self) -> tuple[asyncio.Event | None, asyncio.Event]:
        """What to wait for before a request is posted, and what to set when it was."""
        before, self._last = self._last, asyncio.Event()
        return before, self._last


# No method, for the traceback of a failure that is kept for the user would keep the client too.
async def perform_all(
    session: Session, turns: SubmitOrder, operations: list[Operation[T]], combine: Callable[[list[T]], T]
) -> T:
    """The results of operations, put together; they are posted at once, or in turn where the server needs that."""
    if session.config.parallel_fwdbwd_chunks:
        return combine(list(await asyncio.gather(*(perform(session, operation) for operation in operations))))
    # No await stands before this line, so that operations queue up in the order they were handed over.
    results = [asyncio.create_task(_in_turn(session, operation, *turns.next())) for operation in operations]
    return combine(list(await asyncio.gather(*results)))


async def _in_turn(
    session: Session, operation: Operation[T], previous: asyncio.Event | None, posted: asyncio.Event
) -> T:
    if previous is not None:
        await previous.wait()
    return await perform(session, operation, on_submitted=posted.set)
