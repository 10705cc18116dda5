"""Mistakes in losses that run on the server are named, with the line, the datum or the input."""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.server_losses import (
    PREFERENCES,
    RANKS,
    T,
    clipped,
    dpo,
    kl_regularized,
    minimal,
    policy,
    reference,
    texts,
    tokens,
    untraceable,
)
from tinker_lightning import AdamParams, LossFnOutput, custom_loss, losses
from tinker_lightning.client import ServiceClient, TrainingClient
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.errors import (
    ClientClosed,
    InvalidDatum,
    InvalidInput,
    InvalidLoss,
    LossNotFinite,
    LossNotScalar,
    LossNotTraceable,
    LossWithoutGradient,
    ServerUnreachable,
)
from tinker_lightning.lossgraph.trace import trace_batch_loss
from tinker_lightning.server.endpoints import handshake
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from tinker_lightning.server import EmbeddedTrainer


def test_a_loss_that_cannot_be_serialized_raises_at_decoration(service: ServiceClient) -> None:  # R3.6
    with pytest.raises(LossNotTraceable, match=r"(?s)if loss.item\(\) < least.*branches on the value.*two|second"):
        custom_loss(service, name="mine")(untraceable)
    assert "mine" not in service.list_loss_functions()["available_loss_functions"]


def test_an_unknown_loss_is_named_with_those_that_are_known(model: TrainingClient) -> None:  # R3.6
    with pytest.raises(
        InvalidInput, match=r"loss_fn 'nowhere' is not registered; available losses: cross_entropy.*@custom_loss"
    ):
        model.forward_backward(texts(), "nowhere").result()


def test_a_missing_input_is_named(service: ServiceClient, model: TrainingClient) -> None:  # R3.6
    custom_loss(service, name="dpo")(dpo)
    with pytest.raises(InvalidInput, match=r"loss_fn_inputs: reference_chosen_logprobs, .*: missing; dpo reads it"):
        model.forward_backward(texts(chosen_tokens=tokens), "dpo").result()
    data = [*texts(**PREFERENCES)[:2], *texts()[2:]]
    with pytest.raises(InvalidInput, match="datum 2: chosen_tokens: missing; datum 0 has it"):
        model.forward_backward(data, "dpo").result()
    handle = service.create_custom_loss(clipped, RANKS).result()
    with pytest.raises(InvalidDatum, match="datum 0: advantages: missing; clipped reads it"):
        model.forward_backward(texts(), handle)
    with pytest.raises(InvalidDatum, match=r"datum 0: old: has the shape \[\], but clipped takes 1 dimensions"):
        model.forward_backward(texts(advantages=reference, old=lambda i, _: float(i)), handle)


def test_an_unreachable_server_is_named() -> None:  # R3.6
    with ServiceClient(base_url="http://127.0.0.1:1", retry_policy=RetryPolicy(0.0)) as service:  # noqa: SIM117
        with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
            custom_loss(service, name="mine")(minimal)


def test_what_is_no_client_and_no_function(service: ServiceClient, model: TrainingClient) -> None:
    with pytest.raises(InvalidInput, match=r"custom_loss takes the client that connect\(\) returns, got str"):
        custom_loss("http://localhost", name="mine")  # type: ignore[arg-type]
    custom_loss(model, name="by_a_model")(minimal)
    assert "by_a_model" in service.list_loss_functions()["available_loss_functions"]
    with pytest.raises(InvalidInput, match="on must be one of logits, logprobs, got 'tokens'"):
        custom_loss(service, name="mine", on="tokens")  # type: ignore[arg-type]
    with pytest.raises(InvalidLoss, match="decorates functions, got str"):
        custom_loss(service, name="mine")("minimal")  # type: ignore[arg-type]
    with pytest.raises(InvalidLoss, match="mine has no hyperparameter 'gamma'"):
        custom_loss(service, name="mine", gamma=1.0)(minimal)
    with pytest.raises(InvalidInput, match="invalid loss name 'cross_entropy'"):
        custom_loss(service, name="cross_entropy")(minimal)
    service.close()
    with pytest.raises(ClientClosed):
        custom_loss(service, name="mine")(minimal)


