"""Exceptions of this library.

Each class also derives from the matching builtin, so that `except ValueError` works as expected:

    TinkerLightningError
    ├── InvalidInput (ValueError)          an argument is invalid
    │   ├── InvalidTensor                  a tensor whose data, dtype, shape or indices disagree
    │   ├── InvalidDatum                   a datum whose fields are inconsistent
    │   │   ├── MissingInput               a datum without an input that the loss reads
    │   │   └── TooLong                    a text with more tokens than `max_length` or the context of the model
    │   ├── InvalidLoss                    a custom loss that cannot be trained on
    │   │   ├── LossNotTensor (TypeError)  it did not return a tensor
    │   │   ├── LossNotScalar              it returned a tensor with more than one element
    │   │   ├── LossNotFinite              its value or gradient is NaN or infinite
    │   │   ├── LossNotTraceable           it cannot be traced into a graph for the server
    │   │   └── LossWithoutGradient        it does not depend on the log-probabilities
    │   ├── RequestConflict                a request whose number was used for another one
    │   ├── MemoryLimitExceeded (MemoryError)  a request that does not fit into the memory limit of the server
    │   └── InvalidMessage                 a malformed message body
    │       ├── MessageTooLarge            a body that exceeds the size limit
    │       └── UnsupportedMediaType       an unknown content type or encoding
    ├── NotFound (LookupError)             a model, checkpoint, session or result that does not exist
    │   ├── SessionLost                    a session that a restarted server does not have, or that was ended there
    │   ├── ModelNotFound                  a base model that is not served or not installed
    │   └── NotRetained                    a forward pass whose activations the server does not keep
    ├── Unauthorized (PermissionError)     a missing or wrong API key
    ├── ServerUnreachable (ConnectionError)   nothing answers at the server's address
    │   └── ConnectionDropped              the connection was lost in the middle of a response
    ├── NotATinkerServer (RuntimeError)    the server at the address speaks another protocol
    │   └── NotAnApi                       it does not return JSON: a web page or a proxy
    ├── ResultTimeout (TimeoutError)       a result did not arrive within the timeout
    ├── ClientClosed (RuntimeError)        a client was used after `close()`
    ├── ClientForked (RuntimeError)        a client was used in a forked process
    ├── Unsupported (NotImplementedError)  the server has no such function
    ├── IncompatibleLightning (RuntimeError)  the installed Lightning release is not compatible
    ├── RolloutFailed (RuntimeError)       an episode of an environment could not be finished
    │   └── RewardFailed                   a reward raised, took too long, or returned no number
    └── OperationFailed (RuntimeError)     an operation failed on the server
        ├── ResultExpired                  it succeeded, but its result has expired
        ├── NotStored (OSError)            a checkpoint that cannot be written where the trainer runs
        ├── AnswerLost                     it may or may not have been executed
        └── TrainerClosed                  the embedded trainer was closed before it finished
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# All but tabs and line breaks; a terminal obeys them.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TinkerLightningError(Exception):
    """Base class of all exceptions of this library.

    Attributes:
        operation: The operation that failed, e.g. `forward_backward`; None if the error belongs to no operation.
        model_id: The model or sampler of the operation.
        seq_id: The sequence number of the operation.
        request_id: The id that the server gave to the operation.
    """

    operation: str | None = None
    model_id: str | None = None
    seq_id: int | None = None
    request_id: str | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class InvalidInput(TinkerLightningError, ValueError):
    """An argument is invalid; the message names it and how to fix it."""


class InvalidTensor(InvalidInput):
    """A tensor whose data, dtype, shape or indices disagree."""


class InvalidDatum(InvalidInput):
    """A datum whose fields are inconsistent."""


class MissingInput(InvalidDatum):
    """A datum lacks an input that the loss reads."""


class TooLong(InvalidDatum):
    """A text has more tokens than `max_length` or the context of the model."""


class InvalidLoss(InvalidInput):
    """A custom loss that cannot be trained on."""


class LossNotTensor(InvalidLoss, TypeError):
    """A custom loss did not return a tensor."""


class LossNotScalar(InvalidLoss):
    """A custom loss returned a tensor with more than one element."""


class LossNotFinite(InvalidLoss):
    """The value or gradient of a custom loss is NaN or infinite."""


class LossNotTraceable(InvalidLoss):
    """A loss function cannot be traced into a graph for the server; the message names the line and the reason."""


class LossWithoutGradient(InvalidLoss):
    """A custom loss does not depend on the log-probabilities."""


class RequestConflict(InvalidInput):
    """A request has the number of an earlier one but other contents; the message has the digests of both."""


class MemoryLimitExceeded(InvalidInput, MemoryError):
    """A request does not fit into the memory limit of the server; the message has the size and the limit.

    Attributes:
        is_temporary: Whether it would fit if other requests took less memory.
        fits_without_work: Whether it would fit now if no pass and no sampling took any.
    """

    is_temporary: bool = False
    fits_without_work: bool = False


class InvalidMessage(InvalidInput):
    """A message body is malformed."""


class MessageTooLarge(InvalidMessage):
    """A message body exceeds the size limit."""


class UnsupportedMediaType(InvalidMessage):
    """The content type or encoding of a message is unknown."""


class NotFound(TinkerLightningError, LookupError):
    """A model, checkpoint, session or result does not exist."""


class SessionLost(NotFound):
    """The server was restarted or has ended the session, and no longer has its models."""


class ModelNotFound(NotFound):
    """A base model is not served or not installed."""


# The classes that a server may name in a response. All others have a different meaning in the client.
_NAMED_BY_SERVERS: list[type[TinkerLightningError]] = [
    InvalidTensor,
    InvalidDatum,
    MissingInput,
    RequestConflict,
    MemoryLimitExceeded,
    InvalidLoss,
    *InvalidLoss.__subclasses__(),
    NotFound,
    ModelNotFound,
]


def input_error(name: object) -> type[TinkerLightningError]:
    """Returns the class that a server's response names, so that a mistake raises one class on every path."""
    return next((cls for cls in _NAMED_BY_SERVERS if cls.__name__ == name), InvalidInput)


