"""Settings of a loss are checked when its route is chosen."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning import custom_loss, losses
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import routes

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]

WRONG_SETTINGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "misspelt": (
        losses.dpo,
        {"betta": 1.0},
        "loss_fn_config: dpo has no setting 'betta'; it takes beta, margin, label_smoothing, length_normalized, "
        "reference_free",
    ),
    "no settings": (losses.cross_entropy, {"beta": 1.0}, "cross_entropy has no setting 'beta'; it takes no settings"),
    "a text": (losses.dpo, {"beta": "x"}, "loss_fn_config: beta of dpo must be a finite number, got 'x'"),
    "NaN": (losses.dpo, {"beta": float("nan")}, "loss_fn_config: beta of dpo must be a finite number, got nan"),
    "no switch": (losses.dpo, {"reference_free": "no"}, "reference_free of dpo must be True or False, got 'no'"),
    "half a datum": (losses.contrastive, {"group_size": 2.5}, "group_size of contrastive must be a whole number"),
    "out of range": (losses.dpo, {"label_smoothing": 0.7}, "dpo: label_smoothing must lie in [0, 0.5), got 0.7"),
    "an estimator": (losses.grpo, {"estimator": "k9"}, "grpo: estimator must be one of k1, k2, k3, got 'k9'"),
    "a baseline": (losses.reinforce, {"baseline": "best"}, "reinforce: baseline must be 'leave_one_out', 'mean' or a"),
    "a group": (losses.reinforce, {"group_size": 0}, "reinforce: a group needs at least one datum, got a size of 0"),
    "a distance": (losses.gspo, {"clip_high_threshold": 0.2}, "gspo: clip_low_threshold must lie in [0, 1] and"),
}


@pytest.mark.parametrize("what", WRONG_SETTINGS)
def test_a_wrong_setting_raises_when_the_route_is_chosen_in_the_same_words(
    stage: tuple[EmbeddedTrainer, ServiceClient], what: str
) -> None:  # R5.7
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    loss, config, message = WRONG_SETTINGS[what]
    said = set()
    for route in ("auto", "server", "two-pass"):
        for form, given in ((loss, config), (functools.partial(loss, **config), {})):
            with pytest.raises(InvalidInput, match=re.escape(message)) as caught:
                routes.choose(form, given, route, lambda: client)
            said.add((type(caught.value), str(caught.value)))
    assert len(said) == 1


def test_the_settings_of_a_built_in_loss_are_looked_at_too(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    for route in ("auto", "builtin", "two-pass"):
        with pytest.raises(InvalidInput, match="loss_fn_config: ppo: clip_low_threshold must lie in"):
            routes.choose("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, route, lambda: client)
    with pytest.raises(InvalidInput, match="ppo has no setting 'clip'; it takes clip_low_threshold, clip_high_thr"):
        routes.choose("ppo", {"clip": 1.0}, "two-pass", lambda: client)
    # A server of another make may know more.
    assert routes.choose("ppo", {"clip": 1.0}, "auto", lambda: client).config == {"clip": 1.0}


def test_a_traced_function_that_gives_the_library_a_wrong_setting_raises(
    stage: tuple[EmbeddedTrainer, ServiceClient],
) -> None:
    def mine(data: Any, logprobs: Any) -> Any:
        return losses.grpo(data, logprobs, estimator="k9")  # type: ignore[arg-type]

    with pytest.raises(InvalidInput, match=r"^estimator must be one of k1, k2, k3, got 'k9'$"):
        custom_loss(stage[1], on="logprobs")(mine)
