"""Failures of servers of every kind: one error that names what failed, and nothing trained twice (R5.4)."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from tests.helpers.imitated_clients import BATCH, KINDS, STEP, connected, logprobs_of, model_on, preference
from tests.helpers.imitations import imitate
from tinker_lightning import ServiceClient
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.errors import AnswerLost, InvalidInput, NotFound, TinkerLightningError
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from tests.helpers.imitations.serving import Kind
    from tinker_lightning.server import EmbeddedTrainer


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_answer_never_doubles_a_gradient(kind: Kind, trainer: EmbeddedTrainer) -> None:
    drops = {"forward_backward": [2] if kind in ("open-rl", "tuft") else [1]}  # where the first one is the forward
    with (
        imitate(kind, trainer=trainer, drops_answers=drops) as server,
        connected(server, dialect_named(kind)) as service,
    ):
        client = model_on(service)
        saved = client.save_state("before").result().path

        def step() -> None:
            client.forward_backward_custom(BATCH, preference)
            client.optim_step(STEP).result()

        with pytest.raises(AnswerLost, match=f"may have executed it.* Resume from {saved}") as raised:
            step()
        assert raised.value.operation in ("forward_backward", "optim_step")
        assert raised.value.model_id == client.model_id
        assert server.ran["optim_step"] == 0
        assert server.ran["forward_backward"] <= drops["forward_backward"][0]
        with contextlib.suppress(AnswerLost):  # the failure of the pass, if nobody has read it yet
            client.get_info()


class Proxy(httpx.AsyncBaseTransport):
    """Passes requests on, and answers the next `forward_backward` itself: before it passes it on, or afterwards."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.answer: httpx.Response | Exception | None = None
        self.passes_on = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.answer if request.url.path.endswith("/forward_backward") else None
        if answer is None:
            return await self._inner.handle_async_request(request)
        self.answer = None
        if self.passes_on:
            await self._inner.handle_async_request(request)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "answer", [httpx.Response(503, text="reset before headers"), httpx.DecodingError("bad gzip")], ids=["503", "gzip"]
)
@pytest.mark.parametrize("kind", ["skyrl", "tuft"])
def test_what_a_proxy_answers_never_doubles_a_gradient(
    kind: Kind, answer: httpx.Response | Exception, trainer: EmbeddedTrainer
) -> None:
    with imitate(kind, trainer=trainer) as server:
        proxy = Proxy(server.transport)
        with connected(server, dialect_named(kind), proxy) as service:
            client = model_on(service)
            proxy.answer = answer

            def step() -> None:
                client.forward_backward(BATCH, "cross_entropy")
                client.optim_step(STEP).result()

            with pytest.raises(AnswerLost, match="may have executed it"):
                step()
            assert server.ran["forward_backward"] <= 1
            assert server.ran["optim_step"] == 0
            with contextlib.suppress(AnswerLost):
                client.get_info()


def test_a_server_that_turns_a_pass_away_gets_it_again(trainer: EmbeddedTrainer) -> None:
    with imitate("tuft", trainer=trainer) as server:
        proxy = Proxy(server.transport)
        with connected(server, dialect_named("tuft"), proxy) as service:
            client = model_on(service)
            proxy.answer, proxy.passes_on = httpx.Response(503, json={"detail": "starting"}), False
            client.forward_backward(BATCH, "cross_entropy").result()
            assert server.ran["forward_backward"] == 1


