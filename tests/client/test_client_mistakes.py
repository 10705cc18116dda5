"""Mistakes that users make: the same exception on every backend, with the fix, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tinker import types as sdk

from tests.helpers.client_data import DATA, nll
from tinker_lightning import AdamParams, Datum, ModelInput, SamplingParams
from tinker_lightning.errors import (
    InvalidDatum,
    InvalidInput,
    InvalidLoss,
    LossNotFinite,
    LossNotScalar,
    LossNotTensor,
    LossWithoutGradient,
    NotFound,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.backends import Backend

FAST = AdamParams(learning_rate=1e-2)


def _datum(tokens: list[int], targets: list[int]) -> Datum:
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": [1.0] * len(targets)})


def _sdk_datum(tokens: list[int], **inputs: list[float]) -> sdk.Datum:
    named: Any = inputs
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=named)


MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a token that is not in the vocabulary": (
        lambda model: model.forward_backward([DATA[0], _datum([97], [9999])], "cross_entropy").result(),
        InvalidDatum,
        r"datum 1: target_tokens.*9999",
    ),
    "the same in a custom loss": (
        lambda model: model.forward_backward_custom([DATA[0], _datum([97], [9999])], nll).result(),
        InvalidDatum,
        r"datum 1: target_tokens.*9999",
    ),
    "a loss that is not known": (
        lambda model: model.forward(DATA, "no_such_loss").result(),
        InvalidInput,
        "'no_such_loss' is not registered",
    ),
    "an input that is missing": (
        lambda model: model.forward_backward(DATA, "ppo").result(),
        InvalidDatum,
        "datum 0: ",
    ),
    "an empty batch": (lambda model: model.forward([], "cross_entropy"), InvalidDatum, "pass at least one datum"),
    "an empty batch of a custom loss": (
        lambda model: model.forward_backward_custom([], nll),
        InvalidDatum,
        "pass at least one datum",
    ),
    "one datum": (lambda model: model.forward(DATA[0], "cross_entropy"), InvalidDatum, r"write \[datum\]"),
    "one datum of a custom loss": (
        lambda model: model.forward_backward_custom(DATA[0], nll),
        InvalidDatum,
        r"write \[datum\]",
    ),
    "one datum of the SDK's": (
        lambda model: model.forward(_sdk_datum([1], target_tokens=[2], weights=[1.0]), "cross_entropy"),
        InvalidDatum,
        r"write \[datum\]",
    ),
    "lengths that disagree": (
        lambda model: model.forward([_sdk_datum([1, 2], target_tokens=[2, 3], weights=[1.0])], "cross_entropy"),
        InvalidDatum,
        "datum 0: weights has 1 entries but the input has 2 tokens",
    ),
    "something that is no datum": (
        lambda model: model.forward(["text"], "cross_entropy"),
        InvalidDatum,
        "datum 0: got str; build datums with",
    ),
    "a custom loss without targets": (
        lambda model: model.forward_backward_custom([Datum(ModelInput.from_ints([1]), {})], nll),
        InvalidDatum,
        "datum 0: target_tokens: missing",
    ),
    "a loss that is no function": (
        lambda model: model.forward_backward_custom(DATA, "cross_entropy"),
        InvalidLoss,
        r"function of \(data, logprobs\), got str",
    ),
    "a function where a name is wanted": (
        lambda model: model.forward_backward(DATA, nll),
        InvalidInput,
        r"loss_fn must be the name of a loss.*, got function\..* call forward_backward_custom",
    ),
    "a loss that is no tensor": (
        lambda model: model.forward_backward_custom(DATA, lambda _, lp: (lp[0].sum().item(), {})).result(),
        LossNotTensor,
        "do not call .item",
    ),
    "a loss of many values": (
        lambda model: model.forward_backward_custom(DATA, lambda _, lp: (lp[0], {})).result(),
        LossNotScalar,
        r"\.sum\(\) or \.mean\(\)",
    ),
    "a loss that is not finite": (
        lambda model: model.forward_backward_custom(DATA, lambda _, lp: (lp[0].sum() / 0, {})).result(),
        LossNotFinite,
        "division by zero",
    ),
    "a loss without a gradient": (
        lambda model: model.forward_backward_custom(DATA, lambda _, lp: (lp[0].sum().detach(), {})).result(),
        LossWithoutGradient,
        r"without \.detach\(\)",
    ),
    "a learning rate below zero": (
        lambda model: model.optim_step(sdk.AdamParams(learning_rate=-1.0)),
        InvalidInput,
        "learning_rate must be a finite number of at least 0",
    ),
    "settings of something else": (
        lambda model: model.optim_step(SamplingParams()),
        InvalidInput,
        r"optim_step takes AdamParams, got SamplingParams; write AdamParams\(",
    ),
    "a path that leads nowhere": (
        lambda model: model.load_state("tinker://nobody/weights/nothing").result(),
        NotFound,
        "tinker://nobody/weights/nothing",
    ),
    "a name that is no name": (lambda model: model.save_state("../up").result(), InvalidInput, r"\.\./up"),
}


TOLD_BY_THE_SERVER = (
    "a token that is not in the vocabulary",
    "the same in a custom loss",
    "an input that is missing",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_loses_nothing(backend: Backend, mistake: str) -> None:  # R1.9, R4.5
    make, kind, message = MISTAKES[mistake]
    model = backend.model()
    model.forward_backward(DATA, "cross_entropy").result()
    before = backend.bits(model)
    with pytest.raises((InvalidInput, NotFound), match=message) as caught:
        make(model)
    # The official SDK does not pass on which class the server named.
    is_told = backend.name != "official SDK" or mistake not in TOLD_BY_THE_SERVER
    assert type(caught.value) is (kind if is_told else InvalidInput)
    assert backend.bits(model) == before
    assert model.optim_step(FAST).result().metrics["grad_norm"] > 0


def test_mistakes_in_sampling(backend: Backend) -> None:
    sampler = backend.sampler(base_model="tiny")
    prompt = ModelInput.from_ints([1, 2])
    with pytest.raises(InvalidInput, match="max_tokens must be at least 1"):
        sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=0))
    with pytest.raises(InvalidInput, match="num_samples must be at least 1"):
        sampler.sample(prompt, 0, SamplingParams(max_tokens=1))
    with pytest.raises(InvalidInput, match=r"sample takes SamplingParams, got dict; write SamplingParams\("):
        sampler.sample(prompt, 1, {"max_tokens": 3})
    with pytest.raises(InvalidInput, match=r"must be a ModelInput, got list; use ModelInput\.from_ints"):
        sampler.compute_logprobs([1, 2])
    assert len(sampler.sample(prompt, 1, SamplingParams(max_tokens=2, stop=[])).result().sequences[0].tokens) == 2
