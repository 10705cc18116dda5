"""The losses that the protocol knows by name, as functions of the log-probabilities of one datum.

Each returns the loss of every token (and of every alternative, for `[T, K]` targets) before the sum: the protocol's
losses are plain sums over tokens and datums. `old_logprobs` belong to the policy that sampled the tokens.

`LOSSES` describes each of them: the server computes with it, and clients use it to check and scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, InvalidLoss
from tinker_lightning.losses.batch import TokenCount, action_tokens, total_weight
from tinker_lightning.types import TensorData

if TYPE_CHECKING:
    from tinker_lightning.types import Datum

Threshold: TypeAlias = float | Tensor

# The defaults of the protocol.
CLIP_LOW, CLIP_HIGH, DRO_BETA = 0.8, 1.2, 0.05
# A loss of hosted Tinker whose formula is not published, so that nothing else can compute it.
UNPUBLISHED = "stable_reinforce"
NOT_PUBLISHED = (
    "stable_reinforce exists on hosted Tinker only, because its formula is not published. Train with another loss; "
    'in tinker-cookbook, AsyncConfig(loss_fn="ppo") or, for recipes with a loss of their own, loss_fn="ppo" or "cispo".'
)
LINEAR_ONLY = (
    "Its value is NaN until the server has computed it: it can be multiplied by a number other than 0 and added to "
    "other losses, but no other function of it has a gradient. For those, write the loss in Python."
)


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Returns `-w·p`, which is linear in weights of either sign, so a client can send any gradient as weights.

    >>> cross_entropy(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))
    tensor([1., 1.])
    """
    return -weights * logprobs


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Returns `-r·A` with `r = exp(p - q)`: the policy gradient, corrected for the policy that sampled.

    >>> importance_sampling(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -3.0]))
    tensor([-1.,  3.])
    """
    return -(logprobs - old_logprobs).exp() * advantages


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: Threshold = CLIP_LOW, high: Threshold = CLIP_HIGH
) -> Tensor:
    """Returns `-min(r·A, clip(r, low, high)·A)` (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    >>> ppo(torch.ones(1), torch.zeros(1), torch.ones(1))
    tensor([-1.2000])
    """
    return _clipped_objective((logprobs - old_logprobs).exp(), advantages, low, high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: Threshold = CLIP_LOW, high: Threshold = CLIP_HIGH
) -> Tensor:
    """Returns `-sg(clip(r, low, high))·p·A` (MiniMax 2025, arXiv:2506.13585): every token keeps its gradient.

    >>> cispo(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0]))
    tensor([2.])
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    return -_clip(ratio, low, high) * logprobs * advantages


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, beta: float = DRO_BETA) -> Tensor:
    """Returns `-(p·A - β/2·(p - q)²)` (Richemond et al. 2024, arXiv:2405.19107): held close to the sampling policy.

    >>> dro(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0]))
    tensor([2.])
    """
    return -(logprobs * advantages - 0.5 * beta * (logprobs - old_logprobs) ** 2)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    low: Threshold = CLIP_LOW,
    high: Threshold = CLIP_HIGH,
    *,
    dim: int | None = None,
) -> Tensor:
    """Returns PPO's loss with one ratio for the whole sequence (Zheng et al. 2025, arXiv:2507.18071, token-level).

    The ratio is `exp(mean(p - q))` over the tokens whose mask is nonzero, or 1 if there are none; its gradient at each
    token is the gradient of the token's log-probability. `dim` is the token axis; without it, all values are one
    sequence.

    >>> gspo(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.ones(2))
    tensor([-1., -1.])
    """
    counted = sequence_ratio_mask != 0
    total = torch.where(counted, logprobs.detach() - old_logprobs, 0.0).sum(dim, keepdim=True)
    log_ratio = total / counted.sum(dim, keepdim=True).clamp(min=1)
    return _clipped_objective((log_ratio + logprobs - logprobs.detach()).exp(), advantages, low, high)


def threshold_fault(low: Threshold, high: Threshold, counted: Tensor | None = None) -> str | None:
    """Returns what is wrong with the thresholds of tokens that count, or None."""
    if not (isinstance(low, Tensor) or isinstance(high, Tensor)):  # without tensors, because a function may be traced
        return None if 0 <= low <= 1 <= high else _threshold_message(low, high)
    low, high = torch.as_tensor(low), torch.as_tensor(high)
    wrong = ~((low >= 0) & (low <= 1) & (high >= 1))
    if counted is not None:
        wrong = wrong & counted
    if not wrong.any():
        return None
    return _threshold_message(*(bound.expand(wrong.shape)[wrong][0].item() for bound in (low, high)))


