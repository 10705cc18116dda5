"""Data modules take the renderers of `tinker-cookbook`. Run it with `tox -e cookbook`."""

from __future__ import annotations

from typing import Any

import pytest
from tinker_cookbook.renderers import TrainOnWhat, get_renderer

from tinker_lightning.data import ChatData, PreferenceData, PromptData
from tinker_lightning.server.engine.catalog import Catalog
from tinker_lightning.types import Datum

CHAT = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A very small model."},
    {"role": "user", "content": "Count to three."},
    {"role": "assistant", "content": "One, two, three."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Catalog(["tiny"]).get("tiny").tokenizer


def trained(datum: Datum, tokenizer: Any) -> str:
    targets, weights = (datum.loss_fn_inputs[name].to_torch() for name in ("target_tokens", "weights"))
    return str(tokenizer.decode(targets[weights > 0]))


@pytest.mark.parametrize(
    ("train_on", "what"),
    [("all", TrainOnWhat.ALL_ASSISTANT_MESSAGES), ("last", TrainOnWhat.LAST_ASSISTANT_MESSAGE)],
)
def test_chats_are_rendered_as_the_cookbook_does(train_on: Any, what: Any, tokenizer: Any) -> None:
    data = ChatData([CHAT], renderer="role_colon", tokenizer=tokenizer, train_on=train_on)
    data.setup("fit")
    ((datum,),) = data.train_dataloader()
    renderer = get_renderer("role_colon", tokenizer)
    tokens, weights = renderer.build_supervised_example(CHAT, train_on_what=what)
    assert datum == Datum.from_tokens(tokens.to_ints(), weights)


def test_only_the_answers_of_a_pair_are_trained(tokenizer: Any) -> None:
    pair = {"prompt": CHAT[:3], "chosen": "One, two, three.", "rejected": "No."}
    data = PreferenceData([pair], renderer=get_renderer("role_colon", tokenizer), tokenizer=tokenizer)
    data.setup("fit")
    (((chosen, rejected),),) = data.train_dataloader()
    assert trained(chosen, tokenizer) == " One, two, three.\n\nUser:"
    assert trained(rejected, tokenizer) == " No.\n\nUser:"


def test_prompts_are_those_of_the_cookbook(tokenizer: Any) -> None:
    data = PromptData([{"messages": CHAT}, {"prompt": CHAT[:3]}], renderer="role_colon", tokenizer=tokenizer)
    data.setup("predict")
    ((first, second),) = data.predict_dataloader()
    expected = get_renderer("role_colon", tokenizer).build_generation_prompt(CHAT[:3]).to_ints()
    assert first["prompt"].to_ints() == second["prompt"].to_ints() == expected
