"""The record of finished sampling requests forgets what was seen, and what nobody asks for."""

from __future__ import annotations

from tinker_lightning.server.trainer.samplers import Completions


def test_what_the_cursor_covers_is_forgotten() -> None:
    completions = Completions()
    for i in range(3):
        completions.record(("s", 0), str(i), succeeded=True)
    found = completions.after(("s", 0), 0)
    assert [request_id for _, request_id, _ in found] == ["0", "1", "2"]
    assert [request_id for _, request_id, _ in completions.after(("s", 0), found[1][0])] == ["2"]
    assert completions.after(("s", 0), found[-1][0]) == completions.after(("s", 1), 0) == []


def test_old_requests_are_forgotten() -> None:
    completions = Completions(retention=-1.0)
    for sampler in ("a", "b"):
        completions.record((sampler, 0), "1", succeeded=True)
    assert completions.after(("a", 0), 0) == []
