"""Settings and requests: their defaults are the protocol's, and invalid values raise at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning import errors
from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import AdamParams, LoraConfig, ModelInput, SamplingParams
from tinker_lightning.types.requests import (
    CreateSamplingSessionRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    TtlRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_adam_defaults_are_the_protocols() -> None:
    assert AdamParams() == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def test_sampling_defaults_follow_the_models_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.stop, params.max_tokens) == (
        1.0,
        -1,
        1.0,
        None,
        None,
    )


def test_defaults_agree_with_the_official_sdk() -> None:
    types = pytest.importorskip("tinker.types")
    adam, sampling, lora = types.AdamParams(), types.SamplingParams(), types.LoraConfig(rank=32)
    for ours, theirs, names in [
        (AdamParams(), adam, ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")),
        (SamplingParams(), sampling, ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")),
        (LoraConfig(), lora, ("rank", "seed", "train_unembed", "train_mlp", "train_attn")),
    ]:
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamParams(learning_rate=-1.0), r"adam_params\.learning_rate must be a finite number .* got -1\.0"),
        (lambda: AdamParams(learning_rate=float("nan")), r"learning_rate .* got nan"),
        (lambda: AdamParams(eps=float("inf")), r"eps .* got inf"),
        (lambda: AdamParams(weight_decay=-0.1), "weight_decay"),
        (lambda: AdamParams(grad_clip_norm=-1), "grad_clip_norm"),
        (lambda: AdamParams(beta1=1.0), r"adam_params\.beta1 must lie in \[0, 1\), got 1\.0"),
        (lambda: AdamParams(beta2=float("nan")), "beta2"),
        (lambda: SamplingParams(max_tokens=0), r"sampling_params\.max_tokens must be at least 1, got 0"),
        (lambda: SamplingParams(temperature=-0.5), r"sampling_params\.temperature must be at least 0"),
        (lambda: SamplingParams(temperature=float("inf")), "temperature"),
        (lambda: SamplingParams(top_k=0), r"sampling_params\.top_k must be -1 \(off\) or at least 1, got 0"),
        (lambda: SamplingParams(top_p=0.0), r"sampling_params\.top_p must lie in \(0, 1\], got 0\.0"),
        (lambda: SamplingParams(top_p=1.5), "top_p"),
        (lambda: SamplingParams(stop=""), "stop contains an empty string"),
        (lambda: SamplingParams(stop=["a", ""]), "stop contains an empty string"),
        (lambda: LoraConfig(rank=0), r"lora_config\.rank must be at least 1, got 0"),
        (
            lambda: LoraConfig(train_unembed=False, train_mlp=False, train_attn=False),
            "trains nothing: set train_unembed",
        ),
        (lambda: LoraConfig(seed=2**64), r"lora_config\.seed must fit into 64 bits"),
        (lambda: OptimStepRequest("m", 0), r"seq_id must lie in 1\.\.2147483647: .* got 0"),
        (lambda: ForwardBackwardRequest("m", 2**31, [], "cross_entropy"), "seq_id"),
        (lambda: SaveWeightsRequest("m", 0), "seq_id"),
        (lambda: LoadWeightsRequest("m", -1, "p"), "seq_id"),
        (
            lambda: SaveWeightsRequest("m", 1, ttl_seconds=0),
            "ttl_seconds must lie between a second and ten years, got 0",
        ),
        (lambda: TtlRequest(10**12), "ttl_seconds"),
        (lambda: SaveWeightsForSamplerRequest("m", 1), "give a path .* or a sampling_session_seq_id"),
        (lambda: CreateSamplingSessionRequest("s", 0), "give either base_model or model_path"),
        (lambda: CreateSamplingSessionRequest("s", 0, "b", "p"), "give either base_model or model_path"),
        (
            lambda: SampleRequest("s", 0, ModelInput(), SamplingParams(), num_samples=0),
            "num_samples must be at least 1",
        ),
    ],
)
def test_invalid_values_raise(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize(("name", "value"), [("stop", []), ("temperature", 0.0), ("top_k", 1), ("max_tokens", 1)])
def test_takes_the_edges_of_the_ranges(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidDatum, ValueError),
        (errors.MessageTooLarge, ValueError),
        (errors.ModelNotFound, LookupError),
        (errors.Unauthorized, PermissionError),
        (errors.OperationFailed, RuntimeError),
    ],
)
def test_errors_are_also_the_builtin_that_fits(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, errors.TinkerLightningError)


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert all(name in (errors.__doc__ or "") for name in classes)
