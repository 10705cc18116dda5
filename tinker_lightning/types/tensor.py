"""Tensors of the protocol: float32 or int64, dense or in compressed sparse row (CSR) format."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tinker_lightning.errors import InvalidTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    TensorLike: TypeAlias = "TensorData | torch.Tensor | npt.NDArray[Any] | Sequence[Any] | float"

TensorDtype: TypeAlias = Literal["float32", "int64"]

# A few bytes of CSR data can declare a dense shape of any size.
MAX_DENSE_ELEMENTS = 1 << 28
# The limit of numpy 1. It stops a malicious shape of a million dimensions before anything is computed from it.
MAX_RANK = 32
_NATIVE = (np.dtype("float32"), np.dtype("int64"))
# Values that numpy always copies.
_FRESH = list, tuple, int, float


class TensorData:
    """A tensor with a dtype of the protocol, backed by its own numpy array.

    Args:
        data: The values, flat or shaped; for CSR, the stored values only.
        dtype: `"float32"` or `"int64"`; inferred from the data by default. Values that do not fit raise.
        shape: The dense shape; inferred from the data by default, required for CSR.
        sparse_crow_indices: CSR row pointers, one more than the number of rows.
        sparse_col_indices: CSR column index of each stored value.
        copy: Whether to copy memory that already has the dtype, so that a buffer can be reused while a pass waits to be
            sent. False shares it, which must then not change.
    """

    __slots__ = ("dtype", "shape", "sparse_col_indices", "sparse_crow_indices", "values")

    dtype: TensorDtype
    shape: list[int]
    sparse_crow_indices: npt.NDArray[np.int64] | None
    sparse_col_indices: npt.NDArray[np.int64] | None

    def __init__(
        self,
        data: npt.ArrayLike,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: npt.ArrayLike | None = None,
        sparse_col_indices: npt.ArrayLike | None = None,
        *,
        copy: bool = True,
    ) -> None:
        array = as_array(data)
        self.dtype = _check_dtype(("float32" if array.dtype.kind == "f" else "int64") if dtype is None else dtype)
        values = _convert(array, self.dtype, copy and not isinstance(data, _FRESH))
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise InvalidTensor("a CSR tensor needs both sparse_crow_indices and sparse_col_indices")
        if sparse_crow_indices is None or sparse_col_indices is None:
            self.sparse_crow_indices = self.sparse_col_indices = None
            self.shape = list(values.shape) if shape is None else _check_shape(shape)
            if values.shape != tuple(self.shape):
                if values.size != math.prod(self.shape):
                    raise InvalidTensor(f"{values.size} values do not fill the shape {self.shape}")
                values = values.reshape(self.shape)
        else:
            if shape is None:
                raise InvalidTensor("a CSR tensor needs its dense shape")
            self.shape = _check_shape(shape)
            self.sparse_crow_indices = _convert(as_array(sparse_crow_indices), "int64", copy)
            self.sparse_col_indices = _convert(as_array(sparse_col_indices), "int64", copy)
            values = values.reshape(-1)
            _check_csr(self.shape, values, self.sparse_crow_indices, self.sparse_col_indices)
        self.values = values

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> TensorData:
        """Copies a numpy array; floating dtypes become float32, integers int64."""
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Copies a torch tensor, detached and to the CPU."""
        return cls(tensor)

    @classmethod
    def from_data(cls, value: Any) -> TensorData:
        """Converts a torch tensor, numpy array, list, number or the SDK's tensor; returns a `TensorData` unchanged."""
        if isinstance(value, TensorData):
            return value
        if getattr(value, "sparse_crow_indices", None) is not None:
            return cls(value.data, value.dtype, value.shape, value.sparse_crow_indices, value.sparse_col_indices)
        return cls(value.to_numpy() if hasattr(value, "to_numpy") else value)

    @classmethod
    def wrap(cls, values: npt.NDArray[Any]) -> TensorData:
        """Wraps an array that nothing else writes to; converts it if it lacks a dtype of the protocol or C order."""
        if values.dtype not in _NATIVE or not values.flags.c_contiguous or values.ndim > MAX_RANK:
            return cls(values, copy=False)
        tensor = cls.__new__(cls)
        tensor.dtype = "float32" if values.dtype.kind == "f" else "int64"
        tensor.shape = list(values.shape)
        tensor.sparse_crow_indices = tensor.sparse_col_indices = None
        tensor.values = values
        return tensor

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is stored in CSR format."""
        return self.sparse_crow_indices is not None

    @property
    def data(self) -> list[Any]:
        """The stored values as a flat list."""
        return self.values.reshape(-1).tolist()

    def to_numpy(self) -> npt.NDArray[Any]:
        """Returns the dense array, without a copy unless the tensor is sparse."""
        crow, col = self.sparse_crow_indices, self.sparse_col_indices
        if crow is None or col is None:
            return self.values
        if math.prod(self.shape) > MAX_DENSE_ELEMENTS:
            raise InvalidTensor(f"a CSR tensor of shape {self.shape} is too large to be converted to a dense one")
        dense = np.zeros(self.shape, dtype=self.dtype)
        dense[np.repeat(np.arange(self.shape[0]), np.diff(crow)), col] = self.values
        return dense

    def to_torch(self) -> torch.Tensor:
        """Returns the dense torch tensor; shares memory if the array is writable."""
        import torch

        array = self.to_numpy()
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def tolist(self) -> Any:
        """Returns the dense values as nested lists, or the number if the tensor is a scalar."""
        return self.to_numpy().tolist()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and np.array_equal(self.to_numpy(), other.to_numpy(), equal_nan=self.dtype == "float32")
        )

    __hash__ = None  # type: ignore[assignment]  # equal by value and mutable through its memory

    def __repr__(self) -> str:
        layout = ", csr" if self.is_sparse else ""
        return f"TensorData({self.dtype}{self.shape}{layout})"


def as_array(value: Any) -> npt.NDArray[Any]:
    """Converts a tensor, array, list or number to a numpy array; keeps its dtype and memory where possible."""
    torch = sys.modules.get("torch")  # a torch tensor can only exist if torch was imported
    try:
        array = _from_torch(value) if torch is not None and isinstance(value, torch.Tensor) else np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidTensor(f"not a rectangular array of numbers: {error}") from error
    if array.dtype.kind not in "fiub":
        raise InvalidTensor(f"not an array of numbers: got {type(value).__name__} holding {array.dtype}")
    return array


def _from_torch(tensor: torch.Tensor) -> npt.NDArray[Any]:
    tensor = tensor.detach().cpu().to_dense()
    if tensor.is_floating_point() and tensor.element_size() < 4:  # numpy has no bfloat16
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _convert(array: npt.NDArray[Any], dtype: TensorDtype, copy: bool) -> npt.NDArray[Any]:
    """Converts an array to C order and a dtype of the protocol, which copies it; raises if a value does not fit."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array.copy() if copy else array
    if dtype == "int64" and array.size:
        if array.dtype.kind == "f":
            raise InvalidTensor("must be integers, got floats")
        if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
            raise InvalidTensor(f"{array.max()} does not fit into int64")
    try:
        with np.errstate(over="raise"):
            return np.asarray(array, dtype=dtype, order="C")
    except FloatingPointError:
        raise InvalidTensor("a value does not fit into float32") from None


