"""What `pyproject.toml` and `CONTRIBUTING.md` promise is true of this tree."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# Checkers of the source, which `tox -e lowest` does not run.
NOT_PINNED = {"mypy", "ruff", "types-protobuf"}


def test_every_lower_bound_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    required = [Requirement(text) for group in groups for text in group]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = {pin.name: pin.specifier for pin in map(Requirement, [line for line in lines if line[:1] not in "#"])}
    assert pinned.keys() == {requirement.name for requirement in required} - NOT_PINNED
    for requirement in required:
        if requirement.name in NOT_PINNED | {"torch"}:  # every other torch comes with CUDA, which takes gigabytes
            continue
        (lower,) = (each.version for each in requirement.specifier if each.operator == ">=")
        assert pinned[requirement.name].contains(lower), requirement


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock is for one Python")
def test_the_lock_covers_every_requirement() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    locked = {canonicalize_name(name): release for name, _, release in (line.partition("==") for line in lines)}
    assert all("==" in line and "+" not in line for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    reached: set[str] = set()
    waiting = [*project["build-system"]["requires"], *project["project"]["dependencies"], "tox"]
    waiting += [text for name in ("embedded", "tinker", "examples", "dev") for text in extras[name]]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if f"{name}{sorted(requirement.extras)}" in reached:
            continue
        reached.add(f"{name}{sorted(requirement.extras)}")
        assert name in locked, f"{name} is not in constraints.txt; run tox -e lock"
        try:
            if version(name).partition("+")[0] != locked[name]:
                assert Path(os.environ.get("PIP_CONSTRAINT", "")).name != "constraints.txt", f"{name} is out of date"
                continue  # an environment without the lock
        except PackageNotFoundError:  # tox and the build backend are not installed next to the tests
            continue
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": x}) for x in ("", *requirement.extras)):
                waiting.append(str(each))
    assert len(reached) > 30


def test_contributing_names_files_that_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to make a change")[2].partition("\n\nTests")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for change, files in rows:
        named = [path for path in re.findall(r"`([a-z_/]+(?:\.py|/))`", files) if f"a new folder `{path}`" not in files]
        assert len(named) <= 6, change
        for path in named:
            assert any((root / path).exists() for root in (ROOT, ROOT / "tinker_lightning")), f"{change}: {path}"
