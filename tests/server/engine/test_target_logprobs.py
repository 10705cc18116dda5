"""Chunked log-probabilities: the numbers of a plain log_softmax, in less memory than it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.engine_passes import run_pass
from tests.helpers.fuzzing import examples
from tinker_lightning.server.engine import logprobs
from tinker_lightning.server.engine.lora import Matrices
from tinker_lightning.types import Datum

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM

V, D, R = 13, 5, 2


@examples(20, 1000)
@given(
    n=st.integers(0, 17), k=st.integers(1, 4), rows=st.integers(1, 20), seed=st.integers(0, 999), biased=st.booleans()
)
def test_values_and_gradients_are_those_of_log_softmax(n: int, k: int, rows: int, seed: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden, a, b = (draw(*shape).requires_grad_() for shape in ((n, D), (R, D), (V, R)))
    matrix, bias = draw(V, D), draw(V) if biased else None
    targets = torch.randint(0, V, (n, k), generator=generator)  # repeats in a row are likely, and must add up
    upstream = draw(n, k) * (torch.rand(n, 1, generator=generator) < 0.6)  # no gradient at some positions

    plain = torch.nn.functional.linear(hidden, matrix + 0.5 * b @ a, bias).log_softmax(-1).gather(-1, targets)
    plain_grads = torch.autograd.grad((plain * upstream).sum(), (hidden, a, b))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGITS_BYTES", rows * V * 8)
        chunked = logprobs.target_logprobs(Matrices(matrix, bias, a, b, 0.5), hidden, targets)
        grads = torch.autograd.grad((chunked * upstream).sum(), (hidden, a, b))

    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    for got, expected in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_log_probabilities_are_taken_in_float32_at_least() -> None:
    hidden = torch.randn(6, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = torch.randn(V, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = logprobs.target_logprobs(Matrices(matrix), hidden, torch.zeros(6, 1, dtype=torch.long))
    expected = (hidden @ matrix.T).float().log_softmax(-1)[:, :1]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)


def test_a_second_backward_through_the_same_graph_gives_the_same_gradient() -> None:
    hidden = torch.randn(3, D, generator=torch.Generator().manual_seed(0), requires_grad=True)
    result = logprobs.target_logprobs(Matrices(torch.randn(V, D)), hidden, torch.zeros(3, 1, dtype=torch.long)).sum()
    first, second = (torch.autograd.grad(result, hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second)


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
    tiny: CausalLM, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, forward_only: bool
) -> None:
    rows = 70  # more than the 64 rows of the transposed output matrix, which is as wide
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", rows * tiny.vocab_size * 4 + 3)
    products: list[int] = []
    project = Matrices.project

    def counting_project(head: Matrices, hidden: Tensor) -> Any:
        if len(head.weight_OI) == tiny.vocab_size:
            products.append(len(hidden))
        return project(head, hidden)

    monkeypatch.setattr(Matrices, "project", counting_project)
    data = [Datum.from_tokens(list(range(1, 101))) for _ in range(4)]
    with LargestLogits(tiny.vocab_size) as seen:
        run_pass(tiny, make_adapter(tiny), data, "cross_entropy", {}, forward_only=forward_only)

    assert max(products) == rows
    assert sum(products) == 4 * 99 * (1 if forward_only else 2)  # the backward computes them once more
    assert seen.rows == rows
