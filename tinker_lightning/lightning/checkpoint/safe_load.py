"""The content of a file of `torch.save`, read without running anything that it names."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PICKLE = "/data.pkl"


class Unknown:
    """Stands for an object that only its own code could make, and takes what a file does to it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Unknown:
        """As of a function or a class."""
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """As of a list."""

    def add(self, _: Any) -> None:
        """As of a set."""


def load(file: Path) -> Any:
    """The dicts, lists, numbers, texts and tensors of bytes in a file; `Unknown` for all else.

    Torch's own safe reader refuses the whole file for one object of an unknown class, such as a number of numpy's.

    Raises:
        zipfile.BadZipFile: If it was not written to its end, or not by torch.
    """
    with zipfile.ZipFile(file) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(_PICKLE))
        with archive.open(name) as pickled:
            return _Unpickler(pickled, archive, name.removesuffix(_PICKLE)).load()


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what is named here, so that no file can make it run code."""

    def __init__(self, pickled: IO[bytes], archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(pickled)
        self._archive = archive
        self._folder = folder
        self._known: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "ByteStorage"): self._bytes,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        }

    def find_class(self, module: str, name: str) -> Any:
        return self._known.get((module, name), Unknown)

    def persistent_load(self, stored: tuple[Any, ...]) -> Any:
        _, kind, key, *_ = stored
        return kind(key)

    def _bytes(self, key: str) -> Tensor:
        content = bytearray(self._archive.read(f"{self._folder}/data/{key}"))
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    return torch.as_strided(storage, size, stride, offset) if isinstance(storage, Tensor) else Unknown()
