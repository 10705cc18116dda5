"""A pass that fails says where, leaves the adapter as it was, and the next one works as if it had never been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.engine_passes import run_pass
from tinker_lightning.errors import InvalidDatum, InvalidInput, LossNotFinite, OperationFailed, TinkerLightningError
from tinker_lightning.types import AdamParams, Datum, ModelInput, TensorData
from tinker_lightning.types.model_input import ImageChunk

if TYPE_CHECKING:
    from torch import Tensor

    from tinker_lightning.server.engine.adapter import LoraAdapter
    from tinker_lightning.server.engine.causal_lm import CausalLM

GOOD = Datum.from_tokens([1, 2, 3, 4, 5])
POLICY = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
NAN = float("nan")


def policy_datum(**changes: Any) -> Datum:
    return Datum.from_targets([1, 2], [2, 3], **{**POLICY, **changes})


def state(adapter: LoraAdapter) -> dict[str, Tensor]:
    everything = {f"weights/{name}": tensor for name, tensor in adapter.weights.tensors.items()}
    return {name: tensor.clone() for name, tensor in {**everything, **adapter.training_state()}.items()}


def assert_bit_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def trained(base: CausalLM, make_adapter: Any) -> LoraAdapter:
    """An adapter with moments, and in the middle of a window."""
    adapter: LoraAdapter = make_adapter(base)
    run_pass(base, adapter, [GOOD], "cross_entropy", {})
    adapter.step(AdamParams())
    run_pass(base, adapter, [Datum.from_tokens([7, 8, 9])], "cross_entropy", {})
    return adapter


REFUSED: dict[str, tuple[list[Datum], str, dict[str, float | str], type[TinkerLightningError], str]] = {
    "unknown loss": (
        [GOOD],
        "mean_squared",
        {},
        InvalidInput,
        r"loss_fn 'mean_squared' is not registered.*cross_entropy",
    ),
    "unknown setting": ([GOOD], "cross_entropy", {"beta": 1.0}, InvalidInput, "cross_entropy has no setting 'beta'"),
    "setting that is no number": ([policy_datum()], "dro", {"beta": "1"}, InvalidInput, "beta must be a finite number"),
    "setting that is NaN": ([policy_datum()], "dro", {"beta": NAN}, InvalidInput, "beta must be a finite number"),
    "no data": ([], "cross_entropy", {}, InvalidInput, "the batch is empty"),
    "sparse targets that claim a huge width": (
        [
            Datum.from_targets(
                [1, 2],
                TensorData([5], shape=[2, 10**8], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[3]),
                weights=TensorData([1.0], shape=[2, 10**8], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[3]),
            )
        ],
        "cross_entropy",
        {},
        InvalidDatum,
        "datum 0: target_tokens: 100000000 alternatives exceed the vocabulary of 259",
    ),
    "NaN weight": (
        [GOOD, GOOD, Datum.from_tokens([1, 2, 3], [0.0, 1.0, NAN]), GOOD],
        "cross_entropy",
        {},
        InvalidDatum,
        r"datum 2: weights: the entry at \[1\] is nan",
    ),
    "infinite advantage": (
        [policy_datum(), policy_datum(advantages=[float("inf"), 0.0])],
        "ppo",
        {},
        InvalidDatum,
        r"datum 1: advantages: the entry at \[0\] is inf",
    ),
    "missing input": ([GOOD], "ppo", {}, InvalidDatum, "datum 0: logprobs: missing; ppo needs target_tokens, logprobs"),
    "missing mask": ([policy_datum()], "gspo", {}, InvalidDatum, "datum 0: sequence_ratio_mask: missing"),
    "alternatives where there is one ratio for a sequence": (
        [
            policy_datum(sequence_ratio_mask=[1.0, 1.0]),
            Datum(
                ModelInput.from_ints([1, 2]),
                {
                    "target_tokens": [[2, 3], [4, 5]],
                    **{name: [[1.0, 1.0]] * 2 for name in (*POLICY, "sequence_ratio_mask")},
                },
            ),
        ],
        "gspo",
        {},
        InvalidDatum,
        r"datum 1: target_tokens: has the shape \[2, 2\], but gspo has one ratio per sequence "
        r"and takes one target per position, \[T\]",
    ),
    "a distance for a threshold": (
        [policy_datum()],
        "ppo",
        {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2},
        InvalidInput,
        r"loss_fn_config: clip_low_threshold must lie in \[0, 1\] and clip_high_threshold must be at least 1, got 0.2 "
        "and 0.2: they are bounds on the ratio itself, 0.8 and 1.2, not 0.2",
    ),
    "thresholds that are swapped": (
        [policy_datum()],
        "cispo",
        {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8},
        InvalidInput,
        "got 1.2 and 0.8: they are bounds on the ratio",
    ),
    "a distance for a token's threshold": (
        [policy_datum(), policy_datum(clip_high_threshold=[1.2, 0.2])],
        "ppo",
        {},
        InvalidDatum,
        "datum 1: clip_low_threshold must lie in .*, got 0.8 and 0.2",
    ),
    "missing targets": (
        [GOOD, Datum(ModelInput.from_ints([1, 2]))],
        "cross_entropy",
        {},
        InvalidDatum,
        "datum 1: target_tokens: missing",
    ),
    "wrong shape": (
        [policy_datum(logprobs=[[-1.0], [-1.0]])],
        "importance_sampling",
        {},
        InvalidDatum,
        r"datum 0: logprobs: has the shape \[2, 1\], but target_tokens has \[2\]",
    ),
    "no alternatives": (
        [Datum.from_targets([1, 2], torch.zeros(2, 0, dtype=torch.long), weights=torch.zeros(2, 0))],
        "cross_entropy",
        {},
        InvalidDatum,
        r"datum 0: target_tokens: has the shape \[2, 0\]",
    ),
    "no tokens": (
        [GOOD, Datum(ModelInput.from_ints([]), {"target_tokens": [], "weights": []})],
        "cross_entropy",
        {},
        InvalidDatum,
        "datum 1: model_input: no tokens",
    ),
    "foreign token": (
        [Datum.from_targets([1, 259], [2, 3], weights=[1.0, 1.0])],
        "cross_entropy",
        {},
        InvalidDatum,
        r"datum 0: model_input: the token at \[1\] is 259, but the vocabulary has ids 0\.\.258",
    ),
    "foreign target": (
        [GOOD, Datum.from_targets([1, 2], [[2, 3], [-1, 4]], weights=torch.ones(2, 2))],
        "cross_entropy",
        {},
        InvalidDatum,
        r"datum 1: target_tokens: the token at \[1, 0\] is -1, .*Mask it with a weight or advantage of 0",
    ),
    "too long": (
        [Datum.from_tokens([1] * 2050)],
        "cross_entropy",
        {},
        InvalidDatum,
        "datum 0: model_input: 2049 tokens, but tiny takes at most 2048",
    ),
    "image": (
        [GOOD, Datum(ModelInput([ImageChunk(b"", "png", 2)]), {"target_tokens": [1, 2], "weights": [1.0, 1.0]})],
        "cross_entropy",
        {},
        InvalidDatum,
        "datum 1: model_input: tiny takes text only",
    ),
    "overflowing loss": (
        [policy_datum(), policy_datum(), policy_datum(logprobs=[-1e30, -1.0]), policy_datum()],
        "importance_sampling",
        {},
        LossNotFinite,
        "datum 2: importance_sampling: the loss is -inf. Look for tokens",
    ),
    "overflowing ratio without advantage": (
        [policy_datum(logprobs=[-1e30, -1.0], advantages=[0.0, 1.0])],
        "ppo",
        {},
        LossNotFinite,
        "datum 0: ppo: the loss is nan",
    ),
    "overflowing ratio that is clipped": (
        [policy_datum(), policy_datum(logprobs=[-1e30, -1.0])],
        "ppo",
        {},
        OperationFailed,
        "would not be finite, so the gradient of this batch was not added",
    ),
    "overflowing gradient": (
        [GOOD, Datum.from_tokens([1, 2, 3], [0.0, 1e37, 1e37])],
        "cross_entropy",
        {},
        OperationFailed,
        "would not be finite, so the gradient of this batch was not added. Scale the loss down",
    ),
}


@pytest.mark.parametrize(("data", "loss_fn", "config", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_failed_pass_changes_nothing(
    tiny: CausalLM,
    make_adapter: Any,
    data: list[Datum],
    loss_fn: str,
    config: dict[str, float | str],
    error: type[Exception],
    message: str,
) -> None:
    adapter, untouched = trained(tiny, make_adapter), trained(tiny, make_adapter)
    before = state(adapter)
    # One datum each: those before the bad one have gone through their backward.
    adapter.token_budget = untouched.token_budget = 1
    with pytest.raises(error, match=message) as raised:
        run_pass(tiny, adapter, data, loss_fn, config)
    assert type(raised.value) is error
    assert_bit_equal(state(adapter), before)

    for each in (adapter, untouched):
        run_pass(tiny, each, [GOOD], "cross_entropy", {})
        each.step(AdamParams())
    assert_bit_equal(state(adapter), state(untouched))


def test_a_sum_of_gradients_that_overflows_is_rejected_by_the_call_that_makes_it(
    tiny: CausalLM, make_adapter: Any
) -> None:
    adapter = make_adapter(tiny)
    large = Datum.from_tokens([1, 2], [0.0, 1e17])
    before: dict[str, Tensor] = {}

    def until_it_overflows() -> None:
        for _ in range(1000):
            before.update(state(adapter))
            run_pass(tiny, adapter, [large] * 4, "cross_entropy", {})

    with pytest.raises(OperationFailed, match="the accumulated gradient would not be finite"):
        until_it_overflows()
    assert any(name.startswith("gradient/") for name in before)
    assert_bit_equal(state(adapter), before)
    assert adapter.step(AdamParams())["grad_norm"] > 1e17
