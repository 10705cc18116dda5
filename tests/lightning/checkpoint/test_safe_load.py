"""A file's plain data can be read whatever else is in it, and nothing of the file runs."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import zipfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinker_lightning.lightning.checkpoint import safe_load
from tinker_lightning.lightning.checkpoint.safe_load import Unknown
from tinker_lightning.remote.lm import name_in, named

if TYPE_CHECKING:
    from pathlib import Path

Pair = namedtuple("Pair", "a b")  # noqa: PYI024  # as old files have them


class Listing(list[Any]):
    pass


class Calls:
    """What a hostile file would have."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.file,)


class Starts:
    def __reduce__(self) -> Any:
        return subprocess.run, (["false"],), {"check": True}


def written(folder: Path, content: Any, **options: Any) -> Path:
    torch.save(content, folder / "a.ckpt", **options)
    return folder / "a.ckpt"


PLAIN = {"number": 1.5, "text": "tinker://a", "none": None, "rows": [(1, 2), [True]], "deep": OrderedDict(a={"b": 2})}


@pytest.mark.parametrize(
    "strange",
    [
        np.float64(1.5),
        np.arange(3),
        np.random.RandomState(0),
        argparse.Namespace(rate=1),
        defaultdict(list, {"a": [1]}),
        Counter("aab"),
        Listing([1, 2]),
        Pair(1, 2),
        Fraction(1, 3),
        {Fraction(1, 3), 2},
        print,
        torch.nn.Linear(2, 2),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        torch.float32,
        torch.tensor([1, 2], dtype=torch.uint16),
    ],
    ids=lambda strange: type(strange).__name__,
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_data_is_read_beside_anything(tmp_path: Path, strange: Any, protocol: int) -> None:
    found = safe_load.load(written(tmp_path, {"strange": strange, **PLAIN}, pickle_protocol=protocol))
    assert {key: value for key, value in found.items() if key != "strange"} == PLAIN


def test_bytes_are_read_and_other_tensors_are_not(tmp_path: Path) -> None:
    entries = {"a": named("tinker://a"), "empty": named(""), "part": named("xtinker://b")[1:], "weights": torch.ones(3)}
    found = safe_load.load(written(tmp_path, entries))
    assert [name_in(found[key]) for key in ("a", "empty", "part")] == ["tinker://a", "", "tinker://b"]
    assert isinstance(found["weights"], Unknown)


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    found = safe_load.load(written(tmp_path, {"calls": Calls(tmp_path / "touched"), "starts": Starts(), **PLAIN}))
    assert not (tmp_path / "touched").exists()
    assert isinstance(found["starts"], Unknown)


def test_half_a_file_is_none(tmp_path: Path) -> None:
    file = written(tmp_path, PLAIN)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(zipfile.BadZipFile):
        safe_load.load(file)
