"""Requests that are wrong before their meaning is: URLs, pages, content types, encodings, sizes, damaged bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from tinker_lightning.server import bodies
from tinker_lightning.server.trainer.checkpoint_summary import FORMAT, CheckpointSummary, write_summary
from tinker_lightning.types import Datum, LoraConfig
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import protobuf, tinker_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.helpers.api import Api

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@pytest.mark.parametrize(
    "segment", ["%2e%2e", "..%2f..", "%2e%2e%2f%2e%2e%2fetc", "*", "**", "[a]", "a%00b", "%ff", "~"]
)
@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "sessions/{}"),
        ("POST", "sessions/{}/finish"),
        ("GET", "samplers/{}"),
        ("GET", "training_runs/{}"),
        ("GET", "training_runs/{}/checkpoints"),
        ("DELETE", "training_runs/{}/checkpoints/weights/x"),
        ("DELETE", "training_runs/run/checkpoints/{}"),
        ("DELETE", "training_runs/run/checkpoints/{}/x"),
        ("DELETE", "training_runs/run/checkpoints/weights/{}"),
        ("PUT", "training_runs/run/checkpoints/weights/{}/ttl"),
        ("GET", "training_runs/{}/checkpoints/weights/x/archive"),
        ("GET", "training_runs/run/checkpoints/weights/{}/archive"),
        ("GET", "training_runs/run/checkpoints/external_weights/{}/external_weights_urls"),
    ],
)
def test_no_part_of_a_url_leads_out_of_the_folder(shared_api: Api, method: str, url: str, segment: str) -> None:
    root = shared_api.trainer.store.root
    decoys = {root.parent / "a" / "b": "tinker://a/weights/b", root / "run" / "weights" / "x": "tinker://run/weights/x"}
    for decoy, path in decoys.items():
        decoy.mkdir(parents=True, exist_ok=True)
        saved = CheckpointSummary(path, "tiny", LoraConfig(), 0, "2020-01-01T00:00:00Z", format=FORMAT)
        write_summary(decoy, saved)
    options: Any = {"json": {"ttl_seconds": 5}} if method != "GET" else {}
    response = shared_api.request(method, url.format(segment), **options)
    assert response.status_code in (400, 404, 405), response.text
    assert all(decoy.exists() for decoy in decoys)


@pytest.mark.parametrize(
    "query", [{"limit": "x"}, {"limit": "-1"}, {"offset": "-1"}, {"offset": "1e3"}, {"limit": "9" * 30}]
)
@pytest.mark.parametrize("path", ["checkpoints", "training_runs"])
def test_bad_pages_are_rejected(shared_api: Api, path: str, query: dict[str, str]) -> None:
    response = shared_api.request("GET", path, params=query)
    assert response.status_code == 400
    assert "limit and offset must" in response.json()["detail"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"{" * 5000, b'{"a":NaN}'])
@pytest.mark.parametrize("path", ["create_session", "forward_backward", "forward", "optim_step", "retrieve_future"])
def test_what_is_no_json_object_is_rejected(shared_api: Api, path: str, content: bytes) -> None:
    response = shared_api.request("POST", path, content=content, headers={"content-type": JSON})
    assert response.status_code == 400
    assert "the body" in response.json()["detail"]


@pytest.mark.parametrize("content_type", ["", "text/plain", PROTOBUF, "multipart/form-data", "application/jsonx", ";"])
def test_other_content_types_are_rejected(shared_api: Api, content_type: str) -> None:
    response = shared_api.request("POST", "create_session", content=b"{}", headers={"content-type": content_type})
    assert response.status_code == 415
    assert "is not supported; send application/json" in response.json()["detail"]


def test_a_charset_in_the_content_type_is_fine(shared_api: Api) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert shared_api.request("POST", "create_session", content=b"{}", headers=headers).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, zstd", "nonsense"])
def test_other_encodings_are_rejected(shared_api: Api, encoding: str) -> None:
    headers = {"content-type": JSON, "content-encoding": encoding}
    response = shared_api.request("POST", "create_session", content=b"{}", headers=headers)
    assert response.status_code == 415
    assert f"content encoding {encoding} is not supported" in response.json()["detail"]


def test_zstd_bodies_are_read_and_damaged_ones_rejected(shared_api: Api) -> None:
    def post(content: bytes) -> Any:
        headers = {"content-type": JSON, "content-encoding": "zstd"}
        return shared_api.request("POST", "forward_backward", content=content, headers=headers)

    whole = zstandard.compress(b"{}" + b" " * 1000)
    assert "forward_backward_input: must be an object" in post(whole).json()["detail"]
    for damaged in (whole[:-3], b"", b"{}", whole + b"x"):
        response = post(damaged)
        assert response.status_code == 400
        assert "zstd" in response.json()["detail"]


@pytest.fixture
def small_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1000)


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_rejected_with_or_without_a_length(shared_api: Api, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 10

    content: Any = parts() if chunked else b" " * 2000
    response = shared_api.request("POST", "create_session", content=content, headers={"content-type": JSON})
    assert response.status_code == 413
    assert "exceeds the limit of 1000 bytes; split the batch" in response.json()["detail"]
    assert (
        shared_api.request("POST", "create_session", content=b"{}", headers={"content-type": JSON}).status_code == 200
    )


@pytest.mark.usefixtures("small_bodies")
def test_a_small_body_that_unfolds_to_a_large_one_is_rejected(shared_api: Api) -> None:
    bomb = zstandard.compress(b" " * 10_000_000)
    assert len(bomb) < 1000
    headers = {"content-type": JSON, "content-encoding": "zstd"}
    response = shared_api.request("POST", "forward_backward", content=bomb, headers=headers)
    assert response.status_code == 413
    assert "decompresses to more than the limit of 1000 bytes" in response.json()["detail"]


def test_truncated_protobuf_is_rejected_at_every_length(shared_api: Api) -> None:
    model = shared_api.model()
    data = [Datum.from_tokens([1, 2, 3])]
    body = protobuf.encode_forward_backward(ForwardBackwardRequest(model, 1, data, "cross_entropy"))
    before = shared_api.state(model)
    # A cut between two fields leaves a message without its loss or data, which says so when it is run.
    for length in range(len(body)):
        headers = {"content-type": PROTOBUF}
        response = shared_api.request("POST", "forward_backward", content=body[:length], headers=headers)
        if response.status_code == 200:
            assert tinker_pb2.ForwardBackwardRequest.FromString(body[:length]).model_id == model
            shared_api.trainer.scheduler._jobs.pop(f"{model}:1")
            shared_api.trainer.scheduler._queues[model].last = 0
        else:
            assert response.status_code in (400, 404)
            assert response.json()["detail"]
    assert shared_api.state(model) == before
