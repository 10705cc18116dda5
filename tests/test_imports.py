"""What importing a name brings along: Lightning only for those who use it, and then its strategy."""

from __future__ import annotations

import pytest

import tinker_lightning
from tests.helpers.scripts import run_scripts

LIGHTNING = {"RemoteModule", "TinkerStrategy"}
TRAINER = "print(type(pl.Trainer(strategy='tinker', logger=False).strategy).__name__)"


def test_which_names_import_lightning_and_register_the_strategy() -> None:
    others = ", ".join(sorted(set(tinker_lightning.__all__) - LIGHTNING))
    without, lightning_first = run_scripts(
        "import sys, torch, torchmetrics, warnings; warnings.simplefilter('ignore')",
        f"from tinker_lightning import {others}\nprint('lightning' in sys.modules)",
        f"import lightning.pytorch as pl\nfrom tinker_lightning import RemoteLM\n{TRAINER}",
    )
    assert without.stdout.strip() == "False", without.stderr
    assert lightning_first.stdout.strip() == "TinkerStrategy", lightning_first.stderr


@pytest.mark.soak
def test_other_names_register_the_strategy_as_well() -> None:
    adamw, strategy, module = run_scripts(
        "import sys, torch, torchmetrics, warnings; warnings.simplefilter('ignore')",
        f"import lightning.pytorch as pl\nfrom tinker_lightning import RemoteAdamW\n{TRAINER}",
        f"from tinker_lightning import TinkerStrategy\nimport lightning.pytorch as pl\n{TRAINER}",
        f"from tinker_lightning import RemoteModule\nimport lightning.pytorch as pl\n{TRAINER}",
    )
    for ended in (adamw, strategy, module):
        assert ended.stdout.strip() == "TinkerStrategy", ended.stderr
