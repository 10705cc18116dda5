"""What importing a name brings along: for a trainer its strategy, and for everything else nothing of Lightning."""

from __future__ import annotations

import subprocess
import sys

import tinker_lightning
from tinker_lightning import _TRAINED


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_strategy_is_known_with_whatever_it_trains() -> None:
    """In whatever order packages are imported."""
    assert {"RemoteAdamW", "RemoteLM", "RemoteModule"} == _TRAINED
    run(
        "from tinker_lightning import RemoteLM\n"
        "import lightning.pytorch as pl\n"
        "strategy = pl.Trainer(strategy='tinker', logger=False).strategy\n"
        "assert type(strategy).__name__ == 'TinkerStrategy', strategy\n"
    )


def test_all_else_does_without_lightning() -> None:
    names = ", ".join(sorted(set(tinker_lightning.__all__) - _TRAINED))
    run(f"from tinker_lightning import {names}\nimport sys\nassert 'lightning' not in sys.modules\n")
