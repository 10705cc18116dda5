"""Queues operations in the order of the imitated server and keeps their outcomes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.helpers.imitations.state import Failure, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.imitations.state import Model, State


class Submissions:
    """Runs operations one after another on a thread.

    Attributes:
        futures: The outcomes by request id: a result or a `Failure`.
        ran: How often each operation succeeded, by endpoint.
    """

    def __init__(self, state: State) -> None:
        self.futures: dict[str, Future[Any]] = {}
        self.ran: Counter[str] = Counter()
        self._state = state
        self._behavior = state.behavior
        self._receipts: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "imitation")

    def close(self) -> None:
        """Stops after the running operation."""
        self._pool.shutdown(cancel_futures=True)
        self._state.trainer.finish_session(self._state.session)

    def reject(self, model_id: Any, number: Any) -> None:
        """Frees the number of a request that was rejected, where others wait for it."""
        model = self._state.models.get(model_id)
        if model is None or not isinstance(number, int):
            return
        model.rejected.add(number)
        if self._behavior.order == "number":
            self._take_turn(model, number, lambda: None)

    def submit_numbered(
        self,
        kind: str,
        model: Model,
        number: int | None,
        run: Callable[[], Any],
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Queues a numbered operation of a model, with a check before its number counts; returns the answer."""
        b = self._behavior
        if b.spends_rejected and number in model.rejected:
            raise Refusal(409, f"Sequence conflict: the number {number} was used.")

        def in_turn() -> Any:
            check()
            if b.order != "strict" or number is None:
                return run()
            expected = model.next_number
            if b.doubles_repeats and number < expected:
                return run()
            if number == expected + 1 and model.failed_number == expected:
                model.next_number = number  # a number that has failed may be skipped
            elif number != expected:
                raise Refusal(409, f"Sequence conflict: expected {expected}, got {number}.")
            model.failed_number = number
            outcome = run()
            if not isinstance(outcome, Failure):
                model.failed_number = None
                model.next_number += 1
            return outcome

        key = None if number is None or b.order == "strict" else (model.model_id, number)
        turn = (model, number) if b.order == "number" and number is not None else None
        return self.submit(kind, key, in_turn, model_id=model.model_id, turn=turn)

    def submit(
        self,
        kind: str,
        key: tuple[Any, ...] | None,
        run: Callable[[], Any],
        *,
        model_id: str | None = None,
        turn: tuple[Model, int] | None = None,
    ) -> dict[str, Any]:
        """Queues an operation and returns the answer; submissions with the same key are repeats."""
        b = self._behavior
        future: Future[Any] = Future()

        def task() -> None:
            time.sleep(b.delay)
            try:
                outcome = run()
                self.ran[kind] += not isinstance(outcome, Failure)
                future.set_result(outcome)
            except Refusal as error:
                future.set_result(Failure(str(error.detail), error.status))
            except Exception as error:  # a real server reports any error as the result, too
                future.set_result(Failure(str(error)))

        with self._lock:
            if key is not None and key in self._receipts and not b.doubles_repeats:
                return self._receipts[key]
            request_id = self._state.new_id(b.future_id)
            self.futures[request_id] = future
            receipt: dict[str, Any] = {name: text.format(request_id=request_id) for name, text in b.receipt.items()}
            receipt["request_id"] = request_id
            if model_id is not None and b.receipt_names_model:
                receipt["model_id"] = model_id
            if key is not None:
                self._receipts[key] = receipt
            if turn is None:
                self._pool.submit(task)
        if turn is not None:
            self._take_turn(*turn, task)
        return receipt

    def _take_turn(self, model: Model, number: int, task: Callable[[], None]) -> None:
        with self._lock:
            if number < model.next_number:  # repeated
                self._pool.submit(task)
            else:
                model.waiting[number] = task
            while model.next_number in model.waiting:
                self._pool.submit(model.waiting.pop(model.next_number))
                model.next_number += 1
