"""The metrics of an accumulation window whose losses run on a server."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tinker_lightning import Datum
from tinker_lightning.lightning.deferred_metrics import window_metrics
from tinker_lightning.remote.calls import ServerCall
from tinker_lightning.types import ForwardBackwardOutput


def ran(
    told: dict[str, float], count: int, loss: str = "mine", added: float | None = None, **config: float
) -> tuple[ForwardBackwardOutput, ServerCall]:
    """A pass of `count` datums with a loss that only its server knows."""
    datums = [Datum.from_tokens([1, 2, 3])] * count
    call = ServerCall(datums, loss, config, [torch.tensor(0.5)], added)
    return ForwardBackwardOutput([], told), call


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("weights:sum", {"weights:sum": 8.0}),
        ("ratio:mean", {"ratio:mean": 5.0}),
        ("ratio:min", {"ratio:min": 2.0}),
        ("ratio:max", {"ratio:max": 6.0}),
        ("clock:unique", {"clock:unique": 2.0, "clock:unique_1": 6.0}),
        ("tokens", {"tokens": 8.0}),
        ("action_tokens", {"action_tokens": 8.0}),
        ("kl", {"kl": 4.0}),
        ("kl:of a kind", {"kl:of a kind": 4.0}),
    ],
)
def test_counts_are_summed_and_others_are_combined_as_their_suffixes_say_or_averaged(
    name: str, expected: dict[str, float]
) -> None:
    window = [ran({"loss:sum": 10.0, name: 2.0}, 1), ran({"loss:sum": 20.0, name: 6.0}, 3)]
    assert window_metrics(window) == {"train_loss": 15.0, **expected}


def test_a_short_window_is_a_mean_too() -> None:
    window = [ran({"loss:sum": 10.0}, 1), ran({"loss:sum": 20.0}, 1)]
    assert window_metrics(window, share=4 / 2)["train_loss"] == 30.0


@pytest.mark.parametrize("name", ["weights:sum", "lag:slack", "clock:unique", "kl"])
def test_the_metrics_of_one_pass_are_left_as_they_are(name: str) -> None:
    assert window_metrics([ran({"loss:sum": 10.0, name: 2.0}, 3)]) == {"train_loss": 5.0, name: 2.0}
    window = [ran({"loss:sum": 10.0}, 1), ran({"loss:sum": 10.0, name: 2.0}, 3)]
    assert window_metrics(window) == {"train_loss": 10.0, name: 2.0}


def test_what_the_protocol_counts_is_not_logged() -> None:
    assert window_metrics([ran({"loss:sum": 10.0, "tokens:sum": 7.0}, 3)]) == {"train_loss": 5.0}


@pytest.mark.parametrize("name", ["train_loss", "grad_norm", "learning_rate", "epoch", "step"])
def test_a_metric_with_a_name_that_every_step_has_is_logged_under_the_loss(name: str) -> None:
    told = {"loss:sum": 10.0, name: 2.0}
    assert window_metrics([ran(told, 3)]) == {"train_loss": 5.0, f"loss/{name}": 2.0}
    assert window_metrics([ran(told, 3, added=1.0)])[f"base_loss/{name}"] == 2.0


def test_a_metric_called_value_is_logged_next_to_the_value() -> None:
    found = window_metrics([ran({"loss:sum": 10.0, "value": 2.0}, 3, added=1.0)])
    assert (found["base_loss/value"], found["base_loss/custom/value"]) == (5.0, 2.0)


@pytest.mark.parametrize("added", [None, 1.0])
def test_a_loss_without_a_value_is_absent(added: float | None) -> None:
    window = [ran({"value": 2.0}, 3, added=added), ran({"loss:sum": 10.0}, 1, added=added)]
    assert not {"train_loss", "loss_total"} & window_metrics(window).keys()


TOLD: dict[str, Any] = {"loss:sum": 10.0, "kl": 2.0}


def test_what_is_added_here_is_part_of_the_total_and_the_loss_its_base() -> None:
    window = [ran(TOLD, 1, added=4.0), ran(TOLD, 1, added=6.0)]
    assert window_metrics(window) == {
        "train_loss": 15.0,
        "loss_total": 15.0,
        "base_loss/value": 10.0,
        "base_loss/kl": 2.0,
    }


def test_different_losses_are_distinguished_in_any_order() -> None:
    window = [ran(TOLD, 1, low=0.9), ran(TOLD, 1, "pairs", 4.0), ran(TOLD, 1, low=0.1), ran(TOLD, 2, low=0.1)]
    expected = {
        "train_loss": 22.0,
        "loss_total": 7.0,
        "base_loss/pairs/value": 5.0,
        "base_loss/pairs/kl": 2.0,
        "mine/value": 10.0,
        "mine/kl": 2.0,
        "mine_2/value": 5.0,
        "mine_2/kl": 2.0,
    }
    assert window_metrics(window) == window_metrics(window[::-1]) == expected
