"""Features of hosted services that a trainer on one machine does not have: they fail at once, with the reason.

The status is 404: the official SDK retries every 5xx for minutes, 501 included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

_NO_ACCOUNTS = "it has neither users nor projects"
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}"
_FEATURES = (
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


def _refuse(feature: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        raise Unsupported(f"{feature} is not offered by this trainer, because {reason}")

    return endpoint


routes = [Route(path, _refuse(feature, reason), methods=methods) for path, methods, feature, reason in _FEATURES]
