"""What `pyproject.toml` and `CONTRIBUTING.md` promise is true of this tree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

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


def test_contributing_names_files_that_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to make a change")[2].partition("\n\nTests")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for change, files in rows:
        named = [path for path in re.findall(r"`([a-z_/]+(?:\.py|/))`", files) if f"a new folder `{path}`" not in files]
        assert len(named) <= 3, change
        for path in named:
            assert (ROOT / "tinker_lightning" / path).exists(), f"{change}: {path}"
