"""The training client of the official SDK in `Trainer.fit`, with its datums and a loss written for it, all unchanged.

Start a server with `tinker-lightning serve --model tiny` (or `--model smollm2-135m`), set `TINKER_BASE_URL` to the URL
that it prints, and run `python examples/official_client.py [MODEL]`. With `TINKER_API_KEY` alone, it trains on hosted
Tinker.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import tinker
import torch
from tinker import types
from torch import Tensor
from torch.utils.data import DataLoader

from tinker_lightning import RemoteModule, collate

TEXTS = ["All happy families are alike.", "Call me Ishmael.", "I am an invisible man.", "It was a bright cold day."]


def focal(data: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Focal loss, as `tinker.TrainingClient.forward_backward_custom` takes it."""
    p = torch.cat(logprobs)
    loss = -((1 - p.exp()) ** 2 * p).mean()
    return loss, {"nll": -p.mean().item(), "texts": float(len(data))}


class Focal(RemoteModule):
    loss: Any = focal


def main(model: str = "tiny") -> dict[str, float]:
    """Returns the metrics of the last step."""
    service = tinker.ServiceClient(api_key=os.environ.get("TINKER_API_KEY", "tml-local"))
    client = service.create_lora_training_client(base_model=model, rank=16).result()
    tokenizer = client.get_tokenizer()
    data: Any = []
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    trainer = pl.Trainer(strategy="tinker", max_epochs=4, logger=False, enable_checkpointing=False)
    trainer.fit(Focal(client, learning_rate=1e-3), DataLoader(data, batch_size=2, collate_fn=collate))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
