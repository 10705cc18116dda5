"""Training examples: the input of the model and the inputs of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidTensor
from tinker_lightning.types import chat
from tinker_lightning.types.model_input import EncodedTextChunk, ModelInput, to_model_input, token_array
from tinker_lightning.types.tensor import TensorData

if TYPE_CHECKING:
    from tinker_lightning.types.chat import Truncate
    from tinker_lightning.types.tensor import TensorLike

# Loss inputs with one row per input token. Inputs with other names may have any shape.
PER_TOKEN_FLOATS = frozenset(
    {"weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"}
)
PER_TOKEN = PER_TOKEN_FLOATS | {"target_tokens"}


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """The origin of consecutive tokens: a position in a prompt or in a sampled sequence."""

    source: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not (0 <= self.offset < 2**63 and 0 <= self.length < 2**63):
            raise InvalidDatum(f"a span's offset and length must be at least 0, got {self.offset} and {self.length}")


class Datum:
    """One training example.

    Position `i` of the input predicts target `i`. `from_tokens` and `from_chat` shift the targets for you.

    Args:
        model_input: The input of the model.
        loss_fn_inputs: The inputs of the loss by name: `target_tokens`, `weights`, `advantages`, `logprobs`, or any
            custom name. Values may be lists, numpy arrays, torch tensors or `TensorData`.
        model_input_spans: The origin of the input tokens; few losses need it.
        loss_fn_input_spans: The origin of the target tokens; requires `model_input_spans`.
    """

    __slots__ = ("loss_fn_input_spans", "loss_fn_inputs", "model_input", "model_input_spans")

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]
    model_input_spans: tuple[ProvenanceSpan, ...] | None
    loss_fn_input_spans: tuple[ProvenanceSpan, ...] | None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, TensorLike] | None = None,
        model_input_spans: Sequence[ProvenanceSpan] | None = None,
        loss_fn_input_spans: Sequence[ProvenanceSpan] | None = None,
    ) -> None:
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidDatum("set both model_input_spans and loss_fn_input_spans, or neither")
        if not isinstance(model_input, ModelInput):
            raise InvalidDatum(
                f"model_input must be a ModelInput, got {type(model_input).__name__}. Create one with "
                "ModelInput.from_ints(tokens)."
            )
        self.model_input = model_input
        self.loss_fn_inputs = {name: _tensor(name, value) for name, value in (loss_fn_inputs or {}).items()}
        # Protobuf cannot distinguish two empty lists from no lists.
        has_spans = bool(model_input_spans or loss_fn_input_spans)
        self.model_input_spans = tuple(model_input_spans or ()) if has_spans else None
        self.loss_fn_input_spans = tuple(loss_fn_input_spans or ()) if has_spans else None
        if not PER_TOKEN.isdisjoint(self.loss_fn_inputs) and model_input.is_text:
            _check_alignment(model_input.length, self.loss_fn_inputs)

    @classmethod
    def from_tokens(cls, tokens: TensorLike, weights: TensorLike | None = None, *, truncate: bool = False) -> Datum:
        """Creates a datum for next-token prediction on a whole sequence.

        Args:
            tokens: Prompt and response together.
            weights: The weight of each *token*, by default 1; usually 0 on the prompt. The weight of the first token,
                which is never predicted, is not used.
            truncate: Whether to cut tokens and weights to the shorter of the two instead of raising.
        """
        ids = token_array(tokens)
        values = np.ones(len(ids), np.float32) if weights is None else _tensor("weights", weights).to_numpy()
        if values.ndim != 1:
            raise InvalidDatum(f"weights has the shape {list(values.shape)}; give one number per token")
        if len(ids) != len(values):
            if not truncate:
                raise InvalidDatum(
                    f"weights has {len(values)} entries but there are {len(ids)} tokens. Give one weight per token, or "
                    "pass truncate=True to cut to the shorter."
                )
            ids, values = ids[: len(values)], values[: len(ids)]
        if len(ids) < 2:
            raise InvalidDatum(f"got {len(ids)} tokens; a datum needs at least 2, because each token predicts the next")
        weights = TensorData.wrap(values[1:])
        return cls(ModelInput([EncodedTextChunk.wrap(ids[:-1])]), {"target_tokens": ids[1:], "weights": weights})

    @classmethod
    def from_targets(
        cls, input_tokens: TensorLike, target_tokens: TensorLike, *, truncate: bool = False, **named_tensors: TensorLike
    ) -> Datum:
        """Creates a datum from an input and targets that are already shifted.

        Args:
            input_tokens: The tokens of the input, `[T]`.
            target_tokens: The token to predict at each position, `[T]`, or `K` alternatives, `[T, K]`.
            truncate: Whether to cut the input and the per-token inputs to the shortest of them instead of raising.
            **named_tensors: Other inputs of the loss, such as `weights`, `advantages` or `logprobs`. Only the lengths
                of the protocol's per-token inputs are checked.
        """
        ids = token_array(input_tokens)
        inputs = {"target_tokens": _tensor("target_tokens", target_tokens)}
        inputs |= {name: _tensor(name, value) for name, value in named_tensors.items()}
        if truncate:
            per_token = {name: tensor.to_numpy() for name, tensor in inputs.items() if name in PER_TOKEN}
            length = min([len(ids), *(len(np.atleast_1d(array)) for array in per_token.values())])
            ids = ids[:length]
            inputs |= {name: TensorData.wrap(np.atleast_1d(array)[:length]) for name, array in per_token.items()}
        return cls(ModelInput([EncodedTextChunk.wrap(ids)]), inputs)

    @classmethod
    def from_chat(
        cls,
        messages: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        tokenizer: Any,
        *,
        max_length: int | None = None,
        truncate: Truncate = "error",
    ) -> Datum:
        """Creates a datum from a conversation, with weight 1 on assistant messages, including end-of-turn tokens.

        Args:
            messages: `{"role": ..., "content": ...}` in order, with at least one assistant message, or a row of a
                dataset that has them under `messages`, and optionally `tools`.
            tokenizer: A Hugging Face tokenizer with a chat template.
            max_length: The maximum number of tokens of the conversation.
            truncate: How to treat longer ones: `error` raises `TooLong`, `left` and `right` cut that side.
        """
        row = messages if isinstance(messages, Mapping) else {"messages": messages}
        if "messages" not in row:
            raise InvalidDatum(f"the row has no 'messages'; it has {', '.join(map(str, row)) or 'no columns'}")
        rendered = chat.render(row["messages"], tokenizer, tools=row.get("tools"))
        ids, weights = chat.shorten(*rendered, max_length, truncate)
        if not weights[1:].any():
            raise InvalidDatum(
                f"no token of the assistant is left within max_length={max_length}. Raise max_length, or pass "
                "truncate='left'."
            )
        return cls.from_tokens(ids, weights)

    def with_inputs(self, inputs: Mapping[str, TensorLike] | None = None, **named: TensorLike) -> Datum:
        """Returns a copy of the datum with loss inputs added or replaced.

        >>> Datum.from_tokens([1, 2, 3]).with_inputs(advantages=[0.5, -0.5]).loss_fn_inputs.keys()
        dict_keys(['target_tokens', 'weights', 'advantages'])
        """
        merged: dict[str, TensorLike] = {**self.loss_fn_inputs, **(inputs or {}), **named}
        return Datum(self.model_input, merged, self.model_input_spans, self.loss_fn_input_spans)

    def with_only_inputs(self, inputs: Mapping[str, TensorLike]) -> Datum:
        """Returns a copy of the datum with these loss inputs only."""
        return Datum(self.model_input, inputs, self.model_input_spans, self.loss_fn_input_spans)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Datum):
            return NotImplemented
        return (
            self.model_input == other.model_input
            and self.loss_fn_inputs == other.loss_fn_inputs
            and self.model_input_spans == other.model_input_spans
            and self.loss_fn_input_spans == other.loss_fn_input_spans
        )

    __hash__ = None  # type: ignore[assignment]  # equal by value and mutable through its memory

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}={tensor!r}" for name, tensor in self.loss_fn_inputs.items())
        return f"Datum({self.model_input!r}, {inputs})"


def collate(batch: Sequence[Any]) -> list[Any]:
    """Returns the batch as a list; pass it as `collate_fn`, because the default cannot batch datums.

    >>> len(collate([Datum.from_tokens([1, 2]), Datum.from_tokens([1, 2, 3])]))
    2
    """
    return list(batch)


def to_datums(data: Iterable[Any]) -> list[Datum]:
    """Converts a batch of our or the official SDK's datums to ours; raises `InvalidDatum` that names an invalid one."""
    converted = []
    for i, datum in enumerate(check_batch(data)):
        try:
            converted.append(to_datum(datum))
        except InvalidInput as error:
            raise InvalidDatum(f"datum {i}: {error}") from error
    return converted


