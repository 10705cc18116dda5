"""Functions that are not traced run on a server in this process, or pickled where its owner allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.helpers.server_losses import texts, trains, untraceable
from tinker_lightning import LossFnOutput, custom_loss
from tinker_lightning.client import ServiceClient, TrainingClient
from tinker_lightning.errors import (
    InvalidInput,
    InvalidLoss,
)
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable


def test_functions_of_two_sessions_may_have_one_name(
    service: ServiceClient, model: TrainingClient, trainer: EmbeddedTrainer
) -> None:
    @custom_loss(service, name="plain", trace=False)
    def ours(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, {"ours": 1.0})

    with embedded_service(trainer) as other:

        @custom_loss(other, name="plain", trace=False)
        def theirs(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
            return LossFnOutput(outputs.sum(), None, {"theirs": 1.0})

        their_model = other.create_lora_training_client("tiny", rank=4)
        assert "theirs" in their_model.forward(texts(), "plain").result().metrics
        assert "ours" in model.forward(texts(), "plain").result().metrics

        @custom_loss(service, name="plain", trace=False)
        def again(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
            return LossFnOutput(outputs.sum(), None, {"again": 1.0})

        assert "again" in model.forward(texts(), "plain").result().metrics
        assert "ours" in model.forward(texts(), ours).result().metrics


def test_a_handle_that_is_still_a_future(service: ServiceClient, model: TrainingClient) -> None:
    handle = service.create_custom_loss(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1})
    with pytest.raises(InvalidInput, match=r"loss_fn is a future; pass .* create_custom_loss\(\.\.\.\)\.result\(\)"):
        model.forward_backward(texts(), handle)  # type: ignore[arg-type]


def test_a_function_in_this_process_needs_no_tracing(service: ServiceClient, model: TrainingClient) -> None:
    custom_loss(service, name="plain", trace=False)(untraceable)
    metrics = trains(model, texts(), "plain", 1e-3)
    assert metrics[0]["looked"] == 1.0
    assert "plain" in service.list_loss_functions()["available_loss_functions"]
    with pytest.raises(InvalidInput, match="plain has no setting 'gamma'; it takes least"):
        model.forward(texts(), "plain", {"gamma": 1.0}).result()

    @custom_loss(service, name="raises", trace=False)
    def raises(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        raise ZeroDivisionError("oh")

    with pytest.raises(InvalidInput, match="raises: it raised ZeroDivisionError: oh"):
        model.forward(texts(), "raises").result()

    @custom_loss(service, name="reads", trace=False)
    def reads(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum() * inputs["reward"])

    with pytest.raises(InvalidInput, match="loss_fn_inputs: reward: missing; reads reads it"):
        model.forward(texts(), "reads").result()


@pytest.mark.parametrize("metrics", [None, 1.0, ["loss"], torch.tensor(1.0)], ids=str)
@pytest.mark.parametrize("on", ["logits", "logprobs"])
def test_metrics_of_a_function_that_are_no_dict(
    service: ServiceClient, model: TrainingClient, on: Any, metrics: Any
) -> None:  # R3.6
    def on_logits(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, metrics)

    def on_logprobs(data: Any, logprobs: Tensor) -> Any:
        return logprobs.sum(), metrics

    loss = custom_loss(service, name="odd", on=on, trace=False)(on_logits if on == "logits" else on_logprobs)
    if on == "logits" and metrics is None:  # an output of a custom class may have none
        assert model.forward(texts(), loss).result().metrics["tokens:sum"] > 0
        return
    with pytest.raises(InvalidInput, match=r"odd: it must return its \w+ as a dict, but returned \w+; "):
        model.forward_backward(texts(), loss).result()


def test_pickled_functions_need_permission(trainer: EmbeddedTrainer, running: Any) -> None:  # R3.6, R3.7
    with running(create_app(trainer)) as url, ServiceClient(base_url=url) as service:
        with pytest.raises(InvalidInput, match="--allow-pickled-losses and --api-key"):
            custom_loss(service, name="pickled", trace=False)(untraceable)
        with pytest.raises(InvalidLoss, match="cannot be pickled"):
            custom_loss(service, name="pickled", trace=False)(_with_a_lock())


def _with_a_lock() -> Callable[..., LossFnOutput]:
    import threading

    lock = threading.Lock()

    def locked(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        with lock:
            return LossFnOutput(outputs.sum())

    return locked


def test_pickled_functions_run_where_the_owner_allows_it(tmp_path: Any, running: Any) -> None:  # R3.7
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, allow_pickled_losses=True)
    try:
        with (
            running(create_app(trainer, api_key="tml-k")) as url,
            ServiceClient(base_url=url, api_key="tml-k") as service,
        ):
            custom_loss(service, name="pickled", trace=False)(untraceable)
            model = service.create_lora_training_client("tiny", rank=4)
            trains(model, texts(), "pickled", 1e-3)
            with pytest.raises(InvalidInput, match="invalid loss name 'ppo'"):
                custom_loss(service, name="ppo", trace=False)(untraceable)
    finally:
        trainer.close()
