"""Compares a custom loss of the official SDK with ours on a running SkyRL server, each with the true gradient.

    python -m tests.peers.sdk_on_skyrl URL BASE_MODEL

It prints a table. SkyRL 0.3.0 takes passes as JSON, which the SDK sends up to 0.24.1.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import tinker
import torch

from tests.helpers.peer_suite import BATCH, GRADIENTS, Server, compared, linear, response
from tests.helpers.skyrl_passes import send_alone
from tinker_lightning import Datum, connect

# The change of a log-probability up to which it is linear in the gradient.
LINEAR = 0.05
CALLS = {"one call": [[0, 1, 2]], "two calls": [[0], [1, 2]]}


def ours(server: Server) -> dict[str, tuple[float, float]]:
    with connect(server.url) as service:
        client = service.create_lora_training_client(server.base_model, rank=8, seed=1)
        start = client.save_state("ours").result().path

        def alone(i: int) -> Any:
            return response(client, server.params(), start, lambda: send_alone(client, server, i))

        def custom(calls: list[list[int]]) -> Any:
            return lambda: [client.forward_backward_custom([BATCH[i] for i in call], linear(call)) for call in calls]

        truth = sum((alone(i) for i in range(3)), np.zeros(1))
        return {
            name: compared(response(client, server.params(), start, custom(calls)), truth)
            for name, calls in CALLS.items()
        }


def theirs(server: Server) -> dict[str, tuple[float, float]]:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-unused")
    client = service.create_lora_training_client(server.base_model, rank=8, seed=1)
    start = client.save_state("theirs").result().path
    unit = [converted(each, weights=np.ones(each.model_input.length, np.float32)) for each in BATCH]
    step = tinker.AdamParams(learning_rate=server.step, beta1=0.0, beta2=0.0, eps=1e9)

    def logprobs() -> Any:
        outputs = client.forward(unit, "cross_entropy").result().loss_fn_outputs
        return [each["logprobs"].to_numpy() for each in outputs]

    def changed(accumulate: Any) -> Any:
        """Returns the change by a step, as large as it would be if it were linear in the gradient."""
        for shrunk in 10.0 ** np.arange(0, 14, 2):
            client.load_state_with_optimizer(start).result()
            before = np.concatenate(logprobs()).astype(np.float64)
            accumulate()
            client.optim_step(step.model_copy(update={"learning_rate": server.step / shrunk})).result()
            change = np.concatenate(logprobs()).astype(np.float64) - before
            if np.abs(change).max() < LINEAR:
                break
        return change * shrunk

    def alone(i: int) -> Any:
        n = BATCH[i].model_input.length
        inputs = {"advantages": -GRADIENTS[i] * n, "logprobs": logprobs()[i].astype(np.float32)}
        datum = converted(BATCH[i], **inputs)
        return changed(lambda: client.forward_backward([datum], "importance_sampling").result())

    def custom(calls: list[list[int]]) -> Any:
        plain = [converted(each) for each in BATCH]
        return lambda: [
            client.forward_backward_custom([plain[i] for i in call], linear(call)).result() for call in calls
        ]

    truth = sum((alone(i) for i in range(3)), np.zeros(1))
    return {name: compared(changed(custom(calls)), truth) for name, calls in CALLS.items()}


def converted(datum: Datum, **inputs: Any) -> tinker.Datum:
    tokens = [int(token) for chunk in datum.model_input.chunks for token in chunk.tokens]  # type: ignore[union-attr]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy().astype(np.int64))
    tensors = {"target_tokens": targets, **{name: torch.from_numpy(value) for name, value in inputs.items()}}
    given: Any = {name: tinker.TensorData.from_torch(tensor) for name, tensor in tensors.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=given)


def main() -> None:
    server = Server(sys.argv[1], sys.argv[2], step=1500.0, learning_rate=2e-3)
    print("| client | calls per step | cosine with the true gradient | norm relative to it |")
    print("|---|---|---|---|")
    for name, measured in ((f"tinker {version('tinker')}", theirs(server)), ("tinker-lightning", ours(server))):
        for calls, (cosine, ratio) in measured.items():
            print(f"| {name} | {calls} | {cosine:.6f} | {ratio:.5g} |")


if __name__ == "__main__":
    main()
