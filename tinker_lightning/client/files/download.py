"""Downloads checkpoints as files: in chunks, within limits, and never outside the target folder.

Servers offer a URL for each file or, in older generations, one for an archive. The URLs are signed and often lead to
another host, so the API key is not sent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import tarfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import httpx

from tinker_lightning.client.files import checkpoints
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.errors import (
    ConnectionDropped,
    InvalidMessage,
    MessageTooLarge,
    NotFound,
    OperationFailed,
)
from tinker_lightning.types.responses import ExternalWeightsUrlsResponse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from typing import TypeAlias

    from tinker_lightning.client.transport.connection import Connection

    Stream: TypeAlias = Callable[[str], AbstractAsyncContextManager[httpx.Response]]

logger = logging.getLogger("tinker_lightning.client")

# Far more than any adapter needs; a server that sends endlessly must not fill the disk.
MAX_BYTES = 64 << 30
MAX_FILES = 1000
# A URL that expires within this time is requested again.
_MARGIN = timedelta(minutes=1)
_ATTEMPTS = 6
_RETRY_POLICY = RetryPolicy(300.0)
_REDIRECTS = (301, 302, 303, 307, 308)
# An empty file that some servers put into archives.
_COMPLETE = "checkpoint_complete"


@dataclass(frozen=True, slots=True)
class Addresses:
    """The URLs of files, and when they expire."""

    urls: dict[str, str]
    expires: datetime

    @property
    def are_stale(self) -> bool:
        """Whether the URLs must be requested again."""
        return datetime.now(UTC) > self.expires - _MARGIN


async def checkpoint(connection: Connection, path: str, folder: Path) -> None:
    """Downloads a checkpoint into a folder, which may contain a part of it if that fails."""
    if not checkpoints.parse(path)[1].startswith("external_weights/"):
        return await archive(connection, path, folder)

    async def sign() -> Addresses:
        url = f"{checkpoints.url(path)}/external_weights_urls"
        answer = await connection.get(url, ExternalWeightsUrlsResponse)
        return Addresses(answer.urls, answer.expires)

    return await files(connection.stream, sign, folder)


async def files(stream: Stream, sign: Callable[[], Awaitable[Addresses]], folder: Path) -> None:
    """Downloads each file that `sign` returns a URL for; it is called again when the URLs have expired."""
    addresses = await sign()
    if len(addresses.urls) > MAX_FILES:
        raise MessageTooLarge(f"the server offers {len(addresses.urls)} files, more than the limit of {MAX_FILES}")
    left = MAX_BYTES
    for name, place in {name: _place(folder, name) for name in addresses.urls}.items():
        place.parent.mkdir(parents=True, exist_ok=True)

        async def url(attempt: int, name: str = name) -> str:
            nonlocal addresses
            if addresses.are_stale or attempt:
                addresses = await sign()
            if name not in addresses.urls:
                raise NotFound(f"the server no longer offers the file {name}")
            return addresses.urls[name]

        left -= await _fetch(stream, url, place, left)


async def archive(connection: Connection, path: str, folder: Path) -> None:
    """Downloads and unpacks the archive that older servers offer."""
    packed = folder / ".archive"
    await _fetch(connection.stream, lambda _: _archive_url(connection, path), packed, MAX_BYTES)
    await asyncio.to_thread(unpack, packed, folder)
    packed.unlink()
    (folder / _COMPLETE).unlink(missing_ok=True)


def unpack(packed: Path, folder: Path) -> None:
    """Unpacks an archive into a folder; raises `InvalidMessage` if a file would be written elsewhere."""
    size = 0
    try:
        with tarfile.open(packed) as tar:
            for count, member in enumerate(tar):
                size += member.size
                if count >= MAX_FILES or size > MAX_BYTES:
                    raise MessageTooLarge(f"the archive has more than {MAX_FILES} files or {MAX_BYTES} bytes")
                tar.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise InvalidMessage(f"the server's archive cannot be unpacked: {error}") from error


async def _archive_url(connection: Connection, path: str) -> str:
    whole = checkpoints.url(path)
    bare = "/".join([*whole.split("/")[:-2], whole.rsplit("/", 1)[1]])  # how some servers name it
    try:
        answer = await connection.send("GET", f"{whole}/archive", accept=_is_redirect)
    except NotFound:
        answer = await connection.send("GET", f"{bare}/archive", accept=_is_redirect)
    url = answer.headers.get("location") if _is_redirect(answer) else connection.json(answer).get("url")
    if not isinstance(url, str):
        raise connection.not_a_tinker_server(f"{whole}/archive returned no URL")
    try:
        return urljoin(f"{connection.url}/", url)
    except ValueError as error:
        raise connection.not_a_tinker_server(f"{whole}/archive returned {url!r}, which is not a URL") from error


async def _fetch(stream: Stream, url: Callable[[int], Awaitable[str]], place: Path, limit: int) -> int:
    """Downloads a file, with retries, from the URL for each attempt; returns the number of bytes."""
    for attempt in itertools.count():
        address = await url(attempt)
        try:
            return await _fetch_once(stream, address, place, limit)
        except (ConnectionDropped, OperationFailed) as error:
            if attempt + 1 >= _ATTEMPTS:
                raise
            logger.debug("%s; retrying", error)
            await asyncio.sleep(_RETRY_POLICY.delay(attempt, None))
    raise AssertionError("unreachable")


async def _fetch_once(stream: Stream, url: str, place: Path, limit: int) -> int:
    try:
        where = urlsplit(url)._replace(query="", fragment="").geturl()  # the query holds the signature
        scheme = httpx.URL(url).scheme
    except (ValueError, httpx.InvalidURL) as error:
        raise InvalidMessage(f"the server keeps this checkpoint at an address that is not a URL: {error}") from error
    if scheme not in ("http", "https"):
        raise InvalidMessage(f"the server keeps this checkpoint at {where}, not at an HTTP URL; copy it")
    size = 0
    try:
        async with stream(url) as response:
            if response.status_code == 404:
                raise NotFound(f"{where}: there is nothing to download")
            if response.status_code != 200:
                raise OperationFailed(f"{where}: the download failed (HTTP {response.status_code})")
            with place.open("wb") as file:
                async for piece in response.aiter_bytes():
                    size += len(piece)
                    if size > limit:
                        raise MessageTooLarge(f"{where} is larger than the limit of {limit} bytes")
                    file.write(piece)
    except httpx.RequestError as error:
        raise ConnectionDropped(
            f"{where}: the download was interrupted ({str(error) or type(error).__name__})"
        ) from error
    return size


def _place(folder: Path, name: str) -> Path:
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()) or place == folder.resolve() or "\\" in name:
        raise InvalidMessage(f"the server offers {name!r}, which lies outside of the checkpoint; nothing was written")
    return place


def _is_redirect(response: httpx.Response) -> bool:
    return response.status_code in _REDIRECTS
