"""The examples in docstrings show what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import tinker_lightning

ROOT = Path(tinker_lightning.__file__).parent
# pytest's own collection looks for examples in every object of every test, too, which takes seconds.
FILES = sorted(path for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
MODULES = [".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0, "see the output"
