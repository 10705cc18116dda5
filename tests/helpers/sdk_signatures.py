"""Public names and arguments of the installed official SDK, as JSON.

`tests/client/sdk/signatures` has a file for each release that our client is compared with. This writes one:

    PYTHONPATH=<folder of the release>:. python -m tests.helpers.sdk_signatures > .../signatures/0.38.0.json
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import tinker
from tinker import types

FOLDER = Path(__file__).parents[1] / "client" / "sdk" / "signatures"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "APIFuture")
# Created by a ServiceClient, with arguments that are private to the SDK.
_NOT_CONSTRUCTED = ("TrainingClient", "SamplingClient", "APIFuture")
_PYDANTIC = frozenset({"model_config", "model_fields", "model_computed_fields", "model_post_init"})
RESULTS = (
    "Checkpoint",
    "CheckpointsListResponse",
    "Cursor",
    "ExternalWeightsUrlsResponse",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetSamplerResponse",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "ListSessionsResponse",
    "LoadWeightsResponse",
    "ModelData",
    "OptimStepResponse",
    "PromptAltTokens",
    "SampledSequence",
    "SampleResponse",
    "SaveWeightsExternalResponse",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "SupportedModel",
    "TensorData",
    "TrainingRun",
    "TrainingRunsResponse",
    "WeightsInfoResponse",
)


def arguments(function: Any) -> list[str]:
    """The arguments of a function: `name`, `name=` if it may be left out, `*name` if it is given by name only."""
    found = []
    for each in inspect.signature(function).parameters.values():
        by_name = "*" if each.kind is each.KEYWORD_ONLY else "**" if each.kind is each.VAR_KEYWORD else ""
        if each.name != "self":
            found.append(f"{by_name}{each.name}{'' if each.default is each.empty else '='}")
    return found


def signatures() -> dict[str, dict[str, list[str] | None]]:
    """By class, the public names, each with its arguments if it is called."""
    found: dict[str, dict[str, list[str] | None]] = {
        "tinker": dict.fromkeys(sorted(set(tinker.__all__) - {"__title__"}))
    }
    for kind in CLIENTS:
        cls = getattr(tinker, kind)
        names = [name for name in dir(cls) if not name.startswith("_") and name != "create"]  # not for users
        names += [] if kind in _NOT_CONSTRUCTED else ["__init__"]
        found[kind] = {
            name: arguments(getattr(cls, name)) if callable(getattr(cls, name)) else None for name in sorted(names)
        }
    for kind in RESULTS:
        cls = getattr(types, kind, None) or getattr(tinker, kind)
        own = {*getattr(cls, "model_fields", getattr(cls, "__dataclass_fields__", ()))}
        for base in cls.__mro__[:-1]:
            own |= set() if base.__module__.startswith(("pydantic", "tinker._", "typing")) else set(vars(base))
        found[kind] = dict.fromkeys(name for name in sorted(own - _PYDANTIC) if not name.startswith("_"))
    return found


if __name__ == "__main__":
    print(json.dumps(signatures(), indent=1))