@pytest.mark.parametrize(
    ("loss", "kind", "because"),
    [
        (lambda o, m: o[..., 0], LossNotScalar, r"mine: the loss has the shape \[3, 28\]"),
        (lambda o, m: (o.sum() - o.sum()).log(), LossNotFinite, "mine: the loss is -inf"),
        (lambda o, m: o.sum() * torch.nan, LossNotFinite, "mine: the loss is nan"),
        (lambda o, m: m.sum() * 1.0, LossWithoutGradient, "mine: the loss does not depend on the outputs"),
        (
            lambda o, m: o.detach().sum(),
            LossWithoutGradient,
            "mine: the loss does not depend on the outputs",
        ),
        (lambda o, m: (o * 0).square().sum().sqrt(), LossNotFinite, "mine: .* its gradient has NaN"),
        (lambda o, m: o.sum() + m.sum(dim=7), InvalidLoss, "mine: node 'sum_2': sum failed: Dimension out of range"),
    ],
)
@pytest.mark.parametrize("trace", [True, False])
def test_losses_that_cannot_be_trained_on(  # R1.9
    trainer: EmbeddedTrainer,
    service: ServiceClient,
    model: TrainingClient,
    loss: Any,
    kind: type[InvalidLoss],
    because: str,
    trace: bool,
) -> None:
    """Each is of the class that it has where the loss is computed here."""
    custom_loss(service, name="mine", trace=trace)(lambda outputs, inputs, mask: LossFnOutput(loss(outputs, mask)))
    because = because if trace else because.replace("node 'sum_2': sum failed", "it raised IndexError")
    with pytest.raises(kind, match=because) as raised:
        model.forward_backward(texts(), "mine").result()
    assert type(raised.value) is kind
    _, adapter = trainer.registry.model(model.model_id).ready()
    assert adapter.gradient == {}
    model.optim_step(AdamParams(learning_rate=0.0)).result()  # and the model goes on


@pytest.mark.parametrize(
    ("loss", "kind", "because"),
    [
        (lambda p: p, LossNotScalar, r"datum 0: mine: the loss has the shape \[28\]"),
        (lambda p: p.sum() * torch.nan, LossNotFinite, "datum 0: mine: the loss is nan. Look for a division by zero"),
        (lambda p: p.detach().sum(), LossWithoutGradient, "datum 0: mine: the loss does not depend on"),
        (lambda p: (p * 0).sum().sqrt(), LossNotFinite, "datum 0: mine: .* its gradient has NaN"),
        (lambda p: p.sum(dim=7).sum(), InvalidLoss, "datum 0: mine: node 'sum_1': sum failed: Dimension out of range"),
    ],
)
def test_losses_of_one_datum_that_cannot_be_trained_on(  # R1.9
    service: ServiceClient, model: TrainingClient, loss: Any, kind: type[InvalidLoss], because: str
) -> None:
    def mine(logprobs: Tensor) -> Any:
        return loss(logprobs), {}

    handle = service.create_custom_loss(mine, {"logprobs": 1}).result()
    with pytest.raises(kind, match=because) as raised:
        model.forward_backward(texts(), handle).result()
    assert type(raised.value) is kind
    if kind is LossNotFinite and "is nan" in because:
        with pytest.raises(LossNotFinite, match=because):
            model.forward(texts(), handle).result()


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    ("logprobs", "got"),
    [
        (lambda o: o.flatten(0, 1)[:, 0], r"the shape \[84\]"),
        (lambda o: o.mean(), r"the shape \[\]"),
        (lambda o: o[:2, :, 0], r"the shape \[2, 28\]"),
    ],
)
def test_logprobs_without_a_row_for_each_datum_raise(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient, logprobs: Any, got: str, trace: bool
) -> None:
    custom_loss(service, name="mine", trace=trace)(lambda o, inputs, mask: LossFnOutput(o.sum(), logprobs(o)))
    for run in (model.forward, model.forward_backward):
        with pytest.raises(InvalidLoss, match=rf"mine: its logprobs must have one row for each of the 3 datums.*{got}"):
            run(texts(), "mine").result()
    assert trainer.registry.model(model.model_id).ready()[1].gradient == {}


