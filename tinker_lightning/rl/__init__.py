"""Reinforcement learning: rewards, environments and what was sampled in them."""

from tinker_lightning.rl.conversation import Chat
from tinker_lightning.rl.environment import Environment, Policy, PromptEnvironment
from tinker_lightning.rl.policy import SamplerPolicy
from tinker_lightning.rl.rewards import Rewards
from tinker_lightning.rl.trajectory import Completion, Receipt, Trajectory, Turn

__all__ = [
    "Chat",
    "Completion",
    "Environment",
    "Policy",
    "PromptEnvironment",
    "Receipt",
    "Rewards",
    "SamplerPolicy",
    "Trajectory",
    "Turn",
]
