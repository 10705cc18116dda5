"""Rows as they are found: each is trained exactly as its format defines, or refused by name. R4.1, R4.5, R5.13

`pytest -s tests/rows/test_wild_rows.py -k tiny` prints the table.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.chat_templates import HERMES, SMOLLM2, SMOLLM2_SYSTEM, with_template
from tests.helpers.trainers import SMALL
from tinker_lightning.data import ChatData, PreferenceData
from tinker_lightning.errors import InvalidDatum
from tinker_lightning.rows.formats import RowFormat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.types import Datum

pytestmark = SMALL

Turn = tuple[str, str]
SCHEMA = {"name": "weather", "description": "", "parameters": {}}
TOOLS = [{"type": "function", "function": SCHEMA}]
SHOWN = f"<tools>\n{json.dumps(SCHEMA)}\n</tools>"
ARGUMENTS = '{"city":"Bonn"}'  # which templates render as JSON of their own
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
HI: tuple[Turn, Turn] = (("user", "Hi"), ("ASSISTANT", "Hello."))
UNICODE = "Ω👩‍🚀 e\u0301 עברית \u2028 \x00 \ufeff\t"
GOOD = {"messages": [USER, ANSWER]}


@dataclass(frozen=True)
class Case:
    """A row, and its turns, with the roles of trained ones in capitals; or a text; or why it is refused."""

    name: str
    row: Any
    turns: tuple[Turn, ...] = ()
    text: str | None = None
    refused: str | None = None
    needs_tools: bool = False
    kind: str = ""


def openai(*messages: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


def sharegpt(*turns: Turn, **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": sender, "value": value} for sender, value in turns], **columns}


CASES = [
    Case(
        "OpenAI: chat", openai({"role": "system", "content": "Be kind."}, USER, ANSWER), (("system", "Be kind."), *HI)
    ),
    Case(
        "OpenAI: weights",
        openai(USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}),
        (("user", "Hi"), ("assistant", "Hello."), *HI),
    ),
    Case(
        "OpenAI: a later weight of 0",
        openai(USER, ANSWER, USER, {**ANSWER, "weight": 0}),
        (*HI, ("user", "Hi"), ("assistant", "Hello.")),
    ),
    Case(
        "OpenAI: all weights 0", openai(USER, {**ANSWER, "weight": 0}), refused="every assistant message has weight 0"
    ),
    Case("OpenAI: weight 0.5", openai(USER, {**ANSWER, "weight": 0.5}), refused=r"message 1 .* weight 0\.5; .* 0 or 1"),
    Case(
        "OpenAI: weight of a user",
        openai({**USER, "weight": 1}, ANSWER),
        refused=r"message 0 \(user\) is to be trained",
    ),
    Case(
        "OpenAI: a call without content",
        openai(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, tools=TOOLS),
        (("system", SHOWN), ("user", "Hi"), ("ASSISTANT", CALLED)),
        needs_tools=True,
    ),
    Case(
        "OpenAI: two calls, their results, and the answer",
        openai(
            USER,
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "Sun."}]},
            ANSWER,
            tools=TOOLS,
            parallel_tool_calls=True,
        ),
        (
            ("system", SHOWN),
            ("user", "Hi"),
            ("ASSISTANT", f"{CALLED}\n{CALLED}"),
            ("tool", "<tool_response>\nRain.\n</tool_response>"),
            ("tool", "<tool_response>\nSun.\n</tool_response>"),
            ("ASSISTANT", "Hello."),
        ),
        needs_tools=True,
    ),
    Case(
        "OpenAI: a call of weight 0",
        openai(
            USER, {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 0}, USER, ANSWER, tools=TOOLS
        ),
        (("system", SHOWN), ("user", "Hi"), ("assistant", CALLED), *HI),
        needs_tools=True,
    ),
    Case(
        "OpenAI: tools that are not called",
        openai({"role": "system", "content": "Be kind."}, USER, ANSWER, tools=TOOLS),
        (("system", f"Be kind.\n{SHOWN}"), *HI),
        needs_tools=True,
    ),
    Case(
        "OpenAI: arguments that are not JSON",
        openai(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}),
        refused=r"message 1 \(assistant\): the arguments of f are not JSON",
    ),
    Case(
        "OpenAI: text parts",
        openai(
            {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        ),
        HI,
    ),
    Case(
        "OpenAI: an image",
        openai({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}, ANSWER),
        refused=r"message 0 \(user\) has a part of type 'image_url'",
    ),
    Case(
        "OpenAI: a refusal",
        openai(USER, {"role": "assistant", "content": None, "refusal": "No."}),
        refused=r"message 1 \(assistant\) has no content",
    ),
    Case(
        "OpenAI: function_call",
        openai(USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}),
        refused="has function_call, OpenAI's former tool_calls",
    ),
    Case("OpenAI: functions", openai(USER, ANSWER, functions=[SCHEMA]), refused="has functions, OpenAI's former tools"),
    Case("OpenAI: a name", openai({**USER, "name": "Ada"}, ANSWER), HI),
    Case(
        "OpenAI: developer",
        openai({"role": "developer", "content": "Be kind."}, USER, ANSWER),
        (("developer", "Be kind."), *HI),
    ),
    Case(
        "OpenAI: preferences",
        {
            "input": {"messages": [USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [{"role": "assistant", "content": "Go."}],
        },
        HI,
        kind="pair",
    ),
    Case("ShareGPT", sharegpt(("human", "Hi"), ("gpt", "Hello."), ("human", "Hi"), ("gpt", "Hello.")), (*HI, *HI)),
    Case(
        "ShareGPT: system",
        sharegpt(("human", "Hi"), ("gpt", "Hello."), system="Be kind."),
        (("system", "Be kind."), *HI),
    ),
    Case(
        "ShareGPT: tools",
        sharegpt(
            ("human", "Hi"),
            ("function_call", json.dumps({"name": "weather", "arguments": json.loads(ARGUMENTS)})),
            ("observation", "Rain."),
            ("gpt", "Hello."),
            tools=json.dumps([SCHEMA]),
        ),
        (
            ("system", SHOWN),
            ("user", "Hi"),
            ("ASSISTANT", CALLED),
            ("tool", "<tool_response>\nRain.\n</tool_response>"),
            ("ASSISTANT", "Hello."),
        ),
        needs_tools=True,
    ),
    Case(
        "ShareGPT: unknown sender",
        sharegpt(("humn", "Hi"), ("gpt", "Hello.")),
        refused=r"unknown 'humn'\. Did you mean 'human'",
    ),
    Case(
        "ShareGPT: begins with gpt",
        sharegpt(("gpt", "Hello."), ("human", "Hi")),
        refused="message 0 is an assistant message",
    ),
    Case(
        "Alpaca",
        {"instruction": "Translate.", "input": "Hallo", "output": "Hello."},
        (("user", "Translate.\n\nHallo"), HI[1]),
    ),
    Case("Alpaca: no input", {"instruction": "Hi", "input": "", "output": "Hello.", "id": 7}, HI),
    Case(
        "Alpaca: system and history",
        {"instruction": "Hi", "output": "Hello.", "system": "Be kind.", "history": [["Hi", "Hello."]]},
        (("system", "Be kind."), *HI, *HI),
    ),
    Case("Alpaca: no output", {"instruction": "Hi", "input": ""}, refused="the conversation has no assistant message"),
    Case(
        "Alpaca: a number", {"instruction": "Hi", "output": 3}, refused="instruction, input and output must be strings"
    ),
    Case(
        "Axolotl: train",
        {"conversations": [{**USER, "train": False}, {**ANSWER, "train": False}, USER, {**ANSWER, "train": True}]},
        (("user", "Hi"), ("assistant", "Hello."), *HI),
    ),
    Case(
        "Axolotl: train of a user",
        openai({**USER, "train": True}, ANSWER),
        refused=r"message 0 \(user\) is to be trained",
    ),
    Case(
        "Axolotl: train as a string",
        openai(USER, {**ANSWER, "train": "no"}),
        refused="train 'no'; it must be true or false",
    ),
    Case(
        "Axolotl: train_detail",
        openai(USER, {**ANSWER, "train_detail": []}),
        refused="has train_detail, which trains parts",
    ),
    Case("TRL: conversational prompt and completion", {"prompt": [USER], "completion": [ANSWER]}, HI),
    Case("TRL: prompt and completion", {"prompt": "Hi", "completion": "Hello."}, HI),
    Case("TRL: text", {"text": "Hello."}, text="Hello."),
    Case(
        "TRL: arguments as an object",
        openai(
            USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}]},
        ),
        (("user", "Hi"), ("ASSISTANT", CALLED)),
        needs_tools=True,
    ),
    Case(
        "TRL: preferences of whole chats with their prompt",
        {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "Go."}]},
        HI,
        kind="pair",
    ),
    Case(
        "TRL: empty columns of a mixed dataset",
        {**dict.fromkeys(("text", "tools")), **openai(USER, {**ANSWER, "tool_calls": None})},
        HI,
    ),
    Case(
        "Qwen: reasoning",
        openai(USER, {**ANSWER, "reasoning_content": "Hm."}),
        refused="does not render reasoning_content",
    ),
    Case(
        "Unicode",
        openai({"role": "user", "content": UNICODE}, {"role": "assistant", "content": UNICODE}),
        (("user", UNICODE), ("ASSISTANT", UNICODE)),
    ),
    Case(
        "half of a surrogate pair",
        openai(USER, {"role": "assistant", "content": "\ud83d"}),
        refused=r"'\\ud83d' is half of a surrogate pair",
    ),
    Case("an empty answer", openai(USER, {"role": "assistant", "content": " "}), refused="the answer is empty"),
    Case("no messages", {"messages": []}, refused="no assistant message"),
    Case("no columns", {}, refused="this one has no columns"),
    Case("an empty text", {"text": ""}, refused="none of its tokens has a weight"),
]
DAMAGE: list[Any] = [
    *(None, "", 0, 1.5, True, [], {}, [[]], [{}], "{}", "\ud800", 10**30, [None], {"name": 3}, {"from": "human"}),
    *([{"type": "text", "text": 3}], [{"from": "human", "value": None}], {"function": {"name": "f", "arguments": [1]}}),
]
TEMPLATES = {"tiny": None, "smollm2": SMOLLM2, "hermes": HERMES}


@pytest.fixture(scope="module")
def tiny(service: ServiceClient) -> Any:
    return service.create_sampling_client(base_model="tiny").get_tokenizer()


def expected(case: Case, template: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens and weights of a case, written by hand from the definition of the templates."""
    pieces = [(f"{case.text}<|im_end|>", 1)] if case.text is not None else []
    turns = case.turns
    if template == "smollm2" and turns and turns[0][0] != "system":
        turns = (("system", SMOLLM2_SYSTEM), *turns)
    for role, content in turns:
        pieces += [(f"<|im_start|>{role.lower()}\n", 0), (f"{content}<|im_end|>", int(role.isupper())), ("\n", 0)]
    ids = [(token, weight) for text, weight in pieces for token in tokenizer.encode(text)]
    return [token for token, _ in ids], [weight for _, weight in ids]