def test_truth_values_raise_where_they_would_no_longer_be_a_mask(service: ServiceClient) -> None:
    model = service.create_lora_training_client("tiny", rank=2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for given in (mask, mask.numpy(), mask.tolist()):
        with pytest.raises(InvalidInput, match=r"mask is boolean.*Pass mask\.float\(\)"):
            model.forward(texts(), "minimal", loss_fn_inputs={"mask": given})


def test_settings_of_a_function_are_held_to_what_those_of_a_graph_are(
    service: ServiceClient, model: TrainingClient
) -> None:
    seen: list[dict[str, Any]] = []

    @custom_loss(service, name="mine", trace=False)
    def mine(o: Tensor, i: Any, m: Tensor, beta: float = 0.5, k: int = 2, mode: str = "a", top: Any = None) -> Any:
        seen.append({"beta": beta, "k": k, "mode": mode, "top": top})
        return LossFnOutput(o.sum())

    model.forward(texts(), "mine", {"beta": 1, "k": 3.0, "mode": "b", "top": 4}).result()
    assert seen == [{"beta": 1.0, "k": 3, "mode": "b", "top": 4}]
    assert [type(seen[0][name]) for name in ("beta", "k")] == [float, int]
    for name, value in (("beta", float("nan")), ("beta", "text"), ("k", float("inf")), ("top", float("nan"))):
        with pytest.raises(InvalidInput, match=f"loss_fn_config: {name} must be a finite number, got"):
            model.forward(texts(), "mine", {name: value}).result()
    with pytest.raises(InvalidInput, match="mine has no setting 'gamma'; it takes beta, k, mode, top"):
        model.forward(texts(), "mine", {"gamma": 1.0}).result()


def test_an_error_of_a_graph_has_the_users_line(service: ServiceClient, model: TrainingClient) -> None:  # R3.6
    @custom_loss(service, name="three")
    def three(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        squared = outputs * outputs
        masked = squared * mask.unsqueeze(-1)
        return LossFnOutput((masked * inputs["third"]).mean())

    with pytest.raises(InvalidLoss) as raised:
        model.forward_backward(texts(), "three", loss_fn_inputs={"third": np.ones((2, 3), np.float32)}).result()
    assert "three: node 'mul_2': operator.mul failed: " in str(raised.value)
    assert str(raised.value).endswith('return LossFnOutput((masked * inputs["third"]).mean())')
    assert f"\n    at {__file__}:" in str(raised.value)
    assert raised.value.operation == "forward_backward"


@pytest.mark.parametrize("on_server", [True, False])
def test_an_error_of_a_handle_has_the_users_line(trainer: EmbeddedTrainer, on_server: bool, monkeypatch: Any) -> None:
    def mine(logprobs: Tensor, third: Tensor) -> Any:
        doubled = 2 * logprobs
        return (doubled * third).sum(), {}

    if not on_server:
        monkeypatch.setitem(handshake.CLIENT_CONFIG, "custom_loss_server_side", False)
    with embedded_service(trainer) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        handle = service.create_custom_loss(mine, {"logprobs": 1, "third": 1}).result()
        assert (handle.loss_id is not None) == on_server
        with pytest.raises(InvalidLoss, match=r"datum 0: mine: node 'mul_1': operator\.mul failed") as raised:
            model.forward_backward(texts(third=lambda *_: np.ones(3)), handle).result()
    assert f"\n    at {__file__}:" in str(raised.value)
    assert str(raised.value).endswith("return (doubled * third).sum(), {}")


def test_a_training_client_can_take_a_loss_too(service: ServiceClient, model: TrainingClient) -> None:
    loss = custom_loss(model, name="mine")(minimal)
    assert "mine" in service.list_loss_functions()["available_loss_functions"]
    for each in (loss, "mine"):
        assert model.forward_backward(texts(), each).result().metrics["loss:sum"] > 0
    other = service.create_lora_training_client("tiny", rank=4)
    assert other.forward(texts(), "mine").result().metrics["loss:sum"] > 0


def test_an_input_given_once_that_the_loss_does_not_read_raises(  # R3.4, R3.6
    service: ServiceClient, model: TrainingClient
) -> None:
    custom_loss(service, name="pulled")(kl_regularized)
    rows = {"wird": np.zeros((3, T))}
    with pytest.raises(
        InvalidInput, match=r"pulled does not read 'wird'; it reads reference_logprobs, target_tokens, weights$"
    ):
        model.forward_backward(texts(), "pulled", loss_fn_inputs=rows).result()
    optional = {"weights": np.ones((3, T))}  # the function asks for it
    assert model.forward(texts(), "pulled", loss_fn_inputs=optional).result().metrics["loss:sum"] > 0
    assert model.forward(texts(wird=reference), "pulled").result()  # a datum may have more than one loss needs

    handle = service.create_custom_loss(clipped, RANKS).result()
    with pytest.raises(InvalidInput, match="clipped does not read 'wird'; it reads advantages, old, target_tokens"):
        model.forward(policy(), handle, loss_fn_inputs=rows)
    with pytest.raises(InvalidInput, match="ppo does not read 'wird'; it reads advantages, clip_high_threshold, clip"):
        model.forward(policy(), "ppo", loss_fn_inputs=rows)
    preference = custom_loss(service, name="preference", on="logprobs")(losses.dpo)
    with pytest.raises(InvalidInput, match="preference does not read 'wird'; it reads reference_logprobs, target_toke"):
        model.forward(texts(), preference, loss_fn_inputs=rows)


def test_a_built_in_loss_that_is_not_finite(model: TrainingClient) -> None:  # R1.9
    data = texts(logprobs=lambda _, n: np.full(n, -1e30), advantages=lambda _, n: np.ones(n))
    with pytest.raises(LossNotFinite, match=r"datum 0: importance_sampling: the loss is -inf\. Look for tokens"):
        model.forward_backward(data, "importance_sampling").result()


def test_what_is_wrong_with_a_datum_keeps_its_class(model: TrainingClient) -> None:
    with pytest.raises(InvalidDatum, match="datum 0: advantages: missing") as raised:
        model.forward_backward(texts(logprobs=reference), "ppo").result()
    assert type(raised.value) is InvalidDatum


def test_an_upload_that_is_rejected_keeps_its_class(service: ServiceClient) -> None:
    loss = trace_batch_loss(minimal, "mine", "logits")
    with pytest.raises(InvalidLoss, match="invalid loss name '7'"):
        service.losses.register(replace(loss, name="7"))


def test_a_handle_of_another_session(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    handle = service.create_custom_loss(clipped, RANKS).result()
    with embedded_service(trainer) as other:
        stranger = other.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidLoss, match="clipped was created in another session"):
            stranger.forward_backward(policy(), handle)
        with pytest.raises(InvalidInput, match="this session has no loss"):
            stranger.forward_backward(policy(), "custom", {"loss_id": handle.loss_id or ""}).result()
    model = service.create_lora_training_client("tiny", rank=4)
    with pytest.raises(InvalidInput, match="clipped is a per-datum loss without settings; pass beta with each datum"):
        model.forward_backward(policy(), handle, {"beta": 1.0})


def test_a_batch_that_does_not_fit_is_not_split(
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom_loss(service, name="mine")(minimal)
    monkeypatch.setattr("tinker_lightning.client.passes.request.split", lambda data, *_: [[each] for each in data])
    with pytest.raises(InvalidInput, match=r"3 datums do not fit into one request, and mine@.* is computed from"):
        model.forward_backward(texts(), "mine")


def test_inputs_whose_shapes_do_not_fit(service: ServiceClient, model: TrainingClient) -> None:
    @custom_loss(service, name="mine")
    def mine(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum() * inputs["extra"].sum())

    with pytest.raises(InvalidInput, match=r"datum 1: extra has the shape \[2, 3\], but datum 0 has \[1, 3\]"):
        model.forward(texts(extra=lambda i, _: np.zeros((i + 1, 3))), "mine").result()
    with pytest.raises(InvalidInput, match="loss_fn_inputs: extra: not an array of numbers"):
        model.forward(texts(), "mine", loss_fn_inputs={"extra": "text"})
    with pytest.raises(InvalidInput, match="extra is passed for the batch, but datum 0 has it too"):
        model.forward(texts(extra=reference), "mine", loss_fn_inputs={"extra": 1.0}).result()
