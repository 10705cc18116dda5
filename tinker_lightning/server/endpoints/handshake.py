"""Endpoints of sessions, settings, telemetry, capabilities, health and metrics, and of what this trainer lacks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

from starlette.responses import Response
from starlette.routing import Route

from tinker_lightning.errors import Unsupported
from tinker_lightning.server.bodies import MAX_BODY_BYTES, MAX_JSON_BYTES, read
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.http import answer, sdk_release, submits_in_turn
from tinker_lightning.server.trainer.memory import Pool, resident_memory
from tinker_lightning.types import requests as rq
from tinker_lightning.types.responses import PRODUCT, ServerCapabilities, SupportedModel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from tinker_lightning.server.trainer.scheduler import JobTotals
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

# Settings for clients. Chunking is meant for servers behind proxies; here a batch is a single request.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,  # requests may arrive in any order, because they run by number
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1 << 20,
    "fwdbwd_max_chunk_bytes_count": MAX_JSON_BYTES // 2,
    "fwdbwd_dispatch_bytes_semaphore_size": 2 * MAX_BODY_BYTES,
    # Under load, the Rust threads of the SDK's own transport can crash the interpreter; httpx's do not.
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
    "create_model_via_load_weights": False,
}

_NO_ACCOUNTS = "it has neither users nor projects"
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}"
# Endpoints of the protocol that are not offered: path, methods, feature and reason.
_LACKING = (
    (_CHECKPOINT + "/publish", ["POST", "DELETE"], "publishing checkpoints", _NO_ACCOUNTS),
    ("/copy_weights", ["POST"], "copying weights to a project", f"{_NO_ACCOUNTS}; load the checkpoint instead"),
    ("/sessions/search", ["POST"], "searching sessions", "list them with list_sessions"),
    ("/sessions/{session_id}/project", ["PUT"], "assigning projects", _NO_ACCOUNTS),
    ("/sessions/{session_id}/trace_export", ["GET"], "exporting traces", "it keeps none"),
    ("/audit", ["GET"], "the audit log", _NO_ACCOUNTS),
    ("/billing/{rest:path}", ["GET", "POST"], "billing", "its use is free"),
    ("/auth/token", ["POST"], "exchanging tokens", "it takes API keys"),
    ("/auth/apikey/me", ["GET"], "identification", _NO_ACCOUNTS),
)


async def client_config(request: Request) -> Response:
    await read(request, rq.ClientConfigRequest)
    # Other clients than ours submit in turn, so that a number that they never send is noticed within seconds.
    parallel = CLIENT_CONFIG["parallel_fwdbwd_chunks"] and not submits_in_turn(request)
    # The official SDK 0.38 acknowledges results by polls of their own. On Python 3.11, one that is answered while the
    # client closes loses the cancellation (in asyncio.wait_for), and the client waits for its poller forever.
    shared_polls = CLIENT_CONFIG["sample_use_retrieve_futures"] and sdk_release(request, default=(0, 0)) < (0, 37)
    return answer({**CLIENT_CONFIG, "parallel_fwdbwd_chunks": parallel, "sample_use_retrieve_futures": shared_polls})


async def dynamic_config(request: Request) -> Response:
    await read(request, rq.ClientConfigRequest)
    return answer({"sample_cancel_enabled": True})


async def create_session(request: Request) -> Response:
    body = await read(request, rq.CreateSessionRequest)
    session = trainer_of(request).open_session(body.user_metadata, body.display_name)
    return answer({"type": "create_session", "session_id": session.session_id})


async def heartbeat(request: Request) -> Response:
    body = await read(request, rq.SessionHeartbeatRequest)
    session = trainer_of(request).registry.session(body.session_id)
    if session.finished:
        return answer({"detail": f"{body.session_id} is finished"}, 410)
    session.last_heartbeat = session.last_seen = time.monotonic()
    return answer({"type": "session_heartbeat"})


async def finish(request: Request) -> Response:
    trainer_of(request).finish_session(request.path_params["session_id"])
    return answer({})


async def list_sessions(request: Request) -> Response:
    return answer({"sessions": [session.session_id for session in trainer_of(request).registry.sessions()]})


async def get_session(request: Request) -> Response:
    session = trainer_of(request).registry.session(request.path_params["session_id"])
    return answer(
        {
            "training_run_ids": session.models,
            "sampler_ids": session.samplers,
            "user_metadata": session.metadata["user_metadata"],
            "display_name": session.metadata["display_name"],
        }
    )


async def telemetry(request: Request) -> Response:
    await read(request, rq.TelemetryRequest)
    return answer({"status": "accepted"})


async def healthz(_: Request) -> Response:
    return answer({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Returns what Prometheus reads: numbers of the whole server, with labels from its code and none from clients."""
    # Of all owners, and therefore not by `trainer_of`.
    trainer: EmbeddedTrainer = request.app.state.trainer
    families: list[tuple[str, str, str, Mapping[str, float]]] = [
        (name, "gauge", f"Number of {name}.", {"": count}) for name, count in trainer.registry.counts().items()
    ]
    totals = sorted(trainer.scheduler.totals.items())

    def by_job(value: Callable[[JobTotals], float]) -> dict[str, float]:
        return {f'operation="{kind}",outcome="{outcome}"': value(each) for (kind, outcome), each in totals}

    pools = {f'pool="{pool}"': trainer.memory.used(pool) for pool in get_args(Pool)}
    errors = {f'status="{status}"': count for status, count in sorted(request.app.state.errors.items())}
    families += [
        ("jobs_waiting", "gauge", "Number of jobs that wait for their turn.", {"": trainer.scheduler.waiting}),
        ("jobs_total", "counter", "Number of jobs that have run.", by_job(lambda each: each.jobs)),
        ("tokens_total", "counter", "Tokens that jobs have read and sampled.", by_job(lambda each: each.tokens)),
        ("run_seconds_total", "counter", "Time that jobs have run.", by_job(lambda each: each.run_seconds)),
        ("queue_seconds_total", "counter", "Time that jobs have waited.", by_job(lambda each: each.queue_seconds)),
        ("memory_bytes", "gauge", "Memory that is charged.", pools),
        ("memory_limit_bytes", "gauge", "Limit of all memory that is charged.", {"": trainer.memory.limit}),
        ("resident_memory_bytes", "gauge", "Memory of the process.", {"": resident_memory()}),
        ("errors_total", "counter", "Responses with an error.", errors),
    ]
    lines: list[str] = []
    for name, kind, text, values in families:
        lines += [f"# HELP tinker_{name} {text}", f"# TYPE tinker_{name} {kind}"]
        lines += [f"tinker_{name}{f'{{{labels}}}' if labels else ''} {value:.12g}" for labels, value in values.items()]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")