def tokens_and_weights(datum: Datum) -> tuple[list[int], list[int]]:
    first = datum.model_input.to_ints()[0]
    targets, weights = (datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights"))
    return [first, *targets], weights


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_is_trained_as_its_format_defines_or_refused(
    case: Case, template: str, tiny: Any, tmp_path: Path
) -> None:
    tokenizer = tiny if TEMPLATES[template] is None else with_template(tiny, str(TEMPLATES[template]))
    kind: Any = PreferenceData if case.kind == "pair" else ChatData
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(case.row) + "\n")
    refused = case.refused
    if case.needs_tools and template != "hermes":
        refused = r"the chat template of .* does not render tool(s|_calls).*, which would be lost\. Pass a template"
    if refused is not None:
        with pytest.raises(InvalidDatum, match=rf"^.*rows\.jsonl:1: .*{refused}") as raised:
            kind(file, tokenizer=tokenizer).setup("fit")
        print(f"\n{case.name}: refused: {str(raised.value).partition('rows.jsonl:1: ')[2]}")
        file.write_text(json.dumps(case.row) + "\n" + json.dumps(GOOD))
        lenient = ChatData(file, tokenizer=tokenizer, bad_rows="skip")
        lenient.setup("fit")
        assert (lenient.report["train"]["rows"], lenient.report["train"]["skipped"]) == (1, 1)
        return
    data = kind(file, tokenizer=tokenizer)
    data.setup("fit")
    ((item,),) = data.train_dataloader()
    ids, weights = tokens_and_weights(item[0] if case.kind == "pair" else item)
    trained = tokenizer.decode([token for token, weight in zip(ids[1:], weights, strict=True) if weight])
    print(f"\n{case.name}: {tokenizer.decode(ids)!r}\n  trained {trained!r}\n  tokens {ids}\n  weights {weights}")
    wanted_ids, wanted_weights = expected(case, template, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.decode(wanted_ids)
    assert (ids, weights) == (wanted_ids, wanted_weights[1:])
    named = case.name.partition(":")[0]
    assert data.report["train"]["format"] == {"ShareGPT": named, "Alpaca": named}.get(
        named, data.report["train"]["format"]
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a row."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_damaged_row_is_trained_or_refused_by_name(template: str, tiny: Any) -> None:
    tokenizer = tiny if TEMPLATES[template] is None else with_template(tiny, str(TEMPLATES[template]))
    chance = np.random.default_rng(0)
    for case in CASES:
        for _ in range(30):
            row = json.loads(json.dumps(case.row))
            paths = [*places(row), ("text",)]
            *path, key = paths[chance.integers(len(paths))]
            functools.reduce(operator.getitem, path, row)[key] = DAMAGE[chance.integers(len(DAMAGE))]
            rows = RowFormat(tokenizer)
            for convert in (rows.datum, rows.pair, rows.prompt):
                with contextlib.suppress(InvalidDatum):
                    convert(row)
