"""Passes as SkyRL takes them, without the corrections of our client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from tests.helpers.peer_suite import BATCH, GRADIENTS, Server

if TYPE_CHECKING:
    from tinker_lightning.client import TrainingClient


def send_alone(client: TrainingClient, server: Server, i: int) -> None:
    """Sends one datum by SkyRL's `importance_sampling`, whose only factor then is one over the length."""
    data, n = BATCH[i], BATCH[i].model_input.length
    known = client.forward([data], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    values = {"advantages": -GRADIENTS[i] * n, "logprobs": known}
    inputs = {name: {"data": list(map(float, value)), "dtype": "float32"} for name, value in values.items()}
    targets = data.loss_fn_inputs["target_tokens"].to_numpy().tolist()
    chunk = {"type": "encoded_text", "tokens": [int(t) for part in data.model_input.chunks for t in part.tokens]}  # type: ignore[union-attr]
    body = {
        "model_id": client.model_id,
        "forward_backward_input": {
            "loss_fn": "importance_sampling",
            "data": [
                {
                    "model_input": {"chunks": [chunk]},
                    "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64"}, **inputs},
                }
            ],
        },
    }
    with httpx.Client(base_url=f"{server.url}/api/v1/", timeout=300) as http:
        request = http.post("forward_backward", json=body).json()["request_id"]
        assert http.post("retrieve_future", json={"request_id": request}).status_code == 200