def check_batch(data: Iterable[Any]) -> list[Any]:
    """Returns the caller's datums as a list; raises `InvalidDatum` for a single datum or an empty batch."""
    if hasattr(data, "model_input") or not isinstance(data, Iterable):
        raise InvalidDatum(f"data must be a list of datums, got one {type(data).__name__}; write [datum]")
    given = list(data)
    if not given:
        raise InvalidDatum("data: the batch is empty; pass at least one datum")
    return given


def to_datum(datum: Any) -> Datum:
    """Converts our or the official SDK's datum to ours; copies its arrays, which the caller may reuse."""
    if isinstance(datum, Datum):
        return datum
    if not (hasattr(datum, "model_input") and hasattr(datum, "loss_fn_inputs")):
        check_not_mapped(datum)
        raise InvalidDatum(f"got {type(datum).__name__}; build datums with Datum.from_tokens(...) or tinker.Datum(...)")
    return Datum(
        to_model_input(datum.model_input),
        datum.loss_fn_inputs,
        _to_spans(getattr(datum, "model_input_spans", None)),
        _to_spans(getattr(datum, "loss_fn_input_spans", None)),
    )


def check_not_mapped(value: Any) -> None:
    """Raises `InvalidDatum` for a datum that Hugging Face `datasets` has turned into nested dicts."""
    if isinstance(value, Mapping) and {"model_input", "loss_fn_inputs"} <= value.keys():
        raise InvalidDatum(
            "got a dict with model_input and loss_fn_inputs: datasets.map stores columns of numbers and text, and "
            "turns a Datum that its function returns into nested dicts. Return columns such as tokens and weights "
            "from map, and build the datums in the collate_fn or with set_transform."
        )


