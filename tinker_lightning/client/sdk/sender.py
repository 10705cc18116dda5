"""Sends the passes of one model with a client of the official SDK.

Imported only after the user has passed such a client, so that `tinker` stays an extra.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import tinker
from tinker import types as sdk

from tinker_lightning.client.dialects import servers
from tinker_lightning.client.dialects.detect import detect
from tinker_lightning.client.passes import live_weights, preparation
from tinker_lightning.client.passes.request import as_forward, combine_outputs, size, split
from tinker_lightning.client.sdk import convert
from tinker_lightning.client.sdk.requests import Calls, in_thread, value
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import fetch_capabilities
from tinker_lightning.client.transport.target import Credentials
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.threads.background import BackgroundLoop
from tinker_lightning.types import ForwardBackwardOutput, LoadWeightsResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.dialects.surrogate import Surrogate
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.passes.live_weights import LiveWeights
    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.types import Datum

logger = logging.getLogger("tinker_lightning.client")

# A batch below both limits is sent in one request by every version of the SDK. Some split it at 5,000,000 bytes by an
# estimate that is up to 2.5 times ours.
_CALL_DATUMS = 128
_CALL_BYTES = 2_000_000
_RETRY_POLICY = RetryPolicy(10.0)


class SdkSender:
    """Calls a training client with the SDK's methods.

    Args:
        client: The client that is called.
        inner: The SDK's own client, which may be wrapped by the other.
        dialect: What the server speaks; detected at the first use if it is not given.
        types: The module with the datums and settings of the client.
    """

    retains = False
    waits_for_samples = True  # the SDK posts at the call

    def __init__(self, client: Any, inner: Any, dialect: Dialect | None = None, types: Any = sdk) -> None:
        self.client = client
        self.inner = inner
        self.types = types
        self.model_id = str(getattr(inner, "model_id", type(client).__name__))
        self.calls = Calls(self.model_id)
        self._dialect = dialect
        self._has_moved = False  # to another model, with the log saying so

    @property
    def dialect(self) -> Dialect:
        """The dialect of the server behind the SDK's client; detected at the first use."""
        if self._dialect is None:
            self._dialect = _detect_behind(self.inner)
        return self._dialect

    @property
    def server(self) -> str:
        """The URL of the server behind the SDK's client."""
        return _server_url(self.inner) or f"the server of {type(self.client).__name__}"

    @functools.cached_property
    def live(self) -> LiveWeights:
        """The models in training on the server, by all clients of this process."""
        return live_weights.on_server(self.server)

    def check(self) -> None:
        """Does nothing: the SDK raises for a client that can no longer be used."""

    def prepare(
        self,
        data: list[Datum],
        loss_fn: Any,
        config: Mapping[str, float | str] | None,
        inputs: Mapping[str, Any] | None,
        scale: float,
    ) -> ServerPass:
        """Checks a pass and converts it into a request; raises `InvalidInput` if it is invalid."""
        datums, name = preparation.spread(data, inputs or {}), preparation.loss_name(loss_fn)
        self.dialect.check_loss(name)
        return preparation.built_in(self.dialect, datums, name, config or {}, scale)

    def surrogate(self) -> Surrogate:
        """Returns the built-in loss that carries custom losses; raises `Unsupported` if none is known."""
        if self.dialect.surrogate is None:
            raise Unsupported(
                "custom losses need a built-in loss that carries their gradient exactly, and none is known for a "
                f"server of the dialect {self.dialect.name!r}. Connect with tinker_lightning.connect(), which measures "
                "it; or set route = 'builtin' to train with a built-in loss as this server computes it."
            )
        return self.dialect.surrogate

    def post(
        self, requests: Sequence[ServerPass], *, forward_only: bool = False
    ) -> Iterator[TinkerFuture[ForwardBackwardOutput]]:
        """Sends passes one after another, and returns the future of each when it is sent."""
        return (self.post_one(each, forward_only=forward_only) for each in requests)

    def post_one(self, request: ServerPass, *, forward_only: bool) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends one pass, in several calls if the server divides by the sequences of a call."""
        if forward_only:
            request = as_forward(self.dialect, request)
        chunks = self._split(request)
        calls = [[convert.datum(datum, self.types) for datum in request.call_datums(chunk)] for chunk in chunks]
        is_forward = forward_only and self.dialect.forward != "zero_weights"
        call = self.client.forward if is_forward else self.client.forward_backward
        loss: Any = request.loss
        config = request.config or None

        def combined(results: list[Any]) -> ForwardBackwardOutput:
            pairs = zip(results, chunks, strict=True)
            return combine_outputs([request.call_output(convert.output(result), chunk) for result, chunk in pairs])

        return self.calls.submit(
            "forward" if forward_only else "forward_backward",
            lambda: [call(datums, loss, config) for datums in calls],
            combined,
        )

    def load(
        self,
        name: str,
        path: str,
        token: str | None,
        after: Sequence[TinkerFuture[Any]],  # noqa: ARG002 what must end first was waited for at the call
    ) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights into the model; into a new one, with a client of its own, where the server wants that."""
        settings = {} if token is None else {"weights_access_token": token}
        if self.dialect.loads_first:
            create = functools.partial(self._create_from, self._creation(name), name, path, settings)
            return self.calls.submit(
                name, lambda: in_thread(create), lambda _: LoadWeightsResponse(path, self.model_id)
            )

        def load() -> Any:
            with warnings.catch_warnings():  # the SDK recommends creating a new client instead
                warnings.simplefilter("ignore", FutureWarning)
                return getattr(self.client, name)(path, **settings)

        return self.calls.submit(name, load, lambda result: LoadWeightsResponse(result.path))

    def _creation(self, name: str) -> Callable[..., Any]:
        """Returns the SDK's method that creates a client from a state in the session of this one."""
        service = tinker.ServiceClient()  # opens nothing before it is used
        if type(self.client) is not tinker.TrainingClient or not hasattr(service, "_session_holder"):
            raise Unsupported(
                f"{name}: servers of the dialect {self.dialect.name!r} load states only into new models, and a new "
                f"{type(self.client).__name__} cannot be created here. Create one from the state, with the SDK's "
                "create_training_client_from_state_with_optimizer(), and pass that."
            )
        service._session_holder = service._rest_holder = self.client.holder
        method: Callable[..., Any] = getattr(service, name.replace("load", "create_training_client_from"))
        return method

    def _create_from(self, creation: Callable[..., Any], name: str, path: str, settings: dict[str, str]) -> None:
        """Continues with a client that is created from a state."""
        client = value(creation(path, **settings))
        earlier, created = (value(each.get_info()) for each in (self.client, client))
        for what in ("lora_rank", "model_name"):
            if getattr(earlier, what) != getattr(created, what):
                raise InvalidInput(
                    f"{name}: {path} has {what}={getattr(created, what)}, but this model has {getattr(earlier, what)}. "
                    "Create a client from the state instead: create_training_client_from_state()."
                )
        if not self._has_moved:
            self._has_moved = True
            logger.warning(
                "%s: %s loads states only into new models. From here on, the model %s is trained, by the SDK's client "
                "in `client` of this backend; the one that was passed stays with %s.",
                name,
                self.server,
                client.model_id,
                self.model_id,
            )
        self.client = self.inner = client
        self.model_id = str(client.model_id)
        self.calls = Calls(self.model_id)

    def _split(self, request: ServerPass) -> list[list[Datum]]:
        """Splits a batch where the server divides by the sequences of a request, so that each call is one request.

        Raises:
            Unsupported: If the SDK would split a call.
        """
        if request.per_batch != "call" and not request.even_batch:
            return [request.data]
        config = getattr(getattr(self.inner, "holder", None), "_client_config", None)
        max_datums = min(_CALL_DATUMS, getattr(config, "fwdbwd_max_chunk_len", _CALL_DATUMS)) // 2 * 2
        # Half of it, because the last datum may be sent twice to make the number even.
        max_bytes = min(_CALL_BYTES, getattr(config, "fwdbwd_max_chunk_bytes_count", _CALL_BYTES)) // 2
        chunks = split(request.data, max_datums, max_bytes)
        if request.even_batch and (max_datums == 0 or any(size(chunk) > max_bytes for chunk in chunks)):
            raise Unsupported(
                f"servers of the dialect {self.dialect.name!r} need an even number of sequences in a request, but the "
                "SDK sends the longest sequence of this batch alone. Use shorter ones, or tinker_lightning.connect()."
            )
        return chunks


def _detect_behind(client: Any) -> Dialect:
    """Returns the dialect of the server that a client of the official SDK talks to."""
    url = _server_url(client)
    if url is None:
        return servers.HOSTED
    connection = Connection(url, Credentials(_given(client, "api_key", "TINKER_API_KEY")), None, _RETRY_POLICY)
    loop = BackgroundLoop(connection.close)
    try:
        return loop.run(_detect(connection)).result()
    finally:
        loop.close()


def _server_url(client: Any) -> str | None:
    """Returns the URL that a client of the official SDK was given; None for the SDK's default."""
    return _given(client, "base_url", "TINKER_BASE_URL")


async def _detect(connection: Connection) -> Dialect:
    return await detect(connection, await fetch_capabilities(connection))


def _given(client: Any, name: str, variable: str) -> str | None:
    """Returns a setting that the SDK resolved or was given, or its environment variable; None without any."""
    holder = vars(client.holder)
    return holder.get(f"_{name}") or holder.get("_constructor_kwargs", {}).get(name) or os.environ.get(variable) or None
