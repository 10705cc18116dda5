"""Everything this library raises on purpose.

Each class also derives from the builtin that fits, so that `except ValueError` keeps its meaning:

    TinkerLightningError
    ├── InvalidInput (ValueError)          what the caller passed cannot be used
    │   ├── InvalidTensor                  a tensor whose data, dtype, shape or indices disagree
    │   ├── InvalidDatum                   a datum whose fields do not fit each other
    │   ├── InvalidLoss                    a custom loss that cannot be trained on
    │   │   ├── LossNotTensor (TypeError)  it returned something else than a tensor
    │   │   ├── LossNotScalar              it returned a tensor of more than one value
    │   │   ├── LossNotFinite              its value or gradient is NaN or infinite
    │   │   ├── LossNotTraceable           it cannot be written down for a server to run
    │   │   └── LossWithoutGradient        it does not depend on the log-probabilities
    │   └── InvalidMessage                 bytes that are not the message they claim to be
    │       ├── MessageTooLarge            more bytes than the reader takes
    │       └── UnsupportedMediaType       a content type or encoding the reader does not know
    ├── NotFound (LookupError)             a model, checkpoint, session or result that is not there
    │   └── ModelNotFound                  a base model that is not served or not installed
    ├── Unauthorized (PermissionError)     a missing or wrong API key
    ├── ServerUnreachable (ConnectionError)   nothing answers at the server's address
    │   └── ConnectionDropped              the server began to answer and stopped
    ├── NotATinkerServer (RuntimeError)    what answers speaks another protocol
    │   └── NotAnApi                       it does not even speak JSON: a web page, a proxy
    ├── ResultTimeout (TimeoutError)       a result did not come in the time the caller gave it
    ├── ClientClosed (RuntimeError)        a client was used after `close()`
    ├── ClientForked (RuntimeError)        a client was used in a forked process
    ├── IncompatibleLightning (RuntimeError)  a Lightning release without something this library needs
    └── OperationFailed (RuntimeError)     the server could not carry an operation out
        ├── ResultExpired                  it was carried out, but the result is no longer kept
        └── TrainerClosed                  the embedded trainer stops, so that it is not done
"""

from __future__ import annotations

__all__ = [
    "ClientClosed",
    "ClientForked",
    "ConnectionDropped",
    "IncompatibleLightning",
    "InvalidDatum",
    "InvalidInput",
    "InvalidLoss",
    "InvalidMessage",
    "InvalidTensor",
    "LossNotFinite",
    "LossNotScalar",
    "LossNotTensor",
    "LossNotTraceable",
    "LossWithoutGradient",
    "MessageTooLarge",
    "ModelNotFound",
    "NotATinkerServer",
    "NotAnApi",
    "NotFound",
    "OperationFailed",
    "ResultExpired",
    "ResultTimeout",
    "ServerUnreachable",
    "TinkerLightningError",
    "TrainerClosed",
    "Unauthorized",
    "UnsupportedMediaType",
]


class TinkerLightningError(Exception):
    """The root: catches every error of this library.

    Attributes:
        operation: What was being done when it happened, e.g. `forward_backward`; None where no operation was.
        model_id: The model or sampler it was done to.
        seq_id: The operation's number.
        request_id: The server's name for the operation.
    """

    operation: str | None = None
    model_id: str | None = None
    seq_id: int | None = None
    request_id: str | None = None


class InvalidInput(TinkerLightningError, ValueError):
    """What the caller passed cannot be used; the message says what, where and how to mend it."""


class InvalidTensor(InvalidInput):
    """A tensor whose data, dtype, shape or indices disagree."""


class InvalidDatum(InvalidInput):
    """A datum whose fields do not fit each other."""


class InvalidLoss(InvalidInput):
    """A custom loss that cannot be trained on."""


class LossNotTensor(InvalidLoss, TypeError):
    """A custom loss returned something else than a tensor."""


class LossNotScalar(InvalidLoss):
    """A custom loss returned a tensor of more than one value."""


class LossNotFinite(InvalidLoss):
    """The value or gradient of a custom loss is NaN or infinite."""


class LossNotTraceable(InvalidLoss):
    """A loss function cannot be written down as a graph for a server to run; says where and why."""


class LossWithoutGradient(InvalidLoss):
    """A custom loss does not depend on the log-probabilities."""


# What a server may say by name that a caller's input is. Others have a meaning of their own on this side.
_TOLD_BY_NAME: dict[str, type[InvalidInput]] = {
    cls.__name__: cls
    for cls in (
        InvalidTensor,
        InvalidDatum,
        InvalidLoss,
        LossNotTensor,
        LossNotScalar,
        LossNotFinite,
        LossWithoutGradient,
    )
}


def told_by_name(name: object) -> type[InvalidInput]:
    """The class that a server's answer names, so that `except` means the same wherever a loss runs."""
    return _TOLD_BY_NAME.get(name, InvalidInput) if isinstance(name, str) else InvalidInput


class InvalidMessage(InvalidInput):
    """Bytes that are not the message they claim to be."""


class MessageTooLarge(InvalidMessage):
    """More bytes than the reader takes."""


class UnsupportedMediaType(InvalidMessage):
    """A content type or encoding the reader does not know."""


class NotFound(TinkerLightningError, LookupError):
    """A model, checkpoint, session or result that is not there."""


class ModelNotFound(NotFound):
    """A base model that is not served here or not installed."""


class Unauthorized(TinkerLightningError, PermissionError):
    """A missing or wrong API key."""


class ServerUnreachable(TinkerLightningError, ConnectionError):
    """Nothing answers at the server's address."""


class ConnectionDropped(ServerUnreachable):
    """The server began to answer and stopped."""


class NotATinkerServer(TinkerLightningError, RuntimeError):
    """What answers at the address speaks another protocol."""


class NotAnApi(NotATinkerServer):
    """What answers at the address does not even speak JSON: a web page, a proxy."""


class ResultTimeout(TinkerLightningError, TimeoutError):
    """A result did not come in the time the caller gave it; the operation goes on."""


class ClientClosed(TinkerLightningError, RuntimeError):
    """A client was used after `close()`."""


class ClientForked(TinkerLightningError, RuntimeError):
    """A client was used in a forked process, where its threads and connections do not exist."""


class IncompatibleLightning(TinkerLightningError, RuntimeError):
    """The installed Lightning lacks an attribute that this library needs: it was renamed or removed."""


class OperationFailed(TinkerLightningError, RuntimeError):
    """The server could not carry an operation out; the model is as it was before."""


class ResultExpired(OperationFailed):
    """The operation was carried out, but the server no longer keeps its result."""


class TrainerClosed(OperationFailed):
    """The embedded trainer stops, so that what was asked of it is not done."""

    def __init__(self, message: str = "the trainer was closed while this operation ran") -> None:
        super().__init__(message)
