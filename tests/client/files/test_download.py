"""Adapters can be downloaded from servers of every generation, and no file is written outside of the folder."""

from __future__ import annotations

import io
import logging
import tarfile
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from tinker.types import SaveWeightsExternalRequest

from tests.helpers.backends import recording
from tests.helpers.client_data import DATA
from tinker_lightning import AdamParams
from tinker_lightning.client.files import download
from tinker_lightning.errors import InvalidMessage, MessageTooLarge, OperationFailed
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from tests.helpers.backends import Backend, Recorded
    from tinker_lightning.server import EmbeddedTrainer

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def instead(shared: EmbeddedTrainer, *routes: Route) -> Starlette:
    """The trainer's app with some of its endpoints answered otherwise."""
    return Starlette(routes=[*routes, Mount("/", create_app(shared))])


CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints"
LATER = "2999-01-01T00:00:00Z"


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", ".", "", "C:\\evil"])
def test_files_outside_of_the_folder_raise(shared: EmbeddedTrainer, tmp_path: Path, name: str) -> None:
    async def urls(_: Request) -> Response:
        return JSONResponse({"urls": {name: "http://embedded/evil"}, "expires": LATER})

    app = instead(
        shared,
        Route(CHECKPOINT + "/{rest:path}/external_weights_urls", urls),
        Route("/evil", lambda _: PlainTextResponse("evil")),
    )
    with recording(app) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidMessage, match="lies outside of the checkpoint; nothing was written"):
            model.export_adapter(tmp_path / "below" / "adapter")
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


@pytest.mark.parametrize("url", ["http://[::1", "http://a\x1b[2J/", "file:///etc/passwd"])
def test_an_address_that_is_not_a_url_raises(shared: EmbeddedTrainer, tmp_path: Path, url: str) -> None:
    async def urls(_: Request) -> Response:
        return JSONResponse({"urls": dict.fromkeys(FILES, url), "expires": LATER})

    with recording(instead(shared, Route(CHECKPOINT + "/{rest:path}/external_weights_urls", urls))) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidMessage, match=r"an address that is not a URL|not at an HTTP URL"):
            model.export_adapter(tmp_path / "adapter")


def test_files_that_are_not_a_peft_adapter_raise(shared: EmbeddedTrainer, tmp_path: Path) -> None:
    async def urls(_: Request) -> Response:
        return JSONResponse({"urls": {"model.age": "http://embedded/file"}, "expires": LATER})

    app = instead(
        shared,
        Route(CHECKPOINT + "/{rest:path}/external_weights_urls", urls),
        Route("/file", lambda _: PlainTextResponse("x")),
    )
    with recording(app) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        with pytest.raises(OperationFailed, match=r"sent model\.age, which is not a PEFT adapter"):
            model.export_adapter(tmp_path / "adapter")
    assert names(tmp_path) == []


def test_weights_are_encrypted_for_recipients(backend: Backend) -> None:  # R5.17
    pyrage = pytest.importorskip("pyrage")
    model = backend.model()
    recipients = [str(pyrage.x25519.Identity.generate().to_public())]
    model.save_weights_external("secret", 3600, recipients).result()
    model.save_weights_external("plain").result()
    folder = backend.trainer.store.root / model.model_id.replace(":", "+") / "external_weights"
    assert {*names(folder / "secret")} == {*(f"{name}.age" for name in FILES), "checkpoint.json"}
    assert {*FILES} < {*names(folder / "plain")}


async def _missing(_: Request) -> Response:
    return JSONResponse({"detail": "Not Found"}, 404)


OLDER = Route("/{api}/v1/save_weights_external", _missing, methods=["POST"])


def test_servers_of_older_generations_offer_archives(shared: EmbeddedTrainer, tmp_path: Path) -> None:
    with recording(instead(shared, OLDER)) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4, seed=1)
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step(AdamParams(learning_rate=1e-2))
        folder = model.export_adapter(tmp_path / "adapter")
        assert [name for name in names(folder) if name != "README.md"] == FILES  # which an export adds
        model.save_state("same").result()
        saved = shared.store.root / model.model_id.replace(":", "+") / "weights" / "same"
        assert all((folder / name).read_bytes() == (saved / name).read_bytes() for name in FILES)
        model.delete_checkpoint(f"tinker://{model.model_id}/weights/same")
        assert shared.store.listing(model.model_id) == []
        paths = recorded.paths()
    assert paths.count("archive") == 1
    # Asking whether there is such an endpoint has cost no number.
    kinds = [shared.scheduler.find(f"{model.model_id}:{number}").kind for number in range(1, 5)]
    assert kinds == ["forward_backward", "optim_step", "save_weights_for_sampler", "save_weights"]


