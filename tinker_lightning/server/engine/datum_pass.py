"""Forward and backward passes with a per-datum loss, for batches of any size and any mix of lengths.

Shapes: B datums, T positions, N positions of all datums without padding, K alternatives per position.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidLoss
from tinker_lightning.losses.custom import prefix_clashes
from tinker_lightning.lossgraph.graph_loss import combine_metrics
from tinker_lightning.server.engine.datum_losses import BoundGraph, BoundLoss, error_context
from tinker_lightning.types import ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from tinker_lightning.lossgraph.graph_loss import GraphLoss
    from tinker_lightning.server.engine.adapter import LoraAdapter
    from tinker_lightning.server.engine.causal_lm import CausalLM
    from tinker_lightning.server.engine.interface import Activations
    from tinker_lightning.types import Datum, ModelInput


@dataclass(frozen=True, slots=True)
class _Example:
    """A validated datum, as tensors."""

    tokens_T: Tensor
    targets_TK: Tensor
    shape: list[int]
    arguments: Any  # as `read` of the loss returns them
    counted: tuple[Tensor, Tensor] | None = None  # where log-probabilities matter, unless everywhere; values elsewhere


def start_pass(
    base: CausalLM,
    adapter: LoraAdapter,
    data: Sequence[Datum],
    loss_fn: str | GraphLoss,
    loss_fn_config: Mapping[str, float | str],
    *,
    forward_only: bool = False,
    scale: float = 1.0,
    activations: Activations | None = None,
    counted_only: bool = False,
    reserve: Callable[[int], None] | None = None,
    should_pause: Callable[[], bool] = lambda: False,
) -> Generator[None, None, ForwardBackwardOutput]:
    """Returns the log-probabilities of all targets and the summed loss; adds the gradient unless `forward_only`.

    Yields where it pauses: the model may run anything else then, and the result has the same bits. The adapter is
    unchanged if an error is raised, or if the pass is not run to its end.

    Args:
        base: The model.
        adapter: The adapter, which gets the gradient.
        data: The datums.
        loss_fn: A built-in loss, or an uploaded one.
        loss_fn_config: The settings of the loss.
        forward_only: Whether to leave out the backward pass.
        scale: A factor for the gradient, but not for the loss.
        activations: Filled by a `forward_only` pass; a backward pass over the same data and weights takes them, which
            gives the same bits as a pass without them.
        counted_only: Whether log-probabilities are computed only where a built-in loss depends on them; elsewhere, 0 or
            the log-probabilities of the sampling policy are returned. Values and gradients are the same up to rounding,
            because a product of fewer rows may be rounded differently.
        reserve: Takes memory for the tensors of an uploaded loss.
        should_pause: Called after each model call.
    """
    loss = BoundLoss(loss_fn, loss_fn_config) if isinstance(loss_fn, str) else BoundGraph(loss_fn, reserve)
    dtype = next(iter(adapter.weights.tensors.values())).dtype
    if not data:
        raise InvalidInput("data: the batch is empty; send at least one datum")
    examples = [_read(i, datum, base, loss, dtype, counted_only=counted_only) for i, datum in enumerate(data)]
    lengths = [len(example.tokens_T) for example in examples]

    outputs: list[dict[str, TensorData]] = [{} for _ in examples]
    metrics: Counter[str] = Counter()
    total = 0.0

    def run_call(batch: list[int]) -> None:
        nonlocal total
        terms: list[Tensor] = []
        kept = None if forward_only or activations is None else activations.take(batch)
        with nullcontext() if activations is None else torch.enable_grad():
            logprobs_B = kept or _logprobs(base, [examples[i] for i in batch])
        if forward_only and activations is not None:
            positions = len(batch) * max(lengths[i] for i in batch)
            activations.keep(batch, logprobs_B, base.activation_bytes(positions))
        for i, logprobs in zip(batch, logprobs_B, strict=True):
            with error_context(f"datum {i}: {loss.name}"):
                evaluated = loss.evaluate(logprobs, examples[i].arguments)
            terms.append(evaluated.term if scale == 1 else evaluated.term * scale)
            total += evaluated.value
            outputs[i] = {"logprobs": TensorData(_compact(logprobs.detach(), len(batch)), copy=False)}
            metrics.update(evaluated.metrics)
        if not forward_only:
            torch.autograd.backward(terms)

    calls = deque(base.calls(lengths, adapter.token_budget))
    gradients: dict[str, Tensor | None] = {}  # of the calls before a pause
    while calls:
        with base.lora.use(adapter.weights) as parameters, torch.no_grad() if forward_only else nullcontext():
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
            is_paused = False
            while calls and not is_paused:
                run_call(calls.popleft())
                is_paused = bool(calls) and should_pause()
            if is_paused:
                gradients = {name: parameter.grad for name, parameter in parameters.items()}
            elif not forward_only:
                adapter.add_gradient(parameters)
        if is_paused:
            yield
    totals = {"loss:sum": total, "tokens:sum": sum(lengths)}
    combined = combine_metrics(metrics, len(examples))
    return ForwardBackwardOutput(outputs, {**prefix_clashes(combined, totals, "loss"), **totals})


def _compact(logprobs: Tensor, datums: int) -> Tensor:
    """Copies log-probabilities that are a small part of a tensor, which would be kept in memory with them."""
    return logprobs.clone() if logprobs.untyped_storage().nbytes() > 4 * datums * logprobs.nbytes else logprobs


def _logprobs(base: CausalLM, examples: Sequence[_Example]) -> list[Tensor]:
    """Returns the log-probabilities of each example, in the shape of its targets."""
    tokens_BT = pad_sequence([example.tokens_T for example in examples], batch_first=True)
    lengths = [len(example.tokens_T) for example in examples]
    hidden_BTD = base.hidden_states(tokens_BT)
    is_real_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths)[:, None]
    hidden_ND = hidden_BTD.flatten(0, 1)
    if not is_real_BT.all():
        hidden_ND = hidden_ND[is_real_BT.flatten().nonzero()[:, 0]]
    width = max(example.targets_TK.shape[1] for example in examples)
    targets_NK = torch.cat([pad(example.targets_TK, (0, width - example.targets_TK.shape[1])) for example in examples])
    logprobs_NK = _counted_logprobs(base, hidden_ND, targets_NK, examples)
    return [
        part[:, : example.targets_TK.shape[1]].reshape(example.shape)
        for part, example in zip(logprobs_NK.split(lengths), examples, strict=True)
    ]


def _counted_logprobs(base: CausalLM, hidden_ND: Tensor, targets_NK: Tensor, examples: Sequence[_Example]) -> Tensor:
    """Returns log-probabilities, computed only at positions that count."""
    counted = [example.counted for example in examples if example.counted is not None]
    if len(counted) < len(examples):
        return base.target_logprobs(hidden_ND, targets_NK)
    width = targets_NK.shape[1]
    counted_N = torch.cat([mask_T for mask_T, _ in counted]).nonzero()[:, 0]
    logprobs_CK = base.target_logprobs(hidden_ND[counted_N], targets_NK[counted_N])
    fill_NK = torch.cat([pad(fill_TK, (0, width - fill_TK.shape[1])) for _, fill_TK in counted])
    return fill_NK.to(logprobs_CK.dtype).index_copy(0, counted_N, logprobs_CK)


def _read(
    index: int, datum: Datum, base: CausalLM, loss: BoundLoss | BoundGraph, dtype: torch.dtype, *, counted_only: bool
) -> _Example:
    with datum_context(index):
        tokens = read_tokens("model_input", datum.model_input, base)
        targets = _read_targets(datum, base)
        with error_context(f"datum {index}: {loss.name}"):
            arguments = loss.read(datum, dtype=dtype)
    counted = loss.counted_positions(arguments) if counted_only else None
    if counted is not None:
        mask, fill = (each.reshape(len(tokens), -1) for each in counted)
        counted = mask.any(-1), fill
    return _Example(tokens, targets.reshape(len(tokens), -1), list(targets.shape), arguments, counted)


@contextmanager
def datum_context(index: int) -> Iterator[None]:
    """Prefixes the message of an error about the inputs of a datum with its index."""
    try:
        yield
    except InvalidLoss:
        raise
    except InvalidInput as error:
        raise InvalidDatum(f"datum {index}: {error}") from error


def read_targets(data: Sequence[Datum], lengths: Sequence[int], base: CausalLM) -> list[Tensor]:
    """Returns the targets of all datums, which must have the same number of alternatives."""
    targets_B: list[Tensor] = []
    for i, (datum, length) in enumerate(zip(data, lengths, strict=True)):
        with datum_context(i):
            targets = _read_targets(datum, base)
        if len(targets) != length or (targets_B and targets.shape[1:] != targets_B[0].shape[1:]):
            raise InvalidDatum(
                f"datum {i}: target_tokens has the shape {list(targets.shape)}; give as many alternatives for each of "
                f"its {length} tokens as datum 0 has"
            )
        targets_B.append(targets)
    return targets_B


def _read_targets(datum: Datum, base: CausalLM) -> Tensor:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise InvalidDatum("target_tokens: missing; every loss needs the tokens to predict")
    if not math.prod(targets.shape):
        raise InvalidDatum(f"target_tokens: has the shape {targets.shape}, so there is nothing to predict")
    if len(targets.shape) == 2 and targets.shape[1] > base.vocab_size:
        # Checked before the tensor is made dense, because a few bytes of sparse rows can declare any width.
        raise InvalidDatum(f"target_tokens: {targets.shape[1]} alternatives exceed the vocabulary of {base.vocab_size}")
    dense = targets.to_torch()
    _check_range("target_tokens", dense, base.vocab_size)
    return dense


def read_tokens(name: str, model_input: ModelInput, base: CausalLM) -> Tensor:
    """Returns the token ids of an input; `name` is used in error messages."""
    if not model_input.is_text:
        raise InvalidDatum(f"{name}: {base.name} takes text only, but the input has other chunks")
    tokens = torch.from_numpy(model_input.tokens().astype("int64"))
    if not len(tokens):
        raise InvalidDatum(f"{name}: no tokens")
    if len(tokens) > base.max_context_length:
        raise InvalidDatum(
            f"{name}: {len(tokens)} tokens, but {base.name} takes at most {base.max_context_length}. Truncate it."
        )
    _check_range(name, tokens, base.vocab_size)
    return tokens


def _check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        token = int(tokens[tuple(at)])
        fix = "Mask it with a weight or advantage of 0." if token < 0 else "Was it tokenized for another model?"
        raise InvalidDatum(
            f"{name}: the token at {at} is {token}, but the vocabulary has ids 0..{vocab_size - 1}. {fix}"
        )
