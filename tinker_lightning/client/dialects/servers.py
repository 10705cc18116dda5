"""The dialects of the servers that this library knows, and how a server is recognized."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinker_lightning.client.dialects.dialect import NEWER_FIELDS, Dialect
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.errors import InvalidInput, InvalidMessage, TinkerLightningError
from tinker_lightning.types.responses import PRODUCT
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    import os

    from tinker_lightning.client.transport.connection import Connection
    from tinker_lightning.types import ServerCapabilities

logger = logging.getLogger("tinker_lightning.client")

_SAMPLING = frozenset({"asample.topk_prompt_logprobs"})

HOSTED = Dialect(name="hosted", clears_gradient=True, loads_first=True)
EMBEDDED = Dialect(name="embedded", clears_gradient=True, newer_fields=NEWER_FIELDS - {"asample.record_stability_info"})
# What servers of other projects have in common: what the protocol promises, except for what they are seen to lack.
_PROTOBUF = Dialect(
    name="protobuf",
    newer_fields=_SAMPLING,
    deduplicates=False,
    numbers="strict",
    concurrent=False,
    unit_forward_weights=True,
)
_JSON = _PROTOBUF.but(name="json", encoding="json", forward="forward", numbers="ignored")


def unmeasured(dialect: Dialect) -> Dialect:
    """Returns a dialect of servers whose losses are not known: only `cross_entropy` is relied on, once measured."""
    return dialect.but(surrogate=None, losses=frozenset({"cross_entropy"}), sends_other_losses=True)


# Servers of an unknown kind.
PROTOBUF, JSON = unmeasured(_PROTOBUF), unmeasured(_JSON)

# The factors and properties below were measured on running servers, or read in their code (Twinkle, open-rl).
SKYRL = _JSON.but(
    name="skyrl",
    surrogate=Surrogate("cispo", per_length=True, per_batch="window"),
    losses=frozenset({"importance_sampling", "ppo", "cispo"}),
    clips_gradients=False,
    resets_optimizer=False,
    deletes_checkpoints=False,
    samples_old_weights=False,
    multiple_targets=False,
)
TUFT = _PROTOBUF.but(
    name="tuft",
    newer_fields=frozenset(
        {
            "asample.topk_prompt_logprobs",
            "save_weights.overwrite",
            "save_weights.ttl_seconds",
            "save_weights.user_metadata",
            "save_weights_for_sampler.ttl_seconds",
            "save_weights_for_sampler.user_metadata",
            "retrieve_future.allow_metadata_only",
        }
    ),
    losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
)
TWINKLE = _JSON.but(
    name="twinkle",
    surrogate=Surrogate("importance_sampling", per_length=True, per_batch="call", even_batch=True),
    losses=frozenset({"importance_sampling"}),
    multiple_targets=False,
)
OPEN_RL = _JSON.but(
    name="open-rl",
    forward="zero_weights",
    unloads_models=False,
    deletes_checkpoints=False,
    samples_old_weights=False,
)
TOGETHER = _JSON.but(name="together")

KNOWN = MappingProxyType(
    {each.name: each for each in (HOSTED, EMBEDDED, SKYRL, TUFT, TWINKLE, OPEN_RL, TOGETHER, JSON, PROTOBUF)}
)

_FORWARD = "/api/v1/forward"
_FORWARD_BACKWARD = "/api/v1/forward_backward"
_HOSTED = "thinkingmachines.dev"
# The titles in the API descriptions of servers that have one.
_TITLES = {"Tinker API Mock": SKYRL, "TuFT": TUFT}
# Far more than any server's description.
_MAX_DESCRIPTION = 8 << 20
_OPEN_RL_TITLE = "Open-RL Server MVP"
_TWINKLE_PATH = "/twinkle/"


def dialect_named(name: str) -> Dialect:
    """Returns the dialect of a name.

    Raises:
        InvalidInput: If there is none.
    """
    if name not in KNOWN:
        raise InvalidInput(f"dialect: {name!r} is unknown; choose from auto, {', '.join(KNOWN)}, or pass a Dialect")
    return KNOWN[name]


def as_dialect(given: str | os.PathLike[str] | Dialect | None) -> Dialect | None:
    """Returns the dialect that a `dialect` argument means, by name, as a `.json` file or as it is; None to detect it.

    Raises:
        InvalidInput: If there is none of that name, or the file cannot be read.
    """
    if given is None or isinstance(given, Dialect):
        return given
    if given == "auto":
        return None
    path = Path(given)
    return Dialect.load(path) if path.suffix == ".json" else dialect_named(str(given))


async def detect(connection: Connection, capabilities: ServerCapabilities) -> Dialect:
    """Returns the dialect of a server. Our own server names itself; other servers are probed without side effects.

    An empty `forward` tells the encodings apart: servers with JSON passes have this endpoint and reject the body,
    servers with protobuf passes do not have it. The API's description, where it is published, names the server.
    """
    if capabilities.server == PRODUCT:
        return EMBEDDED
    if _is_hosted(connection.url):
        return HOSTED  # never probed: requests there may cost money
    (title, paths), (status, body) = await asyncio.gather(_description(connection), _empty_forward(connection))
    if title in _TITLES:
        return _TITLES[title]
    if title == _OPEN_RL_TITLE:
        # Its versions differ, and the title does not tell them apart, so its gradients are measured.
        return unmeasured(OPEN_RL).but(forward="zero_weights" if status == 404 else "forward")
    if any(_TWINKLE_PATH in path for path in paths):
        return TWINKLE
    if status == 404:
        # Without an endpoint for forwards, a JSON server returns log-probabilities for weights of zero.
        return JSON.but(forward="zero_weights") if _takes_json(paths) else PROTOBUF
    if status is not None and 400 <= status < 500 and status not in (401, 403):
        return JSON
    reason = "does not answer it" if status is None else f"answers HTTP {status}: {body[:80]!r}"
    logger.warning(
        "%s: cannot tell which encoding the server takes, because it %s to an empty POST %s. Assuming protobuf; pass "
        "dialect='json' to connect() if that is wrong.",
        connection.url,
        reason,
        _FORWARD,
    )
    return PROTOBUF


def _is_hosted(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == _HOSTED or host.endswith(f".{_HOSTED}")


async def _description(connection: Connection) -> tuple[str, dict[str, Any]]:
    """Returns the title and the paths of the OpenAPI description, if the server publishes one."""
    try:
        response = await connection.send(
            "GET", "/openapi.json", accept=lambda _: True, seconds=0, most=_MAX_DESCRIPTION
        )
        content = wire_json.loads(response.content)
    except (TinkerLightningError, InvalidMessage):
        return "", {}
    info, paths = content.get("info"), content.get("paths")
    title = info.get("title") if isinstance(info, dict) else None
    return str(title or ""), paths if isinstance(paths, dict) else {}


def _takes_json(paths: dict[str, Any]) -> bool:
    """Returns whether the description of an API says that `forward_backward` takes JSON."""
    found: Any = paths.get(_FORWARD_BACKWARD)
    for key in ("post", "requestBody", "content"):
        found = found.get(key) if isinstance(found, dict) else None
    return isinstance(found, dict) and wire_json.CONTENT_TYPE in found


async def _empty_forward(connection: Connection) -> tuple[int | None, str]:
    try:
        response = await connection.send("POST", _FORWARD, b"{}", accept=lambda _: True, seconds=0)
    except TinkerLightningError:
        return None, ""
    return response.status_code, response.text
