"""Everything this library raises on purpose.

Each class also derives from the builtin that fits, so that `except ValueError` keeps its meaning:

    TinkerLightningError
    ├── InvalidInput (ValueError)          what the caller passed cannot be used
    │   ├── InvalidTensor                  a tensor whose data, dtype, shape or indices disagree
    │   ├── InvalidDatum                   a datum whose fields do not fit each other
    │   └── InvalidMessage                 bytes that are not the message they claim to be
    │       ├── MessageTooLarge            more bytes than the reader takes
    │       └── UnsupportedMediaType       a content type or encoding the reader does not know
    ├── NotFound (LookupError)             a model, checkpoint, session or result that is not there
    │   └── ModelNotFound                  a base model that is not served or not installed
    ├── Unauthorized (PermissionError)     a missing or wrong API key
    └── OperationFailed (RuntimeError)     the model could not carry an operation out
"""

__all__ = [
    "InvalidDatum",
    "InvalidInput",
    "InvalidMessage",
    "InvalidTensor",
    "MessageTooLarge",
    "ModelNotFound",
    "NotFound",
    "OperationFailed",
    "TinkerLightningError",
    "Unauthorized",
    "UnsupportedMediaType",
]


class TinkerLightningError(Exception):
    """The root: catches every error of this library."""


class InvalidInput(TinkerLightningError, ValueError):
    """What the caller passed cannot be used; the message says what, where and how to mend it."""


class InvalidTensor(InvalidInput):
    """A tensor whose data, dtype, shape or indices disagree."""


class InvalidDatum(InvalidInput):
    """A datum whose fields do not fit each other."""


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


class OperationFailed(TinkerLightningError, RuntimeError):
    """The model could not carry an operation out; it is as it was before."""
