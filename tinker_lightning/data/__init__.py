"""Data modules: files and datasets of chats, preferences and prompts for `Trainer.fit`."""

from tinker_lightning.data.modules import ChatData, PreferenceData, PromptData
from tinker_lightning.data.rollouts import RolloutData

__all__ = ["ChatData", "PreferenceData", "PromptData", "RolloutData"]
