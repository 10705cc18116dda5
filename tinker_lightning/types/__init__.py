"""Plain data types shared by users, client and server. They depend on numpy only."""

from tinker_lightning.types.datum import Datum, ProvenanceSpan, collate
from tinker_lightning.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)
from tinker_lightning.types.params import AdamParams, DimuonParams, LoraConfig, SamplingParams
from tinker_lightning.types.responses import (
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    ServerCapabilities,
    WeightsInfoResponse,
)
from tinker_lightning.types.tensor import TensorData

__all__ = [
    "AdamParams",
    "Datum",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LoadWeightsResponse",
    "LoraConfig",
    "ModelInput",
    "ModelInputChunk",
    "OptimStepResponse",
    "PromptAltTokens",
    "ProvenanceSpan",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "ServerCapabilities",
    "TensorData",
    "WeightsInfoResponse",
    "collate",
]
