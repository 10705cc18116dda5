"""Keeps API keys out of the files of a command line."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from tinker_lightning.lightning.hyperparameters import for_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    import lightning.pytorch as pl


class Secret(str):
    """A string with the repr `***` that command lines do not write to configuration files."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


with contextlib.suppress(ImportError):  # the extra "cli"
    from jsonargparse.typing import register_type

    # A configuration without the key can be reused: the key is then read from the environment.
    register_type(Secret, serializer=lambda _: None, deserializer=Secret)


def hide_in_configs(callbacks: Iterable[pl.Callback], key: str | None) -> None:
    """Removes API keys from the configurations that callbacks of `LightningCLI` are about to write.

    A module may declare `api_key: str` itself, or take the key under another name.
    """
    cli: Any = sys.modules.get("lightning.pytorch.cli")  # not imported here, because only command lines need it
    for callback in callbacks if cli is not None else ():
        if isinstance(callback, cli.SaveConfigCallback):
            callback.config = callback.config.clone()
            for name, value in list(callback.config.items()):
                leaf = name.rpartition(".")[2]
                callback.config[name] = for_files({leaf: value}, key)[leaf]
