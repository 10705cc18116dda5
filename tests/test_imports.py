"""What importing a name brings along: Lightning only for those who use it, and then its strategy."""

from __future__ import annotations

from importlib.metadata import version

import pytest

import tinker_lightning
from tests.helpers.scripts import run_scripts
from tinker_lightning.doctor import examine

LIGHTNING = {"RemoteModule", "TinkerStrategy"}
TRAINER = "print(type(pl.Trainer(strategy='tinker', logger=False).strategy).__name__)"


def test_which_names_import_lightning_and_register_the_strategy() -> None:
    others = ", ".join(sorted(set(tinker_lightning.__all__) - LIGHTNING))
    without, lightning_first, packages = run_scripts(
        "import sys, torch, torchmetrics, warnings; warnings.simplefilter('ignore')",
        f"from tinker_lightning import {others}\nprint(sorted({{'lightning', 'tinker'}} & set(sys.modules)))",
        f"import lightning.pytorch as pl\nimport tinker_lightning\n{TRAINER}",
        "import tinker_lightning as t\nprint(t.client.connect.__name__, t.remote.RemoteLM.__name__, t.server.__name__)",
    )
    assert packages.stdout.strip() == "connect RemoteLM tinker_lightning.server", packages.stderr
    assert without.stdout.strip() == "[]", without.stderr
    assert lightning_first.stdout.strip() == "TinkerStrategy", lightning_first.stderr


# What a user of Lightning, torchmetrics or the official SDK would try first.
GUESSES = """
from tinker_lightning import RemoteModule, TinkerStrategy, RemoteLM, RemoteAdamW
from tinker_lightning import connect, ServiceClient, TrainingClient, SamplingClient, as_backend
from tinker_lightning import TinkerLightningError, __version__
from tinker_lightning import Regularizer, custom_loss, LossFnOutput
from tinker_lightning import Datum, ModelInput, TensorData, AdamParams, SamplingParams, collate
from tinker_lightning import callbacks, metrics, losses, recipes, data, rl, doctor, testing
from tinker_lightning.callbacks import SampleTable, GenerationEval, RemoteMonitor, CostMonitor, ExportAdapter
from tinker_lightning.client import ServiceClient, TrainingClient, SamplingClient, TrainingBackend
from tinker_lightning.client.dialects import Dialect, dialect_named
from tinker_lightning.data import ChatData, PreferenceData, PromptData, RolloutData
from tinker_lightning.doctor import examine, Report
from tinker_lightning.errors import TinkerLightningError, InvalidDatum
from tinker_lightning.lightning import RemoteModule, TinkerStrategy
from tinker_lightning.losses import cross_entropy, dpo, grpo, ppo
from tinker_lightning.losses.kl import k1, k2, k3
from tinker_lightning.losses.regularizers import Regularizer
from tinker_lightning.metrics import TokenNLL, TokenPerplexity, RewardAccuracy
from tinker_lightning.recipes import SFT, DPO, GRPO, Distill
from tinker_lightning.remote import RemoteLM, RemoteAdamW
from tinker_lightning.rl import Conversation, Environment, RolloutLoader
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import Datum, ForwardBackwardOutput
"""


@pytest.mark.parametrize("line", GUESSES.strip().splitlines())
def test_names_that_users_guess_can_be_imported(line: str) -> None:
    exec(line, {})  # noqa: S102


def test_the_package_lists_all_of_its_names() -> None:
    listed = dir(tinker_lightning)
    assert {*tinker_lightning.__all__, "callbacks", "metrics", "doctor", "lightning"} <= set(listed)
    assert all(hasattr(tinker_lightning, name) for name in listed)
    assert tinker_lightning.__version__ == version("tinker-lightning")
    assert tinker_lightning.doctor.examine is examine
    with pytest.raises(AttributeError, match="has no attribute 'RemoteModul'"):
        _ = tinker_lightning.RemoteModul


@pytest.mark.soak
def test_other_names_register_the_strategy_as_well() -> None:
    lm, adamw, strategy, module = run_scripts(
        "import sys, torch, torchmetrics, warnings; warnings.simplefilter('ignore')",
        f"import tinker_lightning, lightning.pytorch as pl\nfrom tinker_lightning import RemoteLM\n{TRAINER}",
        f"import lightning.pytorch as pl\nfrom tinker_lightning import RemoteAdamW\n{TRAINER}",
        f"from tinker_lightning import TinkerStrategy\nimport lightning.pytorch as pl\n{TRAINER}",
        f"from tinker_lightning import RemoteModule\nimport lightning.pytorch as pl\n{TRAINER}",
    )
    for ended in (lm, adamw, strategy, module):
        assert ended.stdout.strip() == "TinkerStrategy", ended.stderr
