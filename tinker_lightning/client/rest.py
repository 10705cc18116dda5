"""Training runs, checkpoints, sessions and samplers of a server: the official SDK's `RestClient`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

from tinker_lightning.client.files import checkpoints
from tinker_lightning.client.futures import TinkerFuture, UnreadFailures, awaited
from tinker_lightning.client.transport import discovery
from tinker_lightning.client.transport.channel import Channel
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import Session, fetch_capabilities
from tinker_lightning.client.transport.target import without_password
from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import WeightsInfoResponse
from tinker_lightning.types import responses as rs

if TYPE_CHECKING:
    from collections.abc import Coroutine

    AccessScope: TypeAlias = Literal["owned", "accessible"]

T = TypeVar("T")


class RestClient:
    """Lists and manages what a server keeps.

    Every method returns a future; its `_async` form is awaited for the result. Without a `ServiceClient`, it needs no
    session: none is created on the server.

    Args:
        channel: The channel of the `ServiceClient` that creates it.
        base_url: The server, chosen as by `connect()`.
        api_key: The API key; `TINKER_API_KEY` if not given.
    """

    def __init__(
        self, channel: Channel | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if isinstance(channel, str):
            raise InvalidInput(f"pass the server by name: RestClient(base_url={without_password(channel)!r})")
        if channel is None:
            target = discovery.find(base_url, api_key, None)
            channel = Channel(target, RetryPolicy(300.0), partial(Session.join, session_id=""), {})
        self.unread = UnreadFailures()
        self._channel = channel
        channel.watch(self)

    def get_server_capabilities(self) -> TinkerFuture[rs.ServerCapabilities]:
        """Returns what the server supports."""
        return self._run("get_server_capabilities", fetch_capabilities(self._channel.session.connection))

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> TinkerFuture[rs.TrainingRun]:
        """Returns a model and its latest checkpoints; `access_scope` can include checkpoints of other users."""
        path = f"training_runs/{quote(training_run_id, safe=':')}"
        return self._get("get_training_run", path, rs.TrainingRun, access_scope=access_scope)

    get_training_run_async = awaited(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TinkerFuture[rs.TrainingRun]:
        """Returns the model that a checkpoint belongs to."""
        return self.get_training_run(checkpoints.parse(tinker_path)[0], access_scope)

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> TinkerFuture[rs.TrainingRunsList]:
        """Returns models, the last used first."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope, "project_id": project_id}
        return self._get("list_training_runs", "training_runs", rs.TrainingRunsList, **query)

    list_training_runs_async = awaited(list_training_runs)

    def list_checkpoints(self, training_run_id: str) -> TinkerFuture[rs.CheckpointsList]:
        """Returns the checkpoints of a model."""
        path = f"training_runs/{quote(training_run_id, safe=':')}/checkpoints"
        return self._get("list_checkpoints", path, rs.CheckpointsList)

    list_checkpoints_async = awaited(list_checkpoints)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> TinkerFuture[rs.CheckpointsList]:
        """Returns the checkpoints of all models, the newest first."""
        return self._get("list_user_checkpoints", "checkpoints", rs.CheckpointsList, limit=limit, offset=offset)

    list_user_checkpoints_async = awaited(list_user_checkpoints)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> TinkerFuture[WeightsInfoResponse]:
        """Returns the base model and adapter of a checkpoint."""
        return self._run("weights_info", checkpoints.weights_info(self._channel.session.connection, tinker_path))

    def get_external_weights_urls(self, tinker_path: str) -> TinkerFuture[rs.ExternalWeightsUrlsResponse]:
        """Returns URLs of the files that `save_weights_external` saved."""
        path = f"{checkpoints.url(tinker_path).removeprefix('/api/v1/')}/external_weights_urls"
        return self._get("get_external_weights_urls", path, rs.ExternalWeightsUrlsResponse)

    get_external_weights_urls_async = awaited(get_external_weights_urls)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> TinkerFuture[None]:
        """Deletes a checkpoint of a model, by its id `<kind>/<name>`."""
        return self.delete_checkpoint_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    delete_checkpoint_async = awaited(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> TinkerFuture[None]:
        """Deletes a checkpoint."""
        deletion = checkpoints.delete(self._channel.session, tinker_path, missing_ok=False)
        return self._run("delete_checkpoint", deletion)

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> TinkerFuture[None]:
        """Sets after how many seconds a checkpoint is deleted; None keeps it."""
        expiry = checkpoints.set_ttl(self._channel.session, tinker_path, ttl_seconds)
        return self._run("set_checkpoint_ttl", expiry)

    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> TinkerFuture[rs.GetSessionResponse]:
        """Returns the models and samplers of a session."""
        path = f"sessions/{quote(session_id)}"
        return self._get("get_session", path, rs.GetSessionResponse, access_scope=access_scope)

    get_session_async = awaited(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> TinkerFuture[rs.SessionsList]:
        """Returns the ids of sessions."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._get("list_sessions", "sessions", rs.SessionsList, **query)

    list_sessions_async = awaited(list_sessions)

    def get_sampler(self, sampler_id: str) -> TinkerFuture[rs.GetSamplerResponse]:
        """Returns the base model and weights of a sampler."""
        return self._get("get_sampler", f"samplers/{quote(sampler_id, safe=':')}", rs.GetSamplerResponse)

    get_sampler_async = awaited(get_sampler)

    def _get(self, operation: str, path: str, result: type[T], **query: Any) -> TinkerFuture[T]:
        given = urlencode({name: value for name, value in query.items() if value is not None})
        url = f"/api/v1/{path}?{given}" if given else f"/api/v1/{path}"
        return self._run(operation, self._channel.session.connection.get(url, result))

    def _run(self, operation: str, coroutine: Coroutine[Any, Any, T]) -> TinkerFuture[T]:
        try:
            self.unread.raise_first()
        except BaseException:
            coroutine.close()
            raise
        return self.unread.add(TinkerFuture(self._channel.run(coroutine), operation))
