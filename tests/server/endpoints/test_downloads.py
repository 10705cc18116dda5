"""Saved adapters can be downloaded by the protocol's two ways by whoever was given an address, and nothing else can."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tinker_lightning.server.endpoints import checkpoints

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.api import Api

SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN"
FILES = ["adapter_config.json", "adapter_model.safetensors"]


def save(api: Api, model: str, seq: int, kind: str = "save_weights_external", **options: Any) -> Any:
    return api.run(kind, {"model_id": model, "seq_id": seq, "path": "one", **options})


def checkpoint(model: str, kind: str = "external_weights") -> str:
    return f"training_runs/{model}/checkpoints/{kind}/one"


def folder(api: Api, model: str, kind: str = "external_weights") -> Path:
    return api.trainer.store.root / model.replace(":", "+") / kind / "one"


def urls(api: Api, model: str) -> dict[str, str]:
    found: dict[str, str] = api.request("GET", f"{checkpoint(model)}/external_weights_urls").json()["urls"]
    return found


def test_external_weights_are_the_adapter_and_nothing_else(api: Api) -> None:
    model = api.model()
    saved = save(api, model, 1)
    assert saved["path"] == f"tinker://{model}/external_weights/one"
    assert saved["type"] == "save_weights_external"
    answer = api.request("GET", f"{checkpoint(model)}/external_weights_urls").json()
    assert sorted(answer["urls"]) == FILES
    valid = datetime.fromisoformat(answer["expires"]).timestamp() - time.time()
    assert 800 < valid <= checkpoints.VALID_SECONDS
    for name, url in answer["urls"].items():
        response = api.request("GET", url)
        assert response.status_code == 200
        assert response.content == (folder(api, model) / name).read_bytes()
    assert sum((folder(api, model) / name).stat().st_size for name in FILES) == saved["size_bytes"]


def test_they_are_listed_expire_and_are_deleted_as_others_are(api: Api) -> None:
    model = api.model()
    save(api, model, 1, ttl_seconds=3600)
    (listed,) = api.request("GET", f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert (listed["checkpoint_type"], listed["checkpoint_id"]) == ("external", "external_weights/one")
    assert listed["expires_at"] > listed["time"]
    given = urls(api, model)
    assert api.request("DELETE", checkpoint(model)).status_code == 200
    assert api.request("GET", f"{checkpoint(model)}/external_weights_urls").status_code == 404
    assert {api.request("GET", url).status_code for url in given.values()} == {404}
    assert "error" not in save(api, model, 2)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_an_archive_holds_the_adapter_of_any_kind_of_checkpoint(api: Api, kind: str) -> None:
    model = api.model()
    endpoints = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
    save(api, model, 1, endpoints.get(kind, "save_weights_external"))
    redirect = api.request("GET", f"{checkpoint(model, kind)}/archive", headers={"accept": "application/json"})
    assert redirect.status_code == 302
    assert 800 < parsedate_to_datetime(redirect.headers["expires"]).timestamp() - time.time() <= 900
    response = api.request("GET", redirect.headers["location"])
    assert int(response.headers["content-length"]) == len(response.content)
    with tarfile.open(fileobj=io.BytesIO(response.content), mode="r:") as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        contents = {name: file.read() for name, file in found.items() if file is not None}
    assert contents.pop("checkpoint_complete") == b""
    assert contents == {name: (folder(api, model, kind) / name).read_bytes() for name in FILES}


def test_only_external_weights_are_given_out_file_by_file(api: Api) -> None:
    model = api.model()
    save(api, model, 1, "save_weights")
    refused = api.request("GET", f"{checkpoint(model, 'weights')}/external_weights_urls")
    assert refused.status_code == 400
    assert "save it with save_weights_external" in refused.json()["detail"]


def test_weights_are_encrypted_to_the_recipients_alone(api: Api) -> None:  # R5.17
    """tinker-cookbook 0.6.1 downloads every training checkpoint in this way."""
    pyrage = pytest.importorskip("pyrage")
    model, identity = api.model(), pyrage.x25519.Identity.generate()
    saved = save(api, model, 1, age_encryption_recipients=[str(identity.to_public()), SSH_KEY])
    api.run("save_weights_external", {"model_id": model, "seq_id": 2, "path": "plain"})
    plain = folder(api, model).with_name("plain")
    found = urls(api, model)
    assert sorted(found) == [f"{name}.age" for name in FILES]
    contents = {name: api.request("GET", url).content for name, url in found.items()}
    assert sum(map(len, contents.values())) == saved["size_bytes"]
    for name, content in contents.items():
        assert pyrage.decrypt(content, [identity]) == (plain / name.removesuffix(".age")).read_bytes()
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(content, [pyrage.x25519.Identity.generate()])
    assert sorted(file.name for file in folder(api, model).iterdir()) == [*sorted(found), "checkpoint.json"]
    loaded = api.run("load_weights", {"model_id": model, "seq_id": 3, "path": saved["path"]})
    assert "is encrypted" in loaded["error"]
    api.request("DELETE", checkpoint(model))
    save(api, model, 4)  # under the same name, and not encrypted
    assert {api.request("GET", url).status_code for url in found.values()} == {404}


@pytest.mark.parametrize(
    ("recipients", "message"),
    [(["age1xyz"], "entry 0 is not a public key"), (["ssh-rsa AAAA"], "entry 0"), ([], "give at least one public key")],
)
def test_encryption_is_rejected_rather_than_left_out(api: Api, recipients: list[str], message: str) -> None:
    pytest.importorskip("pyrage")
    assert message in refused(api, recipients)


def test_encryption_without_its_package_names_the_extra(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    assert "python -m pip install 'tinker-lightning[age]'" in refused(api, ["age1xyz"])


def refused(api: Api, recipients: list[str]) -> str:
    """The reason why weights are not saved."""
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "path": "one", "age_encryption_recipients": recipients}
    response = api.post("save_weights_external", body)
    assert response.status_code == 400
    assert "error" not in save(api, model, 2)  # its number was freed
    return str(response.json()["detail"])


@pytest.mark.parametrize("way", ["external_weights_urls", "archive"])
def test_what_is_not_there_has_no_address(api: Api, way: str) -> None:
    assert api.request("GET", f"training_runs/none/checkpoints/external_weights/one/{way}").status_code == 404


def test_a_signed_address_needs_no_key_and_everything_else_does(api: Api) -> None:
    model = api.model()
    save(api, model, 1)
    locked = type(api)(api.trainer, api_key="tml-right")
    try:
        key = {"x-api-key": "tml-right"}
        for way in ("external_weights_urls", "archive"):
            assert locked.request("GET", f"{checkpoint(model)}/{way}").status_code == 401
        given = locked.request("GET", f"{checkpoint(model)}/external_weights_urls", headers=key).json()["urls"]
        assert [locked.request("GET", url).status_code for url in given.values()] == [200, 200]
        archive = locked.request("GET", f"{checkpoint(model)}/archive", headers=key).headers["location"]
        assert locked.request("GET", archive).status_code == 200
        for url in (*given.values(), *urls(api, model).values()):  # another server's signature is none
            assert locked.request("GET", url.split("?")[0]).status_code == 403
        assert {locked.request("GET", url).status_code for url in urls(api, model).values()} == {403}
    finally:
        locked.close()


def test_a_signature_is_for_one_file_until_one_moment(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = api.model()
    save(api, model, 1)
    parts = urlsplit(urls(api, model)[FILES[0]])
    for path, query in [
        (parts.path.replace(FILES[0], FILES[1]), parts.query),
        (parts.path.replace("external_weights", "weights"), parts.query),
        (parts.path.replace(FILES[0], "checkpoint.json"), parts.query),
        (parts.path, parts.query.replace("expires=", "expires=9")),
        (parts.path, parts.query.replace("expires=", "expires=x")),
        (parts.path, parts.query.replace("expires=", "expires=%d9%a3")),
        (parts.path, parts.query[:-1] + ("0" if parts.query[-1] != "0" else "1")),
        (parts.path, parts.query + "%c3%a9"),
        (parts.path, ""),
    ]:
        assert api.request("GET", f"http://embedded{path}?{query}").status_code == 403, (path, query)
    assert api.request("GET", f"http://embedded{parts.path}?{parts.query}").status_code == 200
    now = time.time()
    monkeypatch.setattr(
        "tinker_lightning.server.endpoints.checkpoints.time.time", lambda: now + checkpoints.VALID_SECONDS + 1
    )
    assert api.request("GET", f"http://embedded{parts.path}?{parts.query}").status_code == 403


def test_a_download_is_of_one_moment_also_while_it_is_overwritten(api: Api) -> None:
    """Files that are open stay what they were."""
    model = api.model()
    save(api, model, 1, "save_weights")
    store = api.trainer.store
    summary = next(each for each in store.listing() if each.path.run == model)
    before = (folder(api, model, "weights") / FILES[1]).read_bytes()
    files = store.open_adapter(summary.path)
    api.run("forward_backward", api.train(model, 2))
    api.run("optim_step", api.step(model, 3))
    save(api, model, 4, "save_weights", overwrite=True)
    assert (folder(api, model, "weights") / FILES[1]).read_bytes() != before
    with files[FILES[0]] as config, files[FILES[1]] as weights:
        assert weights.read() == before
        assert json.load(config)["r"] == 4
