"""The official SDK's datums become ours, with the same checks, and own their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker

from tinker_lightning.errors import InvalidDatum
from tinker_lightning.types import Datum
from tinker_lightning.types.datum import to_datums


def sdk_datum(tokens: list[int], targets: Any, weights: Any) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(targets),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )


def test_a_batch_owns_its_values() -> None:
    tokens, targets, weights = [1, 2, 3], np.array([2, 3, 4]), np.array([0.0, 0.5, 1.0], np.float32)
    given = sdk_datum(tokens, targets, weights)
    first, second = to_datums([given, given])
    given.model_input.chunks[0].tokens[:] = [9, 9, 9]  # type: ignore[index]
    tokens[:] = [8, 8, 8]
    targets[:] = 7
    weights[:] = np.nan
    expected = Datum.from_targets([1, 2, 3], [2, 3, 4], weights=[0.0, 0.5, 1.0])
    assert first == second == expected


def test_tokens_of_one_datum_can_be_changed_without_those_of_another() -> None:
    given = sdk_datum([1, 2], np.array([2, 3]), np.ones(2, np.float32))
    first, second = to_datums([given, given])
    first.model_input.tokens()[:] = 5
    assert second.model_input.to_ints() == [1, 2]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 0.5], "token ids must be integers, got float64"),
        ([1, float("nan")], "token ids must be integers, got float64"),
        ([True, False], "token ids must be integers, got bool"),
        ([1, -1], "token ids must be between 0 and 2147483647, got -1"),
        ([1, 2**31], "token ids must be between 0 and 2147483647, got 2147483648"),
        ([1, 2**80], "token ids: not an array of numbers"),
        ([1, None], "token ids: not an array of numbers"),
        ([1, [2]], "token ids: not a rectangular array of numbers"),
        ([1], "target_tokens has 2 entries but the input has 1 tokens"),
    ],
)
def test_an_invalid_datum_is_named(tokens: list[Any], message: str) -> None:
    good = sdk_datum([1, 2], np.array([2, 3]), np.ones(2, np.float32))
    chunk = SimpleNamespace(tokens=tokens)  # older versions of the SDK do not check the tokens
    bad = SimpleNamespace(model_input=SimpleNamespace(chunks=[chunk]), loss_fn_inputs=good.loss_fn_inputs)
    with pytest.raises(InvalidDatum, match=f"^datum 1: {message}"):
        to_datums([good, bad])
