"""Measures on a scratch model whether a server's built-in losses are what the protocol says.

With Adam's decay rates at 0 and a large epsilon, a step moves the weights by a multiple of the gradient, so a small
step changes the log-probabilities linearly in the gradient that the server has accumulated: its response.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinker_lightning.types import AdamParams, Datum, ModelInput

if TYPE_CHECKING:
    from tinker_lightning.client.backend import TrainingBackend

# The change of a log-probability at which a response is well above rounding and still linear.
CHANGE = 0.01
_EPSILON = 1e9
_TOLERANCE = 0.03
_TRIALS = 5
# Each datum is a prefix of the longer ones: the gradients of their common tokens are equal.
LENGTHS = (5, 8)


@dataclass(frozen=True, slots=True)
class Call:
    """One `forward_backward` of a measurement: the numbers of its datums and their inputs."""

    datums: Sequence[int]
    inputs: Sequence[Mapping[str, NDArray[np.float32]]]
    loss: str = "cross_entropy"
    config: Mapping[str, float | str] | None = None


class Scratch:
    """A model that is only measured. Every response starts from the same weights.

    Args:
        backend: A new model.
        start: The path of its saved state.
        rate: The learning rate of a response; by default, it is found by trials.
    """

    def __init__(self, backend: TrainingBackend, start: str, rate: float | None = None) -> None:
        self.backend = backend
        self.start = start
        tokens = np.random.default_rng(0).integers(1, 100, max(LENGTHS) + 1)
        self.tokens: list[int] = tokens.tolist()
        self.data = [
            Datum(ModelInput.from_ints(tokens[:n].tolist()), {"target_tokens": tokens[1 : n + 1]})
            for n in (*LENGTHS, 1)
        ]
        self.start_logprobs = self.logprobs()
        self.rate = rate or 1e-4
        ones = [weighted(i, np.ones(n, np.float32)) for i, n in enumerate(LENGTHS)]
        self.rises = True
        for _ in range(0 if rate else _TRIALS):
            found = self.response(ones)
            change = float(np.abs(found).max())
            self.rises = float(found.sum()) > 0
            if 0.5 * CHANGE < change < 2 * CHANGE:
                break  # a small response is linear in the rate
            self.rate *= CHANGE / change if change else 1e3

    def logprobs(self) -> list[NDArray[np.float32]]:
        """Returns the log-probabilities of the first two datums."""
        data = [self.data[i].with_inputs(weights=np.ones(n, np.float32)) for i, n in enumerate(LENGTHS)]
        output = self.backend.forward(data, "cross_entropy").result()
        return [each["logprobs"].to_numpy().reshape(-1) for each in output.loss_fn_outputs]

    def flat(self) -> NDArray[np.float64]:
        """Returns these log-probabilities, one after another."""
        return np.concatenate(self.logprobs()).astype(np.float64)

    @property
    def start_flat(self) -> NDArray[np.float64]:
        """The log-probabilities before any training, one after another."""
        return np.concatenate(self.start_logprobs).astype(np.float64)

    def datums(self, call: Call) -> list[Datum]:
        """Returns the datums of a call."""
        return [self.data[i].with_inputs(dict(given)) for i, given in zip(call.datums, call.inputs, strict=True)]

    def response(self, calls: Sequence[Call], **params: Any) -> NDArray[np.float64]:
        """Returns the change of all log-probabilities by a step on the gradient of these calls."""

        def accumulate() -> None:
            for call in calls:
                self.backend.forward_backward(self.datums(call), call.loss, call.config).result()

        return self.change(accumulate, **params)

    def change(self, accumulate: Callable[[], object], **params: Any) -> NDArray[np.float64]:
        """Returns the change of all log-probabilities by a step on an accumulated gradient."""
        self.backend.load_state_with_optimizer(self.start).result()
        before = self.flat()
        accumulate()
        self.backend.optim_step(self.step(**params)).result()
        return self.flat() - before

    def step(self, **params: Any) -> AdamParams:
        """Returns the settings of a step that moves the weights by a multiple of the gradient."""
        settings = {"learning_rate": self.rate * _EPSILON, "beta1": 0.0, "beta2": 0.0, "eps": _EPSILON, **params}
        return AdamParams(**settings)

    @functools.cached_property
    def weights(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Weights of each datum: of both signs, and positive ones."""
        random = np.random.default_rng(1)
        first, second = (random.normal(size=n).astype(np.float32) for n in LENGTHS)
        return first, np.abs(second)

    @functools.cached_property
    def alone(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The responses to each datum in a call of its own, with `weights`."""
        first, second = (self.response([weighted(i, each)]) for i, each in enumerate(self.weights))
        return first, second


def weighted(i: int, weights: NDArray[np.float32]) -> Call:
    """Returns the call of `cross_entropy` with one datum."""
    return Call([i], [{"weights": weights}])


def at_token(i: int, position: int) -> Call:
    """Returns the call of `cross_entropy` with one datum and one weight, of 1.

    It has the same gradient on servers that divide by the sum of the weights, or by the number of those that are not 0.
    """
    weights = np.zeros(LENGTHS[i], np.float32)
    weights[position] = 1.0
    return weighted(i, weights)


# The gradient of the first token, whatever a server divides by: tokens, sequences or weights, there is one of them.
ONE_TOKEN = weighted(len(LENGTHS), np.ones(1, np.float32))


def differs(response: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    """Returns whether a response is not what was expected."""
    scale = max(float(np.linalg.norm(expected)), 1e-12)
    return not float(np.linalg.norm(response - expected)) <= _TOLERANCE * scale


def ratio(response: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Returns by which factor a response is larger than expected."""
    return float(np.linalg.norm(response) / max(float(np.linalg.norm(expected)), 1e-12))


def linearity_fault(scratch: Scratch) -> str | None:
    """Returns why the gradient of cross-entropy is not linear in the weights of a datum; None if it is."""
    if not scratch.rises:
        return "positive weights lower the log-probabilities"
    first, second = scratch.weights
    base = scratch.alone[0]
    doubled = scratch.response([weighted(0, 2 * first)])
    if differs(doubled, 2 * base):
        return f"weights twice as large give a gradient that is {ratio(doubled, base):.3g} times as large"
    if differs(scratch.response([weighted(0, -first)]), -base):
        return "negative weights do not give the negative gradient"
    mean = np.full_like(second, second.mean())
    parts = scratch.alone[1] - scratch.response([weighted(1, mean)])
    if differs(scratch.response([weighted(1, second - mean)]), parts):
        return "the gradient of weights that sum to zero is not the difference of its parts"
    return None


def length_fault(scratch: Scratch) -> str | None:
    """Returns why the gradient of a token depends on the length of its sequence; None if it does not."""
    short, long = (scratch.response([at_token(i, 0)]) for i in range(len(LENGTHS)))
    if not differs(long, short):
        return None
    return (
        f"the gradient of a token in a sequence of {LENGTHS[1]} tokens is {ratio(long, short):.3g} times that of the "
        f"same token in a sequence of {LENGTHS[0]}"
    )


def batch_fault(scratch: Scratch) -> str | None:
    """Returns why the gradient of datums in one call of cross-entropy is not their sum; None if it is."""
    first, second = scratch.weights
    found = scratch.response([Call([0, 1], [{"weights": first}, {"weights": second}])])
    return _sum_fault("two datums in one call", found, sum(scratch.alone, np.zeros(1)))


def calls_fault(scratch: Scratch) -> str | None:
    """Returns why the gradient of several calls of cross-entropy is not their sum; None if it is."""
    found = scratch.response([weighted(i, each) for i, each in enumerate(scratch.weights)])
    return _sum_fault("two calls", found, sum(scratch.alone, np.zeros(1)))


def cross_entropy_fault(scratch: Scratch) -> str | None:
    """Returns why cross-entropy is not a plain weighted sum on a server; None if it is."""
    faults = linearity_fault, length_fault, batch_fault, calls_fault
    return next(filter(None, (fault(scratch) for fault in faults)), None)


def _sum_fault(what: str, found: NDArray[np.float64], expected: NDArray[np.float64]) -> str | None:
    if not differs(found, expected):
        return None
    factor = ratio(found, expected)
    if differs(found, factor * expected):
        return f"the gradient of {what} is not a multiple of their sum"
    return f"the gradient of {what} is {factor:.3g} times their sum"