def _check_dtype(dtype: str) -> TensorDtype:
    if dtype not in ("float32", "int64"):
        raise InvalidTensor(f"dtype {dtype!r} is not supported; use 'float32' or 'int64'")
    return cast("TensorDtype", dtype)


def _check_shape(shape: Sequence[int]) -> list[int]:
    if len(shape) > MAX_RANK:
        raise InvalidTensor(f"a tensor has at most {MAX_RANK} dimensions, got {len(shape)}")
    sizes = [int(n) for n in shape]
    # The product of an empty tensor's dimensions is 0, however large the others are, which numpy could not hold.
    if min(sizes, default=0) < 0 or math.prod(n or 1 for n in sizes) >= 2**60:
        raise InvalidTensor(f"a tensor of shape {sizes} does not fit into memory")
    return sizes


def _check_csr(
    shape: list[int], values: npt.NDArray[Any], crow: npt.NDArray[np.int64], col: npt.NDArray[np.int64]
) -> None:
    if len(shape) != 2:
        raise InvalidTensor(f"a CSR tensor is a matrix, but its shape is {shape}")
    if crow.ndim != 1 or len(crow) != shape[0] + 1:
        raise InvalidTensor(f"sparse_crow_indices has {crow.size} entries, but {shape[0]} rows need {shape[0] + 1}")
    if col.ndim != 1 or len(col) != len(values):
        raise InvalidTensor(f"sparse_col_indices has {col.size} entries, but there are {len(values)} values")
    if crow[0] != 0 or crow[-1] != len(values) or (crow[1:] < crow[:-1]).any():
        raise InvalidTensor(f"sparse_crow_indices must rise from 0 to the {len(values)} values")
    if len(col) and (col.min() < 0 or col.max() >= shape[1]):
        raise InvalidTensor(f"sparse_col_indices must lie in 0..{shape[1] - 1}")
