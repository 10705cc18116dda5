"""What losses read of a batch, and what they say of one that they cannot read."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker
import torch

from tests.helpers.loss_cases import assert_same, batch, value_and_gradient
from tinker_lightning import Datum, losses
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import Batch

if TYPE_CHECKING:
    from collections.abc import Callable


def test_rows_end_with_zeros() -> None:  # R1.1
    data, logprobs = batch(lengths=(3, 1))
    read = Batch(data, logprobs)
    assert read.logprobs.shape == (2, 3)
    assert read.logprobs[1].tolist() == [logprobs[1].item(), 0.0, 0.0]
    assert read.tokens("weights").tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert read.tokens("weights").dtype == torch.float64
    assert read.sequences("reward").shape == (2,)


def test_an_input_that_some_datums_have_is_filled_up_with_the_default() -> None:
    data = [
        Datum.from_targets([1, 2], [2, 3], clip_low_threshold=[0.5, 0.6]),
        Datum.from_targets([1], [2]),
    ]
    read = Batch(data, [torch.zeros(2), torch.zeros(1)])
    assert torch.equal(read.tokens_or("clip_low_threshold", 0.75), torch.tensor([[0.5, 0.6], [0.75, 0.0]]))  # type: ignore[arg-type]
    assert read.tokens_or("clip_high_threshold", 1.25) == 1.25


def test_the_official_sdks_datums_are_read_as_ours() -> None:  # R5.4
    ours, logprobs = batch()
    theirs = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(datum.model_input.to_ints()),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(np.atleast_1d(tensor.to_numpy()))
                for name, tensor in datum.loss_fn_inputs.items()
            },
        )
        for datum in ours
    ]
    for loss in (losses.dpo, losses.grpo, losses.reinforce):
        got, expected = (value_and_gradient(loss, data, logprobs) for data in (theirs, ours))
        assert_same(got, expected)


def broken(i: int, **changes: Any) -> list[Datum]:
    """The usual datums, one of them with other inputs; None takes one away."""
    data, _ = batch()
    inputs = {name: value for name, value in {**data[i].loss_fn_inputs, **changes}.items() if value is not None}
    data[i] = Datum(data[i].model_input, inputs)
    return data


def alternatives(i: int | None = None, **changes: Any) -> list[Datum]:
    """The same with three targets at each position; those of datum i with other inputs."""
    data, _ = batch()
    for j, datum in enumerate(data):
        inputs = {
            name: tensor if name == "reward" else tensor.to_torch()[:, None].repeat(1, 3)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        inputs["teacher_logprobs"] = torch.tensor([0.5, 0.3, 0.1]).log().repeat(datum.model_input.length, 1)
        data[j] = Datum(datum.model_input, {**inputs, **(changes if j == i else {})})
    return data


def without_weights(*which: int) -> list[Datum]:
    data, _ = batch()
    for i in which:
        data[i] = broken(i, weights=torch.zeros(data[i].model_input.length))[i]
    return data


OF = "of its tokens"
ONE_TARGET_ONLY = ("dpo", "contrastive", "grpo", "gspo", "reinforce")
ONE_TARGET = (
    "datum 0: its targets have the shape [5, 3], but this loss takes one target per position, [T]: the token that"
)
NO_WEIGHT = "has a weight, so it cannot be compared with the others of its group. Leave the group out, or give"
NOTHING = "none of the tokens of these 6 datums has a weight, so there is nothing to train on. Leave them out, or give"
BOUNDS = (
    "clip_low_threshold must lie in [0, 1] and clip_high_threshold must be at least 1, got {} and {}: they are bounds "
    "on the ratio itself, 0.8 and 1.2, not 0.2"
)
MISTAKES: dict[str, tuple[Callable[..., Any], list[Datum], str]] = {
    "regularized cross-entropy without weights": (
        losses.kl_regularized,
        broken(2, weights=None),
        "datum 2: weights: missing; Datum.from_tokens(tokens, weights) sets it: 0 on the prompt, 1 on the response.",
    ),
    "a policy loss without the sampler's log-probabilities": (
        losses.ppo,
        broken(0, logprobs=None),
        "datum 0: logprobs: missing; pass the log-probabilities that the sampler returned with its tokens, and 0 on "
        "the prompt.",
    ),
    "DPO without a reference": (
        losses.dpo,
        broken(3, reference_logprobs=None),
        "datum 3: reference_logprobs: missing; pass those of the reference model, e.g. from its compute_logprobs, "
        "and 0 on the prompt. Datum.from_targets(..., reference_logprobs=...) takes it.",
    ),
    "REINFORCE without a reward": (losses.reinforce, broken(1, reward=None), "datum 1: reward: missing; pass one"),
    "a reward for each token": (
        losses.reinforce,
        broken(1, reward=[1.0, 2.0]),
        "datum 1: reward has the shape [2], but it must have one number",
    ),
    "a reference that slid against its tokens": (
        losses.dpo,
        broken(4, reference_logprobs=[0.0] * 5),
        "datum 4: reference_logprobs has the shape [5], but it must have the shape of the log-probabilities, [6]",
    ),
    "a reference of None on the prompt": (
        losses.kl_regularized,
        broken(0, reference_logprobs=[float("nan"), 0.0, 0.0, 0.0, 0.0]),
        "datum 0: reference_logprobs has NaN or infinite entries; pass any finite value where there is none, and a "
        "weight of 0",
    ),
    "distillation on [T] targets": (
        losses.topk_distillation,
        broken(0, teacher_logprobs=[-1.0] * 5),
        "datum 0: its targets have the shape [5], but this loss takes K alternatives per position, [T, K]: the "
        "most likely tokens of a teacher. For one target per position use cross_entropy.",
    ),
    "distillation without a teacher": (
        losses.topk_distillation,
        [Datum(d.model_input, {n: t for n, t in d.loss_fn_inputs.items() if "teach" not in n}) for d in alternatives()],
        "datum 0: teacher_logprobs: missing; pass the teacher's log-probability of each of the [T, K] targets.",
    ),
    "a teacher that rules tokens out": (
        losses.topk_distillation,
        alternatives(1, teacher_logprobs=torch.tensor([0.5, 0.5, 0.0]).log().repeat(2, 1)),
        "datum 1: teacher_logprobs has NaN or infinite entries; pass any finite value where there is none, and a "
        "weight of 0",
    ),
    "a teacher that is certain of several tokens": (
        losses.topk_distillation,
        alternatives(1, teacher_logprobs=[[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]]),
        "datum 1: teacher_logprobs: the targets at position 1 have a total probability of 2.37, but it can be 1 at "
        "most. Pass log-probabilities (0 is certainty), each token once, and a weight of 0 for spare alternatives.",
    ),
    **{
        f"{loss.__name__} on [T, K] targets": (loss, alternatives(), ONE_TARGET)
        for loss in (getattr(losses, name) for name in ONE_TARGET_ONLY)
    },
    "a pair whose rejected response has no weight": (losses.dpo, without_weights(3), f"datum 3: none {OF} {NO_WEIGHT}"),
    "a pair without any weight": (losses.dpo, without_weights(2, 3), f"datum 2: none {OF} {NO_WEIGHT}"),
    "a group of which one has no weight": (losses.contrastive, without_weights(1), f"datum 1: none {OF} {NO_WEIGHT}"),
    **{
        f"{loss.__name__} without any weight": (loss, without_weights(*range(6)), NOTHING)
        for loss in (losses.grpo, losses.reinforce, losses.kl_regularized)
    },
    "a threshold of a token that is no bound on the ratio": (
        losses.ppo,
        broken(4, clip_high_threshold=[1.2, 1.2, 0.3, 1.2, 1.2, 1.2]),
        "datum 4: " + BOUNDS.format(0.8, 0.3),
    ),
    "thresholds of a token that are swapped": (
        losses.grpo,
        broken(1, clip_high_threshold=[0.0, 0.8], clip_low_threshold=[0.0, 1.2]),
        "datum 1: " + BOUNDS.format(1.2, 0.8),
    ),
    "half a pair": (losses.dpo, broken(0)[:5], "5 datums are not a whole number of groups of 2. The datums of a group"),
    "half a group": (
        partial(losses.contrastive, group_size=4),
        broken(0),
        "6 datums are not a whole number of groups of 4. The datums of a group are consecutive: let each item",
    ),
    "no datums": (losses.cross_entropy, [], "a loss needs one tensor per datum, got 0 for 0 datums"),
    "a group of one": (
        losses.reinforce,
        broken(0)[:1],
        "a group of one has nothing to compare with: sample several responses to each prompt",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_datum_field_and_mend(mistake: str) -> None:  # R1.9, R4.5
    loss, data, message = MISTAKES[mistake]
    logprobs = [torch.full(datum.loss_fn_inputs["target_tokens"].shape, -1.0) for datum in data]
    with pytest.raises(InvalidInput, match=re.escape(message)) as caught:
        loss(data, logprobs)
    assert message.startswith(("datum", "none of the tokens")) == isinstance(caught.value, InvalidDatum)


@pytest.mark.parametrize(
    ("loss", "shape", "wrong"),
    [
        *((name, [4, 7, 3], "[7, 3], but this loss takes one target per position, [T]") for name in ONE_TARGET_ONLY),
        ("topk_distillation", [4, 7], "[7], but this loss takes K alternatives per position, [T, K]"),
    ],
)
def test_a_stacked_batch_of_the_wrong_rank_is_refused(loss: str, shape: list[int], wrong: str) -> None:
    inputs = {name: torch.ones(shape) for name in ("weights", "logprobs", "advantages", "reference_logprobs")}
    with pytest.raises(InvalidDatum, match=re.escape(f"the datums' targets have the shape {wrong}")):
        getattr(losses, loss)({**inputs, "reward": torch.ones(4)}, torch.zeros(shape))


def test_a_teacher_may_be_rounded_and_says_nothing_of_alternatives_without_weight() -> None:
    weights = torch.tensor([1.0, 1.0, 0.0]).repeat(2, 1)
    rounded = torch.tensor([0.51, 0.51, 1.0]).log().repeat(2, 1)
    data = alternatives(1, teacher_logprobs=rounded, weights=weights)
    value, _ = losses.topk_distillation(data, [torch.full((d.model_input.length, 3), -2.0) for d in data])
    assert torch.isfinite(value)


def test_thresholds_of_tokens_that_do_not_count_may_be_anything() -> None:
    data = broken(1, clip_high_threshold=[0.0, 1.1], clip_low_threshold=[0.0, 0.9])
    assert torch.isfinite(losses.ppo(data, batch()[1])[0])


def test_one_response_without_weight_is_no_mistake_where_sequences_are_averaged() -> None:
    for loss in (losses.grpo, losses.reinforce, losses.kl_regularized):
        assert torch.isfinite(loss(without_weights(2), batch()[1])[0])


def test_more_tensors_than_datums_are_refused() -> None:
    data, logprobs = batch()
    with pytest.raises(InvalidInput, match="got 6 for 5 datums"):
        losses.cross_entropy(data[:5], logprobs)


def test_targets_of_different_ranks_are_refused() -> None:
    data, logprobs = batch(lengths=(2, 2))
    with pytest.raises(
        InvalidDatum, match=re.escape("datum 1: its targets have the shape [2, 4], but those of datum 0")
    ):
        losses.cross_entropy(data, [logprobs[0], torch.zeros(2, 4)])


def test_a_stacked_batch_names_the_input_that_it_lacks() -> None:
    with pytest.raises(InvalidInput, match=r"weights: missing; Datum\.from_tokens"):
        losses.cross_entropy({}, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing must lie in [0, 0.5), got 0.5"),
        ("contrastive", {"group_size": 1}, "group_size must be at least 2"),
        ("contrastive", {"temperature": 0.0}, "temperature above 0, got 2 and 0.0"),
        ("kl_regularized", {"estimator": "k4"}, "estimator must be one of k1, k2, k3, got 'k4'"),
        *(
            (name, {"clip_low_threshold": low, "clip_high_threshold": high}, BOUNDS.format(low, high))
            for name in ("ppo", "cispo", "gspo", "grpo")
            for low, high in ((0.2, 0.2), (1.2, 0.8), (-0.2, 1.2), (0.8, 0.9))
        ),
        ("grpo", {"estimator": "k4"}, "estimator must be one of k1, k2, k3, got 'k4'"),
        ("grpo", {"reduction": "mean"}, "reduction must be 'sequence', 'token' or 'sum', got 'mean'"),
        ("reinforce", {"baseline": "median"}, "baseline must be 'leave_one_out', 'mean' or a number, got 'median'"),
        ("reinforce", {"baseline": None}, "baseline must be 'leave_one_out', 'mean' or a number, got None"),
        ("reinforce", {"group_size": "two"}, "a group needs at least one datum, got a size of 'two'"),
        ("reinforce", {"group_size": 0}, "a group needs at least one datum, got a size of 0"),
        ("topk_distillation", {"tail": "cut"}, "tail must be 'bucket', 'renormalize' or 'ignore', got 'cut'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(loss: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        getattr(losses, loss)(*batch(), **settings)
