"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.lightning.module import RemoteModule

if TYPE_CHECKING:
    from tinker_lightning.lightning.hyperparameters import ModelSettings, Unpack
    from tinker_lightning.lightning.routes import Reduction


class SFT(RemoteModule):
    """Fine-tunes a model on chats and texts: the tokens with a weight become more likely.

    Takes batches of `ChatData`, and loaders of texts, chats, dicts or datums. Override `loss(self, data, logprobs)` to
    train with another loss; the default is cross-entropy, which the server computes in one pass.

    Logs `train_loss`, `nll`, `perplexity`, `tokens`, `grad_norm` and `learning_rate` for each step, and `val_loss`,
    `val_nll` and `val_perplexity` over all validation tokens.

    Args:
        model: The name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
        reduction: `mean` divides the loss by the sum of the micro-batch's weights, `sum` does not divide it.
        **settings: The other arguments of `RemoteModule`: `rank`, `learning_rate`, `schedule`, `predict` and others.
    """

    loss: Any = "cross_entropy"

    def __init__(self, model: Any = None, *, reduction: Reduction = "mean", **settings: Unpack[ModelSettings]) -> None:
        super().__init__(model, **settings)
        self.reduction = reduction
