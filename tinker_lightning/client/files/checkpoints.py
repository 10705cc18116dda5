"""Checkpoints on a server, by their `tinker://` paths: existence, expiry and deletion."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from tinker_lightning.errors import InvalidInput, NotFound, Unsupported
from tinker_lightning.types import WeightsInfoResponse
from tinker_lightning.types.requests import TtlRequest, WeightsInfoRequest
from tinker_lightning.types.responses import Checkpoint, CheckpointsList
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import httpx

    from tinker_lightning.client.transport.connection import Connection
    from tinker_lightning.client.transport.session import Session

    _Get = Callable[..., Any]

# How long a deletion, a new expiry or a page of a listing is retried, and how long each attempt takes at most: training
# may be waiting for it.
SHORT_SECONDS = 5.0
# The number of checkpoints that a page of a listing is asked for.
PAGE = 100

# The metadata of a state that was saved for a checkpoint file: the run, which a resume continues, the `folder_id` of
# the file's folder, and the file's name.
RUN, FOLDER, FILE = "tinker_lightning_run", "tinker_lightning_folder", "tinker_lightning_file"

# tinker://run/kind/name, and the forms of other servers: tinker://model/name, twinkle://run/kind/name.
_KINDS = "weights|sampler_weights|external_weights"
_PATH = re.compile(rf"(?:tinker|twinkle)://([^/]+)/((?:(?:{_KINDS})/)?(?!(?:{_KINDS})$)[^/]+)")


def parse(path: str) -> tuple[str, str]:
    """Splits a path into the run and the checkpoint's id, `<kind>/<name>`."""
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise InvalidInput(
            f"{path!r} is not the path of a checkpoint. Pass save_state(...).result().path, which has the form "
            "tinker://<run>/weights/<name>."
        )
    return match[1], match[2]


def run_of(path: str) -> str | None:
    """Returns the run that a path names; None if it has a form that does not tell, such as open-rl's sampler paths."""
    match = _PATH.fullmatch(path)
    return None if match is None else match[1]


def saved_by(state: Checkpoint) -> str | None:
    """Returns the run that saved a state for a checkpoint file; None for anything else on a server."""
    return (state.user_metadata or {}).get(RUN)


def written_into(state: Checkpoint) -> str | None:
    """Returns the id of the folder of the checkpoint file for which a state was saved; None for anything else."""
    return (state.user_metadata or {}).get(FOLDER)


def file_of(state: Checkpoint) -> str | None:
    """Returns the name of the checkpoint file for which a state was saved; None for anything else."""
    return (state.user_metadata or {}).get(FILE)


def url(path: str) -> str:
    """Returns the URL path of a checkpoint."""
    run, checkpoint = parse(path)
    return f"/api/v1/training_runs/{quote(run, safe=':')}/checkpoints/{quote(checkpoint)}"


async def exists(connection: Connection, path: str, seconds: float | None = None) -> bool:
    """Returns whether a checkpoint exists: whether the listing of its run has it.

    Each request is tried for so many `seconds`, by default as long as any other.

    TuFT crashes on a run that it does not know, but any server may crash once. So the run counts as unknown only if the
    listing of all runs has nothing of it, and the server crashes again.
    """
    run, _ = parse(path)
    listing = f"/api/v1/training_runs/{quote(run, safe=':')}/checkpoints"
    get = partial(connection.send, "GET", seconds=seconds, timeout=seconds)
    try:
        response = await get(listing, accept=_is_crash)
        if _is_crash(response):
            may_be_unknown = await _is_unlisted(connection, run, get)
            response = await get(listing, accept=_is_crash if may_be_unknown else None)
        if _is_crash(response):
            return False
        return await _lists(connection, listing, response, lambda found: found == path, get)
    except NotFound:
        return False


async def _is_unlisted(connection: Connection, run: str, get: _Get) -> bool:
    """Returns whether the listing of all runs has no checkpoint of a run; False on servers without such a listing."""
    listing = "/api/v1/checkpoints"
    try:
        response = await get(listing)
        return not await _lists(connection, listing, response, lambda found: run_of(found) == run, get)
    except NotFound:
        return False


