"""The dialects of the servers that this library knows."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tinker_lightning.client.dialects.dialect import NEWER_FIELDS, Dialect
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    import os

_SAMPLING = frozenset({"asample.topk_prompt_logprobs"})

HOSTED = Dialect(name="hosted", clears_gradient=True, loads_first=True)
EMBEDDED = Dialect(name="embedded", clears_gradient=True, newer_fields=NEWER_FIELDS - {"asample.record_stability_info"})
# What servers of other projects have in common: what the protocol promises, except for what they are seen to lack.
_PROTOBUF = Dialect(
    name="protobuf",
    newer_fields=_SAMPLING,
    deduplicates=False,
    numbers="strict",
    concurrent=False,
    unit_forward_weights=True,
)
_JSON = _PROTOBUF.but(name="json", encoding="json", forward="forward", numbers="ignored")


def unmeasured(dialect: Dialect) -> Dialect:
    """Returns a dialect of servers whose losses are not known: only `cross_entropy` is relied on, once measured."""
    return dialect.but(surrogate=None, losses=frozenset({"cross_entropy"}), sends_other_losses=True)


# Servers of an unknown kind.
PROTOBUF, JSON = unmeasured(_PROTOBUF), unmeasured(_JSON)

# The factors and properties below were measured on running servers, or read in their code (Twinkle, open-rl).
SKYRL = _JSON.but(
    name="skyrl",
    surrogate=Surrogate("cispo", per_length=True, per_batch="window"),
    losses=frozenset({"importance_sampling", "ppo", "cispo"}),
    clips_gradients=False,
    resets_optimizer=False,
    deletes_checkpoints=False,
    samples_old_weights=False,
    multiple_targets=False,
)
TUFT = _PROTOBUF.but(
    name="tuft",
    newer_fields=frozenset(
        {
            "asample.topk_prompt_logprobs",
            "save_weights.overwrite",
            "save_weights.ttl_seconds",
            "save_weights.user_metadata",
            "save_weights_for_sampler.ttl_seconds",
            "save_weights_for_sampler.user_metadata",
            "retrieve_future.allow_metadata_only",
        }
    ),
    losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
)
TWINKLE = _JSON.but(
    name="twinkle",
    surrogate=Surrogate("importance_sampling", per_length=True, per_batch="call", even_batch=True),
    losses=frozenset({"importance_sampling"}),
    multiple_targets=False,
)
OPEN_RL = _JSON.but(
    name="open-rl",
    forward="zero_weights",
    unloads_models=False,
    deletes_checkpoints=False,
    samples_old_weights=False,
)
TOGETHER = _JSON.but(name="together")

KNOWN = MappingProxyType(
    {each.name: each for each in (HOSTED, EMBEDDED, SKYRL, TUFT, TWINKLE, OPEN_RL, TOGETHER, JSON, PROTOBUF)}
)


def dialect_named(name: str) -> Dialect:
    """Returns the dialect of a name.

    Raises:
        InvalidInput: If there is none.
    """
    if name not in KNOWN:
        raise InvalidInput(f"dialect: {name!r} is unknown; choose from auto, {', '.join(KNOWN)}, or pass a Dialect")
    return KNOWN[name]


def as_dialect(given: str | os.PathLike[str] | Dialect | None) -> Dialect | None:
    """Returns the dialect that a `dialect` argument means, by name, as a `.json` file or as it is; None to detect it.

    Raises:
        InvalidInput: If there is none of that name, or the file cannot be read.
    """
    if given is None or isinstance(given, Dialect):
        return given
    if given == "auto":
        return None
    path = Path(given)
    return Dialect.load(path) if path.suffix == ".json" else dialect_named(str(given))
