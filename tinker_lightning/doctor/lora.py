"""Checks of the settings of an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.client.dialects import measure
from tinker_lightning.doctor.check import Check, Finding, NotOffered

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tinker_lightning.doctor.probe import Probe

_FLAGS = ("train_attn", "train_mlp", "train_unembed")


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
