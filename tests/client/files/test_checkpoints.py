"""Checkpoints can be found and deleted by path, over every transport."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from tests.helpers.backends import QUICK, recording
from tests.helpers.fault_proxy import FaultProxy
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.files import checkpoints
from tinker_lightning.errors import ClientClosed, InvalidInput, NotFound, ServerUnreachable
from tinker_lightning.server import create_app
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from tests.helpers.backends import Backend, Recorded
    from tinker_lightning.server import EmbeddedTrainer

TIME = "2020-01-01T00:00:00Z"


def test_a_deleted_checkpoint_is_gone_and_others_stay(backend: Backend) -> None:
    model = backend.model()
    paths = [model.save_state("one").result().path, model.save_weights_for_sampler("one").result().path]
    assert [model.checkpoint_exists(path) for path in paths] == [True, True]
    model.delete_checkpoint(paths[0])
    assert [model.checkpoint_exists(path) for path in paths] == [False, True]
    folder = backend.trainer.store.root / model.model_id.replace(":", "+")
    assert [each.name for each in (folder / "weights").iterdir()] == []
    assert [each.name for each in (folder / "sampler_weights").iterdir()] == ["one"]
    with pytest.raises(NotFound, match="no such checkpoint"):
        model.load_state_with_optimizer(paths[0]).result()


def test_deleting_a_missing_checkpoint_raises_unless_missing_ok(backend: Backend) -> None:
    model = backend.model()
    path = model.save_state("one").result().path
    model.delete_checkpoint(path, missing_ok=True)
    model.delete_checkpoint(path, missing_ok=True)
    with pytest.raises(NotFound, match="no such checkpoint"):
        model.delete_checkpoint(path)
    assert model.checkpoint_exists(path) is False
    for unknown in ("tinker://no-such-run/weights/one", f"tinker://{model.model_id}/external_weights/none"):
        model.delete_checkpoint(unknown, missing_ok=True)
        assert model.checkpoint_exists(unknown) is False


def test_a_checkpoint_expires_unless_it_is_kept_after_all(backend: Backend) -> None:
    model = backend.model()
    assert model.can_expire
    path = model.save_state("one", ttl_seconds=3600).result().path
    for seconds in (7200, None):
        (summary,) = [each for each in backend.trainer.store.listing() if each.tinker_path == path]
        assert summary.expires_at is not None
        model.set_checkpoint_ttl(path, seconds)
    (summary,) = [each for each in backend.trainer.store.listing() if each.tinker_path == path]
    assert summary.expires_at is None
    with pytest.raises(NotFound):
        model.set_checkpoint_ttl(f"{path}s", None)


def test_all_pages_of_a_listing_are_read(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PAGE", 2)
    model = backend.model()
    paths = {model.save_state(f"{i}", 3600, user_metadata={"number": f"{i}"}).result().path for i in range(5)}
    listed = {each.tinker_path: each for each in model.list_checkpoints()}
    assert paths <= listed.keys()
    assert {(listed[path].user_metadata or {})["number"] for path in paths} == set("01234")
    assert all(listed[path].expires_at is not None for path in paths)


def test_a_deletion_whose_answer_is_lost_is_done(shared: EmbeddedTrainer) -> None:
    class Lossy(httpx.ASGITransport):
        lost = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if request.method == "DELETE" and not Lossy.lost:
                Lossy.lost += 1
                raise httpx.ReadError("the answer was lost", request=request)
            return response

    with ServiceClient(base_url="http://embedded", transport=Lossy(create_app(shared)), retry_policy=QUICK) as service:
        path = service.create_lora_training_client("tiny", rank=4).save_state("one").result().path
        service.delete_checkpoint(path)
        assert Lossy.lost == 1
        assert not service.checkpoint_exists(path)


def test_a_silent_server_holds_up_no_training(
    shared: EmbeddedTrainer,
    running: Callable[[ASGIApp], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One attempt waits no longer than all of them may take."""
    monkeypatch.setattr(checkpoints, "SHORT_SECONDS", 0.1)
    with running(create_app(shared)) as url, FaultProxy(url) as proxy, ServiceClient(base_url=proxy.url) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        path = model.save_state("one").result().path
        proxy.silence(on=True)
        started = time.monotonic()
        requests: list[Callable[[], object]] = [
            lambda: model.delete_checkpoint(path),
            lambda: model.delete_checkpoint(path, missing_ok=True),
            lambda: model.set_checkpoint_ttl(path, None),
            model.list_checkpoints,
        ]
        for request in requests:
            with pytest.raises(ServerUnreachable, match=r"no response within 0\.1 s"):
                request()
        assert time.monotonic() - started < 5
        proxy.silence(on=False)


@pytest.mark.parametrize(
    "path", ["", "one", "tinker://run/weights", "tinker://run/weights/a/b", "tinker://run/other/a", None]
)
def test_an_invalid_path_raises_before_anything_is_sent(backend: Backend, path: str) -> None:
    model = backend.model()
    for call in (model.checkpoint_exists, lambda p: model.delete_checkpoint(p, missing_ok=True)):
        with pytest.raises(InvalidInput, match="is not the path of a checkpoint"):
            call(path)


def test_any_client_of_a_server_can_remove_what_another_saved(shared: EmbeddedTrainer, service: ServiceClient) -> None:
    path = service.create_lora_training_client("tiny", rank=4).save_state("one").result().path
    with embedded_service(shared) as other:
        other.delete_checkpoint(path)
    assert not service.checkpoint_exists(path)
    with pytest.raises(ClientClosed):
        other.delete_checkpoint(path)
    with pytest.raises(ClientClosed):
        other.checkpoint_exists(path)


def test_a_path_cannot_lead_to_another_address(recorded: Recorded) -> None:
    with pytest.raises(InvalidInput, match="is not a valid checkpoint name"):
        recorded.service.delete_checkpoint("tinker://run?x=1#/weights/a%2F..", missing_ok=True)
    (request,) = [request for request in recorded.record.requests if request.method == "DELETE"]
    assert request.path == "/api/v1/training_runs/run?x=1#/checkpoints/weights/a%2F.."


def test_a_listing_in_pages_is_read_to_its_end(shared: EmbeddedTrainer) -> None:
    """Some servers give a run's checkpoints in pages, and call them by their bare names."""

    async def pages(request: Request) -> JSONResponse:
        offset = int(request.query_params.get("offset", 0))
        names = [f"s{i}" for i in range(5)][offset : offset + 2]
        found = [
            {
                "checkpoint_id": n,
                "checkpoint_type": "training",
                "time": TIME,
                "tinker_path": f"tinker://run/weights/{n}",
            }
            for n in names
        ]
        return JSONResponse({"checkpoints": found, "cursor": {"offset": offset, "limit": 2, "total_count": 5}})

    app = Starlette(routes=[Route("/api/v1/training_runs/run/checkpoints", pages), Mount("/", create_app(shared))])
    with recording(app) as recorded:
        assert recorded.service.checkpoint_exists("tinker://run/weights/s4")
        assert not recorded.service.checkpoint_exists("tinker://run/weights/s5")
        assert not recorded.service.checkpoint_exists("tinker://run/sampler_weights/s4")