async def _lists(
    connection: Connection, listing: str, response: httpx.Response, is_wanted: Callable[[str], bool], get: _Get
) -> bool:
    """Returns whether a listing has a wanted path; `response` is its first page."""
    seen = 0
    while True:
        page = connection.parse(CheckpointsList, response)
        if any(is_wanted(found.tinker_path) for found in page.checkpoints):
            return True
        seen += len(page.checkpoints)
        if not page.checkpoints or page.cursor is None or seen >= page.cursor.total_count:
            return False
        response = await get(f"{listing}?offset={seen}")


async def listing(connection: Connection) -> list[Checkpoint]:
    """Returns the checkpoints of all runs, from all pages."""
    found: list[Checkpoint] = []
    while True:
        path = f"/api/v1/checkpoints?limit={PAGE}&offset={len(found)}"
        response = await connection.send("GET", path, seconds=SHORT_SECONDS, timeout=SHORT_SECONDS)
        page = connection.parse(CheckpointsList, response)
        found += page.checkpoints
        if not page.checkpoints or page.cursor is None or len(found) >= page.cursor.total_count:
            return found


async def weights_info(connection: Connection, path: str) -> WeightsInfoResponse:
    """Returns which base model and adapter a checkpoint belongs to.

    Raises:
        NotFound: If there is no such checkpoint, also if the server crashes on an unknown run.
    """
    send = partial(connection.send, "POST", "/api/v1/weights_info", wire_json.dumps(WeightsInfoRequest(path)))
    response = await send(accept=_is_crash)
    if _is_crash(response):
        may_be_unknown = run_of(path) is not None and not await exists(connection, path)
        response = await send(accept=_is_crash if may_be_unknown else None)
    if _is_crash(response):
        raise NotFound(f"{path}: there is no such checkpoint on {connection.url}")
    return connection.parse(WeightsInfoResponse, response)


async def can_be_external(session: Session) -> bool:
    """Returns whether a server saves weights for download file by file; older ones have no such endpoint."""
    if session.saves_external is None:
        try:  # without a model and a number, so that nothing is saved
            await session.connection.send("POST", "/api/v1/save_weights_external", b"{}")
            session.saves_external = True
        except NotFound:
            session.saves_external = False
        except InvalidInput:  # the endpoint exists and rejects the empty request
            session.saves_external = True
    return session.saves_external


async def delete(session: Session, path: str, *, missing_ok: bool) -> None:
    """Deletes a checkpoint.

    Raises:
        NotFound: If there is none and `missing_ok` is not set.
        Unsupported: If the server cannot delete checkpoints.
    """
    connection = session.connection
    unsupported = Unsupported(f"{path} stays on the server: {connection.url} cannot delete checkpoints")
    if not session.dialect.deletes_checkpoints:
        raise unsupported
    # Checked first: a retry after a lost answer no longer finds the checkpoint, which is not an error.
    if not missing_ok and not await exists(connection, path, SHORT_SECONDS):
        raise missing(path)
    try:
        await connection.send("DELETE", url(path), seconds=SHORT_SECONDS, timeout=SHORT_SECONDS)
    except NotFound:  # gone since, or there is no such endpoint
        if await exists(connection, path, SHORT_SECONDS):
            raise unsupported from None


async def set_ttl(session: Session, path: str, ttl_seconds: int | None) -> None:
    """Sets after how many seconds a checkpoint is deleted; None keeps it."""
    TtlRequest(ttl_seconds)
    # None is sent as null: a field that is left out would be no change.
    body = wire_json.dumps({"ttl_seconds": ttl_seconds})
    send = session.connection.send
    await send("PUT", f"{url(path)}/ttl", body, seconds=SHORT_SECONDS, timeout=SHORT_SECONDS)


def missing(path: str) -> NotFound:
    """Returns the error for a checkpoint that does not exist."""
    return NotFound(f"{path}: there is no such checkpoint; pass missing_ok=True to ignore this")


def _is_crash(response: httpx.Response) -> bool:
    return response.status_code == 500