def _tensor(name: str, value: TensorLike) -> TensorData:
    """Converts a loss input to a tensor with the dtype that the protocol requires for its name."""
    try:
        tensor = value if isinstance(value, TensorData) else TensorData.from_data(value)
        if name in PER_TOKEN_FLOATS and tensor.dtype != "float32":
            return TensorData(
                tensor.values, "float32", tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices
            )
        if name == "target_tokens" and tensor.dtype != "int64":
            # This succeeds for an empty list only, which numpy reads as floats; other floats cannot be token ids.
            return TensorData(tensor.values, "int64", tensor.shape)
    except InvalidTensor as error:
        raise InvalidDatum(f"{name}: {error}") from error
    return tensor


def _check_alignment(length: int, inputs: Mapping[str, TensorData]) -> None:
    targets = inputs.get("target_tokens")
    for name, tensor in inputs.items():
        if name not in PER_TOKEN:
            continue
        shape = tensor.shape
        if len(shape) not in (1, 2):
            raise InvalidDatum(f"{name} has the shape {shape}, but it must have one row per token: [T] or [T, K]")
        if shape[0] != length:
            raise InvalidDatum(
                f"{name} has {shape[0]} entries but the input has {length} tokens. Build it with "
                "Datum.from_tokens(...), or pass truncate=True."
            )
        if name == "weights" and targets is not None and shape != targets.shape and targets.shape[0] == length:
            raise InvalidDatum(f"weights has the shape {shape} but target_tokens has {targets.shape}")


def _to_spans(spans: Iterable[Any] | None) -> list[ProvenanceSpan] | None:
    if spans is None:
        return None
    return [
        ProvenanceSpan(
            "sampled" if "Sampled" in type(span).__name__ else "prompt", span.sequence_id, span.offset, span.length
        )
        for span in spans
    ]
