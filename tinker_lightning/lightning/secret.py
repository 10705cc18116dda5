"""A type for API keys, which keeps them out of files."""

from __future__ import annotations

import contextlib


class Secret(str):
    """A string that shows itself as `***`; a command line writes it to no configuration file."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


with contextlib.suppress(ImportError):  # the extra "cli"
    from jsonargparse.typing import register_type

    # A configuration with null can be used again: the key is then read from the environment.
    register_type(Secret, serializer=lambda _: None, deserializer=Secret)
