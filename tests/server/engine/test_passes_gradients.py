"""Values, log-probabilities and gradients of every built-in loss, against plain autograd through the formula.

The reference sees one sequence at a time, its whole `[T, V]` log-softmax, and LoRA as a merged matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.engine_passes import run_pass
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.types import Datum, ModelInput, TensorData

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM

LENGTHS = (5, 12, 1, 9, 12)
Inputs = dict[str, Tensor]


def cross_entropy(p: Tensor, x: Inputs) -> Tensor:
    return -(x["weights"] * p).sum()


def importance_sampling(p: Tensor, x: Inputs) -> Tensor:
    return -(torch.exp(p - x["logprobs"]) * x["advantages"]).sum()


def clip(ratio: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))


def surrogate(ratio: Tensor, x: Inputs) -> Tensor:
    free, held = ratio * x["advantages"], clip(ratio, x["low"], x["high"]) * x["advantages"]
    return -torch.where(held < free, held, free).sum()


def ppo(p: Tensor, x: Inputs) -> Tensor:
    return surrogate(torch.exp(p - x["logprobs"]), x)


def cispo(p: Tensor, x: Inputs) -> Tensor:
    weight = clip(torch.exp(p - x["logprobs"]), x["low"], x["high"]).detach()
    return -(weight * p * x["advantages"]).sum()


def dro(p: Tensor, x: Inputs) -> Tensor:
    return -(p * x["advantages"] - x["beta"] / 2 * (p - x["logprobs"]) ** 2).sum()


def gspo(p: Tensor, x: Inputs) -> Tensor:
    mask = x["sequence_ratio_mask"] != 0
    mean = ((p.detach() - x["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    return surrogate(mean.exp() * (1 + p - p.detach()), x)  # to first order in p_t, which is all a gradient sees


@dataclass
class Case:
    """A loss, what it gets with the request and with each datum, and the targets' alternatives K (0: `[T]`)."""

    formula: Callable[[Tensor, Inputs], Tensor]
    weights: Callable[[Tensor], Tensor] = lambda noise: noise
    k: int = 0
    csr: bool = False
    config: dict[str, float] = field(default_factory=dict)
    per_token: tuple[str, ...] = ()
    mask: Callable[[Tensor], Tensor] = lambda noise: (noise > 0).float()


CASES = {
    "weights of any sign": Case(cross_entropy),
    "weights 0 and 1": Case(cross_entropy, lambda noise: (noise > 0).float()),
    "negative weights": Case(cross_entropy, lambda noise: -noise.abs()),
    "weights that sum to zero": Case(cross_entropy, lambda noise: noise - noise.mean()),
    "K alternatives": Case(cross_entropy, k=7),
    "one alternative": Case(cross_entropy, k=1),
    "K alternatives in CSR": Case(cross_entropy, lambda noise: noise * (noise > 0.8), k=7, csr=True),
    "importance_sampling": Case(importance_sampling),
    "importance_sampling of K": Case(importance_sampling, k=3),
    "ppo": Case(ppo),
    "ppo with thresholds": Case(ppo, config={"clip_low_threshold": 0.6, "clip_high_threshold": 1.05}),
    "ppo with one threshold": Case(ppo, config={"clip_high_threshold": 1.05}),
    "ppo with thresholds per token": Case(ppo, per_token=("clip_low_threshold", "clip_high_threshold")),
    "ppo with one threshold per token": Case(
        ppo, config={"clip_low_threshold": 0.6}, per_token=("clip_high_threshold",)
    ),
    "cispo": Case(cispo),
    "cispo with thresholds": Case(cispo, config={"clip_low_threshold": 0.6, "clip_high_threshold": 1.05}),
    "cispo with thresholds per token": Case(cispo, per_token=("clip_low_threshold", "clip_high_threshold")),
    "dro": Case(dro),
    "dro with beta": Case(dro, config={"beta": 1.5}),
    "gspo": Case(gspo),
    "gspo with narrow thresholds": Case(gspo, config={"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
    "gspo with thresholds per token": Case(gspo, per_token=("clip_low_threshold", "clip_high_threshold")),
    "gspo counting no token": Case(gspo, mask=torch.zeros_like),
}


def csr(dense: Tensor) -> TensorData:
    rows, columns = dense.numpy().nonzero()
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    dtype: Any = "int64" if dense.dtype == torch.int64 else "float32"
    return TensorData(dense.numpy()[rows, columns], dtype, list(dense.shape), crow, columns)


def make_data(
    case: Case, policy: Callable[[Tensor], Tensor], vocab_size: int
) -> tuple[list[Datum], list[tuple[Tensor, Tensor, Inputs]]]:
    """Datums, and for each its tokens, targets and inputs as the reference reads them."""
    generator = torch.Generator().manual_seed(5)
    data: list[Datum] = []
    read: list[tuple[Tensor, Tensor, Inputs]] = []
    for length in LENGTHS:
        shape = (length, case.k) if case.k else (length,)
        tokens = torch.randint(0, vocab_size, (length,), generator=generator)
        targets = torch.randint(0, vocab_size, shape, generator=generator)
        if case.csr:
            targets *= torch.rand(shape, generator=generator) < 0.3
        noise = torch.randn(shape, generator=generator)
        sent: Inputs = {}
        if case.formula is cross_entropy:
            sent["weights"] = case.weights(noise)
        else:
            # Ratios on both sides of both thresholds, some tokens masked by an advantage of zero.
            p = policy(tokens).gather(-1, targets.reshape(length, -1)).reshape(shape)
            sent["logprobs"] = (p + 0.4 * torch.randn(shape, generator=generator)).float()
            sent["advantages"] = noise * (torch.rand(shape, generator=generator) < 0.8)
        if case.formula is gspo:
            sent["sequence_ratio_mask"] = case.mask(torch.randn(shape, generator=generator))
        for name in case.per_token:
            sent[name] = torch.rand(shape, generator=generator) * 0.3 + (0.6 if "low" in name else 1.0)
        encode = csr if case.csr else TensorData.from_data
        inputs_sent = {"target_tokens": encode(targets), **{name: encode(tensor) for name, tensor in sent.items()}}
        data.append(Datum(ModelInput.from_ints(tokens), inputs_sent))
        settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05, **case.config}
        inputs = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in {**settings, **sent}.items()}
        inputs |= {"low": inputs["clip_low_threshold"], "high": inputs["clip_high_threshold"]}
        read.append((tokens, targets, inputs))
    return data, read


