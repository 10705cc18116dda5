"""Log-probabilities of target tokens from hidden states, without the logits of the whole batch in memory.

Shapes: N positions, D hidden width, V vocabulary, K alternatives per position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

# Memory limit for the logits of one chunk of positions. A batch of passes.TOKEN_BUDGET positions with a vocabulary of
# 50k fits into one chunk, so nothing is recomputed.
LOGITS_BYTES = 128 << 20


def target_logprobs(head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_NK: Tensor, vocab_size: int) -> Tensor:
    """Returns `log softmax(head(hidden))` at the targets, `[N, K]`, computed in chunks of positions.

    With more than one chunk, the logits are recomputed in the backward pass. This costs another product with the output
    matrix, but memory does not grow with the batch.
    """
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    rows = max(1, LOGITS_BYTES // (vocab_size * wide.itemsize))

    def chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = _TargetLogprobs.apply(head(hidden).to(wide), targets)  # type: ignore[no-untyped-call]
        return result

    if len(hidden_ND) <= rows:
        return chunk(hidden_ND, targets_NK)
    parts = zip(hidden_ND.split(rows), targets_NK.split(rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([chunk(*part) for part in parts])
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


class _TargetLogprobs(torch.autograd.Function):
    """Gathers from log_softmax, with a backward that allocates one `[N, V]` buffer instead of four."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_NK: Tensor) -> Tensor:
        logprobs_NV = logits_NV.log_softmax(-1)
        ctx.save_for_backward(logprobs_NV, targets_NK)
        return logprobs_NV.gather(-1, targets_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad_NK,) = grads
        logprobs_NV, targets_NK = ctx.saved_tensors
        grad_NV: Tensor = logprobs_NV.exp()
        grad_NV.mul_(-grad_NK.sum(-1, keepdim=True)).scatter_add_(-1, targets_NK, grad_NK)
        return grad_NV, None