async def capabilities(request: Request) -> Response:
    catalog = trainer_of(request).catalog
    bases = {name: catalog.loaded(name) for name in catalog.names}
    # Also by their folders, for clients that load the tokenizer from the name of the model.
    bases |= {base.tokenizer_id: base for base in bases.values() if base is not None}
    models = [
        SupportedModel(name, None if base is None else base.max_context_length, trainable=True, sampleable=True)
        for name, base in bases.items()
    ]
    return answer(ServerCapabilities(models, request.app.state.extensions, PRODUCT))


def _unsupported(feature: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        raise Unsupported(f"{feature} is not offered by this trainer, because {reason}")

    return endpoint


routes = [
    Route("/client/config", client_config, methods=["POST"]),
    Route("/client/dynamic_config", dynamic_config, methods=["POST"]),
    Route("/create_session", create_session, methods=["POST"]),
    Route("/session_heartbeat", heartbeat, methods=["POST"]),
    Route("/sessions/{session_id}/finish", finish, methods=["POST"]),
    Route("/sessions/{session_id}", get_session, methods=["GET"]),
    Route("/sessions", list_sessions, methods=["GET"]),
    Route("/telemetry", telemetry, methods=["POST"]),
    Route("/healthz", healthz, methods=["GET"]),
    Route("/get_server_capabilities", capabilities, methods=["GET"]),
    *(Route(path, _unsupported(feature, reason), methods=methods) for path, methods, feature, reason in _LACKING),
]
