"""The record of finished sampling requests forgets what was seen, and what nobody asks for."""

from __future__ import annotations

from tinker_lightning.server.core.completions import Completions
from tinker_lightning.server.core.scheduler import Job


def test_what_the_cursor_covers_is_forgotten() -> None:
    completions, jobs = Completions(), [Job(str(i), "sample", lambda: None) for i in range(3)]
    for job in jobs:
        completions.record(("s", 0), job)
    found = completions.after(("s", 0), 0)
    assert [job for _, job in found] == jobs
    assert [job for _, job in completions.after(("s", 0), found[1][0])] == jobs[2:]
    assert completions.after(("s", 0), found[-1][0]) == completions.after(("s", 1), 0) == []


def test_old_requests_are_forgotten() -> None:
    completions = Completions(retention=-1.0)
    for sampler in ("a", "b"):
        completions.record((sampler, 0), Job("1", "sample", lambda: None))
    assert completions.after(("a", 0), 0) == []
