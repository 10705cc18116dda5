"""JSON bodies: converts the dataclasses of `types` to bytes and back, without copying arrays.

As the protocol requires, decoding is strict about types and lenient otherwise: unknown fields are ignored, null counts
as missing, and missing fields take their defaults. Only null in place of a float raises, because serializers write NaN
as null. Errors name the field.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import reprlib
import types
import typing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import orjson

from tinker_lightning.errors import InvalidInput, InvalidMessage
from tinker_lightning.types.datum import Datum, ProvenanceSpan
from tinker_lightning.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.types.tensor import TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

CONTENT_TYPE = "application/json"
# The key that identifies each type of chunk without tokens.
_BINARY_CHUNKS: dict[str, type] = {"dmel": DmelChunk, "location": ImageAssetPointerChunk, "data": ImageChunk}

# The number of values that are encoded at a time.
_PIECE = 4096
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_NON_STR_KEYS


def dumps(message: Any) -> bytes:
    """Serializes a message; omits fields that are None, and adds `type` if the class defines it."""
    return orjson.dumps(message, default=_encode, option=_OPTIONS)


def fields_of(message: Any) -> dict[str, Any]:
    """Returns the fields of a message that `dumps` would serialize."""
    fields: dict[str, Any] = message if isinstance(message, dict) else _encode(message)
    return fields


def pieces(message: Any) -> Iterator[bytes]:
    """Yields the bytes of `dumps` in small pieces, because a single call would block all other threads."""
    if isinstance(message, dict) or not isinstance(message, list | np.ndarray | str | int | float | None):
        encoded = message if isinstance(message, dict) else _encode(message)
        if not isinstance(encoded, dict):
            yield dumps(encoded)
            return
        before = b"{"
        for name, value in encoded.items():
            yield before + dumps(name) + b":"
            yield from pieces(value)
            before = b","
        yield b"{}" if before == b"{" else b"}"
    elif isinstance(message, list) and message and dataclasses.is_dataclass(message[0]) | isinstance(message[0], dict):
        before = b"["
        for entry in message:
            yield before
            yield from pieces(entry)
            before = b","
        yield b"]"
    elif isinstance(message, list | np.ndarray) and len(message) > _PIECE:
        before = b"["
        for start in range(0, len(message), _PIECE):
            yield before + dumps(message[start : start + _PIECE])[1:-1]
            before = b","
        yield b"]"
    else:
        yield dumps(message)


def digest(message: Any, operation: str = "") -> str:
    """Returns a hash of a decoded request, equal for JSON and protobuf of the same contents.

    Arrays are hashed as bytes, because their text takes longer than everything else. Protobuf does not distinguish a
    scalar from a vector with one element, so the hash does not either.

    Args:
        message: The request.
        operation: Distinguishes operations whose requests are of the same class.
    """
    arrays: list[Any] = []

    def describe(value: Any) -> Any:
        if isinstance(value, TensorData):
            parts = value.values, value.sparse_crow_indices, value.sparse_col_indices
            arrays.extend(np.ascontiguousarray(part) for part in parts if part is not None)
            return [value.dtype, value.shape or [1], value.values.size, value.is_sparse]
        if isinstance(value, EncodedTextChunk):
            arrays.append(np.ascontiguousarray(value.tokens))
            return value.length
        return _encode(value)

    structure = orjson.dumps(
        [operation, type(message).__name__, message], default=describe, option=_OPTIONS | orjson.OPT_SORT_KEYS
    )
    hashed = hashlib.blake2b(structure, digest_size=16)
    for array in arrays:
        hashed.update(array)
    return hashed.hexdigest()


def estimate_parsed_bytes(body: bytes) -> int:
    """Estimates the most memory that a parsed body takes: some bytes of JSON become large Python objects."""
    values = body.count(b",") + body.count(b":") + 1
    containers = body.count(b"[") + body.count(b"{")
    strings = 0 if b'"' not in body else body.count(b'"') // 2
    return 2 * len(body) + 48 * values + 80 * containers + 60 * strings


def loads(body: bytes) -> dict[str, Any]:
    """Parses a JSON body that must contain an object."""
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidMessage(f"the body is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidMessage(f"the body must be a JSON object, got {type(message).__name__}")
    return message


def parse(cls: type[T], body: bytes) -> T:
    """Parses a JSON body into a dataclass; raises `InvalidMessage`, or `InvalidInput` if the class rejects a value."""
    return typing.cast("T", _decode(cls, loads(body), ""))


def forward_backward_body(request: ForwardBackwardRequest) -> bytes:
    """Serializes a pass as JSON, which older versions of the protocol use."""
    key = "forward_input" if request.forward_only else "forward_backward_input"
    content: dict[str, Any] = {"data": request.data, "loss_fn": request.loss_fn}
    if request.loss_fn_config:
        content["loss_fn_config"] = request.loss_fn_config
    if request.loss_fn_inputs:
        content["loss_fn_inputs"] = request.loss_fn_inputs
    if request.scale != 1.0:
        content["scale"] = request.scale
    return dumps({key: content, "model_id": request.model_id, "seq_id": request.seq_id})


def parse_forward_backward(body: bytes, *, forward_only: bool) -> ForwardBackwardRequest:
    """Parses a pass from JSON, which older versions of the protocol use."""
    message = loads(body)
    key = "forward_input" if forward_only else "forward_backward_input"
    content = message.get(key)
    if not isinstance(content, dict):
        raise InvalidMessage(f"{key}: must be an object, got {_describe(content)}")
    merged = {**content, "model_id": message.get("model_id"), "seq_id": message.get("seq_id")}
    return typing.cast(
        "ForwardBackwardRequest", _decode(ForwardBackwardRequest, {**merged, "forward_only": forward_only}, "")
    )


def _encode(value: Any) -> Any:
    if isinstance(value, TensorData):
        tensor: dict[str, Any] = {"data": value.values.reshape(-1), "dtype": value.dtype, "shape": value.shape}
        if value.is_sparse:
            tensor["sparse_crow_indices"] = value.sparse_crow_indices
            tensor["sparse_col_indices"] = value.sparse_col_indices
        return tensor
    if isinstance(value, Datum):
        datum: dict[str, Any] = {"loss_fn_inputs": value.loss_fn_inputs, "model_input": value.model_input}
        if value.model_input_spans is not None:
            datum["model_input_spans"] = value.model_input_spans
            datum["loss_fn_input_spans"] = value.loss_fn_input_spans
        return datum
    if isinstance(value, ModelInput):
        return {"chunks": value.chunks}
    if isinstance(value, EncodedTextChunk):
        return {"type": "encoded_text", "tokens": value.tokens}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, ProvenanceSpan):
        kind = f"{value.source}_tokens"
        return {"type": kind, "sequence_id": value.sequence_id, "offset": value.offset, "length": value.length}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        encoded = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        encoded = {name: field for name, field in encoded.items() if field is not None}
        if isinstance(literal := getattr(type(value), "type", None), str):
            encoded["type"] = literal
        return encoded
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Converts `value` to the type `hint`; `where` is the path of its field for error messages."""
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(hint), value, where)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise _type_error(where, f"one of {', '.join(map(str, typing.get_args(hint)))}", value)
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _type_error(where, "a list", value)
        (item,) = typing.get_args(hint)
        if item is Datum:
            return [_decode_datum(entry, f"datum {i}") for i, entry in enumerate(value)]
        return [_decode(item, entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if origin is tuple:
        members = typing.get_args(hint)
        if not isinstance(value, list) or len(value) != len(members):
            raise _type_error(where, f"a list of {len(members)}", value)
        pairs = enumerate(zip(members, value, strict=True))
        return tuple(_decode(member, entry, f"{where}[{i}]") for i, (member, entry) in pairs)
    if origin is dict:
        if not isinstance(value, dict):
            raise _type_error(where, "an object", value)
        return {key: _decode(typing.get_args(hint)[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if hint is Datum:
        return _decode_datum(value, where)
    if hint is ModelInput:
        return _decode_model_input(value, where)
    if hint is TensorData:
        return _decode_tensor(value, where)
    if hint is bytes:
        return _decode_base64(value, where)
    if hint is datetime:
        return _decode_time(value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _type_error(
            where, {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[hint], value
        )
    return value


def _decode_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    reason = ""  # not the error, which would keep this frame and those of its callers in a cycle
    if value is None and types.NoneType in members:
        return None
    for member in members:
        if member is types.NoneType:
            continue
        try:
            return _decode(member, value, where)
        except InvalidMessage as error:
            reason = reason or str(error)
    raise InvalidMessage(reason)


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Any, bool]]:
    """Returns the name and type of each field of a dataclass, and whether it is required."""
    hints = typing.get_type_hints(cls)
    return [
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    ]


def _decode_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _type_error(where, "an object", value)
    values: dict[str, Any] = {}
    for name, hint, required in _fields(cls):
        entry = value.get(name)
        path = f"{where}.{name}" if where else name
        if entry is not None:
            values[name] = _decode(hint, entry, path)
        elif hint is float and name in value:
            # Serializers write NaN and infinity as null. Using the default instead would train with another number.
            raise InvalidMessage(f"{path}: must be a finite number, got null")
        elif required and types.NoneType not in typing.get_args(hint):
            raise InvalidMessage(f"{path}: missing")
        elif required:
            values[name] = None
    return cls(**values)


def _decode_datum(value: Any, where: str) -> Datum:
    if not isinstance(value, dict):
        raise _type_error(where, "an object", value)
    inputs = {} if value.get("loss_fn_inputs") is None else value["loss_fn_inputs"]
    if not isinstance(inputs, dict):
        raise _type_error(f"{where}: loss_fn_inputs", "an object", inputs)
    return _build(
        where,
        Datum,
        _decode_model_input(value.get("model_input"), f"{where}: model_input"),
        {name: _decode_tensor(entry, f"{where}: {name}") for name, entry in inputs.items()},
        _decode_spans(value.get("model_input_spans"), f"{where}: model_input_spans"),
        _decode_spans(value.get("loss_fn_input_spans"), f"{where}: loss_fn_input_spans"),
    )


def _decode_spans(value: Any, where: str) -> list[ProvenanceSpan] | None:
    if value is None:
        return None
    spans = []
    for i, entry in enumerate(_decode(list[dict[str, Any]], value, where)):
        kind = _decode(Literal["prompt_tokens", "sampled_tokens"], entry.get("type"), f"{where}[{i}].type")
        source = kind.removesuffix("_tokens")
        spans.append(_build(f"{where}[{i}]", _decode_dataclass, ProvenanceSpan, {**entry, "source": source}, ""))
    return spans


def _decode_tensor(value: Any, where: str) -> TensorData:
    if not isinstance(value, dict):
        raise _type_error(where, "a tensor (an object with data, dtype and shape)", value)
    data = value.get("data")
    if not isinstance(data, list):
        raise _type_error(f"{where}.data", "a list of numbers", data)
    shape = value.get("shape")
    if shape is not None:
        shape = _decode(list[int], shape, f"{where}.shape")
    sparse = value.get("sparse_crow_indices"), value.get("sparse_col_indices")
    return _build(where, TensorData, data, value.get("dtype"), shape, *sparse)


def _decode_model_input(value: Any, where: str) -> ModelInput:
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not isinstance(chunks, list):
        raise _type_error(where, "an object with a list of chunks", value)
    return ModelInput([_decode_chunk(chunk, f"{where}.chunks[{i}]") for i, chunk in enumerate(chunks)])


def _decode_chunk(value: Any, where: str) -> ModelInputChunk:
    if not isinstance(value, dict):
        raise _type_error(where, "an object", value)
    # SDKs before 0.18 omit the type, so chunks are identified by their keys.
    if "tokens" in value:
        if not isinstance(value["tokens"], list):
            raise _type_error(f"{where}.tokens", "a list of token ids", value["tokens"])
        return _build(where, EncodedTextChunk, value["tokens"])
    for key, cls in _BINARY_CHUNKS.items():
        if key in value:
            return typing.cast("ModelInputChunk", _build(where, _decode_dataclass, cls, value, ""))
    raise InvalidMessage(f"{where}: a chunk has tokens, data, location or dmel, got {', '.join(value) or 'nothing'}")


def _decode_base64(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        raise _type_error(where, "a base64 string", value)
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise InvalidMessage(f"{where}: not base64: {error}") from error


def _decode_time(value: Any, where: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise _type_error(where, "a time in ISO 8601", value) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _build(where: str, make: Callable[..., T], *args: Any) -> T:
    try:
        return make(*args)
    except InvalidInput as error:
        raise InvalidMessage(f"{where}: {error}") from error


def _type_error(where: str, expected: str, value: Any) -> InvalidMessage:
    return InvalidMessage(f"{where or 'the body'}: must be {expected}, got {_describe(value)}")


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
