"""Clients of imitated servers, and what they train there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from tests.helpers.imitations.serving import Kind
from tinker_lightning import AdamParams, Datum, ModelInput, ServiceClient
from tinker_lightning.client.transport.retries import RetryPolicy

if TYPE_CHECKING:
    import httpx

    from tests.helpers.imitations import Imitation
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.client.dialects import Dialect

KINDS: tuple[Kind, ...] = get_args(Kind)
# The changes of the weights are linear in the gradient, so that a wrong factor shows.
STEP = AdamParams(learning_rate=2e5, beta1=0.0, beta2=0.0, eps=1e9)


def pair(n: int, seed: int) -> Datum:
    tokens = np.random.default_rng(seed).integers(1, 200, n + 1)
    return Datum(ModelInput.from_ints(tokens[:-1].tolist()), {"target_tokens": tokens[1:]})


BATCH = [pair(6, 1), pair(9, 2), pair(4, 3)]


def preference(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradients of both signs, and of a zero sum within a sequence."""
    margin = logprobs[0].sum() - logprobs[-1].sum()
    within = (logprobs[0] * torch.linspace(-1, 1, len(logprobs[0]))).sum()
    return -torch.nn.functional.logsigmoid(margin) + 0.3 * within, {"margin": margin.item()}


def connected(
    server: Imitation, dialect: Dialect | str = "auto", transport: httpx.AsyncBaseTransport | None = None
) -> ServiceClient:
    settings: dict[str, Any] = {"api_key": server.behavior.api_key, "retry_policy": RetryPolicy(2.0, 0.05)}
    return ServiceClient(
        base_url="http://imitated", transport=transport or server.transport, dialect=dialect, **settings
    )


def model_on(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def logprobs_of(client: TrainingClient) -> np.ndarray[Any, Any]:
    output = client.forward(BATCH, "cross_entropy").result()
    return np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs])
