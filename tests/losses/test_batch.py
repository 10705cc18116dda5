"""Batches as losses read them, and the errors for those that they cannot read."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.helpers.loss_cases import assert_same, batch, value_and_gradient
from tests.helpers.loss_mistakes import BOUNDS, MISTAKES, ONE_TARGET_ONLY, alternatives, broken, without_weights
from tinker_lightning import Datum, losses
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import Batch


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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_datum_field_and_fix(mistake: str) -> None:  # R1.9, R4.5
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
def test_a_stacked_batch_of_the_wrong_rank_raises(loss: str, shape: list[int], wrong: str) -> None:
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


def test_more_tensors_than_datums_raise() -> None:
    data, logprobs = batch()
    with pytest.raises(InvalidInput, match="got 6 for 5 datums"):
        losses.cross_entropy(data[:5], logprobs)


def test_targets_of_different_ranks_raise() -> None:
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
def test_settings_that_make_no_sense_raise(loss: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        getattr(losses, loss)(*batch(), **settings)
