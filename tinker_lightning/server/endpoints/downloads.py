"""Downloads of saved adapters: signed URLs for single files or for an archive."""

from __future__ import annotations

import contextlib
import os
import tarfile
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.endpoints.checkpoints import path_of
from tinker_lightning.server.http import SIGNED, answer
from tinker_lightning.server.trainer.checkpoint_store import ADAPTER_FILES, TinkerPath
from tinker_lightning.types.responses import ExternalWeightsUrlsResponse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from tinker_lightning.server.trainer.signing import Signer

_ARCHIVE = "adapter.tar"
# An empty file that marks the archive as complete for the official SDK.
_COMPLETE = "checkpoint_complete"
_PIECE_BYTES = 1 << 20


async def external_weights_urls(request: Request) -> Response:
    path = path_of(request)
    if path.kind != "external_weights":
        raise InvalidInput(f"path: {path} cannot be downloaded file by file; save it with save_weights_external")
    await run_in_threadpool(trainer_of(request).store.summary, path)
    expires = _signer(request).expiry()
    urls = {name: _signed_url(request, path, name, expires) for name in ADAPTER_FILES}
    return answer(ExternalWeightsUrlsResponse(urls, datetime.fromtimestamp(expires, UTC).isoformat()))


async def archive(request: Request) -> Response:
    path = path_of(request)
    await run_in_threadpool(trainer_of(request).store.summary, path)
    expires = _signer(request).expiry()
    until = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    location = _signed_url(request, path, _ARCHIVE, expires)
    return Response(status_code=302, headers={"Location": location, "Expires": until})


async def signed(request: Request) -> Response:
    name, given = request.path_params["name"], request.query_params
    if not _signer(request).is_valid(name, given.get("expires", ""), given.get("signature", "")):
        raise HTTPException(403, "this URL is invalid or has expired; request a new one")
    path, file = name.rsplit("/", 1)
    files = await run_in_threadpool(trainer_of(request).store.open_adapter, TinkerPath.parse(f"tinker://{path}"))
    return _Download(files, _tar(files) if file == _ARCHIVE else [files[file]])


class _Download(StreamingResponse):
    """Streams a sequence of bytes and files, and always closes the files."""

    def __init__(self, files: Mapping[str, BinaryIO], parts: Sequence[bytes | BinaryIO]) -> None:
        size = sum(len(part) if isinstance(part, bytes) else _size(part) for part in parts)
        headers = {"Content-Length": str(size)}
        super().__init__(_pieces(parts), headers=headers, media_type="application/octet-stream")
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.enter_context(file)
            await super().__call__(scope, receive, send)


def _pieces(parts: Sequence[bytes | BinaryIO]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, bytes):
            yield part
        else:
            while piece := part.read(_PIECE_BYTES):
                yield piece


def _tar(files: Mapping[str, BinaryIO]) -> list[bytes | BinaryIO]:
    """Returns the parts of a tar archive. File contents are read only when they are sent."""
    parts: list[bytes | BinaryIO] = []
    for name, file in files.items():
        info = tarfile.TarInfo(name)
        info.size, info.mtime = _size(file), int(os.fstat(file.fileno()).st_mtime)
        parts += [info.tobuf(), file, bytes(-info.size % tarfile.BLOCKSIZE)]
    return [*parts, tarfile.TarInfo(_COMPLETE).tobuf(), bytes(2 * tarfile.BLOCKSIZE)]


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _signed_url(request: Request, path: TinkerPath, file: str, expires: int) -> str:
    name = f"{path.run}/{path.kind}/{path.name}/{file}"
    query = urlencode({"expires": expires, "signature": _signer(request).sign(name, expires)})
    return f"{request.url_for('signed', name=name)}?{query}"


def _signer(request: Request) -> Signer:
    signer: Signer = request.app.state.signer
    return signer


routes = [
    # Checkpoint ids contain a slash: weights/<name>.
    Route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls", external_weights_urls),
    Route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/archive", archive),
    Route(f"{SIGNED}/{{name:path}}", signed, name="signed"),
]
