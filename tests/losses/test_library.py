"""Properties of every loss of the library: it trains a model, and its formula is a graph."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import pytest
import tinker
import torch
from tinker.lib.public_interfaces import custom_loss as official
from tinker.types import CustomLossInput
from torch import Tensor, fx
from torch.utils.data import DataLoader

from tests.helpers.loss_cases import Numbers, assert_same, stacked, value_and_gradient
from tests.helpers.loss_library import LIBRARY, case_of
from tests.helpers.reference import gathered
from tests.helpers.soaking import mostly_soak
from tinker_lightning import Datum, RemoteModule, collate, losses
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient

MEANS = ("grpo", "reinforce", "dpo", "ipo", "orpo", "kto", "contrastive")
ADDED_UP = [name for name in LIBRARY if name.split(",")[0] not in MEANS]


def traced(name: str) -> fx.GraphModule:
    """The loss as a graph of the stacked log-probabilities and inputs."""
    loss, inputs = LIBRARY[name]
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    logprobs, *tensors = (fx.Proxy(graph.placeholder(n), tracer) for n in ("p", *inputs))
    value, metrics = loss(dict(zip(inputs, tensors, strict=True)), logprobs)
    graph.output((value.node, {n: metric.node for n, metric in metrics.items()}))
    return fx.GraphModule({}, graph)


def test_this_page_knows_every_loss() -> None:
    functions = {
        name
        for name in losses.__all__
        if inspect.isfunction(function := getattr(losses, name)) and "data" in inspect.signature(function).parameters
    }
    assert functions == {name.split(",")[0] for name in LIBRARY}


@pytest.mark.parametrize("name", LIBRARY)
def test_settings_are_keywords_and_metrics_are_numbers(name: str) -> None:
    loss, _ = LIBRARY[name]
    for parameter in list(inspect.signature(loss).parameters.values())[2:]:
        assert parameter.kind is parameter.KEYWORD_ONLY
    data, logprobs = case_of(name)
    value, metrics = loss(data, [each.requires_grad_() for each in logprobs])
    assert value.shape == ()
    assert value.requires_grad
    assert metrics
    for metric in metrics.values():
        assert metric.shape == ()
        assert not metric.requires_grad
        assert torch.isfinite(metric)


@pytest.mark.parametrize("name", LIBRARY)
def test_a_loss_needs_the_inputs_it_names_and_no_others(name: str) -> None:
    loss, inputs = LIBRARY[name]
    data, logprobs = case_of(name)
    for missing in inputs if name != "cross_entropy" else ():  # which counts every token of a datum without weights
        kept = {n: t for n, t in data[1].loss_fn_inputs.items() if n != missing}
        with pytest.raises(ValueError, match=f"datum 1: {missing}: missing; "):
            loss([data[0], Datum(data[1].model_input, kept), *data[2:]], logprobs)


def test_cross_entropy_counts_every_token_of_a_datum_without_weights() -> None:
    data, logprobs = case_of("cross_entropy")
    bare = [Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in data]
    ones = [datum.with_inputs({"weights": torch.ones(len(each))}) for datum, each in zip(bare, logprobs, strict=True)]
    mixed = [bare[0], *ones[1:]]
    for some in (bare, mixed):
        assert losses.cross_entropy(some, logprobs) == losses.cross_entropy(ones, logprobs)


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("seed", range(3))
def test_a_traced_loss_has_the_same_value_gradient_and_metrics(name: str, seed: int) -> None:  # R3.7, R5.7
    graph, (loss, inputs) = traced(name), LIBRARY[name]
    data, logprobs = case_of(name, seed)

    def on_the_graph(data: list[Datum], logprobs: list[Tensor]) -> Any:
        tensors, _ = stacked(data, logprobs)
        rows = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
        return graph(rows, *(tensors[n] for n in inputs))

    assert_same(
        value_and_gradient(on_the_graph, data, logprobs), value_and_gradient(loss, data, logprobs), tolerance=1e-14
    )
    expected = loss(data, logprobs)[1]
    got = on_the_graph(data, logprobs)[1]
    assert {n: v.item() for n, v in got.items()} == pytest.approx({n: v.item() for n, v in expected.items()})


@pytest.mark.parametrize("name", LIBRARY)
def test_a_graph_is_made_of_functions_that_can_be_named(name: str) -> None:  # R3.7
    graph = traced(name)
    inputs = tuple(CustomLossInput(name=node.target, rank=2) for node in graph.graph.nodes if node.op == "placeholder")
    encoded = official.encode_graph(official.LossHandle(name, inputs, "session", graph))
    for node in encoded.nodes:
        if node.op == "call_function":
            module, _, function = node.target.rpartition(".")
            assert module in ("torch", "operator")
            assert callable(getattr(importlib.import_module(module), function))
        elif node.op == "call_method":
            assert callable(getattr(Tensor, node.target))
        else:
            assert node.op in ("placeholder", "output")


@pytest.mark.parametrize("name", ADDED_UP)
def test_losses_of_tokens_add_up_over_datums(name: str) -> None:
    """So that any split into requests, or datum by datum on a server, gives the same."""
    loss, _ = LIBRARY[name]
    data, logprobs = case_of(name)
    each = [value_and_gradient(loss, [d], [p]) for d, p in zip(data, logprobs, strict=True)]
    whole = sum(value for value, _ in each), torch.cat([gradient for _, gradient in each])
    assert_same(value_and_gradient(loss, data, logprobs), whole)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedTrainer, ServiceClient]]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("double"), dtype=torch.float64)
    with embedded_service(trainer) as service:
        yield trainer, service
    trainer.close()


TEXTS = ("hello world", "all happy families", "call me Ishmael", "it was the best of times")


def datums(now: list[Tensor] | None = None) -> list[Datum]:
    """Texts with all inputs of `[T]` losses; `now` are the model's log-probabilities, else numbers near them."""
    numbers, data = Numbers(1), []
    for i, text in enumerate(TEXTS):
        *ids, last = text.encode()
        n = len(ids)
        near = now[i].double() if now else -5.5 - numbers(n)
        response = (torch.arange(n) > 3).float()
        data.append(
            Datum.from_targets(
                ids,
                [*ids[1:], last],
                weights=response,
                kl_weights=response,
                label=float(i == 0),
                logprobs=near,
                reference_logprobs=near,
                advantages=response * (2 * numbers(n) - 1),
                sequence_ratio_mask=response,
                reward=float(i % 2 == 0),
            )
        )
    return data


