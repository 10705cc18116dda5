"""Inputs of a model: sequences of chunks, usually a single chunk of text tokens."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_lightning.errors import InvalidDatum, InvalidTensor
from tinker_lightning.types.tensor import TensorData, as_array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_lightning.types.tensor import TensorLike

INT32_MAX = 2**31 - 1


class EncodedTextChunk:
    """Text as an int32 array of token ids."""

    __slots__ = ("tokens",)

    tokens: npt.NDArray[np.int32]

    def __init__(self, tokens: TensorLike) -> None:
        self.tokens = token_array(tokens)

    @classmethod
    def wrap(cls, tokens: npt.NDArray[np.int32]) -> EncodedTextChunk:
        """Wraps a result of `token_array`, or a slice of it, without a copy."""
        chunk = cls.__new__(cls)
        chunk.tokens = tokens
        return chunk

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedTextChunk):
            return NotImplemented
        return np.array_equal(self.tokens, other.tokens)

    __hash__ = None  # type: ignore[assignment]  # equal by value and mutable through its memory

    def __repr__(self) -> str:
        return f"EncodedTextChunk({self.length} tokens)"


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An image as the bytes of its file; the server converts it to `expected_tokens` tokens."""

    type: ClassVar[str] = "image"
    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_image(self.format, self.expected_tokens)


@dataclass(frozen=True, slots=True)
class ImageAssetPointerChunk:
    """An image that the server fetches; supported for sampling only."""

    type: ClassVar[str] = "image_asset_pointer"
    location: str
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_image(self.format, self.expected_tokens)


@dataclass(frozen=True, slots=True)
class DmelChunk:
    """Audio as discretized mel frames, in the encoding of the protocol."""

    type: ClassVar[str] = "dmel"
    dmel: bytes


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk


class ModelInput:
    """A sequence of chunks, usually created by `ModelInput.from_ints(tokens)`."""

    __slots__ = ("chunks",)

    chunks: list[ModelInputChunk]

    def __init__(self, chunks: Iterable[ModelInputChunk] = ()) -> None:
        self.chunks = list(chunks)

    @classmethod
    def from_ints(cls, tokens: TensorLike) -> ModelInput:
        """Creates a text-only input from a list, numpy array or torch tensor of token ids."""
        return cls([EncodedTextChunk(tokens)])

    @property
    def length(self) -> int:
        """The number of tokens; raises if only the server knows the length of a chunk."""
        return sum(_chunk_length(chunk) for chunk in self.chunks)

    @property
    def is_text(self) -> bool:
        """Whether all chunks are text."""
        return all(isinstance(chunk, EncodedTextChunk) for chunk in self.chunks)

    def tokens(self) -> npt.NDArray[np.int32]:
        """Returns the token ids of a text-only input as an array, without a copy if there is a single chunk."""
        arrays = [chunk.tokens for chunk in self.chunks if isinstance(chunk, EncodedTextChunk)]
        if len(arrays) != len(self.chunks):
            raise InvalidDatum(f"{self!r} has chunks that are not text and so have no token ids")
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)

    def to_ints(self) -> list[int]:
        """Returns the token ids of a text-only input as a list."""
        ids: list[int] = self.tokens().tolist()
        return ids

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """Returns a new input with the chunk appended."""
        return ModelInput([*self.chunks, chunk])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelInput):
            return NotImplemented
        return self.chunks == other.chunks

    __hash__ = None  # type: ignore[assignment]  # equal by value and mutable through its memory

    def __repr__(self) -> str:
        return f"ModelInput({', '.join(map(repr, self.chunks))})"


def token_array(tokens: TensorLike, *, copy: bool = True) -> npt.NDArray[np.int32]:
    """Returns token ids as a 1-D int32 array, which is new unless `copy` is False; raises if they are not valid ids."""
    if type(tokens) is list and tokens and type(tokens[0]) is not bool:
        # Packing takes half of numpy's time for a list. If it fails, the checks below raise an error with the reason.
        packed = np.empty(len(tokens), np.int32)
        try:
            struct.pack_into(f"{len(tokens)}i", packed.data, 0, *tokens)
        except (struct.error, TypeError, ValueError, RuntimeError):
            pass
        else:
            if np.minimum.reduce(packed) >= 0:
                return packed
    try:
        array: npt.NDArray[Any] = tokens.to_numpy() if isinstance(tokens, TensorData) else as_array(tokens)
    except InvalidTensor as error:
        raise InvalidDatum(f"token ids: {error}. Pass the integers that a tokenizer returns.") from error
    if array.ndim != 1:
        raise InvalidDatum(f"token ids must be one sequence, got an array of shape {list(array.shape)}")
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidDatum(f"token ids must be integers, got {array.dtype}. Did you pass weights or a mask?")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > INT32_MAX:
        raise InvalidDatum(f"token ids must be between 0 and {INT32_MAX}, got {low if low < 0 else high}")
    return array.astype(np.int32, order="C", copy=copy)


def to_model_input(model_input: Any) -> ModelInput:
    """Converts our or the official SDK's model input to ours, with a copy of its arrays."""
    if isinstance(model_input, ModelInput):
        return model_input
    if not hasattr(model_input, "chunks"):
        raise InvalidDatum(f"an input must be a ModelInput, got {type(model_input).__name__}; use ModelInput.from_ints")
    return ModelInput([_to_chunk(chunk) for chunk in model_input.chunks])


def _to_chunk(chunk: Any) -> ModelInputChunk:
    if hasattr(chunk, "tokens"):
        return EncodedTextChunk(chunk.tokens)
    if hasattr(chunk, "dmel"):
        return DmelChunk(chunk.dmel)
    if hasattr(chunk, "location"):
        return ImageAssetPointerChunk(chunk.location, chunk.format, chunk.expected_tokens)
    if hasattr(chunk, "data"):
        return ImageChunk(chunk.data, chunk.format, chunk.expected_tokens)
    raise InvalidDatum(f"model_input: unknown kind of chunk {type(chunk).__name__}")


def _check_image(image_format: str, expected_tokens: int | None) -> None:
    if image_format not in ("png", "jpeg"):
        raise InvalidDatum(f"the format of an image must be png or jpeg, got {image_format!r}")
    if expected_tokens is not None and not 0 <= expected_tokens <= INT32_MAX:
        raise InvalidDatum(f"expected_tokens of an image must be between 0 and {INT32_MAX}, got {expected_tokens}")


def _chunk_length(chunk: ModelInputChunk) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return chunk.length
    if isinstance(chunk, ImageChunk | ImageAssetPointerChunk) and chunk.expected_tokens is not None:
        return chunk.expected_tokens
    if isinstance(chunk, DmelChunk):
        return _dmel_length(chunk.dmel)
    raise InvalidDatum("the token length of an image is unknown; set expected_tokens")


def _dmel_length(dmel: bytes) -> int:
    """Returns dimension 0 of encoded frames: dtype byte (optionally after a marker, 254), varint ndim, varint dims."""
    position = 2 if dmel[:1] == b"\xfe" else 1
    for part in ("ndim", "dim 0"):
        number = shift = 0
        while True:
            if position >= len(dmel) or shift > 63:
                raise InvalidDatum(f"the audio chunk ends before its {part}")
            byte = dmel[position]
            position += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        if part == "ndim" and number == 0:
            raise InvalidDatum("the audio chunk has no dimensions, so no length")
    return number
