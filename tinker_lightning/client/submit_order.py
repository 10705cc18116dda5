"""The order in which the requests of a model are posted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from tinker_lightning.client.operations import Operation, perform

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client.session import Session

T = TypeVar("T")


class SubmitOrder:
    """Posts requests one after another, for servers that do not order them by number."""

    def __init__(self) -> None:
        self._last: asyncio.Event | None = None

    def next(self) -> tuple[asyncio.Event | None, asyncio.Event]:
        """Returns the event to wait for before posting, and the one to set afterwards."""
        before, self._last = self._last, asyncio.Event()
        return before, self._last


# Not a method: the traceback of a failure that is kept for the user would also keep the client alive.
async def perform_all(
    session: Session, turns: SubmitOrder, operations: list[Operation[T]], combine: Callable[[list[T]], T]
) -> T:
    """Runs operations, in parallel or one after another as the server requires; returns the combined result."""
    if session.config.parallel_fwdbwd_chunks:
        return combine(list(await asyncio.gather(*(perform(session, operation) for operation in operations))))
    # There is no await before this line, so that operations queue up in the order of submission.
    results = [asyncio.create_task(_in_turn(session, operation, *turns.next())) for operation in operations]
    return combine(list(await asyncio.gather(*results)))


async def _in_turn(
    session: Session, operation: Operation[T], previous: asyncio.Event | None, posted: asyncio.Event
) -> T:
    if previous is not None:
        await previous.wait()
    return await perform(session, operation, on_submitted=posted.set)