def teachers() -> list[Datum]:
    """Texts with three alternatives at each position."""
    data = []
    for text in TEXTS:
        *ids, _ = text.encode()
        n = len(ids)
        tokens = torch.tensor(ids)[:, None] + torch.arange(3)
        probs = torch.tensor([0.6, 0.2, 0.1]).expand(n, 3)
        data.append(Datum.from_targets(ids, tokens, weights=torch.ones(n, 3), teacher_logprobs=probs.log()))
    return data


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
        ("dro", {"beta": 0.2}),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
    ],
)
def test_a_loss_of_the_servers_is_the_same_here(
    double: tuple[EmbeddedTrainer, ServiceClient], name: str, config: dict[str, float]
) -> None:  # R1.11, R3.3
    trainer, service = double
    data, gradients, values = datums(), [], []
    for custom in (False, True):
        client = service.create_lora_training_client("tiny", rank=4, seed=3)
        here = partial(getattr(losses, name), **config)
        sent: Any = (
            client.forward_backward_custom(data, here) if custom else client.forward_backward(data, name, config)
        )
        values.append(sent.result().metrics["loss:sum"])
        gradients.append(gathered(trainer, client.model_id))
    assert values[1] == pytest.approx(values[0], rel=1e-5)  # log-probabilities and weights travel as float32
    assert gradients[0].norm() > 0
    assert (gradients[1] - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


def test_the_official_sdk_trains_with_a_loss_of_the_library(served: Any) -> None:  # R5.4
    with tinker.ServiceClient(base_url=served.url, api_key="tml-any") as service:
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(datum.model_input.to_ints()),
                loss_fn_inputs={
                    name: tinker.TensorData.from_numpy(datum.loss_fn_inputs[name].to_numpy())
                    for name in ("target_tokens", "weights", "reference_logprobs")
                },
            )
            for datum in datums()
        ]
        values, dpo = [], cast("Any", losses.dpo)  # the SDK has floats as metrics, and takes tensors
        for _ in range(3):
            done = client.forward_backward_custom(data, dpo).result()
            client.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
            values.append(done.metrics["loss:sum"])
    assert values[2] < values[0]
    assert 0 <= float(done.metrics["rewards/accuracies"]) <= 1


# CISPO's value says nothing of progress, for its weights change with the model; its gradient is that of this one.
OBJECTIVES: dict[str, Callable[..., Any]] = {"cispo": losses.importance_sampling}


class Library(RemoteModule):
    def __init__(self, *args: Any, function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.function = function

    def loss(self, data: list[Any], logprobs: list[Tensor]) -> Any:
        return self.function(data, logprobs)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.parametrize("name", mostly_soak(LIBRARY, but=["cross_entropy", "ppo", "dpo", "contrastive"]))
def test_a_fit_lowers_the_loss(service: ServiceClient, name: str) -> None:  # R0.2
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    function = LIBRARY[name][0]
    objective = OBJECTIVES.get(name, function)
    module = Library(client, function=function, learning_rate=3e-3)
    with torch.no_grad():
        data = teachers() if name.startswith("topk") else datums(module.lm(datums()))
        before, metrics = objective(data, module.lm(data))
    loader: Any = DataLoader(data, batch_size=len(data), collate_fn=collate)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    with torch.no_grad():
        after, _ = objective(data, module.lm(data))
    assert after < before - 1e-4
    # A custom loss may mean something else by a reserved name.
    assert set(metrics) <= {name.removeprefix("loss/") for name in trainer.callback_metrics}
