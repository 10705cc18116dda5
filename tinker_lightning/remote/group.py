"""Operations on all remote models of a module."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinker_lightning.client.futures import note_failures, raise_together
from tinker_lightning.remote.lm import RemoteHandle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from tinker_lightning.client.backend import TrainingBackend
    from tinker_lightning.remote.window import RemoteModel


def handles_of(module: nn.Module) -> dict[str, RemoteHandle]:
    """Returns the handles among a module's parameters, by name."""
    return {name: one for name, one in module.named_parameters() if isinstance(one, RemoteHandle)}


def remotes_of(module: nn.Module) -> list[RemoteModel]:
    """Returns the remote models of a module."""
    return [handle.remote for handle in handles_of(module).values()]


def wait_for_all(module: nn.Module, timeout: float | None = None) -> None:
    """Waits until all requests are done, at most `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    for remote in remotes_of(module):
        if end is None:
            remote.wait_for_all()
        else:
            remote.unread.wait(max(0.0, end - time.monotonic()))


def raise_first(module: nn.Module) -> None:
    """Raises the first unread failure, with the others as its notes."""
    raise_together([failure for remote in remotes_of(module) for failure in remote.unread.take_failures()])


def settle(module: nn.Module, timeout: float, error: BaseException) -> None:
    """Waits for requests sent before an error, and adds their failures as notes, so that no later fit raises them.

    A `KeyboardInterrupt` or `SystemExit` gets no notes; the next use of the models raises the failures.
    """
    wait_for_all(module, timeout)
    if isinstance(error, Exception):
        for remote in remotes_of(module):
            note_failures(error, remote.unread.take_failures())


@contextmanager
def fresh_states(module: nn.Module, ttl_seconds: int | None = None) -> Iterator[None]:
    """Makes saves inside the `with` block create new states, which no state dict outside of it names.

    Where the server supports it, they expire after `ttl_seconds`, unless `keep_state` keeps them.
    """
    shared = [(remote, remote.saved) for remote in remotes_of(module)]
    for remote, _ in shared:
        remote.saved, remote.ttl_seconds = None, ttl_seconds
    try:
        yield
    finally:
        for remote, saved in shared:
            remote.saved, remote.ttl_seconds = saved, None


def delete_state(module: nn.Module, path: str) -> None:
    """Deletes a state on whichever server holds it; a state that does not exist is not an error."""
    failures: list[Exception] = []
    for backend in _backends_of(module):
        try:
            backend.delete_checkpoint(path, missing_ok=True)
        except Exception as error:  # another backend may hold it
            failures.append(error)
    for remote in remotes_of(module):
        if remote.saved is not None and remote.saved.path == path:
            remote.saved = None
    if failures:
        raise failures[0]


def keep_state(module: nn.Module, path: str) -> None:
    """Makes the server that holds a state keep it until it is deleted; does nothing where states do not expire."""
    failures: list[Exception] = []
    for backend in (each for each in _backends_of(module) if each.can_expire):
        try:
            backend.set_checkpoint_ttl(path, None)
        except Exception as error:  # another backend may hold it
            failures.append(error)
        else:
            return
    if failures:
        raise failures[0]


def _backends_of(module: nn.Module) -> Iterable[TrainingBackend]:
    """Returns the backends of a module's remote models that exist, or else creates the first one."""
    remotes = remotes_of(module)
    made = [remote for remote in remotes if remote.is_created] or remotes[:1]
    return {id(remote.backend): remote.backend for remote in made}.values()
