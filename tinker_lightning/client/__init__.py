"""The client of any Tinker server: sessions, numbered requests, futures, retries."""

from tinker_lightning.client.backend import TrainingBackend
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.rest import RestClient
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.client.sdk.adapters import as_backend, as_sampler
from tinker_lightning.client.server_losses import LossHandle
from tinker_lightning.client.service import ServiceClient, connect
from tinker_lightning.client.training import TrainingClient

__all__ = [
    "LossHandle",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TinkerFuture",
    "TrainingBackend",
    "TrainingClient",
    "as_backend",
    "as_sampler",
    "connect",
]
