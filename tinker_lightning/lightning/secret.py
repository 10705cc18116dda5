"""What is an API key, which is not written to files."""

from __future__ import annotations

import contextlib


class Secret(str):
    """A string with the repr `***` that command lines do not write to configuration files."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


with contextlib.suppress(ImportError):  # the extra "cli"
    from jsonargparse.typing import register_type

    # A configuration without the key can be reused: the key is then read from the environment.
    register_type(Secret, serializer=lambda _: None, deserializer=Secret)


def is_secret(name: object, value: object) -> bool:
    """Whether a value is an API key: a `Secret`, or named `api_key` or `…_api_key` (`X-API-Key` in a header)."""
    plain = str(name).lower().replace("-", "_")
    return isinstance(value, Secret) or plain == "api_key" or plain.endswith("_api_key")
