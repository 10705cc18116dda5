"""A loss cannot give its metrics the names of what is logged of every step, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.trainers import SMALL, loader, new, quiet
from tinker_lightning import LossFnOutput, Regularizer, RemoteModule, custom_loss, losses
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses import regularizers
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

NAMES = ["train_loss", "grad_norm", "learning_rate"]


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    with embedded_service() as service:
        yield service


def telling(name: str) -> Callable[..., Any]:
    """A loss with a metric of that name."""

    def told(data: Any, logprobs: Any) -> Any:
        batch = losses.Batch(data, logprobs)
        loss = -(batch.tokens("weights") * batch.logprobs).sum()
        return loss, {name: loss}

    return told


def on_logits(name: str) -> Callable[..., Any]:
    def told(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        loss = -(logprobs * attention_mask).sum()
        return LossFnOutput(loss, logprobs, {name: loss.item()})

    return told


def registered(service: ServiceClient, name: str, *, trace: bool = True) -> Any:
    return custom_loss(service, name=f"tells_{name}", trace=trace)(on_logits(name))


ROUTES: dict[str, Callable[[ServiceClient, str], dict[str, Any]]] = {
    "two-pass": lambda _, name: {"loss": telling(name), "route": "two-pass"},
    "server": lambda _, name: {"loss": telling(name), "route": "server"},
    "registered": lambda service, name: {"loss": registered(service, name)},
    "by name": lambda service, name: {"loss": registered(service, name).name},
    "not traced": lambda service, name: {"loss": registered(service, name, trace=False)},
}


def made(service: ServiceClient, **attributes: Any) -> RemoteModule:
    module = new(service, RemoteModule)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_a_metric_with_the_name_of_what_is_logged_anyway_is_refused(
    service: ServiceClient, name: str, route: str
) -> None:
    module = made(service, **ROUTES[route](service, name))
    with pytest.raises(InvalidLoss) as caught:
        quiet().fit(module, loader())
    said = f"the loss returns a metric called {name!r}, but {name!r} is logged of every step anyway; rename the metric"
    assert str(caught.value) == said
    # Only what the server was handed as it is shows its names no earlier than its numbers.
    assert bool(module.lm.handle.remote.steps) == (route == "not traced")
    for attribute, value in {"loss": telling("nll"), "route": "auto"}.items():
        setattr(module, attribute, value)
    quiet().fit(module, loader())


@pytest.mark.parametrize("route", ["two-pass", "server"])
def test_beside_regularizers_a_base_has_names_of_its_own(service: ServiceClient, route: str) -> None:
    beside = [Regularizer(regularizers.sparsity, 0.1, "sparsity")]
    trainer = quiet()
    trainer.fit(made(service, loss=telling("grad_norm"), route=route, regularizers=beside), loader())
    found = trainer.callback_metrics
    assert found["base_loss/grad_norm"] == pytest.approx(float(found["base_loss/value"]), rel=1e-5)
    with pytest.raises(InvalidLoss, match=r"metric.*'value'"):
        quiet().fit(made(service, loss=telling("value"), route=route, regularizers=beside), loader())
