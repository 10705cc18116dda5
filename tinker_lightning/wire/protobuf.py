"""Protobuf bodies: passes, their results, and the results of sampling."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tinker_lightning.errors import InvalidInput, InvalidMessage
from tinker_lightning.types.datum import Datum, ProvenanceSpan
from tinker_lightning.types.model_input import DmelChunk, EncodedTextChunk, ImageChunk, ModelInput, token_array
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.types.responses import ForwardBackwardOutput, PromptAltTokens, SampledSequence, SampleResponse
from tinker_lightning.types.tensor import TensorData
from tinker_lightning.wire import framing
from tinker_lightning.wire import tinker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinker_lightning.types.model_input import ModelInputChunk
    from tinker_lightning.types.responses import TopkLogprobs
    from tinker_lightning.wire.framing import Buffer

CONTENT_TYPE = "application/x-protobuf"
_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_MAX_DATUMS = 1 << 20
_MAX_BATCH = 1 << 16
# The first bytes of messages inside of messages, in the fields 1 to 8.
_SUBMESSAGES = tuple(bytes([number << 3 | 2]) for number in range(1, 9))
_INT32: np.dtype[Any] = np.dtype("<i4")
_INT64: np.dtype[Any] = np.dtype("<i8")
_FLOAT32: np.dtype[Any] = np.dtype("<f4")
# Fills the rows of the most likely tokens where there are fewer.
_NO_TOKEN = (0, -99999.0)


def encode_forward_backward(request: ForwardBackwardRequest) -> bytes:
    """Serializes a pass."""
    # Concatenated protobuf messages are merged when they are parsed. Serializing a single message of many megabytes
    # would hold it in memory three times, and allocating that memory takes longer than everything else.
    body: list[Buffer] = [
        pb.ForwardBackwardRequest(model_id=request.model_id, seq_id=request.seq_id).SerializeToString()
    ]
    for datum in request.data:
        if not framing.write_datum(body, datum):
            part = pb.ForwardBackwardRequest()
            _fill_datum(part.data.add(), datum)
            body.append(part.SerializeToString())
    rest = pb.ForwardBackwardRequest(loss_fn=request.loss_fn, forward_only=request.forward_only)
    for name, value in request.loss_fn_config.items():
        if isinstance(value, str):
            rest.loss_fn_config_v2[name].text = value
        else:
            rest.loss_fn_config[name] = value
            rest.loss_fn_config_v2[name].number = value
    for name, tensor in request.loss_fn_inputs.items():
        _fill_tensor(rest.loss_fn_inputs[name], tensor)
    if request.scale != 1.0:
        rest.scale = request.scale
    body.append(rest.SerializeToString())
    return b"".join(body)


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Parses a pass; raises `InvalidMessage` with the datum and field if it is invalid."""
    message = _parse(pb.ForwardBackwardRequest(), body)
    if len(message.data) > _MAX_BATCH:
        raise InvalidMessage(
            f"data: {len(message.data)} datums; a request takes at most {_MAX_BATCH}. Split the batch."
        )
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    inputs = {}
    for name, tensor in message.loss_fn_inputs.items():
        try:
            inputs[name] = _read_tensor(tensor)
        except InvalidInput as error:
            raise InvalidMessage(f"loss_fn_inputs: {name}: {error}") from error
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_read_datum(i, datum) for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=config,
        forward_only=message.forward_only,
        loss_fn_inputs=inputs,
        scale=message.scale if message.HasField("scale") else 1.0,
    )


def read_sequence_number(body: bytes) -> tuple[str, int]:
    """Returns the model id and sequence number of a pass, even if its datums are invalid; `("", 0)` if malformed."""
    try:
        message = _parse(pb.ForwardBackwardRequest(), body)
    except InvalidMessage:
        return "", 0
    return message.model_id, message.seq_id


