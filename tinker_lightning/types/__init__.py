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
from tinker_lightning.types.params import AdamParams, LoraConfig, SamplingParams
from tinker_lightning.types.responses import (
    CreateModelResponse,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    ServerCapabilities,
    SupportedModel,
    WeightsInfoResponse,
)
from tinker_lightning.types.tensor import TensorData, TensorDtype

__all__ = [
    "AdamParams",
    "CreateModelResponse",
    "Datum",
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
    "ProvenanceSpan",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "ServerCapabilities",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
    "WeightsInfoResponse",
    "collate",
]
