"""Rewards by a judge: a model on the same server scores the answers of the one that is trained.

The judge is the base model itself, asked whether a reply is polite; its reward is the probability that it gives to yes
rather than to no. Run it with `python -m examples.judge [FOLDER]`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import lightning.pytorch as pl

from examples.grpo import improve
from tinker_lightning import ModelInput, connect
from tinker_lightning.data import RolloutData
from tinker_lightning.recipes import GRPO

COMPLAINTS = ("My soup is cold.", "The train is late.", "I lost my key.", "My room is loud.", "It still leaks.")


class Judge:
    """Asks a model whether a reply is polite."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._tokenizer = sampler.get_tokenizer()

    async def polite(self, prompt: str, completion: str) -> float:
        """The judge's probability of yes, of yes and no."""
        question = f"Complaint: {prompt}\nReply: {completion.strip()}\nIs the reply polite? Answer yes or no:"
        yes, no = [self._logprob(question, answer) for answer in (" yes", " no")]  # requested together
        return 1 / (1 + math.exp(await no - await yes))

    def _logprob(self, question: str, answer: str) -> Any:
        before = self._tokenizer(question)["input_ids"]
        tokens = [*before, *self._tokenizer(answer, add_special_tokens=False)["input_ids"]]
        found = self._sampler.compute_logprobs(ModelInput.from_ints(tokens))
        return found.then(lambda logprobs: math.fsum(logprobs[len(before) :]))


def main(folder: Any = "runs/judge", model: str = "smollm2-135m", *, steps: int = 20, **settings: Any) -> Any:
    """Returns the mean rewards before and after."""
    pl.seed_everything(0)
    with connect("embedded") as service:
        judge = Judge(service.create_sampling_client(base_model=model))
        sampling = {"batch_size": 5, "group_size": 8, "max_tokens": 16, **settings}
        data = RolloutData(COMPLAINTS, COMPLAINTS, rewards=judge.polite, **sampling)
        module = GRPO(service.create_lora_training_client(model, rank=8), learning_rate=3e-4)
        return improve(module, data, folder, steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
