"""An uploaded per-datum loss, which is also computed locally where the server does not run it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.client.sdk.inputs import to_datum
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import surrogate
from tinker_lightning.lossgraph.datum_inputs import combine_metrics, dense_tensors, select_inputs
from tinker_lightning.lossgraph.graph_loss import GraphLoss
from tinker_lightning.lossgraph.graphs.graph import places_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.lossgraph.graphs.graph import Graph
    from tinker_lightning.types import Datum, ForwardBackwardOutput


@dataclass(frozen=True, slots=True)
class LossHandle:
    """A per-datum loss that `create_custom_loss` returned: `forward_backward(data, handle)` trains with it.

    Call it with datums and their log-probabilities to compute it locally, as for servers that do not run such losses.
    """

    name: str
    session_id: str
    loss: GraphLoss = field(repr=False)
    loss_id: str | None = None
    number: int = 0  # of the upload in the session, by which the server recognizes a repeated one
    by_input: bool = False  # whether the scale is sent as an input of each datum, for servers without a scale

    def __call__(self, data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Returns the sum of the datums' losses, and their metrics."""
        terms: list[Tensor] = []
        sums: dict[str, float] = {}
        for i, (datum, each) in enumerate(zip(data, logprobs, strict=True)):
            try:
                selected = select_inputs(self.loss, to_datum(datum).loss_fn_inputs)
                output = self.loss({"logprobs": each}, dense_tensors(selected, each.dtype))
                surrogate.check_scalar(output.loss)
            except InvalidInput as error:
                raise located(type(error)(f"datum {i}: {self.name}: {error}"), [self.loss.program.graph]) from error
            terms.append(output.loss)
            for name, value in output.diagnostics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        return torch.stack(terms).sum(), combine_metrics(sums, len(terms))


def located(error: BaseException, graphs: Sequence[Graph]) -> BaseException:
    """Adds the line of the user's function to an error that names a node of a graph."""
    places = places_of(str(error), graphs) if isinstance(error, InvalidInput) else []
    if not places:
        return error
    explained = type(error)(f"{error}\n    at {' or '.join(places)}")
    explained.__dict__.update(error.__dict__)  # the operation and request id
    explained.__cause__ = error.__cause__
    return explained


def with_loss(output: ForwardBackwardOutput, data: list[Datum], handle: LossHandle) -> ForwardBackwardOutput:
    """Adds the locally computed loss to the result of a forward pass."""
    with torch.no_grad():
        loss, metrics = handle(data, [leaf.detach() for leaf in surrogate.leaves(output, data)])
    own = {**output.metrics, "loss:sum": float(loss)}
    metrics = {**surrogate.set_apart(metrics, own, "loss"), **own}
    return replace(output, metrics=metrics)


def times(handle: LossHandle, scale: float) -> surrogate.LossFn:
    """Returns a loss with the same value and `scale` times the gradient."""
    if scale == 1:
        return handle

    def scaled_loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = handle(data, logprobs)
        return loss + (scale - 1) * (loss - loss.detach()), metrics

    return scaled_loss