def estimate_parsed_bytes(body: bytes) -> int:
    """Estimates the most memory that a parsed body takes: an empty message of two bytes becomes an object."""
    return 3 * len(body) + 100 * sum(body.count(tag) for tag in _SUBMESSAGES)


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """Serializes the result of a pass."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    # The fields of all datums in a record have the same trailing shapes, so another K starts a new record.
    for _, group in itertools.groupby(output.loss_fn_outputs, key=_record_key):
        _fill_record(message.loss_fn_outputs.add(), list(group))
    return message.SerializeToString()


def decode_output(body: bytes) -> ForwardBackwardOutput:
    """Parses the result of a pass."""
    message = _parse(pb.ForwardBackwardOutput(), body)
    outputs = [datum for record in message.loss_fn_outputs for datum in _read_record(record)]
    kind = message.loss_fn_output_type.rsplit(":", 1)[-1]
    return ForwardBackwardOutput(outputs, dict(message.metrics), kind)


def encode_sample(response: SampleResponse) -> bytes:
    """Serializes a sampling result."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if sequence.stop_reason == "length" else pb.STOP_REASON_STOP,
            tokens=np.asarray(sequence.tokens, _INT32).tobytes(),
            logprobs=None if sequence.logprobs is None else np.asarray(sequence.logprobs, _FLOAT32).tobytes(),
            topk_sampled_logprobs=None if sequence.topk_logprobs is None else _topk_message(sequence.topk_logprobs),
        )
    if response.prompt_logprobs is not None:
        # numpy converts None to NaN, which means "not computed" in the protocol.
        message.prompt_logprobs = np.asarray(response.prompt_logprobs, _FLOAT32).tobytes()
    if response.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk_message(response.topk_prompt_logprobs))
    if response.target_prompt_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        _fill_tensor(message.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def decode_sample(body: bytes) -> SampleResponse:
    """Parses a sampling result."""
    message = _parse(pb.SampleResponse(), body)
    prompt = None
    if message.prompt_logprobs:
        values = _array(message.prompt_logprobs, _FLOAT32, "prompt_logprobs")
        prompt = [None if value != value else value for value in values.tolist()]
    sequences = []
    for i, sequence in enumerate(message.sequences):
        if sequence.stop_reason not in (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH):
            raise InvalidMessage(f"sequence {i}: unknown stop reason {sequence.stop_reason}")
        logprobs = _array(sequence.logprobs, _FLOAT32, f"sequence {i}: logprobs") if sequence.logprobs else None
        sequences.append(
            SampledSequence(
                tokens=_array(sequence.tokens, _INT32, f"sequence {i}: tokens").tolist(),
                logprobs=None if logprobs is None else logprobs.tolist(),
                stop_reason="length" if sequence.stop_reason == pb.STOP_REASON_LENGTH else "stop",
                topk_logprobs=_read_topk(sequence, "topk_sampled_logprobs"),
            )
        )
    alternatives = message.prompt_alt_tokens
    return SampleResponse(
        sequences,
        prompt,
        _read_topk(message, "topk_prompt_logprobs"),
        _read_tensor(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None,
        PromptAltTokens(_read_tensor(alternatives.tokens), _read_tensor(alternatives.logprobs))
        if message.HasField("prompt_alt_tokens")
        else None,
        message.prompt_cache_hit_tokens,
    )


def _topk_message(rows: TopkLogprobs) -> pb.TopkLogprobs:
    k = max((len(row) for row in rows if row), default=1)
    cells = [cell for row in rows for cell in [*(row or ()), *[_NO_TOKEN] * (k - len(row or ()))]]
    ids, values = (np.asarray([cell[i] for cell in cells], dtype) for i, dtype in enumerate((_INT32, _FLOAT32)))
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=len(rows))


def _read_topk(message: Any, name: str) -> TopkLogprobs | None:
    if not message.HasField(name):
        return None
    topk = getattr(message, name)
    ids = _array(topk.token_ids, _INT32, f"{name}: token_ids")
    values = _array(topk.logprobs, _FLOAT32, f"{name}: logprobs")
    if not len(ids) == len(values) == topk.length * topk.k:
        raise InvalidMessage(f"{name}: {len(ids)} ids and {len(values)} values do not fill {topk.length} x {topk.k}")
    shape = topk.length, topk.k
    rows = zip(ids.reshape(shape).tolist(), values.reshape(shape).tolist(), strict=True)
    return [[cell for cell in zip(*row, strict=True) if cell != _NO_TOKEN] or None for row in rows]


def _parse(message: Any, body: bytes) -> Any:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidMessage(f"the body is not a {type(message).__name__}: {error}") from error
    return message


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise InvalidMessage(f"{where}: {len(data)} bytes are not a whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def _fill_datum(message: pb.Datum, datum: Datum) -> None:
    for chunk in datum.model_input.chunks:
        _fill_chunk(message.model_input.add(), chunk)
    for name, tensor in datum.loss_fn_inputs.items():
        _fill_tensor(message.loss_fn_inputs[name], tensor)
    _fill_spans(message.model_input_spans, datum.model_input_spans or ())
    _fill_spans(message.loss_fn_input_spans, datum.loss_fn_input_spans or ())


def _fill_chunk(message: pb.Chunk, chunk: ModelInputChunk) -> None:
    if isinstance(chunk, EncodedTextChunk):
        message.encoded_text.tokens = chunk.tokens.astype(_INT32, copy=False).tobytes()
    elif isinstance(chunk, ImageChunk):
        message.image.data = chunk.data
        message.image.format = chunk.format
        if chunk.expected_tokens is not None:
            message.image.expected_tokens = chunk.expected_tokens
    elif isinstance(chunk, DmelChunk):
        message.dmel.dmel = chunk.dmel
    else:
        raise InvalidInput("an image asset pointer can only be sampled from; training needs the image's bytes")


def _fill_tensor(message: pb.Tensor, tensor: TensorData) -> None:
    values = tensor.values.astype(_FLOAT32 if tensor.dtype == "float32" else _INT64, copy=False).tobytes()
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = tensor.sparse_crow_indices.astype(_INT64, copy=False).tobytes()
        message.sparse_csr.col_indices = tensor.sparse_col_indices.astype(_INT64, copy=False).tobytes()
    else:
        message.dense = values
    message.dtype = _DTYPES[tensor.dtype]
    message.shape.extend(tensor.shape)


def _fill_spans(messages: Any, spans: Iterable[ProvenanceSpan]) -> None:
    for span in spans:
        message = messages.add()
        kind = message.prompt_tokens if span.source == "prompt" else message.sampled_tokens
        kind.sequence_id, kind.offset, kind.length = span.sequence_id, span.offset, span.length
        kind.SetInParent()


def _read_datum(index: int, message: pb.Datum) -> Datum:
    where = "model_input"
    try:
        model_input = ModelInput([_read_chunk(chunk) for chunk in message.model_input])
        tensors = {}
        for name, tensor in message.loss_fn_inputs.items():
            where = name
            tensors[name] = _read_tensor(tensor)
        where = "model_input_spans"
        input_spans = _read_spans(message.model_input_spans)
        where = "loss_fn_input_spans"
        loss_spans = _read_spans(message.loss_fn_input_spans)
    except InvalidInput as error:
        raise InvalidMessage(f"datum {index}: {where}: {error}") from error
    try:
        return Datum(model_input, tensors, input_spans, loss_spans)
    except InvalidInput as error:
        raise InvalidMessage(f"datum {index}: {error}") from error


def _read_chunk(message: pb.Chunk) -> ModelInputChunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = _array(message.encoded_text.tokens, _INT32, "tokens")
        return EncodedTextChunk.wrap(token_array(tokens, copy=False))
    if kind == "image":
        image = message.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return ImageChunk(image.data, cast("Literal['png', 'jpeg']", image.format), expected)
    if kind == "dmel":
        return DmelChunk(message.dmel.dmel)
    raise InvalidMessage("a chunk is empty")


def _read_tensor(message: pb.Tensor) -> TensorData:
    dtype = {pb.DTYPE_FLOAT32: _FLOAT32, pb.DTYPE_INT64: _INT64}.get(message.dtype)
    if dtype is None:
        raise InvalidMessage(f"dtype {message.dtype} is not supported; send float32 (1) or int64 (2)")
    # A scalar has no shape either, so a single value without a shape is read as a vector of one element.
    shape = list(message.shape) or None
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        return TensorData(
            _array(csr.values, dtype, "values"),
            shape=shape,
            sparse_crow_indices=_array(csr.crow_indices, _INT64, "crow_indices"),
            sparse_col_indices=_array(csr.col_indices, _INT64, "col_indices"),
            copy=False,
        )
    return TensorData(_array(message.dense, dtype, "dense"), shape=shape, copy=False)


def _read_spans(messages: Iterable[pb.ProvenanceSpan]) -> list[ProvenanceSpan]:
    spans = []
    for message in messages:
        if message.WhichOneof("span") is None:
            raise InvalidMessage("a span is empty")
        sampled = message.WhichOneof("span") == "sampled_tokens"
        kind = message.sampled_tokens if sampled else message.prompt_tokens
        spans.append(ProvenanceSpan("sampled" if sampled else "prompt", kind.sequence_id, kind.offset, kind.length))
    return spans


def _record_key(datum: dict[str, TensorData]) -> list[tuple[str, str, list[int]]]:
    return sorted((name, tensor.dtype, tensor.shape[1:]) for name, tensor in datum.items())


def _fill_record(message: pb.ArrayRecord, datums: Sequence[dict[str, TensorData]]) -> None:
    message.num_datums = len(datums)
    for name, first in datums[0].items():
        arrays = [datum[name].to_numpy() for datum in datums]
        offsets = np.zeros(len(arrays) + 1, _INT64)
        np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
        field = message.fields[name]
        field.data = b"".join(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays)
        field.offsets = offsets.tobytes()
        field.dtype = _DTYPES[first.dtype]
        field.trailing_shape.extend(first.shape[1:])


def _read_record(message: pb.ArrayRecord) -> list[dict[str, TensorData]]:
    fields = {name: _read_batched(name, field) for name, field in message.fields.items()}
    count = message.num_datums or max(map(len, fields.values()), default=0)
    # A server may omit all fields and still set num_datums, so there may be nothing to check it against.
    if not 0 <= count <= _MAX_DATUMS:
        raise InvalidMessage(f"num_datums must lie in 0..{_MAX_DATUMS}, got {count}")
    for name, tensors in fields.items():
        if len(tensors) != count:
            raise InvalidMessage(f"{name} has {len(tensors)} entries for {count} datums")
    return [{name: tensors[i] for name, tensors in fields.items()} for i in range(count)]


def _read_batched(name: str, message: pb.BatchedTensor) -> list[TensorData]:
    offsets = _array(message.offsets, _INT64, f"{name}: offsets")
    data = message.data  # every access to the field copies it
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > len(data) or (offsets[1:] < offsets[:-1]).any():
        raise InvalidMessage(f"{name}: offsets must rise within the {len(data)} bytes of data")
    if message.dtype == pb.DTYPE_BFLOAT16:
        # bfloat16 is the upper half of a float32.
        halves = _array(data, np.dtype("<u2"), name).astype("<u4") << 16
        values, size = halves.view(_FLOAT32), 2
    elif message.dtype in (pb.DTYPE_FLOAT32, pb.DTYPE_INT64, pb.DTYPE_INT32):
        dtype = {pb.DTYPE_FLOAT32: _FLOAT32, pb.DTYPE_INT64: _INT64, pb.DTYPE_INT32: _INT32}[message.dtype]
        values, size = _array(data, dtype, name), dtype.itemsize
    else:
        raise InvalidMessage(f"{name}: dtype {message.dtype} is not known")
    if (offsets % size).any():
        raise InvalidMessage(f"{name}: offsets must fall on whole values of {size} bytes")
    trailing = list(message.trailing_shape)
    parts = (values[start:stop] for start, stop in itertools.pairwise((offsets // size).tolist()))
    try:
        return [TensorData.wrap(part.reshape(-1, *trailing) if trailing else part) for part in parts]
    except ValueError as error:
        raise InvalidMessage(f"{name}: {error}") from error
