"""What importing a name brings along: Lightning only for those who use it, and then its strategy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tinker_lightning

LIGHTNING = {"RemoteModule", "TinkerStrategy"}
TRAINER = "print(type(pl.Trainer(strategy='tinker', logger=False).strategy).__name__)"


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "from tinker_lightning import RemoteModule\nimport lightning.pytorch as pl",
        "from tinker_lightning import TinkerStrategy\nimport lightning.pytorch as pl",
        "import lightning.pytorch as pl\nfrom tinker_lightning import RemoteLM",
        "import lightning.pytorch as pl\nfrom tinker_lightning import RemoteAdamW",
    ],
)
def test_the_strategy_is_registered_where_lightning_is_used(imports: str) -> None:
    assert run(f"{imports}\n{TRAINER}") == "TinkerStrategy"


def test_everything_else_does_not_import_lightning() -> None:
    names = ", ".join(sorted(set(tinker_lightning.__all__) - LIGHTNING))
    assert run(f"from tinker_lightning import {names}\nimport sys\nprint('lightning' in sys.modules)") == "False"
