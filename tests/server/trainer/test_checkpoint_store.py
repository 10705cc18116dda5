"""Checkpoints: what is saved comes back, by several ways, and a kill at any moment leaves a whole one."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tinker_lightning.errors import InvalidInput, NotFound, NotStored
from tinker_lightning.server.keys import Owner
from tinker_lightning.server.trainer import checkpoint_store as module
from tinker_lightning.server.trainer.checkpoint_store import CheckpointStore
from tinker_lightning.server.trainer.checkpoint_summary import CheckpointSummary, TinkerPath, write_summary
from tinker_lightning.types import LoraConfig
from tinker_lightning.wire import folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tinker_lightning.server.engine.causal_lm import CausalLM

PATH = TinkerPath("session-1:train:0", "weights", "state")
CONFIG = LoraConfig(rank=2, seed=1, train_mlp=False, train_unembed=False)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def save(tiny: CausalLM) -> Callable[..., Any]:
    """Saves weights that all have the same value, so that halves of two checkpoints could be told apart."""

    template = tiny.lora.new_weights(CONFIG)

    def save(store: CheckpointStore, value: float = 1.0, path: TinkerPath = PATH, **options: Any) -> Any:
        weights = template.copy()
        for tensor in weights.tensors.values():
            tensor.fill_(value)
        state = {"exp_avg/x": torch.full((2,), value)} if path.kind == "weights" else None
        return store.save(
            path,
            base_model="tiny",
            weights=weights,
            peft_config=tiny.lora.peft_config(CONFIG),
            steps=1 if math.isnan(value) else int(value),
            training_state=state,
            **options,
        )

    return save


def value_of(store: CheckpointStore, path: TinkerPath = PATH) -> float:
    """The one value of a whole checkpoint."""
    saved = store.load(path, training_state=True)
    assert saved.training_state is not None
    values = {float(v) for t in (*saved.weights.tensors.values(), *saved.training_state.values()) for v in t.flatten()}
    values.add(float(store.summary(path).steps))
    assert len(values) == 1, "a checkpoint made of two"
    return values.pop()


# What is on the disk


def test_a_checkpoint_is_readable_json_and_safetensors_and_nothing_is_unpickled(
    store: CheckpointStore, save: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is pickled")

    for owner, name in [(pickle, "load"), (pickle, "loads"), (pickle, "dump"), (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(owner, name, refuse)
    save(store, user_metadata={"note": "first"}, ttl_seconds=3600)
    assert value_of(store) == 1
    folder = store.root / "session-1+train+0" / "weights" / "state"
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "checkpoint.json",
        "optimizer.safetensors",
    ]
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    summary = json.loads((folder / "checkpoint.json").read_text())
    assert summary["tinker_path"] == str(PATH)
    assert summary["lora_config"] == {
        "rank": 2,
        "seed": 1,
        "train_unembed": False,
        "train_mlp": False,
        "train_attn": True,
    }
    assert summary["user_metadata"] == {"note": "first"}
    assert summary["size_bytes"] > 0
    assert summary["expires_at"] > summary["created_at"]


@pytest.mark.parametrize("text", ["x", "tinker://a/b", "tinker://a/weights/b/c", "tinker:///weights/x", "/etc/passwd"])
def test_what_is_no_address_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="tinker://<run>/<kind>/<name>"):
        TinkerPath.parse(text)


def test_overwriting_must_be_asked_for(store: CheckpointStore, save: Callable[..., Any]) -> None:
    save(store, 1)
    with pytest.raises(InvalidInput, match=r"already exists. Choose another name, or set overwrite=True"):
        save(store, 2)
    assert value_of(store) == 1
    save(store, 2, overwrite=True)
    assert value_of(store) == 2
    assert [summary.steps for summary in store.listing()] == [2]


def test_deleting_removes_and_a_second_time_there_is_nothing(store: CheckpointStore, save: Callable[..., Any]) -> None:
    save(store)
    store.delete(PATH)
    with pytest.raises(NotFound, match="there is no such checkpoint"):
        store.delete(PATH)
    assert store.listing() == []
    save(store, 3)
    assert value_of(store) == 3


def test_a_checkpoint_whose_time_has_come_is_gone_and_its_name_is_free(
    store: CheckpointStore, save: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, ttl_seconds=3600)
    store.set_ttl(PATH, None)
    assert store.summary(PATH).expires_at is None
    monkeypatch.setattr(module, "_expiry", lambda _: "2020-01-01T00:00:00+00:00")
    store.set_ttl(PATH, 1)
    monkeypatch.undo()
    assert store.listing() == []
    with pytest.raises(NotFound):
        store.load(PATH)
    save(store, 2)
    assert value_of(store) == 2


def test_damaged_files_are_named_and_do_not_spoil_the_listing(
    store: CheckpointStore, save: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    broken = TinkerPath(PATH.run, "weights", "broken")
    for path in (PATH, broken):
        save(store, path=path)
    folder = store.root / "session-1+train+0" / "weights" / "broken"
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InvalidInput, match="is damaged"):
        store.load(broken)
    weights.unlink()
    with pytest.raises(InvalidInput, match="is damaged"):
        store.load(broken)
    (folder / "checkpoint.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"checkpoint\.json is damaged"):
        store.load(broken)
    assert [summary.path for summary in store.listing()] == [PATH]
    assert "which is not a valid checkpoint" in caplog.text
    (folder / "checkpoint.json").unlink()
    (folder / "checkpoint.json").mkdir()  # which cannot be read, as one without permission
    (store.root / "session-1+train+0" / "file").touch()
    fresh = CheckpointStore(store.root)
    fresh.prepare()
    assert [summary.path for summary in fresh.listing()] == [PATH]


# Kills


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class Kill:
    """Lets the first `n` steps on the file system happen and none after that, as a kill would."""

    STEPS = ("mkdir", "rename", "replace", "open", "fsync", "unlink", "rmdir", "chmod")

    def __init__(self, patch: pytest.MonkeyPatch, n: int) -> None:
        self.left = n
        self._me = threading.get_ident()
        for name in self.STEPS:
            patch.setattr(os, name, self._counted(getattr(os, name)))
        opened = self._counted(builtins.open)
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        patch.setattr(module, "save_file", self._half(save_file))

    def _step(self) -> None:
        if threading.get_ident() == self._me:
            if not self.left:
                raise Killed
            self.left -= 1

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._step()
            return function(*args, **kwargs)

        return counted

    def _half(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def half(tensors: Any, file: Path, **kwargs: Any) -> None:
            function(tensors, file, **kwargs)
            if not self.left:
                os.truncate(file, file.stat().st_size // 2)
            self._step()

        return half


def kills(action: Callable[[], Any]) -> Iterator[int]:
    """Kills an action after 0, 1, 2... of its steps, until it gets through."""
    for n in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            Kill(patch, n)
            try:
                action()
            except Killed:
                pass
            else:
                assert n > 3, "nothing was counted"
                return
        yield n
    raise AssertionError("it never got through")


def test_a_kill_inside_a_first_save_leaves_nothing_or_all(tmp_path: Path, save: Callable[..., Any]) -> None:
    outcomes = []
    count = iter(range(1000))
    current: list[CheckpointStore] = []

    def action() -> None:
        current[:] = [CheckpointStore(tmp_path / str(next(count)))]
        save(current[0])

    for _ in kills(action):
        fresh = CheckpointStore(current[0].root)
        listed = fresh.listing()
        try:
            outcomes.append(value_of(fresh))
        except NotFound:
            outcomes.append(0)
        assert [summary.steps for summary in listed] == [n for n in outcomes[-1:] if n]
        save(fresh, 5, overwrite=True)  # whatever was left behind is in nobody's way
        assert value_of(fresh) == 5
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


def test_a_kill_inside_an_overwrite_leaves_the_old_or_the_new(tmp_path: Path, save: Callable[..., Any]) -> None:
    outcomes, left_behind = [], 0
    count = iter(range(1000))
    current: list[CheckpointStore] = []

    def prepare() -> None:
        current[:] = [CheckpointStore(tmp_path / str(next(count)))]
        save(current[0], 1)

    prepare()
    for _ in kills(lambda: save(current[0], 2, overwrite=True)):
        fresh = CheckpointStore(current[0].root)
        # Whoever comes next, by whichever way, finds it.
        assert [summary.tinker_path for summary in fresh.listing()] == [str(PATH)]
        outcomes.append(value_of(fresh))
        with pytest.raises(InvalidInput, match="already exists"):
            save(fresh, 3)
        folder = fresh.root / "session-1+train+0" / "weights"
        left_behind += len(list(folder.iterdir())) > 1
        fresh.delete(PATH)
        assert fresh.listing() == []  # and nothing rises from what was left
        with pytest.raises(NotFound):
            CheckpointStore(fresh.root).summary(PATH)
        prepare()
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert left_behind


@pytest.mark.parametrize("what", ["delete", "set_ttl"])
def test_a_kill_inside_a_change_leaves_it_done_or_not(tmp_path: Path, save: Callable[..., Any], what: str) -> None:
    count = iter(range(1000))
    current: list[CheckpointStore] = []

    def prepare() -> None:
        current[:] = [CheckpointStore(tmp_path / str(next(count)))]
        save(current[0], 1)

    def action() -> None:
        if what == "delete":
            current[0].delete(PATH)
        else:
            current[0].set_ttl(PATH, 60)

    prepare()
    outcomes: set[bool | None] = set()
    for _ in kills(action):
        try:
            value_of(CheckpointStore(current[0].root))
            outcomes.add(CheckpointStore(current[0].root).summary(PATH).expires_at is not None)
        except NotFound:
            outcomes.add(None)
        prepare()
    assert outcomes == ({False, None} if what == "delete" else {False, True})


def test_what_kills_left_behind_is_cleared_away_later(store: CheckpointStore, save: Callable[..., Any]) -> None:
    save(store)
    parent = store.root / "session-1+train+0" / "weights"
    for name in (".part-old", ".gone-old"):
        (parent / name).mkdir()
        (parent / name / "file").touch()
    with folders.temporary_folder(parent) as living:  # of another process
        save(store, path=TinkerPath(PATH.run, "weights", "next"))
        assert sorted(folder.name for folder in parent.iterdir()) == [living.name, "next", "state"]
    (parent / ".part-killed").mkdir()
    CheckpointStore(store.root).prepare()
    assert sorted(folder.name for folder in parent.iterdir()) == ["next", "state"]


# Damage


def is_equal(damaged: bytes | bytearray, whole: bytes) -> bool:
    """Whether two texts are the same summary: white space, and the name of a field with its default, may differ."""
    with contextlib.suppress(InvalidInput):
        return CheckpointSummary.parse(bytes(damaged)) == CheckpointSummary.parse(whole)
    return False


def test_a_flipped_bit_anywhere_is_an_error(store: CheckpointStore, save: Callable[..., Any]) -> None:
    """Otherwise a damaged disk would train other weights, or the right ones with another budget."""
    save(store, user_metadata={"note": "first"}, token_budget=64, ttl_seconds=10**6)
    folder = store.root / "session-1+train+0" / "weights" / "state"
    draw = random.Random(0)  # noqa: S311
    for name in ("checkpoint.json", "adapter_model.safetensors", "optimizer.safetensors"):
        whole = (folder / name).read_bytes()
        for at in draw.sample(range(8 * len(whole)), 200):
            damaged = bytearray(whole)
            damaged[at // 8] ^= 1 << at % 8
            (folder / name).write_bytes(damaged)
            if name == "checkpoint.json" and is_equal(damaged, whole):
                continue  # such as other white space
            with pytest.raises(InvalidInput, match=rf"{name} is damaged"):
                store.load(PATH, training_state=True)
        (folder / name).write_bytes(whole)
    assert value_of(store) == 1


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"format": 99}, "its format is 99, and this version of tinker-lightning reads 2"),
        ({"format": 1}, "its format is 1"),
        ({"steps": -5}, "steps must be at least 0, got -5"),
        ({"token_budget": 0}, "token_budget must be at least 1"),
        ({"expires_at": "soon"}, "expires_at: Invalid isoformat"),
        ({"created_at": "2020-01-01T00:00:00"}, "created_at: has no time zone"),
        ({"tinker_path": "tinker://other:train:0/weights/state"}, "it belongs to tinker://other:train:0/weights/state"),
        ({"checksum": ""}, "checksum: missing"),
        ({"steps": 2}, "its contents differ from its checksum"),
        ({"lora_config": {"rank": -1}}, "rank must be at least 1"),
    ],
)
def test_a_summary_that_nobody_has_written_is_named(
    store: CheckpointStore,
    save: Callable[..., Any],
    change: dict[str, Any],
    because: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = TinkerPath(PATH.run, "weights", "other")
    save(store, path=other)
    save(store)
    folder = store.root / "session-1+train+0" / "weights" / "state"
    content = json.loads((folder / "checkpoint.json").read_text()) | change
    if "tinker_path" in change:
        summary = dataclasses.replace(store.summary(PATH), **change, checksum="")
        write_summary(folder, summary)
    else:
        (folder / "checkpoint.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=f"checkpoint.json is damaged: .*{re.escape(because)}"):
        store.load(PATH)
    with pytest.raises(InvalidInput, match=r"checkpoint.json is damaged"):
        store.owned_by(Owner("alice", is_first=True)).delete(PATH)  # whose it is cannot be known
    for _ in range(2):
        assert [summary.path for summary in store.listing()] == [other]
    assert caplog.text.count("which is not a valid checkpoint") == 1  # not with each listing
    CheckpointStore(store.root).prepare()
    store.delete(PATH)
    assert not folder.exists()


def test_numbers_that_are_not_finite_are_an_error(store: CheckpointStore, save: Callable[..., Any]) -> None:
    save(store, math.nan)
    with pytest.raises(InvalidInput, match=r"adapter_model.safetensors is damaged: base_model.* is not finite"):
        store.load(PATH)


def test_a_download_of_damaged_files_is_an_error(store: CheckpointStore, save: Callable[..., Any]) -> None:
    save(store)
    config = store.root / "session-1+train+0" / "weights" / "state" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r": 3'))
    with pytest.raises(InvalidInput, match=r"adapter_config.json is damaged: its SHA-256"):
        store.open_adapter(PATH)


# Space


def test_a_full_disk_is_named_with_path_and_bytes_and_leaves_nothing(
    store: CheckpointStore, save: Callable[..., Any]
) -> None:
    resource = pytest.importorskip("resource")
    save(store)
    parent = store.root / "session-1+train+0" / "weights"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = r"weights/next cannot be written to .*: .*(large|os error).* It takes .* KiB, and .* are free there"
    for size in (100, 3000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(NotStored, match=said):
                save(store, path=TinkerPath(PATH.run, "weights", "next"))
            with pytest.raises(NotStored) if size == 100 else contextlib.nullcontext():
                store.set_ttl(PATH, 60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [folder.name for folder in parent.iterdir()] == ["state"]
    assert value_of(store) == 1
    save(store, path=TinkerPath(PATH.run, "weights", "next"))


def test_the_limit_for_the_disk_holds_for_saves_and_counts_what_is_replaced_once(
    tmp_path: Path, save: Callable[..., Any]
) -> None:
    store = CheckpointStore(tmp_path, disk_limit=150_000)
    for _ in range(20):
        save(store, overwrite=True)
    used = store.summary(PATH).size_bytes
    room = (150_000 - used) // used
    for i in range(room):
        with contextlib.suppress(NotStored):
            save(store, path=TinkerPath(PATH.run, "weights", f"other-{i}"))
    said = r"takes .* KiB, but the other checkpoints take .* KiB of the 146 KiB that are allowed. Delete some"
    with pytest.raises(NotStored, match=said):
        save(store, path=TinkerPath(PATH.run, "weights", "last"))
    assert sum(summary.size_bytes for summary in store.listing()) <= 150_000
    for summary in store.listing()[1:]:
        store.delete(summary.path)
    save(store, path=TinkerPath(PATH.run, "weights", "last"))


def test_a_listing_parses_each_summary_once_and_waits_for_no_save(
    store: CheckpointStore, save: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        save(store, path=TinkerPath(PATH.run, "weights", f"state-{i}"))
    parsed: list[bytes] = []
    parse = CheckpointSummary.parse

    def counted(content: bytes) -> CheckpointSummary:
        parsed.append(content)
        return parse(content)

    monkeypatch.setattr(CheckpointSummary, "parse", counted)
    assert len(store.listing()) == len(parsed) == 5
    with store._lock, ThreadPoolExecutor(1) as pool:  # as a save does
        assert len(pool.submit(store.listing).result(10)) == 5
    assert len(parsed) == 5
    store.set_ttl(TinkerPath(PATH.run, "weights", "state-3"), 60)
    del parsed[:]
    assert [summary.expires_at is None for summary in store.listing()] == [True, True, True, False, True]
    assert len(parsed) == 1


# Several at once


def test_two_stores_on_one_folder_see_each_others_checkpoints(tmp_path: Path, save: Callable[..., Any]) -> None:
    one, other = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    save(one, 1)
    assert value_of(other) == 1
    with pytest.raises(InvalidInput, match="already exists"):
        save(other, 2)
    save(other, 2, overwrite=True)
    assert value_of(one) == 2
    one.delete(PATH)
    assert other.listing() == []


def test_readers_see_whole_checkpoints_while_two_stores_overwrite_them(
    tmp_path: Path, save: Callable[..., Any]
) -> None:
    save(CheckpointStore(tmp_path), 1)
    done = threading.Event()
    errors: list[BaseException] = []
    seen: set[float] = set()

    def read() -> None:
        store = CheckpointStore(tmp_path)
        while not done.is_set():
            try:
                saved = store.load(PATH, training_state=True)
                assert saved.training_state is not None
                tensors = (*saved.weights.tensors.values(), *saved.training_state.values())
                (value,) = {float(v) for tensor in tensors for v in tensor.flatten()}
                seen.add(value)
                assert len(store.listing()) <= 1
            except BaseException as error:
                errors.append(error)

    def write(offset: int) -> None:
        store = CheckpointStore(tmp_path)
        try:
            for i in range(15):
                save(store, offset + i, overwrite=True)
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=[offset]) for offset in (100, 200)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    for thread in readers:
        thread.join(60)
    assert not errors, errors[:3]
    assert len(seen) > 1


def test_of_two_that_save_the_same_name_at_once_one_is_rejected(tmp_path: Path, save: Callable[..., Any]) -> None:
    together = threading.Barrier(2)
    outcomes: list[str] = []

    def write(value: float) -> None:
        store = CheckpointStore(tmp_path)
        together.wait(10)
        try:
            save(store, value)
            outcomes.append("saved")
        except InvalidInput:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=[value]) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["refused", "saved"]
    assert value_of(CheckpointStore(tmp_path)) in (1, 2)
