"""Datums for tests of losses that run on the server, and a few steps of training with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinker_lightning import AdamParams, Datum, LossFnOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client import TrainingClient
TEXTS = (b"All happy families are alike.", b"Call me Ishmael.", b"It was a bright cold day")
T = max(map(len, TEXTS)) - 1


def texts(**inputs: Callable[[int, int], Any]) -> list[Datum]:
    """A datum for each text; inputs are functions of its number and length."""
    data = []
    for i, text in enumerate(TEXTS):
        ids = np.frombuffer(text, np.uint8).astype(np.int64)
        named = {name: make(i, len(ids) - 1) for name, make in inputs.items()}
        data.append(Datum.from_targets(ids[:-1], ids[1:], **named))
    return data


def tokens(i: int, length: int) -> Any:
    return np.random.default_rng(i + 100 * length).integers(0, 256, length)


def reference(i: int, length: int) -> Any:
    return np.random.default_rng(i).normal(-5.5, 0.1, length).astype(np.float32)


def trains(model: TrainingClient, data: list[Datum], loss: Any, rate: float = 2e-2, **options: Any) -> Any:
    """The metrics of six steps; the loss must fall."""
    history = []
    for _ in range(6):
        history.append(model.forward_backward(data, loss, **options))
        model.optim_step(AdamParams(learning_rate=rate))
    metrics = [result.result().metrics for result in history]
    assert metrics[-1]["loss:sum"] < metrics[0]["loss:sum"]
    return metrics


def picked(model_outputs: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities of tokens, where -100 stands for none."""
    safe = ids.clone()
    safe[ids == -100] = 0
    return model_outputs.log_softmax(-1).gather(dim=-1, index=safe.unsqueeze(-1)).squeeze(-1) * mask


def minimal(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
    """The negative log-likelihood of the targets."""
    logprobs = picked(model_outputs, loss_fn_inputs["target_tokens"], attention_mask)
    loss = -logprobs.sum()
    return LossFnOutput(loss=loss, logprobs=logprobs, diagnostics={"loss": loss.item()})


def dpo(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor, beta: float = 0.1) -> LossFnOutput:
    """Preferences against a reference model's log-probabilities."""
    lengths = attention_mask.sum(dim=1, keepdim=True).clamp(min=1)
    scores = {}
    for side in ("chosen", "rejected"):
        policy = picked(model_outputs, loss_fn_inputs[f"{side}_tokens"], attention_mask)
        scores[side] = policy.sum(dim=1) / lengths.squeeze()
        scores[f"{side} reference"] = loss_fn_inputs[f"reference_{side}_logprobs"].sum(dim=1) / lengths.squeeze()
    gap = scores["chosen"] - scores["rejected"]
    loss = -F.logsigmoid(beta * (gap - scores["chosen reference"] + scores["rejected reference"])).mean()
    accuracy = (gap > 0).float().mean()
    diagnostics = {"reward_accuracy": accuracy.item(), "mean_gap": gap.mean().item(), "loss:sum": loss.item()}
    return LossFnOutput(loss, gap, diagnostics)


def kl_regularized(
    outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor, kl_weight: float = 0.1
) -> LossFnOutput:
    """Likelihood, and if there is a reference, a pull towards it."""
    logprobs = picked(outputs, loss_fn_inputs["target_tokens"], attention_mask)
    weights = loss_fn_inputs.get("weights")
    if weights is None:
        weights = torch.ones_like(loss_fn_inputs["target_tokens"], dtype=torch.float32)
    nll = -(logprobs * weights * attention_mask).sum()
    kl: Any = 0.0
    ref = loss_fn_inputs.get("reference_logprobs")
    if ref is not None:
        whole = outputs.log_softmax(-1)
        kl = ((whole.exp() * (whole - ref.unsqueeze(-1))).sum(dim=-1) * attention_mask).sum()
    mean = nll.item() / (weights * attention_mask).sum().clamp(min=1).item()
    kept = kl if isinstance(kl, float) else kl.item()
    return LossFnOutput(nll + kl_weight * kl, logprobs, {"mean_nll": mean, "kl": kept})


def padded(make: Callable[[int, int], Any]) -> Any:
    rows = [make(i, len(text) - 1) for i, text in enumerate(TEXTS)]
    return np.stack([np.pad(row, (0, T - len(row))) for row in rows])


PREFERENCES = {
    "chosen_tokens": tokens,
    "rejected_tokens": lambda i, length: tokens(i + 7, length),
    "reference_chosen_logprobs": reference,
    "reference_rejected_logprobs": lambda i, length: reference(i + 7, length),
}


def clipped(logprobs: Tensor, advantages: Tensor, old: Tensor) -> Any:
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": ratio.detach().sign().sum()}


RANKS = {"logprobs": 1, "advantages": 1, "old": 1}


def policy() -> list[Datum]:
    return texts(advantages=lambda i, n: np.random.default_rng(i).normal(size=n).astype(np.float32), old=reference)


def untraceable(outputs: Tensor, inputs: Any, mask: Tensor, least: float = 0.0) -> LossFnOutput:
    """Does what no graph can say."""
    loss = (outputs * mask.unsqueeze(-1)).square().mean()
    if loss.item() < least:
        loss = loss * 0
    return LossFnOutput(loss, None, {"looked": 1.0})
