"""Converts our types to the official SDK's, and its results, futures and errors to ours.

The datums, inputs and settings of SDK users become ours in `types`, by `to_datum`, `to_model_input` and others.
Imported only after the user has passed such a client, so that `tinker` stays an extra.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import tinker
from tinker import types as sdk

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import (
    InvalidInput,
    NotATinkerServer,
    NotFound,
    OperationFailed,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
    Unsupported,
)
from tinker_lightning.threads.background import run_on_thread
from tinker_lightning.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from tinker_lightning.types.model_input import to_model_input
from tinker_lightning.types.responses import Checkpoint, PromptAltTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinker_lightning.types import ModelInputChunk, ProvenanceSpan, SamplingParams
    from tinker_lightning.types.params import OptimParams

T = TypeVar("T")


def build(kind: Any, *args: Any, **values: Any) -> Any:
    """Creates an object of the SDK, or calls a method, without optional arguments that its version does not know.

    Raises:
        Unsupported: If such a field has a value that matters.
    """
    known = inspect.signature(kind).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        unknown = [name for name, value in values.items() if name not in known and value]
        if unknown:
            raise Unsupported(f"{kind.__name__} of this client has no {', '.join(unknown)}; leave it out")
        values = {name: value for name, value in values.items() if name in known}
    return kind(*args, **values)


def settings(kind: Any, ours: OptimParams | SamplingParams) -> Any:
    """Converts the settings of a step or of sampling to the SDK's type."""
    return build(kind, **{name: getattr(ours, name) for name in ours.__slots__})


def datum(datum: Datum, types: Any = sdk) -> Any:
    """Converts a datum to the SDK's type, or to a vendor's, whose `types` are given."""
    result = types.Datum(
        model_input=model_input(datum.model_input, types),
        loss_fn_inputs={name: tensor(given, types) for name, given in datum.loss_fn_inputs.items()},
    )
    if datum.model_input_spans is None or datum.loss_fn_input_spans is None:
        return result
    return result.with_provenance(_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans))


def tensor(tensor: TensorData, types: Any = sdk) -> Any:
    """Converts a tensor to the SDK's type, or to a vendor's, whose `types` are given."""
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    return build(
        types.TensorData,
        data=tensor.values if types is sdk else tensor.data,
        dtype=tensor.dtype,
        shape=tensor.shape,
        sparse_crow_indices=None if crow is None else crow.tolist(),
        sparse_col_indices=None if col is None else col.tolist(),
    )


def model_input(given: Any, types: Any = sdk) -> Any:
    """Converts an input to the SDK's type, or to a vendor's, whose `types` are given."""
    if isinstance(given, types.ModelInput):
        return given
    return types.ModelInput(chunks=[_chunk(chunk, types) for chunk in to_model_input(given).chunks])


def _chunk(chunk: ModelInputChunk, types: Any) -> Any:
    if isinstance(chunk, EncodedTextChunk):
        return types.EncodedTextChunk(tokens=chunk.tokens.tolist())
    if isinstance(chunk, ImageChunk):
        return types.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens)
    if isinstance(chunk, DmelChunk):
        return types.DmelChunk(dmel=chunk.dmel)
    return types.ImageAssetPointerChunk(
        location=chunk.location, format=chunk.format, expected_tokens=chunk.expected_tokens
    )


def _spans(spans: Sequence[ProvenanceSpan]) -> list[Any]:
    kinds = {"prompt": sdk.PromptProvenanceSpan, "sampled": sdk.SampledProvenanceSpan}
    return [kinds[s.source](sequence_id=s.sequence_id, offset=s.offset, length=s.length) for s in spans]


