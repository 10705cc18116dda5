"""Model inputs: tokens as one array, and chunks of other kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.types import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    TensorData,
)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.uint64),
        np.array([1, 0, 2, 0, 3], np.int32)[::2],
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        TensorData([1, 2, 3]),
    ],
)
def test_tokens_become_one_int32_array(tokens: Any) -> None:
    model_input = ModelInput.from_ints(tokens)
    assert model_input.to_ints() == [1, 2, 3]
    assert model_input.length == 3
    assert model_input.tokens().dtype == np.int32
    assert model_input.tokens().flags.c_contiguous


def test_int32_memory_is_copied() -> None:
    array = np.arange(4, dtype=np.int32)
    for given in (array, torch.from_numpy(array)):
        assert not np.shares_memory(ModelInput.from_ints(given).tokens(), array)


def test_several_text_chunks_read_as_one_sequence() -> None:
    model_input = ModelInput.from_ints([1, 2]).append(EncodedTextChunk([])).append(EncodedTextChunk([3]))
    assert model_input.to_ints() == [1, 2, 3]
    assert model_input.is_text
    assert model_input.length == 3
    assert ModelInput().to_ints() == []


def test_compares_by_value_and_chunks() -> None:
    assert ModelInput.from_ints([1, 2]) == ModelInput.from_ints(np.array([1, 2]))
    assert ModelInput.from_ints([1, 2]) != ModelInput.from_ints([1, 3])
    assert ModelInput.from_ints([1, 2]) != ModelInput.from_ints([1]).append(EncodedTextChunk([2]))
    assert ModelInput.from_ints([1]) != [1]
    assert EncodedTextChunk([1]) != DmelChunk(b"")
    assert repr(ModelInput.from_ints([1, 2])) == "ModelInput(EncodedTextChunk(2 tokens))"
    with pytest.raises(TypeError, match="unhashable"):
        hash(ModelInput())


@pytest.mark.parametrize(
    ("chunk", "length"),
    [
        (ImageChunk(b"", "png", expected_tokens=7), 7),
        (ImageAssetPointerChunk("tinker://a", "jpeg", expected_tokens=0), 0),
        (DmelChunk(bytes([3, 2, 5, 80])), 5),
        (DmelChunk(bytes([254, 3, 2, 0x85, 0x01, 80])), 133),
    ],
)
def test_other_chunks_count_their_tokens(chunk: Any, length: int) -> None:
    model_input = ModelInput([EncodedTextChunk([1, 2]), chunk])
    assert model_input.length == 2 + length
    assert not model_input.is_text
    with pytest.raises(InvalidDatum, match="chunks that are not text and so have no token ids"):
        model_input.to_ints()


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (ImageChunk(b"", "png"), "is unknown; set expected_tokens"),
        (DmelChunk(b""), "ends before its ndim"),
        (DmelChunk(bytes([3, 1])), "ends before its dim 0"),
        (DmelChunk(bytes([3, 1]) + b"\xff" * 20), "ends before its dim 0"),
        (DmelChunk(bytes([3, 0, 1])), "has no dimensions"),
    ],
)
def test_an_unknown_length_is_an_error(chunk: Any, message: str) -> None:
    with pytest.raises(InvalidDatum, match=message):
        _ = ModelInput([chunk]).length


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0.5, 1.0], r"must be integers, got float64\. Did you pass weights or a mask\?"),
        ([True, False], "must be integers, got bool"),
        (torch.rand(3), "must be integers, got float32"),
        ([[1, 2]], r"one sequence, got an array of shape \[1, 2\]"),
        (5, r"one sequence, got an array of shape \[\]"),
        ([1, -100], "between 0 and 2147483647, got -100"),
        ([2**31], "between 0 and 2147483647, got 2147483648"),
        ([2**40], "got 1099511627776"),
        ([2**63], "got 9223372036854775808"),
        ([10**400], "not an array of numbers"),
        ("hello", "not an array of numbers: got str"),
        (None, "not an array of numbers: got NoneType"),
    ],
)
def test_invalid_token_ids_raise(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ModelInput.from_ints(tokens)


@pytest.mark.parametrize("expected", [-1, 2**31])
def test_an_image_of_impossible_length_raises(expected: int) -> None:
    with pytest.raises(InvalidDatum, match=f"expected_tokens of an image must be between .* got {expected}"):
        ImageChunk(b"", "png", expected)
    with pytest.raises(InvalidDatum, match="expected_tokens"):
        ImageAssetPointerChunk("tinker://a", "png", expected)


def test_an_unknown_image_format_raises() -> None:
    with pytest.raises(InvalidDatum, match="the format of an image must be png or jpeg, got 'gif'"):
        ImageChunk(b"", "gif")  # type: ignore[arg-type]