def test_a_rejected_request_leaves_its_number_to_the_next(trainer: EmbeddedTrainer) -> None:
    with imitate("tuft", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(TinkerLightningError):
            client.save_state("a name with blanks/and slashes", ttl_seconds=1).result()
        logprobs_of(client)


@pytest.mark.parametrize(("kind", "wrong"), [("skyrl", "tuft"), ("tuft", "skyrl")])
def test_a_wrong_dialect_is_named_as_the_cause(kind: Kind, wrong: str, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server, dialect_named(wrong)) as service:
        client = model_on(service)
        with pytest.raises(TinkerLightningError, match=f"Does the server speak the dialect '{wrong}'"):
            client.forward(BATCH, "cross_entropy").result()


def test_a_newer_field_that_a_server_rejects_is_named_with_the_fix(trainer: EmbeddedTrainer) -> None:  # R5.17
    field = "save_weights_for_sampler.kind"
    newer = dialect_named("tuft").but(newer_fields=dialect_named("tuft").newer_fields | {field})
    with imitate("tuft", trainer=trainer) as server:
        with connected(server, newer) as service:
            client = model_on(service)
            with pytest.raises(
                InvalidInput, match=f"kind: Extra inputs .* - {{'{field}'}}\\), where mine is"
            ) as raised:
                client.save_weights_and_get_sampling_client()
            assert str(raised.value).count("Extra inputs") == 1
            logprobs_of(client)  # its number was not used
            mine = client.dialect
        with connected(server, mine.but(newer_fields=mine.newer_fields - {field})) as service:
            model_on(service).save_weights_and_get_sampling_client()


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_checkpoint_is_not_found(kind: Kind, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(NotFound, match=r"load_state: .*Checkpoint not found: .*/nothing \("):
            client.load_state(f"tinker://{client.model_id}/weights/nothing").result()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_an_unknown_run_is_not_found(kind: Kind, trainer: EmbeddedTrainer) -> None:
    path = "tinker://gone/weights/nothing"
    with imitate(kind, trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(NotFound):
            service.create_training_client_from_state(path)
        assert not client.checkpoint_exists(path)


class CrashingOnce(httpx.AsyncBaseTransport):
    """Answers 500 to the first request at each path after `start`."""

    def __init__(self, inner: httpx.AsyncBaseTransport, *, hides_runs: bool) -> None:
        self._inner, self._hides_runs = inner, hides_runs
        self._crashed: set[str] | None = None

    def start(self) -> None:
        self._crashed = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self._crashed is not None and path not in self._crashed:
            self._crashed.add(path)
            return httpx.Response(500, text="Internal Server Error")
        if self._hides_runs and path == "/api/v1/checkpoints":
            return httpx.Response(200, json={"checkpoints": []})
        return await self._inner.handle_async_request(request)


# Without a listing of all runs, with one, and with one that has only the user's own runs.
@pytest.mark.parametrize(("kind", "hides_runs"), [("skyrl", False), ("tuft", False), ("tuft", True)])
def test_a_checkpoint_is_found_after_passing_crashes(kind: Kind, hides_runs: bool, trainer: EmbeddedTrainer) -> None:
    with imitate(kind, trainer=trainer) as server:
        transport = CrashingOnce(server.transport, hides_runs=hides_runs)
        with connected(server, dialect_named(kind), transport) as service:
            saved = model_on(service).save_state("here").result().path
            transport.start()
            assert service.checkpoint_exists(saved)
            transport.start()
            assert service.weights_info(saved).lora_rank == 4


def test_a_crash_does_not_lose_the_answer_to_the_next_request(trainer: EmbeddedTrainer) -> None:
    with (
        imitate("tuft", trainer=trainer) as server,
        ServiceClient(
            base_url=server.url, api_key=server.behavior.api_key, retry_policy=RetryPolicy(0.0), dialect="tuft"
        ) as service,
    ):
        client = model_on(service)
        for _ in range(3):
            with pytest.raises(NotFound, match="tinker://unknown/weights/x: there is no such checkpoint on http"):
                service.weights_info("tinker://unknown/weights/x")  # after which the connection is closed
            client.forward_backward(BATCH, "cross_entropy").result()


def test_no_step_follows_a_lost_answer_where_requests_could_be_concurrent(trainer: EmbeddedTrainer) -> None:
    dialect = dialect_named("together").but(concurrent=True)
    with (
        imitate("together", trainer=trainer, drops_answers={"forward_backward": [1]}) as server,
        connected(server, dialect) as service,
    ):
        client = model_on(service)
        saved = client.save_state("before").result().path
        with client.unread.held():  # so that the failure is not raised by the call of the step, if it comes that early
            passed = client.forward_backward(BATCH, "cross_entropy")
            step = client.optim_step(STEP)
            with pytest.raises(AnswerLost, match=f"Resume from {saved}"):
                passed.result()
            with pytest.raises(AnswerLost, match="optim_step: not sent, because of an earlier failure") as raised:
                step.result()
        assert (raised.value.operation, raised.value.seq_id) == ("optim_step", 3)
        assert server.ran["optim_step"] == 0


def test_our_server_that_is_replaced_by_another_is_named(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server, "embedded") as service:
        service.session.extensions = replace(service.session.extensions, submit_and_wait=True)
        with pytest.raises(NotFound, match=r"Not Found\. Does the server speak .* http://imitated was replaced"):
            model_on(service)


class Alternating(httpx.AsyncBaseTransport):
    """A load balancer in front of servers of different kinds: from some request on, it takes turns."""

    def __init__(self, *servers: httpx.AsyncBaseTransport, after: int) -> None:
        self.servers, self.left = servers, after

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.left -= 1
        server = self.servers[0 if self.left >= 0 else self.left % len(self.servers)]
        return await server.handle_async_request(request)


def train_through(transport: httpx.AsyncBaseTransport, api_key: str | None) -> None:
    settings: Any = {"api_key": api_key, "transport": transport, "retry_policy": RetryPolicy(2.0, 0.05)}
    with ServiceClient(base_url="http://imitated", **settings) as service:
        client = model_on(service)
        for _ in range(8):
            client.forward_backward_custom(BATCH, preference)
            client.optim_step(STEP).result()


PAIRS: list[tuple[Kind | Literal["embedded"], ...]] = [
    ("skyrl", "tuft"),
    ("tuft", "skyrl"),
    ("together", "tuft"),
    ("embedded", "skyrl"),
    ("tuft", "embedded"),
]


@pytest.mark.parametrize("after", [0, 8])
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_servers_of_different_kinds_behind_one_url_are_one_error(
    kinds: tuple[Kind | Literal["embedded"], ...], after: int, trainer: EmbeddedTrainer
) -> None:
    with contextlib.ExitStack() as stack:
        imitated = [
            stack.enter_context(imitate(kind, trainer=trainer, hold=0.1)) for kind in kinds if kind != "embedded"
        ]
        transports = [each.transport for each in imitated]
        if "embedded" in kinds:
            transports.insert(kinds.index("embedded"), httpx.ASGITransport(create_app(trainer)))
        key = next((each.behavior.api_key for each in imitated if each.behavior.api_key), None)
        with pytest.raises(TinkerLightningError) as raised:
            train_through(Alternating(*transports, after=after), key)
    named = r"http://imitated.* (connect to one of them|share this URL)"
    assert re.search(named, str(raised.value))
