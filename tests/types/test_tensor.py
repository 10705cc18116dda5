"""Tensors of the protocol: the values they accept, the memory they share, and what raises."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinker_lightning.errors import InvalidInput, InvalidTensor
from tinker_lightning.types import TensorData
from tinker_lightning.types.tensor import MAX_DENSE_ELEMENTS

CSR: dict[str, Any] = {"shape": [2, 3], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [2, 0]}


@pytest.mark.parametrize(
    ("value", "dtype", "dense"),
    [
        ([1, 2], "int64", [1, 2]),
        ([0.5, 2], "float32", [0.5, 2.0]),
        ([True, False], "int64", [1, 0]),
        ([[1, 2], [3, 4]], "int64", [[1, 2], [3, 4]]),
        (7, "int64", 7),
        (0.5, "float32", 0.5),
        ([], "float32", []),
        (np.array([1, 2], np.uint8), "int64", [1, 2]),
        (np.array([0.5], np.float16), "float32", [0.5]),
        (np.array([1, 2], ">i4"), "int64", [1, 2]),
        (np.arange(6, dtype=np.float32)[::2], "float32", [0.0, 2.0, 4.0]),
        (torch.tensor([0.5], dtype=torch.bfloat16), "float32", [0.5]),
        (torch.tensor([1, 2], dtype=torch.int32), "int64", [1, 2]),
        (torch.tensor([0.5], requires_grad=True), "float32", [0.5]),
        (torch.arange(6).reshape(2, 3).T, "int64", [[0, 3], [1, 4], [2, 5]]),
        (torch.tensor([[0.0, 0.5]]).to_sparse(), "float32", [[0.0, 0.5]]),
        (TensorData([1, 2]), "int64", [1, 2]),
    ],
)
def test_takes_what_users_hold(value: Any, dtype: str, dense: Any) -> None:  # R4.2
    tensor = TensorData.from_data(value)
    assert tensor.dtype == dtype
    assert tensor.tolist() == dense
    assert tensor.shape == list(np.shape(dense))
    assert tensor.values.flags.c_contiguous


def test_flat_data_takes_the_given_shape_and_dtype() -> None:
    tensor = TensorData([1, 2, 3, 4], "float32", [2, 2])
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert tensor.data == [1.0, 2.0, 3.0, 4.0]
    assert len(tensor) == 2
    assert repr(tensor) == "TensorData(float32[2, 2])"


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_memory_of_the_right_dtype_is_shared_on_request_only(dtype: type, shape: tuple[int, ...]) -> None:
    array: np.ndarray[Any, np.dtype[Any]] = np.ones(shape, dtype)
    tensor = torch.from_numpy(array)
    assert np.shares_memory(TensorData(array, copy=False).values, array)
    assert np.shares_memory(TensorData(array, shape=[array.size], copy=False).values, array)
    assert TensorData(tensor, copy=False).to_torch().data_ptr() == tensor.data_ptr()
    copies = [
        TensorData(array),
        TensorData.from_numpy(array),
        TensorData.from_torch(tensor),
        TensorData.from_data(array),
    ]
    assert not any(np.shares_memory(made.values, array) for made in copies)


def test_read_only_memory_is_copied_for_torch_only() -> None:
    array = np.frombuffer(np.ones(3, np.float32).tobytes(), np.float32)
    tensor = TensorData(array, copy=False)
    assert np.shares_memory(tensor.to_numpy(), array)
    tensor.to_torch()[0] = 2.0
    assert array.tolist() == [1.0, 1.0, 1.0]


def test_a_scalar_has_no_length() -> None:
    with pytest.raises(TypeError, match="a scalar tensor has no length"):
        len(TensorData(1.0))


def test_compares_by_value_whatever_the_layout() -> None:
    csr = TensorData([0.5, 0.25], **CSR)
    assert csr.is_sparse
    assert csr.data == [0.5, 0.25]
    assert csr == TensorData([[0.0, 0.0, 0.5], [0.25, 0.0, 0.0]])
    assert csr != TensorData([[0.0, 0.0, 0.5], [0.75, 0.0, 0.0]])
    assert TensorData([1.0]) != TensorData([1])
    assert TensorData([1]) != TensorData([[1]])
    assert TensorData([1]) != [1]
    assert TensorData([float("nan")]) == TensorData([float("nan")])
    assert repr(csr) == "TensorData(float32[2, 3], csr)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(csr)


matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    elements=st.sampled_from([0.0, 0.0, 0.0, 0.5, -2.0]),
)


@given(matrices)
def test_csr_means_what_torch_means_by_it(dense: np.ndarray[Any, np.dtype[Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls CSR a beta feature
        csr = torch.from_numpy(dense).to_sparse_csr()
    tensor = TensorData(
        csr.values(), shape=dense.shape, sparse_crow_indices=csr.crow_indices(), sparse_col_indices=csr.col_indices()
    )
    np.testing.assert_array_equal(tensor.to_numpy(), dense)
    assert tensor.to_torch().equal(torch.from_numpy(dense))
    assert tensor == TensorData(dense)
    assert TensorData.from_torch(csr) == tensor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": ["a"]}, "not an array of numbers: got list holding"),
        ({"data": np.array(["a"]), "dtype": "float32"}, "not an array of numbers: got ndarray holding"),
        ({"data": None}, "not an array of numbers: got NoneType"),
        ({"data": [1j]}, "not an array of numbers: got list holding complex128"),
        ({"data": torch.tensor([1j])}, "not an array of numbers: got Tensor holding complex64"),
        ({"data": [[1], [2, 3]]}, "not a rectangular array of numbers"),
        ({"data": [10**400]}, "not an array of numbers"),
        ({"data": [torch.tensor(1.0, requires_grad=True)]}, "not a rectangular array of numbers: .*requires grad"),
        ({"data": [1], "dtype": "int32"}, "dtype 'int32' is not supported; use 'float32' or 'int64'"),
        ({"data": [1], "dtype": ["float32"]}, "is not supported"),
        ({"data": [1], "dtype": ""}, "is not supported"),
        ({"data": [1.5], "dtype": "int64"}, "must be integers, got floats"),
        ({"data": [2**63], "dtype": "int64"}, "9223372036854775808 does not fit into int64"),
        ({"data": [1e300]}, "a value does not fit into float32"),
        ({"data": [1, 2, 3], "shape": [2, 2]}, r"3 values do not fill the shape \[2, 2\]"),
        ({"data": [1, 2], "shape": [-1, 2]}, "does not fit into memory"),
        ({"data": [1, 2], "shape": [-1, -2]}, "does not fit into memory"),
        ({"data": [], "shape": [0, 2**63]}, "does not fit into memory"),
        ({"data": [], "shape": [0, 2**40, 2**40]}, "does not fit into memory"),
        ({"data": [1], "shape": [1] * 33}, "at most 32 dimensions, got 33"),
        ({"data": [1], "shape": [2**62] * 1_000_000}, "at most 32 dimensions, got 1000000"),
    ],
)
def test_values_that_do_not_fit_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTensor, match=message):
        TensorData(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": None}, "needs its dense shape"),
        ({"sparse_crow_indices": None}, "needs both sparse_crow_indices and sparse_col_indices"),
        ({"sparse_col_indices": None}, "needs both sparse_crow_indices and sparse_col_indices"),
        ({"shape": [6]}, r"a CSR tensor is a matrix, but its shape is \[6\]"),
        ({"shape": [-2, 3]}, "does not fit into memory"),
        ({"shape": [2**40, 3]}, "sparse_crow_indices has 3 entries, but 1099511627776 rows need 1099511627777"),
        ({"sparse_crow_indices": [0, 2]}, "sparse_crow_indices has 2 entries, but 2 rows need 3"),
        ({"sparse_crow_indices": [[0, 1, 2]]}, "sparse_crow_indices has 3 entries"),
        ({"sparse_crow_indices": 0}, "sparse_crow_indices has 1 entries"),
        ({"sparse_crow_indices": [0, 3, 2]}, "must rise from 0 to the 2 values"),
        ({"sparse_crow_indices": [1, 1, 2]}, "must rise from 0 to the 2 values"),
        ({"sparse_crow_indices": [0, 1, 1]}, "must rise from 0 to the 2 values"),
        ({"sparse_crow_indices": [0.0, 1.5, 2.0]}, "must be integers, got floats"),
        ({"sparse_crow_indices": [0, 2**63, 2]}, "must be integers"),
        (
            # The steps of this one overflow into positive numbers.
            {"shape": [5, 3], "sparse_crow_indices": [0, 2**62, 2**63 - 1, -(2**63), -1, 2]},
            "must rise from 0 to the 2 values",
        ),
        ({"sparse_col_indices": [2]}, "sparse_col_indices has 1 entries, but there are 2 values"),
        ({"sparse_col_indices": [2, 3]}, r"must lie in 0\.\.2"),
        ({"sparse_col_indices": [-1, 0]}, r"must lie in 0\.\.2"),
        ({"sparse_col_indices": "ab"}, "not an array of numbers"),
        ({"sparse_col_indices": {"a": 1}}, "not an array of numbers"),
    ],
)
def test_invalid_csr_raises(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTensor, match=message):
        TensorData([0.5, 0.25], **{**CSR, **change})


def test_a_few_bytes_of_csr_cannot_fill_the_memory() -> None:
    tensor = TensorData([0.5], shape=[1, MAX_DENSE_ELEMENTS + 1], sparse_crow_indices=[0, 1], sparse_col_indices=[0])
    with pytest.raises(InvalidTensor, match="too large to be converted to a dense one"):
        tensor.to_numpy()


@given(
    st.lists(st.integers(-(2**64), 2**64), max_size=4),
    st.lists(st.one_of(st.integers(-3, 5), st.integers(), st.floats()), max_size=4),
    st.sampled_from([None, "float32", "int64"]),
    st.none() | st.lists(st.integers(), max_size=4),
)
def test_anything_else_raises_invalid_input(
    shape: list[int], data: list[Any], dtype: Any, indices: list[int] | None
) -> None:
    with suppress(InvalidInput):
        TensorData(data, dtype, shape, indices, indices).to_numpy()