def output(result: sdk.ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Converts the result of a pass to our type."""
    outputs = [{name: TensorData.from_data(each) for name, each in datum.items()} for datum in result.loss_fn_outputs]
    return ForwardBackwardOutput(outputs, dict(result.metrics), result.loss_fn_output_type)


def sampled(response: sdk.SampleResponse) -> SampleResponse:
    """Converts the result of sampling to our type."""
    sequences = [
        SampledSequence(
            list(s.tokens),
            None if s.logprobs is None else list(s.logprobs),
            s.stop_reason,
            _optional(s, "topk_logprobs"),
            _optional(s, "sequence_id") or "",
        )
        for s in response.sequences
    ]
    scores = response.prompt_logprobs
    targets, drawn = _optional(response, "target_prompt_logprobs"), _optional(response, "prompt_alt_tokens")
    read = TensorData.from_data
    return SampleResponse(
        sequences,
        None if scores is None else list(scores),
        _optional(response, "topk_prompt_logprobs"),
        None if targets is None else read(targets),
        None if drawn is None else PromptAltTokens(read(drawn.tokens), read(drawn.logprobs)),
        _optional(response, "prompt_cache_hit_tokens") or 0,
    )


def _optional(result: Any, name: str) -> Any:
    """Returns a field of a result that older versions of the SDK do not have."""
    return getattr(result, name, None)


class Calls:
    """The calls of one SDK client: results become our futures, and errors become ours."""

    def __init__(self, model_id: str | None) -> None:
        self._model_id = model_id
        self._in_flight: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def submit(self, operation: str, send: Callable[[], Any], convert: Callable[[Any], T]) -> TinkerFuture[T]:
        """Sends with the SDK; returns a future of the converted result, or list of results."""
        source = _source(self._sent(operation, send))
        self._in_flight.add(source)
        return TinkerFuture(source, self._subject(operation)).then(convert, partial(self._error, operation))

    def in_flight(self) -> list[Future[Any]]:
        """Returns the futures of submitted calls that have not ended."""
        return [each for each in self._in_flight if not each.done()]

    def translated(self, operation: str, action: Callable[[], Any]) -> Any:
        """Runs an action and waits if it returns a future; converts its errors to ours."""
        return self._sent(operation, lambda: value(action()))

    def _sent(self, operation: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            raise self._error(operation, error) from error

    def _subject(self, operation: str) -> str:
        return operation if self._model_id is None else f"{operation} of {self._model_id}"

    def _error(self, operation: str, error: BaseException) -> TinkerLightningError:
        request_id = getattr(error, "request_id", None)
        where = self._subject(operation)
        if request_id is not None:
            where += f", request {request_id}"
        which = f" ({where})" if where != operation else ""
        ours = _kind(error)(f"{operation}: {error or type(error).__name__}{which}")
        ours.operation, ours.model_id, ours.request_id = operation, self._model_id, request_id
        ours.__cause__ = error
        return ours


def checkpoint(theirs: Any) -> Checkpoint:
    """Converts an entry of a listing, which has fewer fields in older versions of the SDK."""
    fields: dict[str, Any] = {name: getattr(theirs, name, None) for name in Checkpoint.__slots__}
    return Checkpoint(**fields)


def _source(sent: Any) -> Future[Any]:
    """Returns the future of a call, whichever kind the client returns: the SDK has changed it, and vendors differ."""
    if isinstance(sent, list):
        return _all([_source(each) for each in sent])
    if callable(wrapped := getattr(sent, "future", None)):  # first, because 0.38 warns about calls on what it wraps
        source: Future[Any] = wrapped()
        return source
    if isinstance(sent, Future):
        return sent
    return run_on_thread(sent.result, "a call")  # futures of other vendors cannot call back


def _all(sources: list[Future[Any]]) -> Future[list[Any]]:
    """Returns a future of the results of several calls."""
    gathered: Future[list[Any]] = Future()
    gathered.set_running_or_notify_cancel()
    left = itertools.count(len(sources) - 1, -1)

    def settle(_: object) -> None:
        if next(left) == 0:
            try:
                gathered.set_result([source.result() for source in sources])
            except Exception as error:
                gathered.set_exception(error)

    for source in sources:
        source.add_done_callback(settle)
    return gathered


def value(returned: Any) -> Any:
    """Returns the result of a call that may return a future of it: all of them do from SDK 0.38 on."""
    return returned.result() if callable(getattr(returned, "result", None)) else returned


def _kind(error: BaseException) -> type[TinkerLightningError]:
    if isinstance(error, TinkerLightningError):  # what was asked for is not supported
        return type(error)
    if isinstance(error, tinker.RequestFailedError) and error.category == sdk.RequestErrorCategory.User:
        return InvalidInput
    kinds: dict[type[BaseException], type[TinkerLightningError]] = {
        tinker.AuthenticationError: Unauthorized,
        tinker.PermissionDeniedError: Unauthorized,
        tinker.NotFoundError: NotFound,
        tinker.BadRequestError: InvalidInput,
        tinker.UnprocessableEntityError: InvalidInput,
        tinker.APIConnectionError: ServerUnreachable,
        tinker.APIResponseValidationError: NotATinkerServer,
    }
    return next((ours for theirs, ours in kinds.items() if isinstance(error, theirs)), OperationFailed)
