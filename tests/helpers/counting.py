"""Counts what a training client sends and converts."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Where the converter of datums is looked up.
CONVERTER = ("tinker_lightning.remote.lm", "tinker_lightning.client.training_base")


def count_passes(client: Any) -> Counter[str]:
    """Counts the passes and steps that a client sends from now on, by name."""
    counts: Counter[str] = Counter()
    forwards = {name: getattr(client, name) for name in ("logprobs", "forward")}
    send, optim_step = client.send, client.optim_step

    def counted_send(request: Any) -> Any:
        counts["forward_backward"] += 1
        return send(request)

    def counted_forward(name: str, *args: Any, **options: Any) -> Any:
        counts["forward"] += 1
        return forwards[name](*args, **options)

    def counted_step(*args: Any) -> Any:
        counts["optim_step"] += 1
        return optim_step(*args)

    client.send, client.optim_step = counted_send, counted_step
    for name in forwards:
        setattr(client, name, partial(counted_forward, name))
    return counts


def count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls that convert a batch to datums from now on: one entry, the number of datums, for each."""
    from tinker_lightning.types.datum import to_datums

    convert, calls = to_datums, list[int]()

    def counted(data: Any) -> Any:
        converted = convert(data)
        calls.append(len(converted))
        return converted

    for module in CONVERTER:
        monkeypatch.setattr(f"{module}.to_datums", counted)
    return calls
