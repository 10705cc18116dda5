"""Routes of a loss: the same numbers on every route, the best one unless another is requested."""

from __future__ import annotations

import functools
import logging
import types
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.counting import count_passes
from tests.helpers.soaking import first_only
from tinker_lightning import Datum, LossFnOutput, Regularizer, RemoteModule, custom_loss, losses
from tinker_lightning.errors import InvalidInput, InvalidLoss, LossNotTraceable
from tinker_lightning.lightning import routes
from tinker_lightning.losses import regularizers
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]

LENGTH = 24


def preference(i: int) -> Datum:
    """One half of a pair, with what the policy losses need as well."""
    generator = torch.Generator().manual_seed(i)
    tokens = torch.randint(32, 120, (LENGTH + 1,), generator=generator)
    return Datum.from_targets(
        tokens[:-1],
        tokens[1:],
        weights=torch.ones(LENGTH),
        reference_logprobs=-3 - torch.rand(LENGTH, generator=generator),
        logprobs=-5 - torch.rand(LENGTH, generator=generator),
        advantages=torch.randn(LENGTH, generator=generator),
    )


DATA = [preference(i) for i in range(8)]


def fitted(stage: tuple[EmbeddedTrainer, ServiceClient], **attributes: Any) -> tuple[torch.Tensor, Counter[str]]:
    """The weights after a fit with these class attributes, and how often each operation was called."""
    trainer, service = stage
    kind: type[RemoteModule] = type("Routed", (RemoteModule,), attributes)
    module = kind(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2, eps=1e-3)
    calls = count_passes(module.lm.backend)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit = pl.Trainer(strategy="tinker", max_epochs=2, accumulate_grad_batches=2, enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    fit.fit(module, DataLoader(DATA, batch_size=4))  # type: ignore[arg-type]
    del calls["optim_step"]
    _, adapter = trainer.registry.model(module.lm.backend.model_id).ready()  # type: ignore[attr-defined]
    return torch.cat([tensor.flatten() for tensor in adapter.weights.tensors.values()]), calls


def branching(_: Any, __: Any, logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else -logprobs.sum()), {}


ONE_PASS, TWO_PASSES = {"forward_backward": 4}, {"forward": 4, "forward_backward": 4}


@pytest.mark.parametrize(
    ("loss", "config"),
    first_only(
        [
            ("ppo", {"clip_low_threshold": 0.9}),
            (functools.partial(losses.dpo, beta=0.3, label_smoothing=0.1), {}),
            (losses.dpo, {"beta": 0.3}),
            (losses.kl_regularized, {}),
            ("cross_entropy", {}),
        ],
        2,
    ),
    ids=["ppo", "dpo, bound", "dpo", "kl_regularized", "cross_entropy"],
)
def test_every_route_gives_the_same_weights(
    stage: tuple[EmbeddedTrainer, ServiceClient], loss: Any, config: dict[str, float]
) -> None:  # R5.7
    here, passes_here = fitted(stage, loss=loss, loss_config=config, route="two-pass")
    there, passes_there = fitted(stage, loss=loss, loss_config=config, route="auto")
    assert (passes_here, passes_there) == (TWO_PASSES, ONE_PASS)
    assert (there - here).norm() <= 1e-5 * here.norm()  # four backwards of float32 numbers, through Adam


def test_a_custom_function_stays_here_unless_the_server_is_asked_for(
    stage: tuple[EmbeddedTrainer, ServiceClient], caplog: pytest.LogCaptureFixture
) -> None:
    def loss(_: Any, data: Any, logprobs: Any) -> Any:
        batch = losses.Batch(data, logprobs)
        return -(batch.tokens("weights") * batch.logprobs).sum() / 100, {}

    caplog.set_level(logging.INFO, "tinker_lightning")
    here, passes = fitted(stage, loss=loss)
    assert passes == TWO_PASSES
    assert ".loss: route retained (it is Python)" in caplog.text
    there, passes = fitted(stage, loss=loss, route="server")
    assert passes == ONE_PASS
    assert ".loss: route server (requested)" in caplog.text
    assert (there - here).norm() <= 1e-5 * here.norm()  # four backwards of float32 numbers, through Adam


def focal(data: Any, logprobs: Any, gamma: float = 2.0) -> Any:
    batch = losses.Batch(data, logprobs)
    surprise = -batch.logprobs * (1 - batch.logprobs.exp()) ** gamma
    return (batch.tokens("weights") * surprise).sum() / 100, {}


@pytest.mark.parametrize(
    "function", first_only([focal, lambda data, logprobs: focal(data, logprobs)]), ids=["function", "lambda"]
)
def test_a_function_may_stand_in_a_class(stage: tuple[EmbeddedTrainer, ServiceClient], function: Any) -> None:
    static, _ = fitted(stage, loss=staticmethod(focal))
    inside, _ = fitted(stage, loss=function)
    assert torch.equal(inside, static)
    there, passes = fitted(stage, loss=function, route="server")
    assert passes == ONE_PASS
    assert (there - static).norm() <= 1e-5 * static.norm()  # four backwards of float32 numbers, through Adam


def test_a_function_may_be_put_into_a_class_later(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    class Later(RemoteModule):
        pass

    Later.loss = focal  # type: ignore[method-assign,assignment]
    assert Later(stage[1].create_lora_training_client("tiny", rank=4)).chosen_route().loss is focal


def test_a_loss_of_other_arguments_raises_before_anything_is_sent(
    stage: tuple[EmbeddedTrainer, ServiceClient],
) -> None:
    module = RemoteModule(stage[1].create_lora_training_client("tiny", rank=4))
    module.loss = lambda logprobs: -torch.cat(logprobs).mean()  # type: ignore[method-assign,assignment,misc]
    with pytest.raises(InvalidLoss, match=r"function of \(data, logprobs\), but takes \(logprobs\): too many"):
        module.chosen_route()


def test_methods_of_other_objects_are_distinguished(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def compute(self, _: Any, logprobs: Any) -> Any:
            return -self.factor * torch.cat(logprobs).mean(), {}

    module = RemoteModule(stage[1].create_lora_training_client("tiny", rank=4))
    for factor in (1.0, 100.0):
        module.loss = Scaled(factor).compute  # type: ignore[method-assign,assignment]
        loss, _ = module.chosen_route().loss(DATA, [torch.ones(2)])
        assert loss == -factor


def weighted(factor: float, data: Any, logprobs: Any) -> Any:
    return -factor * (data["weights"] * logprobs).sum(), {}


def ppo(data: Any, logprobs: Any) -> Any:
    return weighted(1.0, data, logprobs)


class Weighted:
    name = "no text but a <name> of its own"

    def __call__(self, data: Any, logprobs: Any) -> Any:
        return weighted(1.0, data, logprobs)


NAMELESS: dict[str, Any] = {
    "a lambda": lambda data, logprobs: weighted(1.0, data, logprobs),
    "a partial by position": functools.partial(weighted, 1.0),
    "an object": Weighted(),
    "a built-in loss's name": ppo,
    "a name that no server takes": types.FunctionType(ppo.__code__, globals(), "Verlust_für_alle"),
}


@pytest.mark.parametrize("kind", NAMELESS)
def test_any_function_runs_on_the_server_whatever_it_is_called(
    stage: tuple[EmbeddedTrainer, ServiceClient], kind: str
) -> None:
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    chosen = routes.choose(NAMELESS[kind], {}, "server", lambda: client)
    expected = client.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    got = client.forward(DATA, chosen.loss, chosen.config).result().metrics["loss:sum"]
    assert got == pytest.approx(expected, rel=1e-6)


class Alone(torch.nn.Module):
    """A module, which returns its loss only."""

    def forward(self, data: Any, logprobs: Any, factor: float = 0.01) -> Any:
        batch = losses.Batch(data, logprobs)
        return -(batch.weights() * batch.logprobs).sum() * factor


def test_a_module_that_returns_its_loss_only_is_a_loss_on_every_route(
    stage: tuple[EmbeddedTrainer, ServiceClient],
) -> None:
    attributes = {"loss": Alone(), "loss_config": {"factor": 0.02}}
    here, there = (fitted(stage, **attributes, route=route)[0] for route in ("two-pass", "server"))
    assert (there - here).norm() <= 1e-5 * here.norm()
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    for trace in (True, False):
        loss = custom_loss(stage[1], on="logprobs", trace=trace, factor=0.5)(Alone())
        got = client.forward(DATA, loss).result().metrics["loss:sum"]
        expected = client.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
        assert got == pytest.approx(0.5 * expected, rel=1e-6)


def test_a_loss_with_kwargs_gets_loss_config_on_every_route(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    def by_name(_: Any, data: Any, logprobs: Any, **settings: float) -> Any:
        batch = losses.Batch(data, logprobs)
        return -(batch.weights() * batch.logprobs).sum() * settings["factor"], {"grad_norm": batch.logprobs.mean()}

    attributes = {"loss": by_name, "loss_config": {"factor": 0.02}}
    here, there = (fitted(stage, **attributes, route=route)[0] for route in ("two-pass", "server"))
    alone, _ = fitted(stage, loss=Alone(), loss_config={"factor": 0.02}, route="two-pass")
    for weights in (here, there):
        assert (weights - alone).norm() <= 1e-5 * alone.norm()


def test_what_would_read_the_padding_on_a_server_stays_here(
    stage: tuple[EmbeddedTrainer, ServiceClient], caplog: pytest.LogCaptureFixture
) -> None:
    def margin(_: Any, __: Any, logprobs: Any) -> Any:
        return logprobs[1].mean() - logprobs[0].mean(), {}

    caplog.set_level(logging.INFO, "tinker_lightning")
    assert fitted(stage, loss=margin)[1] == TWO_PASSES
    assert "loss margin: route retained (it is Python)" in caplog.text
    with pytest.raises(LossNotTraceable, match=r"(?s)log-probabilities of datum 1, .*or use route='two-pass'"):
        fitted(stage, loss=margin, route="server")


def test_a_loss_that_was_registered_on_logprobs_runs_here_by_its_name_too(
    stage: tuple[EmbeddedTrainer, ServiceClient],
) -> None:
    registered = custom_loss(stage[1], name="mine", on="logprobs")(losses.cross_entropy)
    here, passes = fitted(stage, loss="mine", route="two-pass")
    assert passes == TWO_PASSES
    there, passes = fitted(stage, loss=registered)
    assert passes == ONE_PASS
    assert (there - here).norm() <= 1e-5 * here.norm()


def test_what_nobody_has_registered_is_in_no_list(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    custom_loss(stage[1], name="mine.too", on="logprobs")(ppo)
    for loss in (losses.dpo, ppo):
        routes.choose(loss, {}, "server", lambda: client)
    listed = stage[1].list_loss_functions()
    assert listed["available_loss_functions"][-2:] == list(listed["descriptions"])[-2:] == ["gspo", "mine.too"]
    with pytest.raises(InvalidInput, match=r"available losses: cross_entropy, .*, gspo, mine\.too\. Register"):
        client.forward(DATA, "no_such_loss").result()


@pytest.mark.parametrize("kind", ["a lambda", "a name that no server takes"])
def test_a_decorator_without_a_name_asks_for_one(stage: tuple[EmbeddedTrainer, ServiceClient], kind: str) -> None:
    fix = r"Give it a name: custom_loss\(client, name='my_loss'\)"
    with pytest.raises(InvalidLoss, match=f"invalid loss name .* {fix}"):
        custom_loss(stage[1], on="logprobs")(NAMELESS[kind])
    with pytest.raises(InvalidLoss, match=r"invalid loss name 'a b': .* letter or '_'$"):
        custom_loss(stage[1], name="a b", on="logprobs")(NAMELESS[kind])
    assert custom_loss(stage[1], on="logprobs")(functools.partial(weighted, 1.0)).name == "weighted"


def test_a_registered_loss_is_used_by_name(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:  # R3.1
    @custom_loss(stage[1], name="brevity")
    def brevity(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any, strength: float = 1.0) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        loss = -(logprobs * attention_mask).sum() * strength
        return LossFnOutput(loss=loss, logprobs=logprobs, diagnostics={"nll": loss.item()})

    by_name, passes = fitted(stage, loss="brevity", loss_config={"strength": 0.5})
    by_object, _ = fitted(stage, loss=brevity, loss_config={"strength": 0.5})
    assert passes == ONE_PASS
    assert torch.equal(by_name, by_object)


def test_what_needs_logits_cannot_run_here(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    with pytest.raises(InvalidInput, match="brevity runs on the server only"):
        fitted(stage, loss="brevity", route="two-pass")


REGULARIZERS = (Regularizer(regularizers.sparsity, 0.1, "sparsity"),)


@pytest.mark.parametrize(
    ("loss", "config"),
    first_only([("ppo", {"clip_low_threshold": 0.9}), ("cross_entropy", {}), (losses.dpo, {"beta": 0.3})]),
    ids=["ppo", "cross_entropy", "dpo"],
)
def test_with_regularizers_a_loss_is_computed_from_the_same_log_probabilities(
    stage: tuple[EmbeddedTrainer, ServiceClient], loss: Any, config: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:  # R2.1
    caplog.set_level(logging.INFO, "tinker_lightning")
    attributes = {"loss": loss, "loss_config": config, "regularizers": REGULARIZERS}
    auto, passes = fitted(stage, **attributes)
    assert passes == TWO_PASSES
    assert "route retained (its regularizers need the log-probabilities)" in caplog.text
    assert torch.equal(auto, fitted(stage, **attributes, route="two-pass")[0])


@pytest.mark.parametrize("kind", first_only(["a handle", "of the library"]))
def test_with_regularizers_a_registered_loss_that_is_the_same_here_is_computed_here(
    stage: tuple[EmbeddedTrainer, ServiceClient], kind: str
) -> None:
    def of_datum(logprobs: Any, weights: Any) -> Any:
        return -(logprobs * weights).sum(), {}

    loss: Any = (
        stage[1].create_custom_loss(of_datum, {"logprobs": 1, "weights": 1}).result()
        if kind == "a handle"
        else custom_loss(stage[1], name="preference", on="logprobs")(losses.dpo)
    )
    assert fitted(stage, loss=loss)[1] == ONE_PASS
    auto, passes = fitted(stage, loss=loss, regularizers=REGULARIZERS)
    assert passes == TWO_PASSES
    there, passes = fitted(stage, loss=loss, regularizers=REGULARIZERS, route="server")
    assert passes == {"forward": 4, "forward_backward": 8}
    assert (there - auto).norm() <= 1e-5 * auto.norm()  # four backwards of float32 numbers, through Adam


def test_what_only_the_server_has_stays_there_with_regularizers(
    stage: tuple[EmbeddedTrainer, ServiceClient],
) -> None:
    @custom_loss(stage[1], name="likely")
    def likely(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        return LossFnOutput(loss=-(logprobs * attention_mask).sum(), logprobs=logprobs)

    # As it was traced, and with the inputs that a server gives it.
    stacked = custom_loss(stage[1], name="stacked", on="logprobs")(functools.partial(weighted, 1.0))
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    for loss in ("likely", likely, "stacked", stacked):
        assert routes.choose(loss, {}, "auto", lambda: client, regularized=True).route == "server"
    asked = routes.choose("cross_entropy", {}, "builtin", lambda: client, regularized=True)
    assert asked.route == "builtin"


def test_the_log_says_what_was_asked_for_and_what_is_taken(
    stage: tuple[EmbeddedTrainer, ServiceClient], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinker_lightning")
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    for route in ("auto", "builtin", "server"):
        assert routes.choose("ppo", {}, route, lambda: client).route == "builtin"
    assert [record.message.partition("route ")[2] for record in caplog.records if "route " in record.message] == [
        "builtin (the server knows it by name)",
        "builtin (requested)",
        "builtin (requested; the server knows it by name)",
    ]


def test_regularizers_that_come_or_go_change_the_route(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    class Routed(RemoteModule):
        loss = "cross_entropy"  # type: ignore[assignment]

    module = Routed(stage[1].create_lora_training_client("tiny", rank=4, seed=1))
    found = [module.chosen_route().route]
    for module.regularizers in (REGULARIZERS, ()):
        found.append(module.chosen_route().route)
    assert found == ["builtin", "retained", "builtin"]


def test_a_backend_that_takes_the_place_of_another_has_a_route_of_its_own(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    module = RemoteModule(stage[1].create_lora_training_client("tiny", rank=4, seed=1))
    module.loss = losses.kl_regularized  # type: ignore[method-assign]
    assert module.chosen_route().route == "server"
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    with embedded_service(trainer, extended=False) as service:
        module.lm.backend = service.create_lora_training_client("tiny", rank=4, seed=1)
        assert module.chosen_route().route == "two-pass"
        module.lm.backend = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
        assert module.chosen_route().route == "server"
    trainer.close()


def test_every_fit_decides_on_the_route(stage: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    backend = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    module = RemoteModule(backend)
    module.loss = "own"  # type: ignore[assignment]
    assert module.chosen_route().local is None
    custom_loss(backend, name="own", on="logprobs")(losses.kl_regularized)
    assert module.chosen_route().local is None
    module.trainer = pl.Trainer(strategy="tinker", logger=False, enable_checkpointing=False)
    assert module.chosen_route().local is not None


def test_a_server_that_takes_no_losses_leaves_them_here(tmp_path: Path) -> None:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data", dtype=torch.float64)
    with embedded_service(trainer, extended=False) as service:
        _, passes = fitted((trainer, service), loss=losses.dpo)
        assert passes == TWO_PASSES
        _, passes = fitted((trainer, service), loss="cross_entropy")
        assert passes == ONE_PASS
    trainer.close()


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"route": "fastest"}, InvalidInput, "route must be one of auto, .*, retained, two-pass, got 'fastest'"),
        ({"loss": losses.dpo, "route": "builtin"}, InvalidInput, "dpo is not built into servers"),
        ({"loss": branching, "route": "server"}, LossNotTraceable, r"(?s)test_routes.py:\d+: .*it branches"),
    ],
    ids=["unknown", "not built in", "not traceable"],
)
def test_routes_that_do_not_exist_raise(
    stage: tuple[EmbeddedTrainer, ServiceClient], attributes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fitted(stage, **attributes)
