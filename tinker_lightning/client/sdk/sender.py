"""Sends the passes of one model with a client of the official SDK.

Imported only after the user has passed such a client, so that `tinker` stays an extra.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import warnings
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar

import tinker
from tinker import types as sdk

from tinker_lightning.client import models
from tinker_lightning.client.dialects import servers
from tinker_lightning.client.dialects.servers import detect
from tinker_lightning.client.passes import live_weights, preparation
from tinker_lightning.client.passes.request import as_forward, combine_outputs, size, split
from tinker_lightning.client.sdk import convert
from tinker_lightning.client.sdk.convert import Calls, value
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import Session, fetch_capabilities
from tinker_lightning.client.transport.target import HOSTED_URL, Credentials, without_password
from tinker_lightning.errors import InvalidInput, TinkerLightningError, Unsupported
from tinker_lightning.threads.background import BackgroundLoop, run_on_thread
from tinker_lightning.types import ForwardBackwardOutput, LoadWeightsResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.dialects.surrogate import Surrogate
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.passes.live_weights import LiveWeights
    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.types import Datum

T = TypeVar("T")

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
    pause = None  # the SDK retries by itself
    waits_for_samples = True  # the SDK posts at the call

    def __init__(self, client: Any, inner: Any, dialect: Dialect | None = None, types: Any = sdk) -> None:
        self.client = client
        self.inner = inner
        self.types = types
        self.calls = Calls(self.model_id)
        self._dialect = dialect

    @property
    def model_id(self) -> str:
        """The model that the client trains; the name of its class, if the client has no id of a model."""
        return str(getattr(self.inner, "model_id", type(self.client).__name__))

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

    @property
    def storage(self) -> str:
        """Where saved states are: on the server."""
        return without_password(self.server)

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

    @property
    def replaces_model(self) -> bool:
        """Whether a state is loaded into a new model: where the server, or a deprecation of the SDK, asks for it.

        SDK 0.38 creates a model from a state in one request, which older servers do not have.
        """
        if self.dialect.loads_first:
            return True
        is_deprecated = hasattr(tinker.TrainingClient.load_state, "__deprecated__")
        return is_deprecated and self._can_continue and self.dialect.knows("load_weights", "session_id")

    @property
    def _can_continue(self) -> bool:
        """Whether the client can continue with another model; releases without this class open sessions at once."""
        return isinstance(self.inner, tinker.TrainingClient) and hasattr(tinker, "RestClient")

    def load(
        self,
        name: str,
        path: str,
        token: str | None,
        after: Sequence[TinkerFuture[Any]],  # noqa: ARG002 what must end first was waited for at the call
    ) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights into the model, or into a new one, which the SDK's client then continues with."""
        settings = {} if token is None else {"weights_access_token": token}
        if self.replaces_model:
            if not self._can_continue:
                raise Unsupported(
                    f"{name}: servers of the dialect {self.dialect.name!r} load states only into new models, and a "
                    f"{type(self.inner).__name__} of tinker {tinker.__version__} cannot continue with another model. "
                    "Create a client from the state, with create_training_client_from_state_with_optimizer(), and pass "
                    "that."
                )
            continued = functools.partial(self._continue_from, name, path, settings, self.calls.in_flight())
            return self.calls.submit(
                name, lambda: run_on_thread(continued, name), lambda _: LoadWeightsResponse(path, self.model_id)
            )

        def load() -> Any:
            with warnings.catch_warnings():  # this server has no other way
                warnings.simplefilter("ignore", FutureWarning)
                return getattr(self.client, name)(path, **settings)

        loaded = self.calls.submit(name, load, lambda result: LoadWeightsResponse(result.path))
        return loaded.then(lambda result: result, self._explained)

    def _explained(self, error: BaseException) -> BaseException:
        if hint := self.dialect.load_hint(str(error)):
            error.args = (f"{error}.{hint}",)
        return error

    def _continue_from(self, name: str, path: str, settings: dict[str, Any], in_flight: list[Future[Any]]) -> None:
        """Creates a model from a state, makes the SDK's client continue with it, and unloads the earlier one.

        Requests that are in flight end first: one of them may save the state.
        """
        wait(in_flight)
        earlier = value(self.inner.get_info())
        create = getattr(_same_session(self.inner.holder), name.replace("load", "create_training_client_from"))
        optimizer = getattr(earlier, "optimizer_config", None)
        if optimizer is not None and "optimizer" in inspect.signature(create).parameters:
            settings = {**settings, "optimizer": optimizer}  # of a state with an optimizer, it is the state's
        with contextlib.suppress(tinker.TinkerError):  # where the server describes no runs
            run = value(tinker.RestClient(self.inner.holder).get_training_run(self.model_id))
            settings = {**settings, "user_metadata": run.user_metadata}
        client = value(create(path, **settings))
        created = value(client.get_info())
        for what in ("lora_rank", "model_name", "optimizer_config"):
            wanted, found = getattr(earlier, what, None), getattr(created, what, None)
            if None not in (wanted, found) and wanted != found:
                self._unload(str(client.model_id))
                raise InvalidInput(
                    f"{name}: {path} has {what}={found}, but this model has {wanted}. Create a client from the state "
                    "instead: create_training_client_from_state()."
                )
        previous = self.model_id
        # The user's object trains the new model from here on. Otherwise, its own saves would be of the earlier one.
        vars(self.inner).update(vars(client))
        self.calls = Calls(self.model_id)
        logger.info("%s: %s is loaded into a new model, %s, in place of %s", name, path, self.model_id, previous)
        self._unload(previous)

    def _unload(self, model_id: str) -> None:
        """Unloads a model if the server can; the SDK has no call for it."""

        async def unload(connection: Connection) -> None:
            session = await Session.join(connection, self.dialect, self.inner.holder.get_session_id())
            await models.unload(session, model_id)

        try:
            _ask_server(self.inner, unload)
        except TinkerLightningError as error:
            logger.info("the model %s stays on %s until the session ends: %s", model_id, self.server, error)

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


def _same_session(holder: Any) -> tinker.ServiceClient:
    """Returns a client that creates models in the session of another one."""
    service = tinker.ServiceClient()  # opens nothing before it is used
    service._session_holder = service._rest_holder = holder
    return service


def _detect_behind(client: Any) -> Dialect:
    """Returns the dialect of the server that a client of the official SDK talks to."""
    if _server_url(client) is None:
        return servers.HOSTED

    async def ask(connection: Connection) -> Dialect:
        return await detect(connection, await fetch_capabilities(connection))

    return _ask_server(client, ask)


def _ask_server(client: Any, ask: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Runs requests of ours to the server of an SDK's client, with its API key."""
    credentials = Credentials(_given(client, "api_key", "TINKER_API_KEY"))
    connection = Connection(_server_url(client) or HOSTED_URL, credentials, None, _RETRY_POLICY)
    loop = BackgroundLoop(connection.close)
    try:
        return loop.run(ask(connection)).result()
    finally:
        loop.close()


def _server_url(client: Any) -> str | None:
    """Returns the URL that a client of the official SDK was given; None for the SDK's default."""
    return _given(client, "base_url", "TINKER_BASE_URL")


def _given(client: Any, name: str, variable: str) -> str | None:
    """Returns a setting that the SDK resolved or was given, or its environment variable; None without any."""
    holder = vars(client.holder)
    return holder.get(f"_{name}") or holder.get("_constructor_kwargs", {}).get(name) or os.environ.get(variable) or None