def _threshold_message(low: float, high: float) -> str:
    return (
        f"clip_low_threshold must lie in [0, 1] and clip_high_threshold must be at least 1, got {low:g} and {high:g}: "
        "they are bounds on the ratio itself, 0.8 and 1.2, not 0.2"
    )


def _clipped_objective(ratio: Tensor, advantages: Tensor, low: Threshold, high: Threshold) -> Tensor:
    return -torch.minimum(ratio * advantages, _clip(ratio, low, high) * advantages)


def _clip(ratio: Tensor, low: Threshold, high: Threshold) -> Tensor:
    # One bound at a time: clamp takes two numbers or two tensors, and the thresholds may be one of each.
    return ratio.clamp(min=low).clamp(max=high)


def ratio_totals(
    log_ratio: Tensor, counted: Tensor, low: Threshold | None = None, high: Threshold | None = None
) -> dict[str, Tensor]:
    """Returns sums over the tokens that count: their number, their ratios, and how many are outside the thresholds.

    Prompt tokens do not count: they have no log-probabilities of the sampling policy.
    """
    ratio = log_ratio.exp()

    def total(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum()

    totals = {"ratio": total(ratio), "kl_old_new": total(-log_ratio), "action_tokens": counted.sum()}
    if low is not None and high is not None:
        totals["clipped_tokens"] = total((ratio < low) | (ratio > high))
    return totals


def _weight_metrics(_: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {"weights:sum": weights.sum()}


def _policy_metrics(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *_: Any) -> dict[str, Tensor]:
    totals = ratio_totals(logprobs - old_logprobs, advantages != 0)
    return {f"{name}:sum": totals[name] for name in ("action_tokens", "kl_old_new")}


def _clip_metrics(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: Threshold, high: Threshold
) -> dict[str, Tensor]:
    totals = ratio_totals(logprobs - old_logprobs, advantages != 0, low, high)
    return {f"{name}:sum": totals[name] for name in ("action_tokens", "kl_old_new", "clipped_tokens")}


_DIVERGED = "a learning rate so high that training has diverged"
_RATIOS = (
    "Look for tokens whose logprobs are far below the model's, so that their ratio overflows (also where the "
    f"advantage is 0), for huge advantages, or {_DIVERGED}"
)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """The description of a loss.

    Args:
        formula: The loss of each token.
        description: The text that `list_loss_functions` shows.
        inputs: The datum inputs that the formula takes after the log-probabilities, in order.
        settings: The settings and defaults that the formula takes next; datums may override them per token.
        scaled_by: Inputs and settings that, all multiplied by a factor, multiply the loss by it.
        has_negative: Whether the factor may be negative.
        masked_by: Inputs that are all zero where the loss ignores the log-probability; none if it ignores no position.
        is_sequence_level: Whether a datum is one sequence, so that `[T, K]` targets are not supported.
        token_count: Returns the number of tokens by which `reduction="mean"` divides the loss.
        metrics: Returns sums to add up over datums, named as in the protocol, from the arguments of the formula.
        overflow: What to look for if the loss is not finite.
    """

    formula: Callable[..., Tensor]
    description: str
    inputs: tuple[str, ...]
    settings: Mapping[str, float] = field(default_factory=dict)
    scaled_by: tuple[str, ...] = ("advantages",)
    has_negative: bool = True
    masked_by: tuple[str, ...] = ("advantages",)
    is_sequence_level: bool = False
    token_count: TokenCount = action_tokens
    metrics: Callable[..., dict[str, Tensor]] = _policy_metrics
    overflow: str = _RATIOS

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs that the loss looks for in a datum, apart from the targets."""
        return (*self.inputs, *self.settings)

    def total(
        self,
        logprobs: Sequence[TensorData],
        inputs: Sequence[Mapping[str, TensorData]],
        settings: Mapping[str, float | str],
    ) -> float:
        """Returns the loss of datums, given their log-probabilities, their inputs, and the settings."""
        defaults = {name: float(settings.get(name, value)) for name, value in self.settings.items()}
        datums = list(zip(logprobs, inputs, strict=True))
        total = 0.0
        with torch.no_grad():
            for part in [[datum] for datum in datums] if self.is_sequence_level else [datums]:
                present = [name for name in self.reads if any(name in own for _, own in part)]
                arguments = {name: _joined(name, part, defaults) for name in present}
                logp = torch.cat([logp.to_torch().flatten() for logp, _ in part])
                terms = self.formula(logp, *({**defaults, **arguments}[name] for name in self.reads))
                total += float(terms.sum(dtype=torch.float64))
        return total

    @property
    def has_thresholds(self) -> bool:
        """Whether the settings are the two thresholds."""
        return self.settings == _CLIP


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}

LOSSES: Mapping[str, BuiltIn] = {
    "cross_entropy": BuiltIn(
        cross_entropy,
        "-Σ w·p: the weighted negative log-likelihood of the targets",
        ("weights",),
        scaled_by=("weights",),
        masked_by=("weights",),
        token_count=total_weight,
        metrics=_weight_metrics,
        overflow=f"Look for huge weights, or {_DIVERGED}",
    ),
    "importance_sampling": BuiltIn(
        importance_sampling, "-Σ r·A: the policy gradient, corrected for the policy that sampled", _POLICY
    ),
    "ppo": BuiltIn(
        ppo,
        "-Σ min(r·A, clip(r)·A): clipped policy gradient",
        _POLICY,
        _CLIP,
        has_negative=False,
        metrics=_clip_metrics,
    ),
    "cispo": BuiltIn(
        cispo,
        "-Σ sg(clip(r))·p·A: clipped weights, every token keeps its gradient",
        _POLICY,
        _CLIP,
        metrics=_clip_metrics,
    ),
    "dro": BuiltIn(
        dro,
        "-Σ (p·A - β/2·(p - q)²): held close to the sampling policy",
        _POLICY,
        {"beta": DRO_BETA},
        scaled_by=("advantages", "beta"),
        masked_by=(),
    ),
    "gspo": BuiltIn(
        gspo,
        "clipped policy gradient with one ratio for each sequence",
        (*_POLICY, "sequence_ratio_mask"),
        _CLIP,
        has_negative=False,
        masked_by=("advantages", "sequence_ratio_mask"),
        is_sequence_level=True,
    ),
}


def _joined(
    name: str, datums: Sequence[tuple[TensorData, Mapping[str, TensorData]]], defaults: Mapping[str, float]
) -> Tensor:
    """Returns an input of datums one after the other, or the setting of the same name for datums that lack it."""
    parts = [
        own[name].to_torch() if name in own else torch.full(tuple(logp.shape), defaults[name]) for logp, own in datums
    ]
    return torch.cat([part.flatten() for part in parts])


def check_factor(loss: str, factor: float) -> None:
    """Raises `InvalidLoss` if the factor of a server-side loss, the gradient that reaches it, is 0 or not finite."""
    if not math.isfinite(factor) or factor == 0:
        raise InvalidLoss(f"a gradient of {factor} reached the server-side loss {loss!r}. {LINEAR_ONLY}")


def scale_loss(
    data: Sequence[Datum], loss: str, config: Mapping[str, float | str], factor: float
) -> tuple[list[Datum], dict[str, float | str]]:
    """Returns datums and settings whose loss is `factor` times the loss of `data` and `config`."""
    check_factor(loss, factor)
    settings = dict(config)
    if factor == 1:
        return list(data), settings
    built_in = LOSSES.get(loss)
    if built_in is None:
        raise InvalidLoss(
            f"the server-side loss {loss!r} cannot be scaled by {factor}: it is not known to be homogeneous in one of "
            "its inputs. Use it without gradient accumulation and without a factor."
        )
    if factor < 0 and not built_in.has_negative:
        raise InvalidLoss(f"{loss!r} cannot be multiplied by {factor}: it clips, so its negative is another loss")
    for name in built_in.scaled_by:
        if name in built_in.settings:
            settings[name] = float(settings.get(name, built_in.settings[name])) * factor
    needed = [name for name in built_in.scaled_by if name in built_in.inputs]
    return [_scale_inputs(i, datum, built_in.scaled_by, needed, factor) for i, datum in enumerate(data)], settings


def _scale_inputs(i: int, datum: Datum, names: Sequence[str], needed: Sequence[str], factor: float) -> Datum:
    if missing := [name for name in needed if name not in datum.loss_fn_inputs]:
        raise InvalidDatum(f"datum {i}: {missing[0]}: missing; the loss needs it")
    inputs = datum.loss_fn_inputs
    return datum.with_inputs(
        {name: TensorData(inputs[name].to_torch() * factor, copy=False) for name in names if name in inputs}
    )
