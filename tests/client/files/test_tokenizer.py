"""The tokenizer of a model comes from the server, from a folder, or from the hub."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import huggingface_hub.constants
import pytest

from tests.helpers.backends import QUICK, recording
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.files import tokenizer
from tinker_lightning.errors import ModelNotFound, NotATinkerServer
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.server import EmbeddedTrainer


def test_a_server_offers_the_files(shared: EmbeddedTrainer) -> None:
    with recording(create_app(shared)) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        sampler = recorded.service.create_sampling_client(base_model="tiny")
        assert model.get_tokenizer().encode("hé") == list("hé".encode())
        assert sampler.get_tokenizer() is model.get_tokenizer()
        assert sampler.get_base_model() == "tiny"
        folder = model.get_tokenizer().name_or_path
    # It is ours, not the server's: the two may be on different machines.
    assert folder != shared.catalog.get("tiny").tokenizer_id
    assert "tokenizer.json" in os.listdir(folder)
    assert os.stat(folder).st_mode & 0o077 == 0


def test_without_the_extension_the_name_is_a_folder_or_of_the_hub(shared: EmbeddedTrainer) -> None:
    with recording(create_app(shared, extended=False)) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        assert model.get_tokenizer().name_or_path == shared.catalog.get("tiny").tokenizer_id
        assert not any("tokenizer" in each.path for each in recorded.record.requests)


def test_a_folder_is_read_once(shared: EmbeddedTrainer) -> None:
    folder = shared.catalog.get("tiny").tokenizer_id
    assert tokenizer.load(folder) is tokenizer.load(folder)


def test_a_tokenizer_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="is neither a local folder nor available from the hub"):
        tokenizer.load(str(tmp_path / "nothing"))


def test_without_a_network_a_hub_id_fails_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(ModelNotFound, match=r"nor available from the hub: http://127\.0\.0\.1:9 cannot be reached"):
        tokenizer.load("nobody/nothing")


def test_the_code_of_a_tokenizer_is_not_run(  # R5.18
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `trust_remote_code=False`, transformers asks the user on the terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ..."
    with pytest.raises(ModelNotFound, match="needs Python code of its author, which is not run") as error:
        tokenizer.load_files({"tokenizer_config.json": json.dumps(config).encode(), "own.py": code.encode()})
    assert "trust_remote_code" not in str(error.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil", "..", "", "a/b"])
def test_a_server_cannot_write_elsewhere(name: str, shared: EmbeddedTrainer) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/tokenizer"):
            return httpx.Response(200, json={"files": {name: "AAAA"}})
        return await inner.handle_async_request(request)

    inner = httpx.ASGITransport(create_app(shared))
    with ServiceClient(base_url="http://a", transport=httpx.MockTransport(answer), retry_policy=QUICK) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        with pytest.raises(NotATinkerServer, match="whose name is a path"):
            sampler.get_tokenizer()


@pytest.mark.parametrize("body", [{}, {"files": {"a": "not base64!"}}, {"files": ["a"]}])
def test_malformed_records_raise(body: Any, shared: EmbeddedTrainer) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/tokenizer"):
            return httpx.Response(200, json=body)
        return await inner.handle_async_request(request)

    inner = httpx.ASGITransport(create_app(shared))
    with ServiceClient(base_url="http://a", transport=httpx.MockTransport(answer), retry_policy=QUICK) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        with pytest.raises(NotATinkerServer, match="files"):
            sampler.get_tokenizer()
