"""Passes of an engine without pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.lossgraph.graph_loss import GraphLoss
    from tinker_lightning.server.engine.interface import A, BaseModel
    from tinker_lightning.types import Datum, ForwardBackwardOutput


def run_pass(
    base: BaseModel[A],
    adapter: A,
    data: Sequence[Datum],
    loss_fn: str | GraphLoss,
    loss_fn_config: Mapping[str, float | str],
    **options: Any,
) -> ForwardBackwardOutput:
    """Runs a pass to its end; see `start_pass` of the model."""
    slices = base.start_pass(adapter, data, loss_fn, loss_fn_config, **options)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            output: ForwardBackwardOutput = ended.value
            return output
