"""Checks of optimizer steps, saved optimizer states, and the LoRA seed and flags of a new model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinker_lightning.client.dialects import measure
from tinker_lightning.doctor.probe import Check, Finding, NotOffered
from tinker_lightning.types import AdamParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tinker_lightning.doctor.probe import Probe

_TRIALS = 4
_CLIPPED = 1e-4
_FLAGS = ("train_attn", "train_mlp", "train_unembed")


def _zero_rate(probe: Probe) -> Finding:
    call = measure.weighted(0, np.ones(measure.LENGTHS[0], np.float32))
    usual = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    moved = float(np.abs(probe.scratch.response([call], learning_rate=0.0, **usual)).max())
    still = moved <= 0.01 * measure.CHANGE
    return Finding(None if still else f"a step with the learning rate 0 changes log-probabilities by {moved:.2g}")


def _clipping(probe: Probe) -> Finding:
    scratch = probe.scratch
    call = [measure.weighted(0, scratch.weights[0])]
    whole = scratch.alone[0]
    if not measure.differs(scratch.response(call, grad_clip_norm=_CLIPPED), whole):
        return Finding(f"grad_clip_norm={_CLIPPED} has no effect", dialect={"clips_gradients": False})
    # The factor by which the rate must grow for the same change gives the norm of the gradient.
    factor = 1.0 / _CLIPPED
    for _ in range(_TRIALS):
        rate = scratch.step().learning_rate * factor
        factor /= max(measure.ratio(scratch.response(call, grad_clip_norm=_CLIPPED, learning_rate=rate), whole), 1e-3)
    norm = factor * _CLIPPED
    half = scratch.response(call, grad_clip_norm=norm / 2)
    if measure.differs(half, whole / 2):
        fault = f"the gradient is clipped, but to {measure.ratio(half, whole):.3g} of its norm instead of 0.5"
        return Finding(fault, dialect={"clips_gradients": False})
    return Finding(detail=f"the norm of the gradient is {norm:.3g}", dialect={"clips_gradients": True})


def _restored(probe: Probe) -> Finding:
    client = probe.model()
    scratch = probe.measured(client)
    ones = [np.ones(n, np.float32) for n in measure.LENGTHS]

    def step(i: int, weight: float) -> NDArray[np.float64]:
        client.forward_backward(scratch.datums(measure.weighted(i, weight * ones[i])), "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-3)).result()
        return scratch.flat()

    saved_at = step(0, 10.0)  # its large gradient stays in the moments of the next step
    path = probe.save(client)
    continued = step(1, 1.0) - saved_at
    client.load_state_with_optimizer(path).result()
    if measure.differs(scratch.flat() - scratch.start_flat, saved_at - scratch.start_flat):
        return Finding("loading a state does not restore the weights")
    if measure.differs(step(1, 1.0) - saved_at, continued):
        return Finding("the step after load_state_with_optimizer is another one than without saving and loading")
    client.load_state(path).result()
    resets = measure.differs(step(1, 1.0) - saved_at, continued)
    dialect = {"resets_optimizer": resets, "clears_gradient": _clears_gradient(probe.scratch)}
    fault = None if resets else "load_state restores the optimizer, although only the weights were asked for"
    detail = "" if dialect["clears_gradient"] else "a gradient that was accumulated before is kept"
    return Finding(fault, detail=detail, dialect=dialect)


def _clears_gradient(scratch: measure.Scratch) -> bool:
    """Returns whether a gradient that was accumulated before a state is loaded is no part of the next step."""
    backend, call, other = scratch.backend, measure.at_token(0, 0), measure.at_token(1, measure.LENGTHS[1] - 1)

    def accumulate() -> None:
        backend.forward_backward(scratch.datums(other), other.loss).result()
        backend.load_state_with_optimizer(scratch.start).result()
        backend.forward_backward(scratch.datums(call), call.loss).result()

    return not measure.differs(scratch.change(accumulate), scratch.response([call]))


def _response(probe: Probe, seed: int = 0, **flags: bool) -> NDArray[np.float64]:
    scratch = probe.measured(probe.model(seed, **flags))
    return scratch.response([measure.weighted(0, scratch.weights[0])])


def _seed(probe: Probe) -> Finding:
    expected = probe.scratch.alone[0]
    if measure.differs(_response(probe), expected):
        return Finding("two models with the same seed have different adapters")
    if not measure.differs(_response(probe, 1), expected):
        return Finding("models with different seeds have the same adapter")
    return Finding()


def _flags(probe: Probe) -> Finding:
    expected = probe.scratch.alone[0]
    if measure.differs(_response(probe), expected):
        raise NotOffered("it cannot be measured, because the LoRA seed is ignored")
    ignored = [flag for flag in _FLAGS if not measure.differs(_response(probe, **{flag: False}), expected)]
    return Finding(f"{', '.join(ignored)}: no effect" if ignored else None)


ZERO_RATE = Check(
    "zero rate",
    "a step with the learning rate 0 leaves the weights alone",
    "The server takes 0 for its default. Use a tiny rate instead, such as 1e-20, in warm-up schedules.",
    _zero_rate,
)
CLIPPING = Check(
    "clipping",
    "grad_clip_norm is honored",
    "Set grad_clip_norm to 0 (Trainer(gradient_clip_val=None)), and choose a smaller learning rate.",
    _clipping,
)
RESTORED = Check(
    "optimizer state",
    "the optimizer state is restored by load_state_with_optimizer, and reset by load_state",
    "If it is not restored, a resumed run differs from an uninterrupted one. If it is not reset, the first steps after "
    "load_state follow the moments of the saved run: warm the learning rate up.",
    _restored,
)
SEED = Check(
    "LoRA seed",
    "the seed determines the adapter",
    "Runs cannot be repeated from create_lora_training_client(seed=...). Start them from one saved state instead.",
    _seed,
)
FLAGS = Check(
    "LoRA flags",
    "train_attn, train_mlp and train_unembed are honored",
    "Other layers are trained than asked for. Choose them in the configuration of the server.",
    _flags,
)
