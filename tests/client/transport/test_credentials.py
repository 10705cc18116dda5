"""The key, the token that some servers want instead of it, and the session they open."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.responses import JSONResponse

from tests.helpers.backends import recording
from tests.helpers.client_data import DATA
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.target import Credentials
from tinker_lightning.errors import NotATinkerServer, Unauthorized
from tinker_lightning.server import create_app
from tinker_lightning.server.endpoints import handshake

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tinker_lightning.server import EmbeddedTrainer

KEY = "tml-raw"


def jwt(claims: dict[str, Any]) -> str:
    """A token with these claims."""
    return f"eyJh.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


class Tokens:
    """Hands out tokens for the key, and takes nothing else for other requests."""

    def __init__(
        self,
        app: ASGIApp,
        lifetime: float = 0.0,
        answer: dict[str, Any] | None = None,
        claims: dict[str, Any] | None = None,
    ) -> None:
        self.app, self.lifetime, self.answer, self.claims = app, lifetime, answer, claims
        self.made: list[str] = []
        self.revoked: set[str] = set()
        self.broken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-api-key", b"").decode()
        by_key = scope["path"].endswith(("/client/config", "/auth/token"))
        if given not in ([KEY] if by_key else self.made[-2:]):
            await JSONResponse({"detail": f"{scope['path']} does not take {given}"}, 401)(scope, receive, send)
        elif given in self.revoked:
            why = {"WWW-Authenticate": 'Bearer realm="tinker", error="invalid_token"'}
            await JSONResponse({"detail": "it was revoked"}, 401, headers=why)(scope, receive, send)
        elif scope["path"].endswith("/auth/token") and self.broken:
            await JSONResponse({"detail": "not now"}, 500)(scope, receive, send)
        elif scope["path"].endswith("/auth/token"):
            claims = {
                **({"exp": time.time() + self.lifetime} if self.claims is None else self.claims),
                "n": len(self.made),
            }
            self.made.append(jwt(claims))
            await JSONResponse({"jwt": self.made[-1]} if self.answer is None else self.answer)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@pytest.fixture(autouse=True)
def _with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CLIENT_CONFIG", {**handshake.CLIENT_CONFIG, "pjwt_auth_enabled": True})


def test_the_key_is_exchanged_once_for_a_token(shared: EmbeddedTrainer) -> None:
    tokens = Tokens(create_app(shared), lifetime=3600)
    with recording(tokens, api_key=KEY) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        for _ in range(3):
            model.forward(DATA, "cross_entropy")
        model.optim_step().result()
    assert len(tokens.made) == 1
    keys = {each.path.rsplit("/", 1)[1]: each.headers["x-api-key"] for each in recorded.record.requests}
    assert keys.pop("config") == keys.pop("token") == KEY
    assert set(keys.values()) == {tokens.made[0]}


def test_a_token_is_replaced_before_it_ends(shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(create_app(shared), lifetime=3600)
    with recording(tokens, api_key=KEY) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        model.forward(DATA, "cross_entropy").result()
        assert len(tokens.made) == 1
        nearly_over = SimpleNamespace(time=lambda: time.time() + 3550)  # a minute is kept in reserve
        monkeypatch.setattr("tinker_lightning.client.transport.target.time", nearly_over)
        model.forward(DATA, "cross_entropy").result()
        assert len(tokens.made) == 2


@pytest.mark.parametrize("is_dated", [True, False])
def test_a_token_is_replaced_at_half_of_its_life(
    shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_dated: bool
) -> None:  # R5.17
    # The server's clock is far behind; how long a token lives is the difference of its times. Without the time at which
    # it was issued, what is left of its life counts.
    start = time.time()
    now = start - 20_000 if is_dated else start
    claims = {"iat": now, "exp": now + 10_000}
    tokens = Tokens(create_app(shared), claims=claims if is_dated else {"exp": claims["exp"]})
    with recording(tokens, api_key=KEY) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        for seconds, made in ((0, 1), (4400, 1), (5600, 2)):
            clock = SimpleNamespace(time=lambda seconds=seconds: start + seconds)
            monkeypatch.setattr("tinker_lightning.client.transport.target.time", clock)
            model.forward(DATA, "cross_entropy").result()
            assert len(tokens.made) == made
        # A token that still lives is used on while it cannot be replaced.
        tokens.claims, tokens.broken = {"iat": now, "exp": now + 60_000}, True
        later = SimpleNamespace(time=lambda: start + 5600)
        recorded.service.session.connection.credentials._renewal = 0.0
        monkeypatch.setattr("tinker_lightning.client.transport.target.time", later)
        model.forward(DATA, "cross_entropy").result()
        assert sum("could not be replaced yet" in record.message for record in caplog.records) == 1
        model.forward(DATA, "cross_entropy").result()
        assert sum("could not be replaced yet" in record.message for record in caplog.records) == 1


def test_requests_use_a_token_while_it_is_being_replaced() -> None:  # R5.17
    async def run() -> None:
        replacing, finish = asyncio.Event(), asyncio.Event()
        # The first token is far beyond half of its life, but still valid.
        issued = [jwt({"iat": time.time() - 9_000, "exp": time.time() + 1_000}), jwt({"exp": time.time() + 9_000})]

        async def exchange(_: float | None) -> str:
            if len(issued) == 1:
                replacing.set()
                await finish.wait()
            return issued.pop(0)

        credentials = Credentials(KEY)
        credentials.use_tokens(exchange)
        old = await credentials.header()
        credentials._renewal = 0.0
        first = asyncio.create_task(credentials.header())
        await replacing.wait()
        assert await asyncio.wait_for(credentials.header(), 5) == old
        finish.set()
        assert await first != old

    asyncio.run(run())


def test_a_rejected_token_is_replaced_and_the_request_repeated_once(shared: EmbeddedTrainer) -> None:  # R5.17
    tokens = Tokens(create_app(shared), lifetime=3600)
    with recording(tokens, api_key=KEY) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        tokens.revoked.add(tokens.made[0])
        passes = [model.forward(DATA, "cross_entropy") for _ in range(4)]
        assert len({each.result().metrics["loss:sum"] for each in passes}) == 1
        assert len(tokens.made) == 2  # one exchange for all of them
        tokens.made.append("eyJh.other.sig")
        tokens.revoked |= {tokens.made[1]}
        sent = len(recorded.record.requests)
        tokens.claims = {"exp": time.time() + 3600, "revoked": True}
        tokens.revoked |= {jwt({**tokens.claims, "n": 3})}
        with pytest.raises(Unauthorized, match="it was revoked"):
            model.forward(DATA, "cross_entropy").result()
        assert [each.path.rsplit("/", 1)[1] for each in recorded.record.requests[sent:]] == [
            *("forward_backward", "token", "forward_backward")
        ]


def test_a_key_that_is_an_expired_token_raises_at_once(shared: EmbeddedTrainer) -> None:  # R5.17
    key = jwt({"iat": 1.0, "exp": time.time() - 1.0})
    with recording(create_app(shared), api_key=key) as recorded:
        with pytest.raises(Unauthorized, match="the API key is a JWT that has expired"):
            recorded.service.create_sampling_client(base_model="tiny")
        assert not recorded.record.requests


@pytest.mark.parametrize("answer", [{}, {"jwt": 3}])
def test_an_exchange_that_returns_no_token(shared: EmbeddedTrainer, answer: dict[str, Any]) -> None:
    tokens = Tokens(create_app(shared), 3600, answer)
    with recording(tokens, api_key=KEY) as recorded, pytest.raises(NotATinkerServer, match="auth/token: jwt"):
        recorded.service.create_sampling_client(base_model="tiny")


def test_a_key_that_gets_no_token(shared: EmbeddedTrainer) -> None:
    tokens = Tokens(create_app(shared), 3600)
    with recording(tokens, api_key="tml-other") as recorded, pytest.raises(Unauthorized, match="Set TINKER_API_KEY"):
        recorded.service.create_sampling_client(base_model="tiny")


@pytest.mark.parametrize("claims", [{"exp": 0.0}, {"exp": "soon"}, {}])
def test_a_token_that_does_not_say_when_it_ends_is_used_once(shared: EmbeddedTrainer, claims: dict[str, Any]) -> None:
    tokens = Tokens(create_app(shared), claims=claims)
    with recording(tokens, api_key=KEY) as recorded:
        recorded.service.get_server_capabilities()
        recorded.service.create_sampling_client(base_model="tiny")
    assert len(tokens.made) >= 3


def test_headers_of_the_user_reach_no_other_server() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.host, request.headers.get("x-gateway")))
        elsewhere = {"location": "https://storage.example/adapter"}
        return (
            httpx.Response(302, headers=elsewhere) if request.url.path == "/archive" else httpx.Response(200, json={})
        )

    async def download() -> None:
        credentials = Credentials(None)
        headers = {"X-Gateway": "secret"}
        transport = httpx.MockTransport(answer)
        connection = Connection("http://server.example", credentials, transport, RetryPolicy(1.0), headers)
        await connection.send("GET", "/api/v1/healthz")
        for url in ("http://server.example/archive", "https://storage.example/adapter"):
            async with connection.stream(url):
                pass
        await connection.close()

    asyncio.run(download())
    assert seen == [("server.example", "secret")] * 2 + [("storage.example", None)] * 2
