"""What importing a name brings along: Lightning only for those who use it, and then its strategy."""

from __future__ import annotations

import tinker_lightning
from tests.helpers.scripts import run_scripts

LIGHTNING = {"RemoteModule", "TinkerStrategy"}
TRAINER = "print(type(pl.Trainer(strategy='tinker', logger=False).strategy).__name__)"


def test_the_strategy_is_registered_if_lightning_is_imported_first() -> None:
    imports = "import warnings; warnings.simplefilter('ignore'); import lightning.pytorch as pl"
    names = ("RemoteLM", "RemoteAdamW")
    for ended in run_scripts(imports, *(f"from tinker_lightning import {name}\n{TRAINER}" for name in names)):
        assert ended.stdout.strip() == "TinkerStrategy", ended.stderr


def test_the_strategy_is_registered_by_the_classes_that_need_lightning_and_by_no_other() -> None:
    others = ", ".join(sorted(set(tinker_lightning.__all__) - LIGHTNING))
    without, *registered = run_scripts(
        "import sys, torch, torchmetrics, warnings; warnings.simplefilter('ignore')",
        f"from tinker_lightning import {others}\nprint('lightning' in sys.modules)",
        *(
            f"from tinker_lightning import {name}\nimport lightning.pytorch as pl\n{TRAINER}"
            for name in sorted(LIGHTNING)
        ),
    )
    assert without.stdout.strip() == "False", without.stderr
    for ended in registered:
        assert ended.stdout.strip() == "TinkerStrategy", ended.stderr
