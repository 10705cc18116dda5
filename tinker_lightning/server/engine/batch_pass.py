"""Passes with a batch-level loss, on the logits or on the stacked log-probabilities of the targets.

Shapes: B datums, T positions of the longest, V vocabulary, D hidden width, K alternatives per position.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidLoss
from tinker_lightning.losses.custom import check_finite, check_scalar, number, prefix_clashes
from tinker_lightning.lossgraph.graph_loss import OUTPUTS, check_batch_inputs, dense_tensors, metric_names
from tinker_lightning.lossgraph.program import Limits
from tinker_lightning.server.engine.datum_losses import error_context, loss_gradient
from tinker_lightning.server.engine.datum_pass import datum_context, read_targets, read_tokens
from tinker_lightning.server.engine.interface import RETURNED_BYTES
from tinker_lightning.types import ForwardBackwardOutput, TensorData
from tinker_lightning.types.datum import PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.lossgraph.graph_loss import Source
    from tinker_lightning.lossgraph.server_loss import RegisteredLoss
    from tinker_lightning.server.engine.adapter import LoraAdapter
    from tinker_lightning.server.engine.causal_lm import CausalLM
    from tinker_lightning.types import Datum

# A loss on logits gets the logits of the whole batch and keeps several tensors of this size, up to a gigabyte each.
MAX_LOGITS = 1 << 28
_PADDING: dict[Source, str] = {
    "logits": "; padding has logits like any other position, so multiply by attention_mask",
    "logprobs": "; shorter datums are padded with zeros",
}
# Limits for the intermediate tensors of a loss: their total size, and the number of elements read and written.
MAX_LOSS_BYTES = 4 << 30
MAX_WORK = 1 << 32
# Memory limit for the activations of a batch. The gradient of a batch-level loss is known only after the forward pass
# of the whole batch, so activations have to be kept until then or recomputed.
KEPT_BYTES = 2 << 30
# Inputs of the losses in this package with a known layout, in addition to those that every datum is checked for.
_BY_TOKEN = PER_TOKEN | {"reference_logprobs", "teacher_logprobs"}
_BY_DATUM = frozenset({"reward"})


def run_batch_pass(
    base: CausalLM,
    adapter: LoraAdapter,
    data: Sequence[Datum],
    loss: RegisteredLoss,
    loss_fn_config: Mapping[str, float | str],
    loss_fn_inputs: Mapping[str, TensorData],
    *,
    forward_only: bool = False,
    scale: float = 1.0,
    reserve: Callable[[int], None] | None = None,
) -> ForwardBackwardOutput:
    """Runs a pass with a batch-level loss; adds `scale` times the gradient to the adapter unless `forward_only`.

    The adapter is unchanged if an error is raised. `reserve` takes memory for the tensors of the loss.
    """
    if not data:
        raise InvalidInput("data: the batch is empty; send at least one datum")
    settings = loss.settings(loss_fn_config)
    if loss.reads is not None:
        check_batch_inputs(loss.name, loss_fn_inputs, loss.reads)
    dtype = next(iter(adapter.weights.tensors.values())).dtype
    tokens_B: list[Tensor] = []
    for i, datum in enumerate(data):
        with datum_context(i):
            tokens_B.append(read_tokens("model_input", datum.model_input, base))
    lengths = [len(tokens) for tokens in tokens_B]
    targets_B = read_targets(data, lengths, base) if loss.source == "logprobs" else []
    shape = [len(data), max(lengths), *(targets_B[0].shape[1:] if targets_B else [base.vocab_size])]
    if math.prod(shape) > MAX_LOGITS:
        raise InvalidInput(f"data: logits of shape {shape} exceed {MAX_LOGITS} elements. Send fewer or shorter datums.")
    limits = _limits(math.prod(shape), reserve)
    selected = loss.select({*loss_fn_inputs, *(name for datum in data for name in datum.loss_fn_inputs)})
    inputs = stack_inputs(data, loss_fn_inputs, selected, lengths, dtype, limits.elements)
    mask_BT = pad_sequence([torch.ones(length, dtype=dtype) for length in lengths], batch_first=True)
    shapes = _outputs(loss.source, torch.empty(shape, dtype=dtype, device="meta"), mask_BT)
    with error_context(loss.name):
        loss.check(shapes, inputs, settings, limits)

    with base.lora.use(adapter.weights) as parameters, torch.no_grad() if forward_only else nullcontext():
        hidden_B = _hidden_states(base, tokens_B, adapter.token_budget)
        if loss.source == "logits":
            model_output = base.head(pad_sequence(hidden_B, batch_first=True)).to(dtype)
        else:
            model_output = _target_logprobs(base, hidden_B, targets_B)
        leaf = model_output.detach().requires_grad_(not forward_only)
        with error_context(loss.name):
            output = loss(_outputs(loss.source, leaf, mask_BT), inputs, settings, limits)
            check_scalar(output.loss)
            check_finite(output.loss, hint=_PADDING[loss.source])
            totals = {"loss:sum": output.loss.item(), "tokens:sum": float(sum(lengths))}
            names = metric_names(output.diagnostics)
            numbers = {names[name]: number(name, value) for name, value in output.diagnostics.items()}
            metrics = {**prefix_clashes(numbers, totals, "loss"), **totals}
            returned = model_output if output.logprobs is None and loss.source == "logprobs" else output.logprobs
            alternatives = math.prod(shape[2:]) if loss.source == "logprobs" else 1
            by_datum = _per_datum(returned, lengths, alternatives)
            gradient = None if forward_only else loss_gradient(output.loss, leaf)
        if gradient is not None:
            del output, returned, leaf  # frees the autograd graph of the loss before the model's backward
            model_output.backward(gradient if scale == 1 else gradient * scale)
            adapter.add_gradient(parameters)
    return ForwardBackwardOutput(by_datum, metrics)


def _limits(elements: int, reserve: Callable[[int], None] | None = None) -> Limits:
    """Returns limits that grow with the size of the model output, up to a maximum."""
    total = min(max(1 << 27, 64 * elements), MAX_WORK)
    largest = max(1 << 23, 2 * elements)
    return Limits(elements=largest, total=total, seconds=60.0, memory=MAX_LOSS_BYTES, reserve=reserve)


def _outputs(source: Source, model_output: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    return dict(zip(OUTPUTS[source], (model_output, mask_BT), strict=False))


def _hidden_states(base: CausalLM, tokens_B: Sequence[Tensor], token_budget: int | None) -> list[Tensor]:
    """Returns the hidden states of each datum, `[T, D]`.

    Activations that would take too much memory are recomputed in the backward pass.
    """
    lengths = [len(tokens) for tokens in tokens_B]
    batches = base.calls(lengths, token_budget)
    recompute = len(batches) > 1 and base.kept_bytes(lengths, token_budget) > KEPT_BYTES
    hidden_B: list[Tensor] = [torch.empty(0)] * len(tokens_B)
    for batch in batches:
        tokens_BT = pad_sequence([tokens_B[i] for i in batch], batch_first=True)
        if recompute and torch.is_grad_enabled():
            hidden_BTD = checkpoint(base.hidden_states, tokens_BT, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden_BTD = base.hidden_states(tokens_BT)
        for i, hidden_TD in zip(batch, hidden_BTD, strict=True):
            hidden_B[i] = hidden_TD[: len(tokens_B[i])]
    return hidden_B


def _target_logprobs(base: CausalLM, hidden_B: Sequence[Tensor], targets_B: Sequence[Tensor]) -> Tensor:
    """Returns log-probabilities as `[B, T]` or `[B, T, K]`, padded with zeros."""
    targets_NK = torch.cat([targets.reshape(len(targets), -1) for targets in targets_B])
    parts = base.target_logprobs(torch.cat(list(hidden_B)), targets_NK).split([len(targets) for targets in targets_B])
    return pad_sequence(
        [part.reshape(targets.shape) for part, targets in zip(parts, targets_B, strict=True)], batch_first=True
    )


def _per_datum(logprobs: Any, lengths: Sequence[int], width: int = 1) -> list[dict[str, TensorData]]:
    """Splits log-probabilities by datum, without padding; raises `InvalidLoss` if a row is missing."""
    if logprobs is None:
        return [{} for _ in lengths]
    if not isinstance(logprobs, Tensor) or not logprobs.ndim or logprobs.shape[0] != len(lengths):
        got = f"the shape {list(logprobs.shape)}" if isinstance(logprobs, Tensor) else type(logprobs).__name__
        raise InvalidLoss(
            f"its logprobs must have one row for each of the {len(lengths)} datums, such as [B, T], got {got}. Return "
            "None if there are none; other numbers are diagnostics."
        )
    if (most := (RETURNED_BYTES // 4 + width) * sum(lengths)) < logprobs.numel():
        # An expanded tensor takes no memory until it is returned.
        raise InvalidLoss(
            f"its logprobs have {logprobs.numel()} elements for {sum(lengths)} tokens; at most {most} are returned. "
            "Return [B, T], or None."
        )
    # Copied, because a view would keep the memory of the tensor that it is a part of.
    copied = logprobs.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
    by_token = logprobs.ndim > 1 and logprobs.shape[1] == max(lengths)
    return [
        {"logprobs": TensorData(row[:length] if by_token else row.reshape(-1), copy=False)}
        for row, length in zip(copied, lengths, strict=True)
    ]


def stack_inputs(
    data: Sequence[Datum],
    once: Mapping[str, TensorData],
    names: Sequence[str],
    lengths: Sequence[int],
    dtype: torch.dtype,
    max_elements: int,
) -> dict[str, Tensor]:
    """Returns the named inputs, stacked over datums; inputs in `once` keep their shape.

    Inputs with one row per token become `[B, T, ...]`, padded with zeros, and inputs with one number per datum become
    `[B]`. Other inputs must have the same shape in all datums. If every datum has a single token and a single number,
    only a known name determines the layout.
    """
    inputs = {}
    for name in names:
        holders = [i for i, datum in enumerate(data) if name in datum.loss_fn_inputs]
        if name in once:
            if holders:
                raise InvalidInput(f"loss_fn_inputs: {name} is passed for the batch, but datum {holders[0]} has it too")
            _check_size(name, math.prod(once[name].shape), max_elements)
            inputs[name] = _tensor(once[name], dtype).clone()  # the loss may write to it
            continue
        if len(holders) < len(data):
            index = next(i for i in range(len(data)) if i not in holders)
            raise InvalidDatum(f"datum {index}: {name}: missing; datum {holders[0]} has it, and the loss reads it")
        inputs[name] = _stack(name, [datum.loss_fn_inputs[name] for datum in data], lengths, dtype, max_elements)
    return inputs


def _stack(
    name: str, tensors: Sequence[TensorData], lengths: Sequence[int], dtype: torch.dtype, max_elements: int
) -> Tensor:
    shapes = [tensor.shape for tensor in tensors]
    by_token = all(shape[:1] == [length] for shape, length in zip(shapes, lengths, strict=True))
    rows = max(lengths) if by_token else math.prod(shapes[0][:1])
    # Checked before tensors are made dense, because a few bytes of sparse rows can declare any size.
    _check_size(name, len(tensors) * max(rows * math.prod(shape[1:]) for shape in shapes), max_elements)
    if name in _BY_TOKEN and not by_token:
        i = next(i for i, (shape, length) in enumerate(zip(shapes, lengths, strict=True)) if shape[:1] != [length])
        raise InvalidDatum(
            f"datum {i}: {name} has the shape {shapes[i]}, but it must have one row for each of the {lengths[i]} "
            "tokens. Use another name for a number of the whole datum."
        )
    # Protobuf does not distinguish a scalar from a vector with one element.
    if name not in _BY_TOKEN and all(math.prod(shape) == 1 and len(shape) < 2 for shape in shapes):
        if by_token and name not in _BY_DATUM:
            raise InvalidInput(
                f"loss_fn_inputs: {name}: every datum has one token and one number, so it could be a number per datum, "
                f"[B], or per token, [B, T]. Give it once for the batch, loss_fn_inputs={{{name!r}: ...}}, with the "
                "shape that the loss reads, or add datums with more tokens."
            )
        return torch.stack([_tensor(tensor, dtype).reshape(()) for tensor in tensors])
    trailing = [shape[1:] for shape in shapes]
    if by_token and all(shape == trailing[0] for shape in trailing):
        return pad_sequence([_tensor(tensor, dtype) for tensor in tensors], batch_first=True)
    if all(shape == shapes[0] for shape in shapes):
        return torch.stack([_tensor(tensor, dtype) for tensor in tensors])
    i = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
    raise InvalidDatum(
        f"datum {i}: {name} has the shape {shapes[i]}, but datum 0 has {shapes[0]}. Give one row per token, or the "
        "same shape in every datum."
    )


def _tensor(tensor: TensorData, dtype: torch.dtype) -> Tensor:
    return dense_tensors({"": tensor}, dtype)[""]


def _check_size(name: str, elements: int, max_elements: int) -> None:
    if elements > max_elements:
        raise InvalidInput(f"loss_fn_inputs: {name} has {elements} values; at most {max_elements} are allowed")
