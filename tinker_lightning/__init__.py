"""Train remote language models with PyTorch Lightning over the Tinker API."""

from tinker_lightning.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

__all__ = ["AdamParams", "Datum", "ModelInput", "SamplingParams", "TensorData"]
