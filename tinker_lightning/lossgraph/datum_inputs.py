"""Inputs and metrics of per-datum losses, which the protocol uploads with `create_custom_loss`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, MissingInput
from tinker_lightning.lossgraph.graphs.graph import Graph
from tinker_lightning.lossgraph.graphs.json import Node, Ref, mapped
from tinker_lightning.lossgraph.graphs.run import Program
from tinker_lightning.types import TensorData

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinker_lightning.lossgraph.graph_loss import GraphLoss

# The name of an input that multiplies the loss, for servers that have no other way to scale it.
SCALE = "loss_scale"


def select_inputs(loss: GraphLoss, given: Mapping[str, TensorData]) -> dict[str, TensorData]:
    """Returns the inputs that a loss reads from a datum, without `logprobs`; sparse ones stay sparse."""
    selected: dict[str, TensorData] = {}
    for input_name, rank in loss.inputs.items():
        name = "target_tokens" if input_name == "logprobs" else input_name
        if name not in given:
            raise MissingInput(f"{name}: missing; {loss.name} reads it")
        tensor = given[name]
        if rank == 0 and tensor.shape == [1]:  # protobuf does not distinguish a scalar from a vector of length 1
            tensor = TensorData(tensor.to_numpy().reshape(()))
        if len(tensor.shape) != rank:
            raise InvalidDatum(f"{name}: has the shape {tensor.shape}, but {loss.name} takes {rank} dimensions")
        if input_name != "logprobs":
            selected[name] = tensor
    return selected


def meta_tensors(selected: Mapping[str, TensorData], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns tensors with the shapes of the selected inputs and without memory."""
    return {
        name: torch.empty(each.shape, dtype=torch.int64 if each.dtype == "int64" else dtype, device="meta")
        for name, each in selected.items()
    }


def dense_tensors(selected: Mapping[str, TensorData], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the selected inputs as dense tensors, and converts floating-point ones to `dtype`."""
    tensors = {name: each.to_torch() for name, each in selected.items()}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}


def combine_metrics(sums: Mapping[str, float], datums: int) -> dict[str, float]:
    """Returns the metrics of a batch, given their sums over datums."""
    return {name: value / datums if name.endswith(":mean") else value for name, value in sums.items()}


def scale_by_input(loss: GraphLoss) -> GraphLoss:
    """Returns the loss multiplied by an additional input, `loss_scale`."""
    graph, count = loss.program.graph, len(loss.program.graph.inputs)

    def moved(value: Any) -> Any:
        return mapped(value, lambda part: Ref(part.node + (part.node >= count)) if isinstance(part, Ref) else part)

    value, metrics = moved(graph.output)
    calls = [replace(node, args=moved(node.args), kwargs=moved(dict(node.kwargs))) for node in graph.calls]
    calls.append(Node("call_function", "scaled_loss", "operator.mul", (value, Ref(count))))
    scaled = Graph([*graph.inputs, SCALE], calls, (Ref(count + len(calls)), metrics))
    return replace(loss, inputs={**loss.inputs, SCALE: 0}, program=Program(Graph.decode(scaled.encode())))
