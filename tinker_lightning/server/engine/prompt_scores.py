"""Log-probabilities of a prompt: of its tokens, the most likely ones, requested ones and drawn alternatives.

Shapes: T prompt tokens, R = T - 1 rows (row i predicts token i + 1), N rows of a chunk, V vocabulary, K per row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.server.engine.interface import MAX_SCORES, PromptScoring
from tinker_lightning.server.engine.logprobs import LOGITS_BYTES
from tinker_lightning.types import PromptAltTokens, SampleResponse, TensorData

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM


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
