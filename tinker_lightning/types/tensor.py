"""Tensors as the protocol knows them: float32 or int64, dense or in compressed sparse rows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_lightning.errors import InvalidTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    TensorLike: TypeAlias = "TensorData | torch.Tensor | npt.NDArray[Any] | Sequence[Any] | float"

TensorDtype: TypeAlias = Literal["float32", "int64"]

# A few bytes of CSR can claim a dense shape of any size, so readers of foreign data cap it.
MAX_DENSE_ELEMENTS = 1 << 28


class TensorData:
    """An array with the protocol's dtypes; holds numpy memory and never copies it without need.

    Args:
        data: The values: flat or already shaped; for CSR the listed values only.
        dtype: `"float32"` or `"int64"`; taken from the data if not given (other dtypes are converted).
        shape: The dense shape; taken from the data if not given. Required for CSR.
        sparse_crow_indices: CSR row pointers, one more than there are rows.
        sparse_col_indices: CSR column of each listed value; cells that are not listed are 0.
    """

    __slots__ = ("_values", "dtype", "shape", "sparse_col_indices", "sparse_crow_indices")

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
    ) -> None:
        values = _as_array(data)
        self.dtype = _wire_dtype(values.dtype) if dtype is None else _known_dtype(dtype)
        values = np.ascontiguousarray(values, dtype=self.dtype) if values.ndim else values.astype(self.dtype)
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise InvalidTensor("a CSR tensor needs both sparse_crow_indices and sparse_col_indices")
        if sparse_crow_indices is None or sparse_col_indices is None:
            self.sparse_crow_indices = self.sparse_col_indices = None
            self.shape = list(values.shape) if shape is None else [int(n) for n in shape]
            if values.shape != tuple(self.shape):
                if min(self.shape, default=0) < 0 or values.size != _product(self.shape):
                    raise InvalidTensor(f"{values.size} values do not fill the shape {self.shape}")
                values = values.reshape(self.shape)
        else:
            if shape is None:
                raise InvalidTensor("a CSR tensor needs its dense shape")
            self.shape = [int(n) for n in shape]
            self.sparse_crow_indices = np.ascontiguousarray(_as_array(sparse_crow_indices), dtype=np.int64)
            self.sparse_col_indices = np.ascontiguousarray(_as_array(sparse_col_indices), dtype=np.int64)
            values = values.reshape(-1)
            _check_csr(self.shape, values, self.sparse_crow_indices, self.sparse_col_indices)
        self._values = values

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> TensorData:
        """Wrap a numpy array; floating dtypes become float32, integers int64."""
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Wrap a torch tensor (detached, on the CPU); shares its memory where the dtype allows."""
        return cls(_from_torch(tensor))

    @classmethod
    def of(cls, value: TensorLike) -> TensorData:
        """Any of what users hold: a `TensorData`, a torch tensor, a numpy array, a list or a number."""
        return value if isinstance(value, TensorData) else cls(_as_array(value))

    @property
    def is_sparse(self) -> bool:
        """Whether the values are stored as compressed sparse rows."""
        return self.sparse_crow_indices is not None

    @property
    def data(self) -> list[Any]:
        """The stored values as a flat list; of a CSR tensor only the listed ones."""
        return self._values.reshape(-1).tolist()

    @property
    def values(self) -> npt.NDArray[Any]:
        """The stored values as numpy memory: shaped if dense, flat if CSR."""
        return self._values

    def to_numpy(self) -> npt.NDArray[Any]:
        """The dense array; of a dense tensor its own memory, not a copy."""
        crow, col = self.sparse_crow_indices, self.sparse_col_indices
        if crow is None or col is None:
            return self._values
        if _product(self.shape) > MAX_DENSE_ELEMENTS:
            raise InvalidTensor(f"a CSR tensor of shape {self.shape} is too large to be made dense")
        dense = np.zeros(self.shape, dtype=self.dtype)
        dense[np.repeat(np.arange(self.shape[0]), np.diff(crow)), col] = self._values
        return dense

    def to_torch(self) -> torch.Tensor:
        """The dense torch tensor; shares memory with this one where it is writable."""
        import torch

        array = self.to_numpy()
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def tolist(self) -> Any:
        """The dense values as nested lists; of a scalar the number."""
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


def _as_array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    torch = sys.modules.get("torch")  # a torch tensor can only exist where torch was imported
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidTensor(f"not a rectangular array of numbers: {error}") from error
    # An empty list has no dtype of its own; numpy calls it float64, which is right for all but target tokens.
    if array.dtype.kind not in "fiub":
        raise InvalidTensor(f"not an array of numbers: got {type(value).__name__} holding {array.dtype}")
    return array


def _from_torch(tensor: torch.Tensor) -> npt.NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.is_sparse or tensor.layout is not _torch().strided:
        tensor = tensor.to_dense()
    if tensor.dtype in (_torch().bfloat16, _torch().float16):
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.contiguous().numpy()
    return array


def _torch() -> Any:
    return sys.modules["torch"]


def _wire_dtype(dtype: np.dtype[Any]) -> TensorDtype:
    if dtype.kind == "f":
        return "float32"
    if dtype.kind in "iub":
        return "int64"
    raise InvalidTensor(f"dtype {dtype} has no place in the protocol; use float32 or int64")


def _known_dtype(dtype: str) -> TensorDtype:
    if dtype == "float32":
        return "float32"
    if dtype == "int64":
        return "int64"
    raise InvalidTensor(f"dtype {dtype!r} is not of the protocol; use 'float32' or 'int64'")


def _product(shape: Sequence[int]) -> int:
    """The number of cells, in Python integers: numpy's would overflow silently on a hostile shape."""
    total = 1
    for n in shape:
        total *= n
    return total


def _check_csr(
    shape: list[int], values: npt.NDArray[Any], crow: npt.NDArray[np.int64], col: npt.NDArray[np.int64]
) -> None:
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidTensor(f"a CSR tensor is a matrix, but its shape is {shape}")
    if crow.ndim != 1 or len(crow) != shape[0] + 1:
        raise InvalidTensor(f"sparse_crow_indices has {crow.size} entries, but {shape[0]} rows need {shape[0] + 1}")
    if col.ndim != 1 or len(col) != len(values):
        raise InvalidTensor(f"sparse_col_indices has {col.size} entries, but there are {len(values)} values")
    if crow[0] != 0 or crow[-1] != len(values) or (np.diff(crow) < 0).any():
        raise InvalidTensor(f"sparse_crow_indices must rise from 0 to the {len(values)} values")
    if len(col) and (col.min() < 0 or col.max() >= shape[1]):
        raise InvalidTensor(f"sparse_col_indices must lie in 0..{shape[1] - 1}")
