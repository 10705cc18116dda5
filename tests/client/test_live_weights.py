"""Which saved weights are those of a model in training, while its weights change."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.live_weights import LiveWeights
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
    return live.sample(path, "model", lambda: TinkerFuture.of(1, "sample")).result()


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
    with live.changing("model"):
        pass
