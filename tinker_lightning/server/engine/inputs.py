"""Inputs of a batch-level loss: stacked inputs of the datums, and inputs of the whole batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.types.datum import PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.types import Datum, TensorData


# Inputs of the losses in this package with a known layout, in addition to those that every datum is checked for.
_BY_TOKEN = PER_TOKEN | {"reference_logprobs", "teacher_logprobs"}
_BY_DATUM = frozenset({"reward"})


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
            lacking = next(i for i in range(len(data)) if i not in holders)
            raise InvalidDatum(f"datum {lacking}: {name}: missing; datum {holders[0]} has it, and the loss reads it")
        inputs[name] = _stacked(name, [datum.loss_fn_inputs[name] for datum in data], lengths, dtype, max_elements)
    return inputs


def _stacked(
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
    dense = tensor.to_torch()
    return dense.to(dtype) if dense.is_floating_point() else dense


def _check_size(name: str, elements: int, max_elements: int) -> None:
    if elements > max_elements:
        raise InvalidInput(f"loss_fn_inputs: {name} has {elements} values; at most {max_elements} are allowed")