def test_every_loss_has_a_case() -> None:
    assert {case.formula.__name__ for case in CASES.values()} == set(LOSSES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_pass_is_plain_autograd_of_the_formula(  # R3.3, R1.1
    tiny64: CausalLM, reference64: Any, make_adapter: Any, assert_same_gradient: Any, case: Case
) -> None:
    adapter = make_adapter(tiny64)
    tensors, rank = adapter.weights.tensors, adapter.weights.config.rank
    data, read = make_data(case, lambda tokens: reference64.logprobs(tokens, tensors, rank), tiny64.vocab_size)
    logprobs: list[Tensor] = []

    def loss(logprobs_TV: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for tokens, targets, inputs in read:
            every = logprobs_TV(tokens)
            p = torch.stack([every[t, target] for t, target in enumerate(targets)])
            logprobs.append(p.detach())
            total = total + case.formula(p, inputs)
        return total

    value, gradient = reference64.gradient(adapter, loss)
    adapter.token_budget = 25
    output = run_pass(tiny64, adapter, data, case.formula.__name__, case.config)

    assert output.metrics["loss:sum"] == pytest.approx(value, rel=1e-9)
    assert [outputs.keys() for outputs in output.loss_fn_outputs] == [{"logprobs"}] * len(data)
    for outputs, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        # The protocol's tensors are float32.
        torch.testing.assert_close(outputs["logprobs"].to_torch(), expected.float(), rtol=2e-7, atol=0)
    assert all(grad.any() for grad in gradient.values())
    assert_same_gradient(adapter.gradient, gradient)


def test_weights_of_zero_give_a_gradient_of_zero(tiny64: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny64)
    data = [Datum.from_tokens([1, 2, 3, 4], [0.0] * 4), Datum.from_tokens([5, 6], [0.0] * 2)]
    output = run_pass(tiny64, adapter, data, "cross_entropy", {})
    assert output.metrics["loss:sum"] == 0
    assert adapter.gradient.keys() == adapter.weights.tensors.keys()
    assert not any(grad.any() for grad in adapter.gradient.values())


def test_a_forward_gives_the_same_numbers_and_no_gradient(tiny64: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny64)
    data = [Datum.from_tokens([1, 2, 3, 4], [0.0, -1.0, 2.0, 0.5]), Datum.from_tokens([5, 6])]
    forward = run_pass(tiny64, adapter, data, "cross_entropy", {}, forward_only=True)
    assert adapter.gradient == {}
    assert forward == run_pass(tiny64, adapter, data, "cross_entropy", {})


def test_a_forward_needs_no_weights(tiny64: CausalLM, make_adapter: Any) -> None:
    bare = Datum.from_targets([1, 2, 3], [2, 3, 4])
    ones = Datum.from_targets([1, 2, 3], [2, 3, 4], weights=[1.0, 1.0, 1.0])
    got, expected = (
        run_pass(tiny64, make_adapter(tiny64), [datum], "cross_entropy", {}, forward_only=True)
        for datum in (bare, ones)
    )
    assert got == expected


def test_metrics_are_sums_over_the_batch(tiny64: CausalLM, reference64: Any, make_adapter: Any) -> None:
    adapter = make_adapter(tiny64)
    case = CASES["ppo"]
    tensors, rank = adapter.weights.tensors, adapter.weights.config.rank

    def policy(tokens: Tensor) -> Tensor:
        return reference64.logprobs(tokens, tensors, rank)  # type: ignore[no-any-return]

    data, read = make_data(case, policy, tiny64.vocab_size)
    output = run_pass(tiny64, adapter, data, "ppo", {}, forward_only=True)
    log_ratios = torch.cat(
        [policy(tokens).gather(-1, targets[:, None])[:, 0] - inputs["logprobs"] for tokens, targets, inputs in read]
    )
    counted = torch.cat([inputs["advantages"] for _, _, inputs in read]) != 0
    outside = counted & ((log_ratios.exp() < 0.8) | (log_ratios.exp() > 1.2))
    assert output.metrics["tokens:sum"] == sum(LENGTHS)
    # A prompt, masked by advantages of zero, says nothing of how far the policy has moved.
    assert output.metrics["action_tokens:sum"] == int(counted.sum()) < sum(LENGTHS)
    assert output.metrics["clipped_tokens:sum"] == int(outside.sum()) > 0
    assert output.metrics["kl_old_new:sum"] == pytest.approx(-float(log_ratios[counted].sum()), rel=1e-9)
    # The protocol's clients reduce metrics by the word behind the colon, and need exactly one.
    assert all(name.count(":") == 1 for name in output.metrics)
