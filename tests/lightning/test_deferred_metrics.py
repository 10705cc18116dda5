"""What a window's losses on the server say together, whatever server it is."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_lightning import Datum
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lightning.deferred_metrics import of_losses
from tinker_lightning.remote.calls import PendingBackward


def sent(count: int, loss: str = "ppo", added: float | None = None, **config: float) -> PendingBackward:
    datums = [Datum.from_tokens([1, 2, 3])] * count
    return PendingBackward(datums, loss, config or None, 0.5, by_server=True, name=loss, added=added)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokens:sum", {"tokens:sum": 8.0}),
        ("ratio:mean", {"ratio:mean": 5.0}),
        ("ratio:min", {"ratio:min": 2.0}),
        ("ratio:max", {"ratio:max": 6.0}),
        ("clock:unique", {"clock:unique": 2.0, "clock:unique_1": 6.0}),
        ("kl", {"kl": 5.0}),
        ("kl:of a kind", {"kl:of a kind": 5.0}),
    ],
)
def test_diagnostics_are_combined_as_their_endings_say_and_are_means_without_one(
    name: str, expected: dict[str, float]
) -> None:
    window = [({"loss:sum": 10.0, name: 2.0}, sent(1)), ({"loss:sum": 20.0, name: 6.0}, sent(3))]
    assert of_losses(window) == {"train_loss": 15.0, **expected}


@pytest.mark.parametrize("name", ["tokens:sum", "lag:slack", "clock:unique", "kl"])
def test_what_one_pass_says_is_left_as_it_is(name: str) -> None:
    assert of_losses([({"loss:sum": 10.0, name: 2.0}, sent(3))]) == {"train_loss": 5.0, name: 2.0}
    window = [({"loss:sum": 10.0}, sent(1)), ({"loss:sum": 10.0, name: 2.0}, sent(3))]
    assert of_losses(window) == {"train_loss": 10.0, name: 2.0}


@pytest.mark.parametrize("name", ["train_loss", "grad_norm", "learning_rate"])
def test_what_is_logged_of_every_step_is_no_name_for_a_diagnostic(name: str) -> None:
    with pytest.raises(InvalidLoss, match=f"called '{name}', but '{name}' is logged of every step anyway; rename"):
        of_losses([({"loss:sum": 10.0, name: 2.0}, sent(3))])
    told = {"loss:sum": 10.0, name: 2.0}
    assert of_losses([(told, sent(3, added=1.0))])[f"base_loss/{name}"] == 2.0
    with pytest.raises(InvalidLoss, match="called 'value', but 'base_loss/value' is logged"):
        of_losses([({"loss:sum": 10.0, "value": 2.0}, sent(3, added=1.0))])


TOLD: dict[str, Any] = {"loss:sum": 10.0, "kl": 2.0}


def test_what_is_added_here_is_part_of_the_total_and_the_loss_its_base() -> None:
    window = [(TOLD, sent(1, added=4.0)), (TOLD, sent(1, added=6.0))]
    assert of_losses(window) == {"train_loss": 15.0, "loss_total": 15.0, "base_loss/value": 10.0, "base_loss/kl": 2.0}


def test_different_losses_are_told_apart_whatever_their_order() -> None:
    window = [(TOLD, sent(1, low=0.9)), (TOLD, sent(1, "dpo", 4.0)), (TOLD, sent(1, low=0.1)), (TOLD, sent(2, low=0.1))]
    expected = {
        "train_loss": 22.0,
        "loss_total": 7.0,
        "base_loss/dpo/value": 5.0,
        "base_loss/dpo/kl": 2.0,
        "ppo/value": 10.0,
        "ppo/kl": 2.0,
        "ppo_2/value": 5.0,
        "ppo_2/kl": 2.0,
    }
    assert of_losses(window) == of_losses(window[::-1]) == expected
