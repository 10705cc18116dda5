"""Fine-tuning with a custom loss that runs on the server: one pass, no wait, and all logits at hand.

The function is traced and uploaded as data. Run it with `python examples/server_loss.py [MODEL]`; the model is `tiny`
or, for a model that can read, `smollm2-135m`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from tinker_lightning import LossFnOutput, RemoteModule, connect, custom_loss
from tinker_lightning.data import ChatData

if TYPE_CHECKING:
    from torch import Tensor

ROWS = Path(__file__).parent / "data" / "orders_validation.jsonl"


def confident(
    model_outputs: Tensor, loss_fn_inputs: dict[str, Tensor], attention_mask: Tensor, entropy_weight: float = 0.1
) -> LossFnOutput:
    """Returns the negative log-likelihood of the answers, with a penalty on the entropy of each prediction."""
    logprobs_BTV = model_outputs.log_softmax(-1)
    target_BT = logprobs_BTV.gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    weights_BT = loss_fn_inputs["weights"] * attention_mask
    tokens = weights_BT.sum()
    loss = ((entropy_weight * entropy_BT - target_BT) * weights_BT).sum() / tokens
    return LossFnOutput(loss, target_BT, {"entropy": ((entropy_BT * weights_BT).sum() / tokens).item()})


def main(model: str = "tiny") -> dict[str, float]:
    """Returns the metrics of the last step."""
    trainer = pl.Trainer(strategy="tinker", max_epochs=1, log_every_n_steps=1, logger=False, enable_checkpointing=False)
    with connect("embedded") as service:

        class Confident(RemoteModule):
            loss: Any = custom_loss(service, name="confident")(confident)
            loss_config = {"entropy_weight": 0.05}  # noqa: RUF012

        client = service.create_lora_training_client(model, rank=16, seed=0)
        trainer.fit(Confident(client, learning_rate=1e-3), ChatData(ROWS, batch_size=4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    for name, value in main(*sys.argv[1:]).items():
        print(f"{name:20} {value:.4g}")
