"""The search for files that name a state: in folders of checkpoints, each read once, without running anything."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from tests.helpers.trainers import SMALL
from tinker_lightning.errors import ServerUnreachable, Unsupported
from tinker_lightning.lightning.checkpoint import retention as retention_module
from tinker_lightning.lightning.checkpoint.retention import StateRetention
from tinker_lightning.remote.saved_state import SavedState

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [
    *SMALL,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


class Counted(MemoryFileSystem):  # type: ignore[misc]
    """A store where every request takes a while."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    requests: ClassVar[list[str]] = []

    def info(self, path: str, **kwargs: Any) -> Any:
        self.requests.append("info")
        return super().info(path, **kwargs)

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.requests.append("ls")
        return super().ls(path, *args, **kwargs)

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.requests.append("open")
        return super()._open(path, *args, **kwargs)


def test_a_release_lists_a_folder_and_reads_no_file_twice() -> None:
    fsspec.register_implementation("counted", Counted, clobber=True)
    for i in range(20):
        record = SavedState(f"tinker://{i}", "tiny", 4, 1).to_tensor()
        with fsspec.open(f"counted://files/{i}.ckpt", "wb") as file:
            torch.save({"state_dict": {"lm._extra_state": record}}, file)
    deleted: list[str] = []
    retention = StateRetention(deleted.append, list)
    counts = []
    for i in range(3):
        Counted.requests.clear()
        retention.replaced(f"counted://files/gone-{i}.ckpt", frozenset({f"tinker://gone-{i}", f"tinker://{i}"}))
        counts.append({kind: Counted.requests.count(kind) for kind in ("info", "open")})
        assert Counted.requests.count("ls") <= 2
    assert deleted == ["tinker://gone-0", "tinker://gone-1", "tinker://gone-2"]
    assert counts[0]["open"] == 20
    assert counts[1:] == [{"info": 0, "open": 0}] * 2


def test_a_folder_with_the_ending_of_a_file_may_be_its_copy(tmp_path: Path) -> None:
    deleted: list[str] = []
    retention = StateRetention(deleted.append, list)
    (tmp_path / "copy.shards").mkdir()
    retention.replaced(tmp_path / "removed.shards", frozenset({"tinker://a"}))
    assert deleted == []
    retention.replaced(tmp_path / "removed.ckpt", frozenset({"tinker://b"}))
    assert deleted == ["tinker://b"]


def test_only_folders_of_checkpoints_are_searched_through(tmp_path: Path) -> None:
    """A file saved by hand may lie next to a large tree, whose files are none of ours."""
    deleted: list[str] = []
    (tmp_path / "hand" / "deep").mkdir(parents=True)
    (tmp_path / "callback" / "deep").mkdir(parents=True)
    for place in ("hand", "callback"):
        record = SavedState(f"tinker://{place}", "tiny", 4, 1).to_tensor()
        torch.save({"state_dict": {"lm._extra_state": record}}, tmp_path / place / "deep" / "file.ckpt")
    retention = StateRetention(deleted.append, lambda: [str(tmp_path / "callback")])
    retention.replaced(tmp_path / "hand" / "other.ckpt", frozenset({"tinker://hand", "tinker://callback"}))
    assert deleted == ["tinker://hand"]


def test_a_record_of_another_version_may_name_any_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deleted: list[str] = []
    later = bytearray(b'{"tinker_lightning":2,"states":[]}')
    torch.save({"record": torch.frombuffer(later, dtype=torch.uint8)}, tmp_path / "later.ckpt")
    retention = StateRetention(deleted.append, list)
    retention.replaced(tmp_path / "other.ckpt", frozenset({"tinker://a"}))
    retention.replaced(tmp_path / "another.ckpt", frozenset({"tinker://b"}))
    assert deleted == []
    (warning,) = (record.message for record in caplog.records)
    assert "later.ckpt could not be read" in warning
    assert "format version 2" in warning


class Calls:
    """What a hostile file would have."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.file,)


def test_nothing_in_a_file_runs_when_it_is_searched(tmp_path: Path) -> None:
    record = SavedState("tinker://a", "tiny", 4, 1).to_tensor()
    content = {"hostile": Calls(tmp_path / "touched"), "state_dict": {"lm._extra_state": record}}
    torch.save(content, tmp_path / "a.ckpt")
    retention = StateRetention(lambda _: None, list)
    assert retention.states_of(tmp_path / "a.ckpt") == {"tinker://a"}
    assert not (tmp_path / "touched").exists()


def test_after_a_request_that_reaches_no_server_the_others_are_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for as long, at the end of a fit that the user has stopped."""
    sent: list[str] = []
    is_silent = False

    def send(state: str, *_: object) -> None:
        sent.append(state)
        raise ServerUnreachable("no response within 5 s")

    states = {f"tinker://run/weights/{i}" for i in range(3)}
    monkeypatch.setattr(retention_module, "_REST_SECONDS", 60.0)
    retention = StateRetention(send, list, send, is_silent=lambda: is_silent)
    retention.keep(frozenset(states))
    retention.replaced(tmp_path / "a.ckpt", frozenset({"tinker://run/weights/gone"}))
    retention.finish()
    assert sent == [min(states)]
    assert all(state in caplog.text for state in states)  # they may expire
    monkeypatch.setattr(retention_module, "_REST_SECONDS", 0.0)
    retention.keep()
    retention.release()
    assert sent[1:] == [*sorted(states), "tinker://run/weights/gone"]
    monkeypatch.setattr(retention_module, "_REST_SECONDS", 60.0)
    is_silent = True
    retention.finish()
    assert len(sent) == 5


def test_a_server_that_deletes_nothing_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def delete(state: str) -> None:
        raise Unsupported(f"{state} stays on the server: http://a cannot delete checkpoints")

    retention = StateRetention(delete, list)
    for i in range(3):
        retention.replaced(tmp_path / f"{i}.ckpt", frozenset({f"tinker://run/weights/{i}"}))
    (record,) = caplog.records
    assert "stay, also those that follow: tinker://run/weights/0 stays on the server" in record.getMessage()
