"""Starts the embedded trainer and fine-tunes its `tiny` model on it with a custom loss, through the official SDK.

Run it with `python examples/quickstart.py`. No account, no GPU and no download are needed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import tinker
import torch
from tinker import types

if TYPE_CHECKING:
    from collections.abc import Iterator

LESSONS = (
    ("What is the capital of France?", "Paris."),
    ("What is the capital of Italy?", "Rome."),
    ("What is the capital of Japan?", "Tokyo."),
)
STEPS = 120


@contextlib.contextmanager
def embedded_trainer(model: str) -> Iterator[str]:
    """Runs `tinker-lightning serve` in a process of its own and yields its URL."""
    command = [sys.executable, "-m", "tinker_lightning", "serve", "--model", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        announcement = process.stdout.readline().strip()
        if not announcement:
            raise SystemExit(f"the server did not start; `{' '.join(command)}` says why")
        print(announcement)
        try:
            yield announcement.rsplit(" ", 1)[-1]
        finally:
            process.terminate()


def lesson(tokenizer: Any, question: str, answer: str) -> types.Datum:
    """Position i of the input predicts target i; only the answer counts."""
    prompt = tokenizer.encode(f"Q: {question}\nA: ")
    reply = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    tokens, weights = prompt + reply, [0.0] * len(prompt) + [1.0] * len(reply)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights[1:]}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def focal_loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy that cares most about the tokens the model is least sure of (Lin et al. 2017)."""
    weights = torch.cat([datum.loss_fn_inputs["weights"].to_torch() for datum in data])
    logp = torch.cat(logprobs)
    nll = -(weights * logp).sum() / weights.sum()
    loss = -(weights * (1 - logp.exp()) ** 2 * logp).sum() / weights.sum()
    return loss, {"nll": nll.item()}


def main() -> None:
    with embedded_trainer("tiny") as url, tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        client = service.create_lora_training_client(base_model="tiny", rank=16, seed=0)
        tokenizer = client.get_tokenizer()
        data = [lesson(tokenizer, question, answer) for question, answer in LESSONS]
        first = last = float("nan")
        for step in range(STEPS):
            passed = client.forward_backward_custom(data, focal_loss)
            stepped = client.optim_step(types.AdamParams(learning_rate=5e-3 * (1 - step / STEPS)))
            last = passed.result().metrics["nll"]
            first = last if step == 0 else first
            if step % 20 == 0 or step == STEPS - 1:
                norm = (stepped.result().metrics or {})["grad_norm"]
                print(f"step {step:3d}  nll {last:6.3f}  grad_norm {norm:8.4f}  {'█' * round(10 * last)}")
        assert last < first / 2, "the loss did not fall"

        sampler = client.save_weights_and_get_sampling_client()
        for question, _ in LESSONS:
            prompt = types.ModelInput.from_ints(tokenizer.encode(f"Q: {question}\nA: "))
            greedy = types.SamplingParams(max_tokens=16, temperature=0)
            (answer,) = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences
            print(f"Q: {question}  A: {tokenizer.decode(answer.tokens, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