class Archives:
    """An older server with an archive of the test's making."""

    def __init__(self, content: bytes, shared: EmbeddedTrainer, location: str = "http://embedded/file") -> None:
        async def bare(request: Request) -> Response:
            return RedirectResponse(location, 302)

        async def file(_: Request) -> Response:
            return Response(content)

        whole = Route(CHECKPOINT + "/{kind}/{name}/archive", _missing)
        self.app = instead(shared, OLDER, whole, Route(CHECKPOINT + "/{name}/archive", bare), Route("/file", file))


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def test_some_servers_list_checkpoints_by_their_bare_names(shared: EmbeddedTrainer, tmp_path: Path) -> None:
    content = tar((FILES[0], b"{}"), (FILES[1], b"weights"), ("checkpoint_complete", b""))
    with recording(Archives(content, shared, "/file").app) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        folder = model.export_adapter(tmp_path / "adapter")
    assert names(folder) == ["README.md", *FILES]
    assert [(folder / name).read_bytes() for name in FILES] == [b"{}", b"weights"]


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "content",
    [
        tar(("../evil", b"evil")),
        tar(special("link", tarfile.SYMTYPE, "/etc"), ("link/evil", b"evil")),
        tar(special("link", tarfile.SYMTYPE, "../..")),
        tar(special("pipe", tarfile.FIFOTYPE)),
        tar(("a", b"x" * 5000))[:40],
        b"<html>no archive</html>",
    ],
    ids=["above", "through a link", "link above", "pipe", "cut off", "no archive"],
)
def test_malicious_and_damaged_archives_raise(shared: EmbeddedTrainer, tmp_path: Path, content: bytes) -> None:
    with recording(Archives(content, shared).app) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidMessage, match="cannot be unpacked"):
            model.export_adapter(tmp_path / "a" / "b" / "adapter")
    assert [each for each in tmp_path.rglob("*") if not each.is_dir()] == []


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_archives_that_unpack_to_too_much_raise(
    shared: EmbeddedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    content = tar(*((f"file{i}", bytes(100_000)) for i in range(20)))
    assert len(content) < 10_000
    monkeypatch.setattr(download, limit, {"MAX_FILES": 10, "MAX_BYTES": 1_000_000}[limit])
    with recording(Archives(content, shared).app) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        with pytest.raises(MessageTooLarge, match="the archive has more than"):
            model.export_adapter(tmp_path / "adapter")
    assert names(tmp_path) == []


def test_an_address_on_the_servers_own_disk_is_not_read_here(shared: EmbeddedTrainer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with recording(Archives(b"", shared, secret.as_uri()).app) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidMessage, match=r"keeps this checkpoint at file:///.*not at an HTTP URL"):
            model.export_adapter(tmp_path / "adapter")


def test_a_failed_deletion_after_an_export_is_logged(
    shared: EmbeddedTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: Request) -> Response:
        return JSONResponse({"detail": "not today"}, 405)

    app = instead(shared, Route(CHECKPOINT + "/{rest:path}", refuse, methods=["DELETE"]))
    with recording(app) as recorded, caplog.at_level(logging.WARNING):
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        assert names(model.export_adapter(tmp_path / "adapter")) == ["README.md", *FILES]
    assert "stays on the server for a day" in caplog.text
    (summary,) = shared.store.listing(model.model_id)
    assert summary.expires_at is not None


def test_what_is_asked_is_what_the_sdk_asks(recorded: Recorded) -> None:
    model = recorded.service.create_lora_training_client("tiny", rank=4)
    model.save_weights_external("one", ttl_seconds=7200).result()
    probe, request = [each for each in recorded.record.requests if each.path.endswith("/save_weights_external")]
    theirs = SaveWeightsExternalRequest(model_id=model.model_id, path="one", seq_id=1, ttl_seconds=7200)
    assert request.message == theirs.model_dump(mode="json", exclude_none=True)
    assert probe.message == {}
