"""Data modules: files and datasets of chats, preferences and prompts for `Trainer.fit`."""

from tinker_lightning.data.chats import ChatData
from tinker_lightning.data.preferences import PreferenceData
from tinker_lightning.data.prompts import PromptData
from tinker_lightning.data.rollouts import RolloutData

__all__ = ["ChatData", "PreferenceData", "PromptData", "RolloutData"]
