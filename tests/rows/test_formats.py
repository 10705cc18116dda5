"""Rows of a dataset that loaders yield: texts, chats and dicts are trained on and answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

from tests.helpers.counting import count_passes
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import Datum, ModelInput, RemoteModule, SamplingParams, collate
from tinker_lightning.data import ChatData
from tinker_lightning.errors import ClientClosed, InvalidDatum, InvalidInput, TooLong
from tinker_lightning.rows.formats import RowFormat
from tinker_lightning.types.chat import generation_prompt

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
ROWS: list[Any] = [
    "a text",
    CHAT,
    {"messages": CHAT, "id": 3},
    {"prompt": "Hi", "completion": "Hello."},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"text": "a text"},
    Datum.from_tokens([1, 2, 3]),
]


class Few(RemoteModule):
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=3, seed=1)


@pytest.fixture(scope="module")
def module(service: ServiceClient) -> RemoteModule:
    return new(service, Few)


def words(datum: Datum, tokenizer: Any) -> tuple[str, str]:
    """The whole text of a datum, and what is trained of it."""
    targets, weights = (datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights"))
    whole = tokenizer.decode([datum.model_input.to_ints()[0], *targets])
    return whole, tokenizer.decode([token for token, weight in zip(targets, weights, strict=True) if weight])


def test_datums_takes_each_kind_of_row(module: RemoteModule) -> None:
    texts = [words(datum, module.tokenizer) for datum in module.datums(ROWS[:-1])]
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert texts == [
        ("a text<|im_end|>", " text<|im_end|>"),
        *[(chat, "Hello.<|im_end|>")] * 4,
        ("a text<|im_end|>", " text<|im_end|>"),
    ]
    assert module.datums(ROWS[-1:]) == ROWS[-1:]
    # As in a dataset with rows of several kinds.
    empty = dict.fromkeys(("messages", "prompt", "completion", "text"))
    mixed: list[Any] = [{**empty, **row} for row in ROWS if isinstance(row, dict)]
    assert [words(datum, module.tokenizer) for datum in module.datums(mixed)] == texts[2:]
    module.datums([[*CHAT, CHAT[0], {"role": "assistant", "content": ""}]])  # not all are empty
    assert module.datums(CHAT) == module.datums([CHAT]) == module.datums({"messages": CHAT})


def test_a_fit_takes_rows_with_look_ahead_and_validates_on_them(service: ServiceClient) -> None:  # R5.3
    module = new(service, RemoteModule)
    counts = count_passes(module.lm.backend)
    rows: Any = DataLoader(ROWS * 2, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    trainer = quiet(max_epochs=4, accumulate_grad_batches=3, num_sanity_val_steps=0)
    trainer.fit(module, rows, rows)
    assert trainer.callback_metrics["val_loss"] < 5
    assert counts["forward_backward"] == 4 * 7


@pytest.mark.parametrize("rows", [ROWS[:2], [ROWS[2]], ["a", "b"], [ROWS[-1]], [CHAT]], ids=str)
def test_rows_without_a_loader_raise_with_the_line_to_write(module: RemoteModule, rows: Any) -> None:
    line = r"DataLoader\(rows, batch_size=4, collate_fn=tinker_lightning\.collate\)"
    with pytest.raises(InvalidInput, match=rf"trainer\.fit\(module, {line}"):
        quiet().fit(module, rows)
    with pytest.raises(InvalidInput, match=rf"trainer\.predict\(module, {line}"):
        quiet().predict(module, rows)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            [{"prompt": "Hi", "answer": "x"}],
            "row 0 of the batch: a row to train on needs .* this one has prompt, answer",
        ),
        (["x", [{"role": "asistant", "content": "x"}]], "row 1 of the batch: message 0 .* did you mean 'assistant'"),
        (
            {"messages": [{"role": ["user"] * 2, "content": ["a", "b"]}]},
            "messages has one value per row: torch's default",
        ),
        ({"prompt": ["a", "b"], "completion": ["c", "d"]}, "prompt has one value per row: torch's default collate_fn"),
        ([[{"content": "x"}]], "row 0 of the batch: message 0 has no role"),
        ([{"messages": [CHAT[0], {"role": "assistant", "content": ""}]}], "row 0 of the batch: the answer is empty"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "Pairs of answers are for DPO"),
        ([(ROWS[-1], ROWS[-1])], "groups of 2 datums, such as the pairs of PreferenceData, which DPO and KTO train on"),
        (["x", 3], "a batch must be a list of datums, texts, chats or dicts .* got list of int"),
        ([], "the batch has no datums"),
    ],
)
def test_a_batch_that_is_none_says_why(module: RemoteModule, batch: Any, text: str) -> None:
    with pytest.raises(InvalidDatum, match=text):
        module.datums(batch)


@pytest.mark.parametrize("row", [ROWS[2], ROWS[3]])
def test_an_undesirable_answer_is_not_trained(module: RemoteModule, row: dict[str, Any]) -> None:  # R5.13
    with pytest.raises(InvalidDatum, match=r"undesirable, but would be trained\. Use KTO with PreferenceData"):
        module.datums([{**row, "label": False}])
    assert len(module.datums([{**row, "label": True}, {**row, "label": 0}])) == 2


def test_rows_are_cut_and_counted(module: RemoteModule) -> None:
    counted: list[str] = []
    rows = RowFormat(module.tokenizer, max_length=10, truncate="left", count=counted.append)
    assert rows.datum(CHAT).model_input.length == 9
    assert counted == ["truncated", "messages"]
    with pytest.raises(TooLong, match="max_length is 10"):
        RowFormat(module.tokenizer, max_length=10).datum(CHAT)
    with pytest.raises(InvalidDatum, match="none of its tokens has a weight within max_length=10"):
        RowFormat(module.tokenizer, max_length=10, truncate="right").datum(CHAT)


def test_strings_can_be_plain_text_and_chats_can_get_a_system_message(module: RemoteModule) -> None:
    by = module.tokenizer
    plain = RowFormat(by, as_text=True)
    assert words(plain.datum({"prompt": "1+1=", "completion": "2"}), by) == ("1+1=2<|im_end|>", "2<|im_end|>")
    assert by.decode(plain.prompt({"prompt": "1+1="}).to_ints()) == "1+1="
    polite = RowFormat(by, system="Be kind.")
    start = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi"
    assert words(polite.datum({"prompt": "Hi", "completion": "x"}), by)[0].startswith(start)
    assert by.decode(polite.prompt({"prompt": "Hi"}).to_ints()).startswith(start)
    own = [{"role": "system", "content": "Own."}, *CHAT]
    assert words(polite.datum(own), by)[0].startswith("<|im_start|>system\nOwn.")


def test_a_pair_is_two_datums_with_one_prompt(module: RemoteModule) -> None:
    rows, by = RowFormat(module.tokenizer), module.tokenizer
    other = [{"role": "assistant", "content": "Go away."}]
    expected = rows.pair({"prompt": "Hi", "chosen": "Hello.", "rejected": "Go away."})
    assert rows.pair({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": other}) == expected
    assert rows.pair({"chosen": CHAT, "rejected": [*CHAT[:1], *other]}) == expected
    assert [words(datum, by)[1] for datum in expected] == ["Hello.<|im_end|>", "Go away.<|im_end|>"]
    earlier = [*CHAT, {"role": "user", "content": "And?"}]
    chosen, _ = rows.pair({"prompt": earlier, "chosen": "Yes.", "rejected": "No."})
    assert words(chosen, by)[1] == "Yes.<|im_end|>"  # and not the answer that belongs to the prompt


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "x"}, "the pair has no 'rejected'; it has prompt, chosen"),
        ({"chosen": "x", "rejected": "y"}, "the pair has no 'prompt'"),
        ("x", "a pair must be a dict with prompt, chosen and rejected, got str"),
    ],
)
def test_a_pair_that_is_none_says_why(module: RemoteModule, row: Any, text: str) -> None:
    with pytest.raises(InvalidDatum, match=text):
        RowFormat(module.tokenizer).pair(row)


def test_predict_takes_messages_and_several_samples_in_one_request(module: RemoteModule) -> None:
    prompt = ModelInput.from_ints(generation_prompt(CHAT[:1], module.tokenizer))
    (expected,) = module.predict_step([prompt], 0)
    for batch in (CHAT[:1], [CHAT[:1]], [CHAT], {"messages": CHAT}, [{"prompt": "Hi"}], [{"prompt": prompt, "id": 1}]):
        assert module.predict_step(batch, 0) == [expected]
    sampler = module.lm.backend.save_weights_and_get_sampling_client()
    requests: list[int] = []
    sample = type(sampler).sample

    class Several(Few):
        num_samples = 3

    several = Several(module.lm.backend)

    def counted(self: Any, prompt: Any, num_samples: int, *args: Any) -> Any:
        requests.append(num_samples)
        return sample(self, prompt, num_samples, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sampler), "sample", counted)
        first, second = several.predict_step([CHAT, "x"], 0)
    assert requests == [3, 3]
    assert len(first["samples"]) == len(second["samples"]) == 3
    assert first["samples"][0]["tokens"] == first["tokens"] == expected["tokens"]


def test_a_module_without_a_model_or_closed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_MODEL", raising=False)
    with pytest.raises(InvalidInput, match=r"there is no base model: pass one, for example SFT\('tiny'\)"):
        RemoteModule(base_url="embedded").datums(["x"])
    module = RemoteModule("tiny", base_url="embedded")
    module.close()
    with pytest.raises(ClientClosed, match=r"this module was closed.*Create a new module"):
        module.datums(["x"])


def test_a_module_that_was_closed_after_its_use_says_so() -> None:
    with Few("tiny", rank=4, base_url="embedded") as module:
        tokenizer = module.tokenizer
        module.predict_step(["x"], 0)
    assert module.tokenizer is tokenizer
    loader: Any = DataLoader(["x"], collate_fn=collate)  # type: ignore[arg-type]
    for data in (loader, ChatData(["x"])):
        with pytest.raises(ClientClosed, match=r"this module was closed.*Create a new module"):
            quiet().fit(module, data)


@pytest.mark.parametrize(
    ("stage", "arguments", "data"),
    [
        ("fit", ("a.jsonl",), "ChatData('a.jsonl')"),
        ("fit", ([], "a.jsonl"), "ChatData(..., validation='a.jsonl')"),
        ("validate", ("a.jsonl",), "ChatData(validation='a.jsonl')"),
        ("test", ("a.jsonl",), "ChatData(test='a.jsonl')"),
        ("predict", ("a.jsonl",), "ChatData(test='a.jsonl')"),
    ],
)
def test_a_path_in_place_of_a_loader_names_the_stage_and_the_data_module(
    stage: str, arguments: tuple[Any, ...], data: str, module: RemoteModule
) -> None:
    line = f"Pass a data module such as ChatData or PreferenceData: trainer.{stage}(module, {data})."
    with pytest.raises(InvalidInput, match=f"got the path 'a.jsonl'.*{re.escape(line)}"):
        getattr(quiet(), stage)(module, *arguments)
