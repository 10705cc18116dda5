"""Endpoints of training runs and checkpoints: listing, expiry, deletion, and downloads with signed URLs."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tarfile
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeVar
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.server.bodies import read
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.http import SIGNED, answer, sdk_release
from tinker_lightning.server.trainer.checkpoint_summary import CheckpointSummary, TinkerPath
from tinker_lightning.server.trainer.operations import OPTIMIZER_CONFIG
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from tinker_lightning.server.trainer.checkpoint_summary import Kind
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

T = TypeVar("T")

# The checkpoint types of the protocol.
_TYPES: dict[Kind, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_ARCHIVE = "adapter.tar"
# An empty file that marks the archive as complete for the official SDK.
_COMPLETE = "checkpoint_complete"
_PIECE_BYTES = 1 << 20
# The validity that clients assume if they do not check the expiry.
VALID_SECONDS = 900


async def weights_info(request: Request) -> Response:
    body = await read(request, rq.WeightsInfoRequest)
    summary = await run_in_threadpool(trainer_of(request).store.summary, TinkerPath.parse(body.tinker_path))
    lora = summary.lora_config
    return answer(
        rs.WeightsInfoResponse(
            summary.base_model,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            optimizer_config=OPTIMIZER_CONFIG,
        )
    )


async def checkpoints(request: Request) -> Response:
    summaries = _supported(request, await run_in_threadpool(trainer_of(request).store.listing))
    page, cursor = _page(request, [_checkpoint(summary) for summary in reversed(summaries)])
    return answer(rs.CheckpointsList(page, cursor))


async def run_checkpoints(request: Request) -> Response:
    run_id, trainer = request.path_params["run_id"], trainer_of(request)
    summaries = await run_in_threadpool(trainer.store.listing, run_id)
    if not summaries and not trainer.registry.has_model(run_id):
        raise NotFound(f"there is no training run {run_id!r}")
    return answer(rs.CheckpointsList([_checkpoint(summary) for summary in _supported(request, summaries)]))


async def delete(request: Request) -> Response:
    await run_in_threadpool(trainer_of(request).store.delete, path_of(request))
    return answer({})


async def set_ttl(request: Request) -> Response:
    body = await read(request, rq.TtlRequest)
    await run_in_threadpool(trainer_of(request).store.set_ttl, path_of(request), body.ttl_seconds)
    return answer({})


async def training_runs(request: Request) -> Response:
    runs = await run_in_threadpool(_runs, trainer_of(request))
    page, cursor = _page(request, sorted(runs.values(), key=lambda run: run.last_request_time, reverse=True))
    return answer(rs.TrainingRunsList(page, cursor))


async def training_run(request: Request) -> Response:
    run_id = request.path_params["run_id"]
    runs = await run_in_threadpool(_runs, trainer_of(request))
    if run_id not in runs:
        raise NotFound(f"there is no training run {run_id!r}")
    return answer(runs[run_id])


def _runs(trainer: EmbeddedTrainer) -> dict[str, rs.TrainingRun]:
    """Returns the models since the server started, and earlier ones that have checkpoints."""
    saved: dict[str, list[CheckpointSummary]] = {}
    for summary in trainer.store.listing():
        saved.setdefault(summary.path.run, []).append(summary)
    runs: dict[str, rs.TrainingRun] = {}
    models = {model.model_id: model for model in trainer.registry.models()}
    for run_id in [*models, *(run_id for run_id in saved if run_id not in models)]:
        model, summaries = models.get(run_id), saved.get(run_id, [])
        last = {summary.path.kind: _checkpoint(summary) for summary in summaries}
        runs[run_id] = rs.TrainingRun(
            training_run_id=run_id,
            base_model=model.base_model if model else summaries[-1].base_model,
            model_owner="local",
            is_lora=True,
            last_request_time=model.last_request_time if model else datetime.fromisoformat(summaries[-1].created_at),
            lora_rank=model.lora_config.rank if model else summaries[-1].lora_config.rank,
            last_checkpoint=last.get("weights"),
            last_sampler_checkpoint=last.get("sampler_weights"),
            user_metadata=model.metadata["user_metadata"] if model else None,
        )
    return runs


def _supported(request: Request, summaries: list[CheckpointSummary]) -> list[CheckpointSummary]:
    """Leaves out external checkpoints for releases of the official SDK that reject a listing with one, before 0.28."""
    if sdk_release(request, default=(0, 28)) >= (0, 28):
        return summaries
    return [summary for summary in summaries if summary.path.kind != "external_weights"]


def _checkpoint(summary: CheckpointSummary) -> rs.Checkpoint:
    path = summary.path
    return rs.Checkpoint(
        checkpoint_id=f"{path.kind}/{path.name}",
        checkpoint_type=_TYPES[path.kind],
        time=datetime.fromisoformat(summary.created_at),
        tinker_path=summary.tinker_path,
        size_bytes=summary.size_bytes,
        user_metadata=summary.user_metadata,
        expires_at=None if summary.expires_at is None else datetime.fromisoformat(summary.expires_at),
    )


def path_of(request: Request) -> TinkerPath:
    """Returns the path of the checkpoint in the URL."""
    return TinkerPath.parse(f"tinker://{request.path_params['run_id']}/{request.path_params['checkpoint_id']}")


def _page(request: Request, items: list[T]) -> tuple[list[T], rs.Cursor]:
    try:
        limit, offset = (
            int(request.query_params.get(name, default)) for name, default in (("limit", 20), ("offset", 0))
        )
    except ValueError as error:
        raise InvalidInput(f"limit and offset must be whole numbers: {error}") from error
    if not (0 <= limit < 2**31 and 0 <= offset < 2**31):
        raise InvalidInput(f"limit and offset must lie in 0..{2**31 - 1}, got {limit} and {offset}")
    return items[offset : offset + limit], rs.Cursor(offset, limit, len(items))


async def external_weights_urls(request: Request) -> Response:
    path = path_of(request)
    if path.kind != "external_weights":
        raise InvalidInput(f"path: {path} cannot be downloaded file by file; save it with save_weights_external")
    summary = await run_in_threadpool(trainer_of(request).store.summary, path)
    expires = _signer(request).expiry()
    urls = {name: _signed_url(request, path, name, expires) for name in summary.adapter_files}
    return answer(rs.ExternalWeightsUrlsResponse(urls, datetime.fromtimestamp(expires, UTC)))


async def archive(request: Request) -> Response:
    path = path_of(request)
    await run_in_threadpool(trainer_of(request).store.summary, path)
    expires = _signer(request).expiry()
    until = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    location = _signed_url(request, path, _ARCHIVE, expires)
    return Response(status_code=302, headers={"Location": location, "Expires": until})


async def download(request: Request) -> Response:
    name, query = request.path_params["name"], request.query_params
    keys, key_name = request.app.state.keys, query.get("owner")
    # The owner is part of what is signed. A URL that its key made is worth nothing without the key.
    owner = None if keys is None else keys.named(key_name)
    is_valid = _signer(request).is_valid(name, key_name, query.get("expires", ""), query.get("signature", ""))
    if not is_valid or (keys is not None and owner is None):
        raise HTTPException(403, "this URL is invalid or has expired; request a new one")
    path, file = name.rsplit("/", 1)
    only = None if file == _ARCHIVE else file
    store = trainer_of(request, owner).store
    files = await run_in_threadpool(store.open_adapter, TinkerPath.parse(f"tinker://{path}"), only)
    return _Download(files, _tar(files) if only is None else list(files.values()))


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
    owner = trainer_of(request).registry.owner.name
    query = {"expires": expires, "signature": _signer(request).sign(name, owner, expires)}
    query |= {} if owner is None else {"owner": owner}
    return f"{request.url_for('download', name=name)}?{urlencode(query)}"


def _signer(request: Request) -> Signer:
    signer: Signer = request.app.state.signer
    return signer


class Signer:
    """Signs names of files for their owner and a limited time. A restart of the server invalidates all signatures."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def expiry(self) -> int:
        """Returns the expiry of a signature that is created now, as a Unix timestamp."""
        return int(time.time()) + VALID_SECONDS

    def sign(self, name: str, owner: str | None, expires: int) -> str:
        """Returns the signature of a name, its owner and its expiry."""
        return hmac.new(self._secret, f"{expires} {owner or ''} {name}".encode(), hashlib.sha256).hexdigest()

    def is_valid(self, name: str, owner: str | None, expires: str, signature: str) -> bool:
        """Returns whether the signature is correct and has not expired."""
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 20):
            return False
        right = hmac.compare_digest(signature.encode(), self.sign(name, owner, int(expires)).encode())
        return right and time.time() < int(expires)


routes = [
    # Checkpoint ids contain a slash: weights/<name>.
    Route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls", external_weights_urls),
    Route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/archive", archive),
    Route(f"{SIGNED}/{{name:path}}", download, name="download"),
    Route("/weights_info", weights_info, methods=["POST"]),
    Route("/checkpoints", checkpoints, methods=["GET"]),
    Route("/training_runs", training_runs, methods=["GET"]),
    Route("/training_runs/{run_id}", training_run, methods=["GET"]),
    Route("/training_runs/{run_id}/checkpoints", run_checkpoints, methods=["GET"]),
    Route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl", set_ttl, methods=["PUT"]),
    Route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}", delete, methods=["DELETE"]),
]
