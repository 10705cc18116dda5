"""Measures on a scratch model whether a server's built-in losses are what the protocol says.

With Adam's decay rates at 0 and a large epsilon, a step moves the weights by a multiple of the gradient, so a small
step changes the log-probabilities linearly in the gradient that the server has accumulated: its response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinker_lightning.types import AdamParams, Datum, ModelInput

if TYPE_CHECKING:
    from tinker_lightning.client.backend import TrainingBackend

# The change of a log-probability at which a response is well above rounding and still linear.
_CHANGE = 0.01
_EPSILON = 1e9
_TOLERANCE = 0.03
_LENGTHS = (5, 8)


@dataclass(frozen=True, slots=True)
class Call:
    """One `forward_backward` of a measurement: the numbers of its datums and their inputs."""

    datums: Sequence[int]
    inputs: Sequence[Mapping[str, NDArray[np.float32]]]
    loss: str = "cross_entropy"
    config: Mapping[str, float] | None = None


class Scratch:
    """A model that is only measured. Every response starts from the same weights.

    Args:
        backend: A new model.
        lengths: The lengths of the datums.
    """

    def __init__(self, backend: TrainingBackend, lengths: Sequence[int] = _LENGTHS) -> None:
        self.backend = backend
        tokens = np.random.default_rng(0).integers(1, 100, (len(lengths), max(lengths) + 1))
        self.data = [
            Datum(ModelInput.from_ints(row[:n].tolist()), {"target_tokens": row[1 : n + 1].astype(np.int64)})
            for row, n in zip(tokens, lengths, strict=True)
        ]
        self.start = str(backend.save_state("measured").result().path)
        self.rate = 1.0
        ones = [np.ones(n, np.float32) for n in lengths]
        for _ in range(3):  # the response is linear in the rate only when it is small
            change = float(np.abs(self.response([Call([i], [{"weights": w}]) for i, w in enumerate(ones)])).max())
            self.rate *= _CHANGE / change if change else 1e3

    def logprobs(self) -> list[NDArray[np.float32]]:
        """Returns the log-probabilities of the datums."""
        data = [datum.with_inputs(weights=np.ones(datum.model_input.length, np.float32)) for datum in self.data]
        output = self.backend.forward(data, "cross_entropy").result()
        return [each["logprobs"].to_numpy().reshape(-1) for each in output.loss_fn_outputs]

    def response(self, calls: Sequence[Call], **params: Any) -> NDArray[np.float64]:
        """Returns the change of all log-probabilities by a step on the gradient of these calls."""
        self.backend.load_state_with_optimizer(self.start).result()
        before = np.concatenate(self.logprobs()).astype(np.float64)
        for call in calls:
            data = [self.data[i].with_inputs(dict(given)) for i, given in zip(call.datums, call.inputs, strict=True)]
            self.backend.forward_backward(data, call.loss, call.config).result()
        settings = {"learning_rate": self.rate * _EPSILON, "beta1": 0.0, "beta2": 0.0, "eps": _EPSILON, **params}
        self.backend.optim_step(AdamParams(**settings)).result()
        return np.concatenate(self.logprobs()).astype(np.float64) - before


def differs(response: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    """Returns whether a response is not what was expected."""
    scale = max(float(np.linalg.norm(expected)), 1e-12)
    return not float(np.linalg.norm(response - expected)) <= _TOLERANCE * scale


def cross_entropy_fault(scratch: Scratch) -> str | None:
    """Returns why cross-entropy is not a plain weighted sum on a server; None if it is."""
    random = np.random.default_rng(1)
    first, second = (random.normal(size=datum.model_input.length).astype(np.float32) for datum in scratch.data)
    second -= second.mean()  # sums to zero

    def one(i: int, weights: NDArray[np.float32]) -> Call:
        return Call([i], [{"weights": weights}])

    base, other = scratch.response([one(0, first)]), scratch.response([one(1, second)])
    checks = {
        "the gradient does not double with the weights": ([one(0, 2 * first)], 2 * base),
        "negative weights do not give the negative gradient": ([one(0, -first)], -base),
        "the gradient of two datums in one call is not their sum": (
            [Call([0, 1], [{"weights": first}, {"weights": second}])],
            base + other,
        ),
        "the gradient of two calls is not their sum": ([one(0, first), one(1, second)], base + other),
    }
    return next((fault for fault, (calls, sum_) in checks.items() if differs(scratch.response(calls), sum_)), None)
