"""What losses read of a batch, and what they say of one that they cannot read."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tinker
import torch

from tests.losses.case import assert_same, batch, value_and_gradient
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


MISTAKES: dict[str, tuple[Callable[..., Any], list[Datum], str]] = {
    "cross-entropy without weights": (
        losses.cross_entropy,
        broken(2, weights=None),
        "datum 2: weights: missing; Datum.from_tokens(tokens, weights) sets it: 0 on the prompt, 1 on the response.",
    ),
    "a policy loss without the sampler's log-probabilities": (
        losses.ppo,
        broken(0, logprobs=None),
        "datum 0: logprobs: missing; give those that the sampler returned with its tokens, and 0 on the prompt.",
    ),
    "DPO without a reference": (
        losses.dpo,
        broken(3, reference_logprobs=None),
        "datum 3: reference_logprobs: missing; give those of the reference model, e.g. from its compute_logprobs, "
        "and 0 on the prompt. Datum.from_targets(..., reference_logprobs=...) takes it.",
    ),
    "REINFORCE without a reward": (losses.reinforce, broken(1, reward=None), "datum 1: reward: missing; give one"),
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
        "datum 0: reference_logprobs has NaN or infinite entries; give 0 where there is no value",
    ),
    "distillation on [T] targets": (
        losses.topk_distillation,
        broken(0),
        "datum 0: teacher_logprobs: missing; give the teacher's log-probability of each of the [T, K] targets.",
    ),
    "half a pair": (losses.dpo, broken(0)[:5], "5 datums are no whole number of groups of 2. The datums of a group"),
    "half a group": (
        partial(losses.contrastive, group_size=4),
        broken(0),
        "6 datums are no whole number of groups of 4. The datums of a group stand one behind the other: let the loader",
    ),
    "no datums": (losses.cross_entropy, [], "a loss needs one tensor for each datum, got 0 for 0 datums"),
    "a group of one": (
        losses.reinforce,
        broken(0)[:1],
        "a group of one has nothing to compare with: sample several responses to each prompt",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_datum_field_and_mend(mistake: str) -> None:  # R1.9, R4.5
    loss, data, message = MISTAKES[mistake]
    _, logprobs = batch()
    with pytest.raises(InvalidInput, match=re.escape(message)) as caught:
        loss(data, logprobs[: len(data)])
    assert message.startswith("datum") == isinstance(caught.value, InvalidDatum)


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
        ("grpo", {"estimator": "k4"}, "estimator must be one of k1, k2, k3, got 'k4'"),
        ("grpo", {"reduction": "mean"}, "reduction must be 'sequence', 'token' or 'sum', got 'mean'"),
        ("reinforce", {"baseline": "median"}, "baseline must be 'leave_one_out', 'mean' or a number, got 'median'"),
        ("reinforce", {"group_size": 0}, "a group has at least one datum, got a size of 0"),
        ("topk_distillation", {"tail": "cut"}, "tail must be 'bucket', 'renormalize' or 'ignore', got 'cut'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(loss: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        getattr(losses, loss)(*batch(), **settings)
