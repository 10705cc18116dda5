"""Log-probabilities of target tokens from hidden states, without the logits of the whole batch in memory.

Shapes: N positions, D hidden width, V vocabulary, K alternatives per position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from tinker_lightning.server.engine.lora import Matrices

if TYPE_CHECKING:
    from collections.abc import Sequence

# Memory limit for the logits of one chunk of positions. A batch of 512 positions with a vocabulary of 50k fits into one
# chunk, so nothing is recomputed.
LOGITS_BYTES = 128 << 20
# Rows of logits that are normalized at a time, in a buffer small enough for the allocator to use it again.
_SOFTMAX_ROWS = 64


def target_logprobs(head: Matrices, hidden_ND: Tensor, targets_NK: Tensor) -> Tensor:
    """Returns `log softmax(head(hidden))` at the targets, `[N, K]`, computed in chunks of positions.

    Positions whose gradient is zero, as at a weight of 0, take no part in the backward pass. With more than one chunk,
    the logits are recomputed in the backward pass. This costs another product with the output matrix, but memory does
    not grow with the batch.
    """
    result: Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, targets_NK, head.weight_OI, head.bias_O, head.a_RI, head.b_OR, head.scaling
    )
    return result


def chunk_rows(head: Matrices, dtype: torch.dtype) -> int:
    """Returns how many rows of logits are computed at a time."""
    return max(1, LOGITS_BYTES // (len(head.weight_OI) * torch.promote_types(dtype, torch.float32).itemsize))


class _TargetLogprobs(torch.autograd.Function):
    """The output matrix, log_softmax and gather as one node, so that the backward can leave out rows."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        targets_NK: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
    ) -> Tensor:
        head = Matrices(weight, bias, a, b, scaling)
        ctx.scaling, ctx.rows = scaling, chunk_rows(head, hidden_ND.dtype)
        ctx.save_for_backward(hidden_ND, targets_NK, weight, bias, a, b)
        ctx.kept = None
        if len(hidden_ND) > ctx.rows:
            parts = zip(hidden_ND.split(ctx.rows), targets_NK.split(ctx.rows), strict=True)
            return torch.cat([_log_softmax(head, hidden)[0].gather(-1, targets) for hidden, targets in parts])
        logprobs_NV, low_NR = _log_softmax(head, hidden_ND)
        if any(ctx.needs_input_grad):
            ctx.kept = logprobs_NV, low_NR
        return logprobs_NV.gather(-1, targets_NK)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_NK,) = grads
        hidden_ND, targets_NK, weight, bias, a, b = ctx.saved_tensors
        head = Matrices(weight, bias, a, b, ctx.scaling)
        needs_input, needs_adapter = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        kept, ctx.kept = ctx.kept, None  # overwritten below; a second backward computes them again
        used_N = grad_NK.ne(0).any(-1).nonzero()[:, 0]
        grad_ND = torch.zeros_like(hidden_ND) if needs_input else None
        grad_a, grad_b = (torch.zeros_like(each) if needs_adapter and not len(used_N) else None for each in (a, b))
        for rows in used_N.split(ctx.rows) if len(used_N) else ():
            everything = len(rows) == len(hidden_ND)
            hidden, targets, grad = (_rows(each, rows, everything) for each in (hidden_ND, targets_NK, grad_NK))
            logprobs_NV, low_NR = _log_softmax(head, hidden) if kept is None else _select(kept, rows, everything)
            grad_NV = logprobs_NV.exp_().mul_(-grad.sum(-1, keepdim=True)).scatter_add_(-1, targets, grad)
            part_ND, part_a, part_b = head.gradients(
                grad_NV, hidden, low_NR, needs_input=needs_input, needs_adapter=needs_adapter
            )
            if grad_ND is not None and part_ND is not None:
                grad_ND = part_ND if everything else grad_ND.index_copy_(0, rows, part_ND)
            if part_a is not None and part_b is not None:
                grad_a, grad_b = _sum(grad_a, part_a), _sum(grad_b, part_b)
        return grad_ND, None, None, None, grad_a, grad_b, None


def _log_softmax(head: Matrices, hidden_ND: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probabilities of the whole vocabulary, in float32 at least."""
    logits_NV, low_NR = head.project(hidden_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    for part in logits_NV.split(_SOFTMAX_ROWS):
        part.copy_(part.log_softmax(-1))
    return logits_NV, low_NR


def _select(kept: Sequence[Tensor | None], rows: Tensor, everything: bool) -> tuple[Tensor, Tensor | None]:
    logprobs_NV, low_NR = (None if each is None else _rows(each, rows, everything) for each in kept)
    assert logprobs_NV is not None  # noqa: S101
    return logprobs_NV, low_NR


def _rows(tensor: Tensor, rows: Tensor, everything: bool) -> Tensor:
    return tensor if everything else tensor[rows]


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
