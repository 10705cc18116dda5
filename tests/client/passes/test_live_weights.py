"""Which saved weights are those of a model in training, while its weights change."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.passes.live_weights import LiveWeights
from tinker_lightning.errors import Unsupported
from tinker_lightning.types import SaveWeightsForSamplerResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    Save = Callable[[str], None]


@pytest.fixture
def live() -> LiveWeights:
    return LiveWeights("http://server")


@pytest.fixture
def save(live: LiveWeights) -> Save:
    def saved(path: str) -> None:
        future: Future[SaveWeightsForSamplerResponse] = Future()
        live.saving(live.version("model"), future)
        future.set_result(SaveWeightsForSamplerResponse(path=path))

    return saved


def sample(live: LiveWeights, path: str) -> int:
    return live.sample(path, "model", lambda: TinkerFuture.from_result(1, "sample")).result()


def test_nothing_is_sampled_while_the_weights_change(live: LiveWeights, save: Save) -> None:
    """A step and a save by two threads may arrive in either order."""
    save("before")
    assert sample(live, "before") == 1
    with live.changing("model"):
        save("meanwhile")
        with pytest.raises(Unsupported, match="sampling from before would replace the weights of model on http"):
            sample(live, "before")
    save("after")
    with pytest.raises(Unsupported, match="sampling from meanwhile would replace"):
        sample(live, "meanwhile")
    assert sample(live, "after") == 1


def test_a_sample_that_cannot_be_sent_is_not_waited_for(live: LiveWeights, save: Save) -> None:
    def fail() -> TinkerFuture[int]:
        raise ZeroDivisionError

    save("before")
    with pytest.raises(ZeroDivisionError):
        live.sample("before", "model", fail)
    with live.changing("model") as samples:
        assert samples == []


def interrupted_at(line: int, live: LiveWeights, call: Callable[[], object]) -> bool:
    """Interrupts a call before the nth line of `sample_version` without the lock; returns whether it got there."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code is not LiveWeights.sample_version.__code__:
            return None
        if event == "line" and not live._lock.locked():
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_leaves_no_sample_that_never_ends(live: LiveWeights, save: Save) -> None:
    """Every later step would wait for it."""
    save("before")
    sent: list[Future[int]] = []

    def send() -> TinkerFuture[int]:
        sent.append(Future())
        return TinkerFuture(sent[-1], "sample")

    line = 0
    while interrupted_at(line, live, lambda: live.sample("before", "model", send)):
        line += 1
    assert len(sent) > 1  # the last one was not interrupted
    assert live._samples("model")
    for source in sent:
        source.set_result(1)
    assert live._samples("model") == []
