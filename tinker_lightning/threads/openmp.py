"""Ends the idle threads of a thread that waits for a trainer in this process.

torch has a team of OpenMP threads for each thread that calls it. GNU's OpenMP lets threads wait actively for their next
piece of work only while all teams of a process together have no more threads than there are cores. A custom loss or a
metric of a few thousand numbers gives the calling thread a team, and from then on the trainer's threads would sleep and
wake for every operation, although that team is idle: a pass of smollm2-135m takes 1.2 to 1.5 times as long, and more on
a virtual machine. So the team is ended while its thread waits, in 0.3 ms; torch starts another one when it needs it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SOFT = 1  # of omp_pause_resource_t
_end_team: Callable[[int], object] | None = None


def enable() -> None:
    """Lets `end` end threads; called when a client connects to a trainer in this process."""
    global _end_team
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return
    # Other OpenMP libraries do not have the problem, and would pause the trainer's threads too.
    if hasattr(library, "GOACC_parallel") and not hasattr(library, "__kmpc_fork_call"):
        _end_team = getattr(library, "omp_pause_resource_all", None)


def end() -> None:
    """Ends the OpenMP threads of the calling thread, if this process has had a trainer."""
    if _end_team is not None:
        _end_team(_SOFT)
