"""Teaches SmolLM2-135M to guess a number from hints: an environment of several turns is ordinary Python.

Run it with `python -m examples.multi_turn [FOLDER [MODEL [SEED]]]`. The same `rollout` could call a tool or another
model in between.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from examples.grpo import improve
from tinker_lightning import SamplingParams
from tinker_lightning.data import RolloutData
from tinker_lightning.recipes import GRPO
from tinker_lightning.rl import Conversation, Environment, Policy, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

TURNS = 4


class GuessTheNumber(Environment):
    """Thinks of a number from 1 to 9; each guess is answered by a hint."""

    def __init__(self, secret: int) -> None:
        self.secret = secret

    async def rollout(self, policy: Policy) -> Trajectory:
        """Plays until the number is found. A guess that ignores the hints so far costs a little."""
        chat = Conversation(policy, as_text=True, params=SamplingParams(max_tokens=2, stop=["\n"]))
        low, high, valid = 1, 9, 0
        hint = "I think of a number from 1 to 9.\nGuess:"
        for turn in range(TURNS):
            found = re.match(r"\s*(\d+)", (await chat.reply(hint)).text)
            guess = int(found[1]) if found else 0
            if guess == self.secret:
                return chat.trajectory(1 - 0.1 * turn, metrics={"found": 1})
            valid += low <= guess <= high
            hint = "\nToo low.\nGuess:" if guess < self.secret else "\nToo high.\nGuess:"
            low, high = (max(low, guess + 1), high) if guess < self.secret else (low, min(high, guess - 1))
        return chat.trajectory(0.1 * valid, metrics={"found": 0})


def main(
    folder: Path | str = "runs/multi_turn",
    model: str = "smollm2-135m",
    seed: int | str = 0,
    *,
    steps: int = 16,
    **settings: Any,
) -> Any:
    """Returns the mean rewards of all nine numbers before and after."""
    seed = pl.seed_everything(int(seed))
    games = [GuessTheNumber(secret) for secret in range(1, 10)]
    data = RolloutData(games, games, **{"batch_size": 3, "group_size": 6, "seed": seed, **settings})
    with GRPO(model, rank=8, learning_rate=1e-4, seed=seed, base_url="embedded") as module:
        return improve(module, data, folder, steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
