"""Log-probabilities of targets and of prompts from hidden states, without the logits of all positions in memory.

Shapes: N positions, D hidden width, V vocabulary, K alternatives per position; of a prompt T tokens and R = T - 1 rows
(row i predicts token i + 1).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.server.engine.interface import MAX_SCORES, PromptScoring
from tinker_lightning.server.engine.lora import Matrices
from tinker_lightning.types import PromptAltTokens, SampleResponse, TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.server.engine.causal_lm import CausalLM

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


@dataclass(slots=True)
class _Targets:
    """The requested tokens as a matrix, padded on the right, and the position of each requested value in it."""

    ids_RK: Tensor
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, requested: TensorData, vocab_size: int) -> _Targets:
        crow, ids = requested.sparse_crow_indices, requested.values.reshape(-1)
        counts = np.full(requested.shape[0], requested.shape[1]) if crow is None else np.diff(crow)
        width = int(counts.max(initial=0))
        check_size("target_prompt_logprobs", len(counts) * width)
        wanted = ids != -1
        if not wanted.any():
            raise InvalidInput("target_prompt_logprobs: names no token; -1 requests nothing")
        if (outside := ids[wanted & ((ids < 0) | (ids >= vocab_size))]).size:
            raise InvalidInput(f"target_prompt_logprobs: token {outside[0]} is not in 0..{vocab_size - 1}")
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids_RK = np.zeros((len(counts), width), np.int64)
        ids_RK[rows, columns] = np.where(wanted, ids, 0)
        return cls(torch.from_numpy(ids_RK), rows, columns, wanted)

    @property
    def first_row(self) -> int:
        return int(self.rows[self.wanted][0])

    def result(self, requested: TensorData, logprobs_RK: Tensor) -> TensorData:
        """Returns the log-probabilities in the layout of the request, 0 where it has -1."""
        values = np.where(self.wanted, logprobs_RK.float().numpy()[self.rows, self.columns], np.float32(0))
        return TensorData(
            values, "float32", requested.shape, requested.sparse_crow_indices, requested.sparse_col_indices
        )


def score_prompt(
    base: CausalLM,
    hidden_TD: Tensor,
    tokens_T: Tensor,
    scoring: PromptScoring,
    temperature: float,
    generator: torch.Generator,
) -> SampleResponse:
    """Returns the scores of a prompt, without sequences, from its hidden states in chunks of rows.

    Only alternatives depend on the temperature.
    """
    rows = len(tokens_T) - 1
    check_size("topk_prompt_logprobs", rows * scoring.topk)
    check_size("prompt_alt_tokens_k", rows * scoring.alt_tokens)
    targets = None if scoring.targets is None else _Targets.read(scoring.targets, base.vocab_size)
    first_scored = 0 if scoring.last_n is None else rows - scoring.last_n
    starts = [first_scored] if scoring.logprobs or scoring.topk else []
    starts += [0] if scoring.alt_tokens else []
    starts += [targets.first_row] if targets is not None else []
    start = min(starts)
    k = min(scoring.topk, base.vocab_size)
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    size = max(1, LOGITS_BYTES // (base.vocab_size * wide.itemsize))
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for begin in range(start, rows, size):
        chunk = slice(begin, min(begin + size, rows))
        logprobs_NV = base.head(hidden_TD[chunk]).to(wide).log_softmax(-1)
        if logprobs_NV.isnan().any():
            raise OperationFailed("the model's logits are not finite, so the prompt has no log-probabilities")
        parts["own"].append(logprobs_NV.gather(-1, tokens_T[1:][chunk, None])[:, 0])
        if k:
            top = logprobs_NV.topk(k)
            parts["top ids"].append(top.indices)
            parts["top"].append(top.values)
        if targets is not None:
            parts["targets"].append(logprobs_NV.gather(-1, targets.ids_RK[chunk]))
        if scoring.alt_tokens:
            drawn_NK = _draw(logprobs_NV, scoring.alt_tokens, temperature, generator)
            parts["drawn ids"].append(drawn_NK)
            parts["drawn"].append(logprobs_NV.gather(-1, drawn_NK))
    scores: dict[str, Any] = {}
    skipped = first_scored - start
    unscored = [None] * (1 + first_scored)
    if scoring.logprobs:
        scores["prompt_logprobs"] = [*unscored, *_concat(parts["own"])[skipped:].tolist()]
    if scoring.topk:
        ids, values = (_concat(parts[name])[skipped:].tolist() for name in ("top ids", "top"))
        pairs = (list(zip(*row, strict=True)) for row in zip(ids, values, strict=True))
        scores["topk_prompt_logprobs"] = [*unscored, *pairs]
    if scoring.targets is not None and targets is not None:
        before_RK = torch.zeros(start, targets.ids_RK.shape[1])
        scores["target_prompt_logprobs"] = targets.result(scoring.targets, torch.cat([before_RK, *parts["targets"]]))
    if scoring.alt_tokens:
        shape = (rows, scoring.alt_tokens)
        drawn, logprobs = (_concat(parts[name]).reshape(shape) for name in ("drawn ids", "drawn"))
        scores["prompt_alt_tokens"] = PromptAltTokens(
            TensorData(drawn.long(), copy=False), TensorData(logprobs.float(), copy=False)
        )
    return SampleResponse([], **scores)


def check_size(name: str, count: int) -> None:
    """Raises `InvalidInput` if an option asks for more log-probabilities than a result may contain."""
    if count > MAX_SCORES:
        raise InvalidInput(f"{name}: {count} log-probabilities exceed the maximum of {MAX_SCORES}")


def _draw(logprobs_NV: Tensor, k: int, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logprobs_NV.argmax(-1, keepdim=True).expand(-1, k)
    # The largest is shifted to 0 first, because a small temperature would make it infinite.
    shifted_NV = logprobs_NV - logprobs_NV.amax(-1, keepdim=True)
    probabilities_NV = (shifted_NV / max(temperature, torch.finfo(shifted_NV.dtype).tiny)).softmax(-1)
    return probabilities_NV.multinomial(k, replacement=True, generator=generator)


def _concat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)
