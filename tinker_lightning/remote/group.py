"""All the remote models of a module, taken together: what is promised of one holds for each."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.futures import note_failures, raise_together
from tinker_lightning.remote.handle import RemoteHandle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from tinker_lightning.remote.window import Remote


def handles_of(module: nn.Module) -> dict[str, RemoteHandle]:
    """The handles among a module's parameters by their names, each once."""
    return {name: one for name, one in module.named_parameters() if isinstance(one, RemoteHandle)}


def remotes_of(module: nn.Module) -> list[Remote]:
    """Where they lead."""
    return [handle.remote for handle in handles_of(module).values()]


def wait_for_all(module: nn.Module, timeout: float | None = None) -> None:
    """Waits until everything that was sent is done, or until `timeout` seconds have passed."""
    end = None if timeout is None else time.monotonic() + timeout
    for remote in remotes_of(module):
        if end is None:
            remote.wait_for_all()
        else:
            remote.unread.wait(max(0.0, end - time.monotonic()))


def raise_first(module: nn.Module) -> None:
    """Raises the first failure that nobody has read; the others are its notes."""
    raise_together([failure for remote in remotes_of(module) for failure in remote.unread.take_failures()])


def settle(module: nn.Module, timeout: float, error: BaseException) -> None:
    """Waits a while for what was sent before an error; what has failed is told with it, and is no later fit's to raise.

    What ends the process shows no notes; then it is left to whoever uses the models next.
    """
    end = time.monotonic() + timeout
    for remote in remotes_of(module):
        # Also of the client itself: forward passes that were asked for ahead.
        of_client = [remote.backend.unread] if remote.is_made else []
        for unread in (remote.unread, *of_client):
            unread.wait(max(0.0, end - time.monotonic()))
            if isinstance(error, Exception):
                note_failures(error, unread.take_failures())


@contextmanager
def saved_for_file(module: nn.Module) -> Iterator[None]:
    """What is saved inside is for a file that takes its states with it, so that no other state dict may name them."""
    remotes = remotes_of(module)
    for remote in remotes:
        remote.for_file = True
    try:
        yield
    finally:
        for remote in remotes:
            remote.for_file = False


def delete_state(module: nn.Module, path: str) -> None:
    """Deletes a state on the server that has it, which a path does not say; one that is gone already is no error."""
    remotes = remotes_of(module)
    made = [remote for remote in remotes if remote.is_made] or remotes[:1]
    backends: dict[int, Any] = {id(remote.backend): remote.backend for remote in made}
    failures: list[Exception] = []
    for backend in backends.values():
        try:
            backend.delete_checkpoint(path, missing_ok=True)
        except Exception as error:  # it may be another's
            failures.append(error)
    for remote in remotes:
        remote.forget(path)
    if failures:
        raise failures[0]