class NotRetained(NotFound):
    """The server does not keep the activations of a forward pass; clients send the datums again."""


class Unauthorized(TinkerLightningError, PermissionError):
    """The API key is missing or wrong."""


class ServerUnreachable(TinkerLightningError, ConnectionError):
    """Nothing answers at the server's address."""


class ConnectionDropped(ServerUnreachable):
    """The connection was lost in the middle of a response."""


class NotATinkerServer(TinkerLightningError, RuntimeError):
    """The server at the address speaks another protocol."""


class NotAnApi(NotATinkerServer):
    """The server at the address does not return JSON: it is a web page or a proxy."""


class ResultTimeout(TinkerLightningError, TimeoutError):
    """A result did not arrive within the timeout; the operation continues on the server."""


class ClientClosed(TinkerLightningError, RuntimeError):
    """A client was used after `close()`."""


class ClientForked(TinkerLightningError, RuntimeError):
    """A client was used in a forked process, where its threads and connections do not exist."""


class IncompatibleLightning(TinkerLightningError, RuntimeError):
    """The installed Lightning lacks an attribute that this library needs."""


class Unsupported(TinkerLightningError, NotImplementedError):
    """The server has no such function."""


class RolloutFailed(TinkerLightningError, RuntimeError):
    """An episode of an environment could not be finished."""


class RewardFailed(RolloutFailed):
    """A reward raised, took too long, or did not return a finite number; the message has prompt and completion."""


class OperationFailed(TinkerLightningError, RuntimeError):
    """An operation failed on the server; the model is unchanged."""


class ResultExpired(OperationFailed):
    """The operation succeeded, but its result has expired on the server."""


class NotStored(OperationFailed, OSError):
    """A checkpoint cannot be written where the trainer runs, or exceeds its limit; the message has path and sizes."""


class AnswerLost(OperationFailed):
    """An operation that may or may not have been executed, and that cannot be sent again safely."""


class TrainerClosed(OperationFailed):
    """The embedded trainer was closed before the operation finished."""

    def __init__(self, message: str = "the trainer was closed while this operation ran") -> None:
        super().__init__(message)


def printable(text: str) -> str:
    """Returns a server's text with the codes of its control characters in their place, for terminals and logs."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a question that suggests the most similar of the valid names; empty if none is similar.

    >>> did_you_mean("wieght", ["name", "weight"])
    "Did you mean 'weight'?"
    """
    similar = difflib.get_close_matches(name, list(names), 1)
    return f"Did you mean {similar[0]!r}?" if similar else ""


_ALPHA = (
    "The server fixes the alpha of LoRA: it is 32 on the embedded trainer, and other servers have their own. Leave it "
    "out, and choose the learning_rate."
)
_DROPOUT = "The Tinker API has no dropout. Leave it out; weight_decay and fewer epochs also prevent overfitting."
_WARMUP = "Pass it as warmup: below 1 it is a share of the steps, from 1 on their number."
_SCHEDULE = "Pass schedule, one of constant, linear, cosine and wsd, and warmup; or override configure_optimizers."
PREDICT_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "num_samples", "seed", "stop")
_SAMPLING = (
    "Pass it within predict, for example predict={'max_tokens': 32}; rollouts are sampled with the options of their "
    "loader."
)
# What to use in place of arguments that modules of other libraries have.
_INSTEAD = {
    "target_modules": "Choose the layers that get an adapter by train_mlp, train_attn and train_unembed.",
    "lr": "Pass it as learning_rate.",
    **dict.fromkeys(("alpha", "lora_alpha"), _ALPHA),
    **dict.fromkeys(("dropout", "lora_dropout"), _DROPOUT),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "Pass it as rank."),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), _WARMUP),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), _SCHEDULE),
    **dict.fromkeys(PREDICT_OPTIONS, _SAMPLING),
}


def suggestion(name: str, names: Iterable[str]) -> str:
    """Returns what to use in place of an unknown argument of a module, or the most similar of the valid names.

    >>> suggestion("lr", ["learning_rate"])
    'Pass it as learning_rate.'
    """
    return _INSTEAD.get(name) or did_you_mean(name, names)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises `InvalidInput` if the value of an option is not one of its choices."""
    choices = list(choices)
    if value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, got {value!r}")
