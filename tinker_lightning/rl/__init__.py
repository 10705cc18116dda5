"""Reinforcement learning: rewards, environments, trajectories, and the loader that samples them during a fit."""

from tinker_lightning.rl.environment import Conversation, Environment, Policy, PromptEnvironment, SamplerPolicy
from tinker_lightning.rl.rewards import Rewards, no_reward
from tinker_lightning.rl.rollouts import RolloutBatch, RolloutLoader
from tinker_lightning.rl.trajectory import Completion, Group, Receipt, Trajectory, Turn

__all__ = [
    "Completion",
    "Conversation",
    "Environment",
    "Group",
    "Policy",
    "PromptEnvironment",
    "Receipt",
    "Rewards",
    "RolloutBatch",
    "RolloutLoader",
    "SamplerPolicy",
    "Trajectory",
    "Turn",
    "no_reward",
]
