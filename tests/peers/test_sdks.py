"""Releases of the official SDK on our trainer: the whole path, and every public method. Run it with `tox -e sdks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import sdk_signatures as signatures

if TYPE_CHECKING:
    from tests.helpers.api import Served

# One from each generation of the protocol; see "SDK versions" in docs/servers.md.
RELEASES = ("0.38.0", "0.36.0", "0.30.0", "0.25.0", "0.24.1", "0.18.2", "0.14.0")
# Each release in a folder of its own, which tox fills; their dependencies are those of the environment.
FOLDER = Path(os.environ.get("SDKS_FOLDER", ""))


@pytest.mark.parametrize("release", RELEASES)
def test_every_public_method_of_the_official_sdk(served: Served, release: str, tmp_path: Path) -> None:  # R5.5
    assert (FOLDER / release / "tinker").is_dir(), "run it with tox -e sdks, which installs the releases"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER / release), "TINKER_TELEMETRY": "0"}
    warnings = "error::FutureWarning" if release == RELEASES[0] else "ignore"
    done = subprocess.run(
        [sys.executable, "-W", warnings, Path(__file__).with_name("sdk_driver.py"), served.url],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert "FORGOTTEN" not in table.values(), {name for name, state in table.items() if state == "FORGOTTEN"}
    counts = Counter(table.values())
    print(f"| {release} | {counts['called']} | {counts['not offered']} | {counts['local']} |")


@pytest.mark.parametrize("recorded", sorted(signatures.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_names_that_our_client_is_compared_with_are_those_of_the_release(recorded: Path) -> None:  # R5.17
    places = os.pathsep.join(str(folder) for folder in (FOLDER / recorded.stem, Path(__file__).parents[2]))
    found = subprocess.check_output(
        [sys.executable, "-W", "ignore", "-m", signatures.__name__], env={**os.environ, "PYTHONPATH": places}
    )
    assert json.loads(found) == json.loads(recorded.read_text())
