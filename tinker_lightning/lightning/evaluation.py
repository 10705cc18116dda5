"""The loss of a `RemoteModule` on a batch of validation or test data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.client.sdk.inputs import to_datums
from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.lightning import metric_names
from tinker_lightning.lightning.deferred_metrics import of_pass
from tinker_lightning.lightning.metric_names import TOTAL, VALUE
from tinker_lightning.losses.regularizers import composition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tinker_lightning.lightning.base import RemoteBase

# What is raised where the data lack an input of the loss, or the server cannot evaluate it without a backward.
NOT_HERE = (InvalidInput, KeyError, OperationFailed)


def own_loss(
    module: RemoteBase, data: list[Any], logprobs: list[Tensor], inputs: Mapping[str, Any]
) -> tuple[float, dict[str, float]]:
    """Returns the value of the module's loss with its regularizers, and its metrics without the prefix of the stage.

    A loss that only the server can evaluate takes a second forward pass.

    Raises:
        InvalidInput: If the data lack what the loss needs.
    """
    chosen = module.chosen_route()
    value, flat = 0.0, {}
    if chosen.local is None and chosen.loss is not None:
        backend = module.lm.backend
        request = backend.prepare(to_datums(data), chosen.loss, chosen.config, loss_fn_inputs=inputs)
        output = module.lm.handle.remote.wait(backend.send(request, forward_only=True))
        value, flat = float(output.metrics["loss:sum"]), of_pass(output, chosen.loss, data, chosen.config)
        if not chosen.regularized:
            return value, metric_names.of_loss(flat, is_of_library=False)
        flat = {f"base_loss/{VALUE}": value, **metric_names.of_part(flat, "base_loss/")}
    total, telemetry = composition.evaluate(
        data,
        logprobs,
        chosen.local,
        module.regularizers,
        step=module.global_step,
        grad_norms=False,
        timeout=module.regularizer_timeout,
    )
    value += total.item()
    flat |= composition.flatten(telemetry)
    if chosen.regularized:
        return value, flat | {TOTAL: value}
    if chosen.is_of_library:  # whose nll and perplexity are those of all tokens
        flat = {name: number for name, number in flat.items() if name not in metric_names.SCORES}
    return value, metric_names.of_loss(flat, is_of_library=chosen.is_of_library)
