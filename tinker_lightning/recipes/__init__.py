"""Recipes: algorithms as small `RemoteModule`s, with a method to override."""

import tinker_lightning.lightning.strategy  # noqa: F401 which registers `Trainer(strategy="tinker")`
from tinker_lightning.recipes.distill import Distill
from tinker_lightning.recipes.dpo import DPO
from tinker_lightning.recipes.grpo import GRPO
from tinker_lightning.recipes.kto import KTO
from tinker_lightning.recipes.learning_rates import recommended_lr
from tinker_lightning.recipes.sft import SFT

__all__ = ["DPO", "GRPO", "KTO", "SFT", "Distill", "recommended_lr"]
