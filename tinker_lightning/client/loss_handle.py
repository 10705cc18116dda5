"""A loss of one datum that was uploaded, and how it is computed here where the server does not run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.client.sdk.inputs import to_datum
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import surrogate
from tinker_lightning.lossgraph.datum_loss import DatumLoss
from tinker_lightning.lossgraph.graphs.graph import places_of
from tinker_lightning.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.lossgraph.graphs.graph import Graph


@dataclass(frozen=True, slots=True)
class LossHandle:
    """A loss of one datum, as `create_custom_loss` gives it: `forward_backward(data, handle)` trains with it.

    Called with datums and their log-probabilities it is computed here, which is how `forward_backward_custom` and
    servers without this feature use it.
    """

    name: str
    session_id: str
    loss: DatumLoss = field(repr=False)
    loss_id: str | None = None
    number: int = 0  # of its upload in the session: a repeat with the same one is no second loss
    by_input: bool = False  # the server multiplies by an input of each datum, for it knows no factor of a pass

    def __call__(self, data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The sum of the datums' losses, and their metrics.

        Raises:
            InvalidInput: If a datum lacks an input, or the loss cannot take it.
        """
        terms: list[Tensor] = []
        sums: dict[str, float] = {}
        for i, (datum, each) in enumerate(zip(data, logprobs, strict=True)):
            try:
                selected = self.loss.select(to_datum(datum).loss_fn_inputs)
                term, metrics = self.loss(each, self.loss.tensors(selected, each.dtype))
            except InvalidInput as error:
                raise located(type(error)(f"datum {i}: {self.name}: {error}"), [self.loss.program.graph]) from error
            terms.append(term)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        means = {name: value / len(terms) if name.endswith(":mean") else value for name, value in sums.items()}
        return torch.stack(terms).sum(), means


def located(error: BaseException, graphs: Sequence[Graph]) -> BaseException:
    """An error that names a node of a graph, with the line of the user's function that the node comes from."""
    places = places_of(str(error), graphs) if isinstance(error, InvalidInput) else []
    if not places:
        return error
    told = type(error)(f"{error}\n    at {' or '.join(places)}")
    told.__dict__.update(error.__dict__)  # the operation and request that it was about
    told.__cause__ = error.__cause__
    return told


def with_loss(output: ForwardBackwardOutput, data: list[Datum], handle: LossHandle) -> ForwardBackwardOutput:
    """A forward pass with a loss that was computed here."""
    with torch.no_grad():
        loss, metrics = handle(data, [leaf.detach() for leaf in surrogate.leaves(output, data)])
    metrics = {**output.metrics, **metrics, "loss:sum": float(loss)}
    return ForwardBackwardOutput(output.loss_fn_outputs, metrics, output.loss_fn_output_type)


def times(handle: LossHandle, scale: float) -> surrogate.LossFn:
    """A loss with the same value and `scale` times its gradient."""
    if scale == 1:
        return handle

    def scaled_loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = handle(data, logprobs)
        return loss + (scale - 1) * (loss - loss.detach()), metrics

    return scaled_loss
