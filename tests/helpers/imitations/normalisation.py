"""How servers normalise losses: the datums for which a plain sum has the same gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_lightning.types import Datum, TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.helpers.imitations.behaviour import Normalisation

Array = npt.NDArray[np.float64]


def weights_of(datum: Datum) -> Array:
    """Returns the weights of a datum, by default ones."""
    inputs = datum.loss_fn_inputs
    if "weights" in inputs:
        return inputs["weights"].to_numpy().astype(np.float64)
    return np.ones(inputs["target_tokens"].shape)


def normalise(data: Sequence[Datum], loss_fn: str, rule: Normalisation) -> list[Datum]:
    """Returns datums for which the plain sum of the loss is the normalised loss of the given ones."""
    weights = [weights_of(datum) for datum in data]
    if loss_fn == "cross_entropy":
        return [_with(datum, "weights", factor) for datum, factor in zip(data, _of_weights(weights, rule), strict=True)]
    factors = _of_advantages(weights, rule)
    return [
        _with(datum, "advantages", datum.loss_fn_inputs["advantages"].to_numpy() * factor)
        if "advantages" in datum.loss_fn_inputs
        else datum
        for datum, factor in zip(data, factors, strict=True)
    ]


def elementwise_loss(datum: Datum, loss_fn: str, logprobs: Array) -> TensorData:
    """Returns the loss of each token before it is normalised; ratios are not clipped."""
    inputs = datum.loss_fn_inputs
    values = logprobs
    if loss_fn != "cross_entropy":
        values = np.exp(logprobs - inputs["logprobs"].to_numpy()) * inputs["advantages"].to_numpy()
    return TensorData(-values * weights_of(datum), "float32")


def _of_weights(weights: Sequence[Array], rule: Normalisation) -> list[Array]:
    if rule == "length":
        return [each / each.size for each in weights]
    if rule == "mean":
        return [each / sum(part.size for part in weights) for each in weights]
    if rule == "masked_mean":
        count = sum(np.count_nonzero(each) for each in weights)
        return [(each != 0) / max(count, 1) for each in weights]
    if rule == "sequence_mean":
        return [each / max(each.sum(), 1e-9) for each in weights]
    return list(weights)


def _of_advantages(weights: Sequence[Array], rule: Normalisation) -> list[Array]:
    if rule == "masked_mean":
        return [(each != 0) / max(np.count_nonzero(each), 1) / len(weights) for each in weights]
    if rule in ("sum", "length", "mean"):  # which do not depend on weights
        return _of_weights([np.ones_like(each) for each in weights], rule)
    return _of_weights(weights, rule)


def _with(datum: Datum, name: str, values: npt.NDArray[Any]) -> Datum:
    return Datum(datum.model_input, {**datum.loss_fn_inputs, name: TensorData(values, "float32")})
