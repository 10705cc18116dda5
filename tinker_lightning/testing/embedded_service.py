"""A client connected to a real trainer in the same process."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING

import httpx

from tinker_lightning.client.service import ServiceClient
from tinker_lightning.client.transport.retries import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.server import EmbeddedTrainer


@contextlib.contextmanager
def embedded_service(
    trainer: EmbeddedTrainer | None = None,
    *,
    wrap: Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport] | None = None,
    retry_policy: RetryPolicy = RetryPolicy(300.0),  # noqa: B008  # immutable
    extended: bool = True,
) -> Iterator[ServiceClient]:
    """Yields a client connected to a real trainer in this process, and closes it afterwards.

    Args:
        trainer: The trainer to use, which the caller closes. By default, a new one that serves `tiny`, and that is
            closed and its files deleted afterwards.
        wrap: Wraps the transport to the trainer in a custom one.
        retry_policy: How long failing requests are retried.
        extended: Whether the server offers its protocol extensions.
    """
    from tinker_lightning.server import EmbeddedTrainer, create_app

    with contextlib.ExitStack() as stack:
        if trainer is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            trainer = EmbeddedTrainer(["tiny"], data_dir=folder)
            stack.callback(trainer.close)
        transport: httpx.AsyncBaseTransport = httpx.ASGITransport(create_app(trainer, extended=extended))
        if wrap is not None:
            transport = wrap(transport)
        register = trainer.losses.register_function
        client = ServiceClient(
            base_url="http://embedded", transport=transport, retry_policy=retry_policy, in_process=register
        )
        yield stack.enter_context(client)
