"""Runs calls of the official SDK's clients, converting results to our futures and errors to ours.

Imported only after the user has passed such a client, so that `tinker` stays an extra.
"""

from __future__ import annotations

import itertools
import weakref
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import tinker
from tinker import types as sdk

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import (
    InvalidInput,
    NotATinkerServer,
    NotFound,
    OperationFailed,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
)
from tinker_lightning.threads.background import run_on_thread

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Calls:
    """The calls of one SDK client: results become our futures, and errors become ours."""

    def __init__(self, model_id: str | None) -> None:
        self._model_id = model_id
        self._in_flight: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def submit(self, operation: str, send: Callable[[], Any], convert: Callable[[Any], T]) -> TinkerFuture[T]:
        """Sends with the SDK; returns a future of the converted result, or list of results."""
        source = _source(self._sent(operation, send))
        self._in_flight.add(source)
        return TinkerFuture(source, self._subject(operation)).then(convert, partial(self._error, operation))

    def in_flight(self) -> list[Future[Any]]:
        """Returns the futures of submitted calls that have not ended."""
        return [each for each in self._in_flight if not each.done()]

    def translated(self, operation: str, action: Callable[[], Any]) -> Any:
        """Runs an action and waits if it returns a future; converts its errors to ours."""
        return self._sent(operation, lambda: value(action()))

    def _sent(self, operation: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            raise self._error(operation, error) from error

    def _subject(self, operation: str) -> str:
        return operation if self._model_id is None else f"{operation} of {self._model_id}"

    def _error(self, operation: str, error: BaseException) -> TinkerLightningError:
        request_id = getattr(error, "request_id", None)
        where = self._subject(operation)
        if request_id is not None:
            where += f", request {request_id}"
        which = f" ({where})" if where != operation else ""
        ours = _kind(error)(f"{operation}: {error or type(error).__name__}{which}")
        ours.operation, ours.model_id, ours.request_id = operation, self._model_id, request_id
        ours.__cause__ = error
        return ours


def _source(sent: Any) -> Future[Any]:
    """Returns the future of a call, whichever kind the client returns: the SDK has changed it, and vendors differ."""
    if isinstance(sent, list):
        return _all([_source(each) for each in sent])
    if callable(wrapped := getattr(sent, "future", None)):  # first, because 0.38 warns about calls on what it wraps
        source: Future[Any] = wrapped()
        return source
    if isinstance(sent, Future):
        return sent
    return run_on_thread(sent.result, "a call")  # futures of other vendors cannot call back


def _all(sources: list[Future[Any]]) -> Future[list[Any]]:
    """Returns a future of the results of several calls."""
    gathered: Future[list[Any]] = Future()
    gathered.set_running_or_notify_cancel()
    left = itertools.count(len(sources) - 1, -1)

    def settle(_: object) -> None:
        if next(left) == 0:
            try:
                gathered.set_result([source.result() for source in sources])
            except Exception as error:
                gathered.set_exception(error)

    for source in sources:
        source.add_done_callback(settle)
    return gathered


def value(returned: Any) -> Any:
    """Returns the result of a call that may return a future of it: all of them do from SDK 0.38 on."""
    return returned.result() if callable(getattr(returned, "result", None)) else returned


def _kind(error: BaseException) -> type[TinkerLightningError]:
    if isinstance(error, TinkerLightningError):  # what was asked for is not supported
        return type(error)
    if isinstance(error, tinker.RequestFailedError) and error.category == sdk.RequestErrorCategory.User:
        return InvalidInput
    kinds: dict[type[BaseException], type[TinkerLightningError]] = {
        tinker.AuthenticationError: Unauthorized,
        tinker.PermissionDeniedError: Unauthorized,
        tinker.NotFoundError: NotFound,
        tinker.BadRequestError: InvalidInput,
        tinker.UnprocessableEntityError: InvalidInput,
        tinker.APIConnectionError: ServerUnreachable,
        tinker.APIResponseValidationError: NotATinkerServer,
    }
    return next((ours for theirs, ours in kinds.items() if isinstance(error, theirs)), OperationFailed)
