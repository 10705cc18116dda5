"""The retry policy of failing requests, and the log messages of retries."""

from __future__ import annotations

import contextlib
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

logger = logging.getLogger("tinker_lightning.client")

# At the first contact the URL is probably wrong, so the error is raised soon.
FIRST_CONTACT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The time for which a failing request is retried, and the pauses in between, in seconds."""

    seconds: float  # from the first attempt on; for an account without credit, the server sets another limit
    first_delay: float = 0.5  # doubles with each attempt, up to the longest
    longest_delay: float = 10.0
    billing_delay: float = 5.0  # while the account has no credit

    def delay(self, attempt: int, response: httpx.Response | None) -> float:
        """Returns the pause before the next attempt: the one that the server asks for, or an increasing one."""
        if response is not None:
            for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
                try:
                    asked = float(response.headers[header]) * unit
                except (KeyError, ValueError):
                    continue
                if 0 < asked <= 60:
                    return asked
            if response.status_code == 402:
                return self.billing_delay
        longest: float = min(self.first_delay * 2 ** min(attempt, 30), self.longest_delay)
        return longest * random.uniform(0.75, 1.0)  # noqa: S311  # spreads retries, hides nothing


class StatusLog:
    """Logs what the client is waiting for: once per change, not once per attempt."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def show(self, subject: str, state: str, reason: str = "") -> None:
        """Logs the state of a subject (a model, the server) if it has changed; the initial state is `active`."""
        if state == self._states.get(subject, "active"):
            return
        if state == "active":
            del self._states[subject]
            logger.warning("%s: continuing", subject)
        else:
            self._states[subject] = state
            logger.warning("%s: %s (%s)", subject, state, reason or "no reason given")

    @contextlib.contextmanager
    def waiting(self, subject: str) -> Iterator[Callable[[str, str], None]]:
        """Shows the states in which one request waits for a subject. Afterwards the subject is active.

        If the request fails, that is not logged, because the error is raised; but the next outage is shown again.
        """
        shown = False

        def show(state: str, reason: str) -> None:
            nonlocal shown
            shown = True
            self.show(subject, state, reason)

        try:
            yield show
        except BaseException:
            if shown:
                self._states.pop(subject, None)
            raise
        if shown:
            self.show(subject, "active")
