"""Chunked log-probabilities: the numbers of a plain log_softmax, in less memory than it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinker_lightning.server.engine import logprobs
from tinker_lightning.server.engine.passes import run_pass
from tinker_lightning.types import Datum

if TYPE_CHECKING:
    from tinker_lightning.server.engine.base import BaseModel

V, D = 13, 5


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 17), k=st.integers(1, 4), rows=st.integers(1, 20), seed=st.integers(0, 999))
def test_values_and_gradients_are_those_of_log_softmax(n: int, k: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (n, k), generator=generator)  # repeats in a row are likely, and must add up
    upstream = torch.randn(n, k, generator=generator, dtype=torch.float64)

    plain = (hidden @ matrix.T).log_softmax(-1).gather(-1, targets)
    plain_grads = torch.autograd.grad((plain * upstream).sum(), (hidden, matrix))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGITS_BYTES", rows * V * 8)
        chunked = logprobs.target_logprobs(lambda x: x @ matrix.T, hidden, targets, V)
        grads = torch.autograd.grad((chunked * upstream).sum(), (hidden, matrix))

    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    for got, expected in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_log_probabilities_are_taken_in_float32_at_least() -> None:
    hidden = torch.randn(6, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = torch.randn(V, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = logprobs.target_logprobs(lambda x: x @ matrix.T, hidden, torch.zeros(6, 1, dtype=torch.long), V)
    expected = (hidden @ matrix.T).float().log_softmax(-1)[:, :1]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)


class LargestLogits(TorchDispatchMode):
    """Sees every tensor that any operation makes, also in the backward; keeps the most rows of width `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == self.vocab_size:
                self.rows = max(self.rows, tensor.numel() // self.vocab_size)
        return result


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_logits_of_a_batch_never_exist_at_once(
    tiny: BaseModel, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, forward_only: bool
) -> None:
    rows = 70  # more than the 64 rows of the transposed output matrix, which is as wide
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", rows * tiny.vocab_size * 4 + 3)
    calls: list[int] = []
    head = tiny.head

    def counting_head(hidden: Tensor) -> Tensor:
        calls.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(tiny, "head", counting_head)
    data = [Datum.from_tokens(list(range(1, 101))) for _ in range(4)]
    with LargestLogits(tiny.vocab_size) as seen:
        run_pass(tiny, make_adapter(tiny), data, "cross_entropy", {}, forward_only=forward_only)

    assert max(calls) == rows
    assert sum(calls) == 4 * 99 * (1 if forward_only else 2)  # the backward computes them once more
    assert seen.rows == rows
