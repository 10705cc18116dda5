"""Data modules: what they read, convert, count, refuse and resume."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.helpers.chat_templates import HERMES, with_template
from tests.helpers.trainers import SMALL, logprobs_of, new, quiet
from tinker_lightning import Datum, ModelInput, RemoteModule
from tinker_lightning.data import ChatData, PreferenceData, PromptData
from tinker_lightning.errors import InvalidDatum, InvalidInput, TooLong
from tinker_lightning.types.chat import generation_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Say {i}."},
            {"role": "assistant", "content": f"It is {i}." * (1 + i % 3)},
        ]
    }
    for i in range(12)
]
PAIRS = [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "No."} for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer(service: ServiceClient) -> Any:
    return service.create_sampling_client(base_model="tiny").get_tokenizer()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    return path


def batches(data: Any, stage: str = "fit") -> list[Any]:
    data.setup(stage)
    loader = {"fit": data.train_dataloader, "predict": data.predict_dataloader}[stage]
    return list(loader())


class Dataset:
    """The part of a dataset of the package `datasets` that is used."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def test_files_lists_and_datasets_give_the_same_datums(tokenizer: Any, file: Path, tmp_path: Path) -> None:
    expected = [Datum.from_chat(row, tokenizer) for row in ROWS]
    other_editor = tmp_path / "other.jsonl"
    other_editor.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    for source in (file, str(file), other_editor, ROWS, Dataset(), iter(ROWS)):
        found = batches(ChatData(source, tokenizer=tokenizer, batch_size=5, shuffle=False))
        assert [len(batch) for batch in found] == [5, 5, 2]
        assert [datum for batch in found for datum in batch] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_each_row_once(tokenizer: Any, file: Path, workers: int) -> None:
    data = ChatData(file, tokenizer=tokenizer, streaming=True, shuffle_buffer=4, num_workers=workers, batch_size=4)
    found = [datum for batch in batches(data) for datum in batch]
    expected = [Datum.from_chat(row, tokenizer) for row in ROWS]
    assert found != expected
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    next(iter(data.train_dataloader()))  # another pass, which stops early
    data.teardown("fit")
    assert data.report["train"]["rows"] == len(ROWS)  # counted in the workers, in one pass


class Whole(IterableDataset[Any]):
    """A dataset that yields all rows in each worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


class Streamed(IterableDataset[Any]):
    """Stands for the class of streaming datasets in the package `datasets`."""

    __module__ = "datasets.iterable_dataset"


class Split(Streamed):
    """A dataset that chooses the rows of each worker itself, as streaming ones of the package `datasets` do."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(self._rows if info is None else self._rows[info.id :: info.num_workers])


@pytest.mark.parametrize("dataset", [Whole(), Split(ROWS)], ids=["whole", "split"])
def test_workers_share_the_rows_of_a_dataset(dataset: Any, tokenizer: Any) -> None:
    data = ChatData(dataset, tokenizer=tokenizer, streaming=True, num_workers=2, batch_size=4)
    found = [datum for batch in batches(data) for datum in batch]
    assert sorted(map(repr, found)) == sorted(repr(Datum.from_chat(row, tokenizer)) for row in ROWS)


def test_a_row_of_a_dataset_that_splits_itself_is_counted_in_its_worker(tokenizer: Any) -> None:
    rows = Split([*ROWS[:5], 3])
    with pytest.raises(InvalidDatum, match="worker 1, row 2: messages must be a list"):
        batches(ChatData(rows, tokenizer=tokenizer, streaming=True, num_workers=2))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_may_be_one_json_array(indent: int | None, tokenizer: Any, file: Path) -> None:
    file.write_text(json.dumps(ROWS, indent=indent))
    assert batches(ChatData(file, tokenizer=tokenizer, shuffle=False, batch_size=12)) == [
        [Datum.from_chat(row, tokenizer) for row in ROWS]
    ]
    with pytest.raises(
        InvalidInput, match=r"is one JSON array, which cannot be streamed\. Write one row per line, .*jq"
    ):
        ChatData(file, streaming=True)
    file.write_text(json.dumps([*ROWS, {"text": 3}], indent=indent))
    with pytest.raises(InvalidDatum, match=r"chats\.jsonl: row 12: a row to train on needs"):
        batches(ChatData(file, tokenizer=tokenizer))
    file.write_text(json.dumps(ROWS, indent=indent)[:-1])
    with pytest.raises(InvalidDatum, match=r"chats\.jsonl: not JSON: .* or be one JSON array"):
        batches(ChatData(file, tokenizer=tokenizer))


def test_an_array_may_start_with_a_byte_order_mark(tokenizer: Any, file: Path) -> None:
    for indent in (None, 1):
        file.write_text(json.dumps(ROWS, indent=indent), encoding="utf-8-sig")
        assert len(batches(ChatData(file, tokenizer=tokenizer, batch_size=12))[0]) == len(ROWS)


def test_an_array_in_one_line_is_parsed_once(tokenizer: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps(ROWS))
    loads = Mock(wraps=json.loads)
    monkeypatch.setattr(json, "loads", loads)
    batches(ChatData(file, tokenizer=tokenizer))
    loads.assert_called_once()


@pytest.mark.parametrize(
    "array", ["[\n{}\n]", "[{},\n{}]", "[{},\n{}\n]", "[\n{},\n{}\n]\n", "[{}\n,{}\n]", "[\n\n  {}\n\n]"]
)
def test_an_array_may_have_its_line_breaks_anywhere(array: str, tokenizer: Any, file: Path) -> None:
    file.write_text(array.replace("{}", json.dumps(ROWS[0])))
    found = batches(ChatData(file, tokenizer=tokenizer))
    assert found == [[Datum.from_chat(ROWS[0], tokenizer)] * array.count("{}")]


@pytest.mark.parametrize("following", [[], ["[3"], ["{}"]], ids=str)
def test_a_damaged_first_line_is_no_array(following: list[str], tokenizer: Any, file: Path) -> None:
    chats = [json.dumps(row["messages"]) for row in ROWS]
    file.write_text("\n".join([chats[0][:-1], *following, *chats[1:], "[3"]))
    with pytest.raises(InvalidDatum, match=r"chats\.jsonl:1: not JSON: .* A JSON Lines file has one JSON object"):
        batches(ChatData(file, tokenizer=tokenizer))
    data = ChatData(file, tokenizer=tokenizer, bad_rows="skip", batch_size=12)
    assert len(batches(data)[0]) == len(ROWS) - 1
    assert data.report["train"]["skipped"] == len(following) + 2
    batches(ChatData(file, tokenizer=tokenizer, bad_rows="skip", streaming=True))


def test_lines_that_are_lists_are_no_array(tokenizer: Any, file: Path) -> None:
    file.write_text(json.dumps(ROWS[0]["messages"]))
    assert batches(ChatData(file, tokenizer=tokenizer)) == [[Datum.from_chat(ROWS[0], tokenizer)]]
    file.write_text('["a", "b"]\n["a", "c"]')
    assert len(batches(PreferenceData(file, tokenizer=tokenizer))[0]) == 2


def test_an_error_of_a_worker_is_one_line(tokenizer: Any) -> None:
    with pytest.raises(InvalidDatum, match=r"^row 1: messages must be a list of dicts with role and content, got int$"):
        batches(ChatData([ROWS[0], 3], tokenizer=tokenizer, num_workers=1))


def test_workers_convert_rows_in_order(tokenizer: Any) -> None:
    data = ChatData(ROWS, tokenizer=tokenizer, num_workers=2, shuffle=False, batch_size=12)
    assert batches(data) == [[Datum.from_chat(row, tokenizer) for row in ROWS]]


def test_a_share_is_held_out(tokenizer: Any) -> None:
    data = ChatData(ROWS, 0.25, tokenizer=tokenizer, batch_size=12)
    (train,), (held_out,) = batches(data), list(data.val_dataloader())
    assert (len(train), len(held_out)) == (9, 3)
    assert sorted(map(repr, train + held_out)) == sorted(repr(Datum.from_chat(row, tokenizer)) for row in ROWS)
    again = ChatData(ROWS, 0.25, tokenizer=tokenizer)
    again.setup("validate")
    assert list(again.val_dataloader()) == [held_out]
    assert (again.report["train"]["rows"], again.report["validation"]["rows"]) == (9, 3)


@pytest.mark.parametrize("truncate", ["left", "drop"])
def test_rows_that_are_too_long_are_counted(tokenizer: Any, truncate: Any, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [Datum.from_chat(row, tokenizer).model_input.length + 1 for row in ROWS]
    limit = sorted(lengths)[5]
    longer = sum(length > limit for length in lengths)
    data = ChatData(ROWS, tokenizer=tokenizer, max_length=limit, truncate=truncate, batch_size=100)
    with caplog.at_level(logging.INFO, "tinker_lightning"):
        (batch,) = batches(data)
    assert all(datum.model_input.length < limit for datum in batch)
    report = data.report["train"]
    assert report["truncated" if truncate == "left" else "dropped"] == longer > 0
    assert report["rows"] == len(batch) == len(ROWS) - report["dropped"]
    assert report["tokens"] == sum(datum.model_input.length for datum in batch)
    assert caplog.records[-1].levelno == logging.WARNING
    assert f"{longer} {'truncated' if truncate == 'left' else 'dropped because they are too long'}" in caplog.text


BAD: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ('{"messages": [', "not JSON: Expecting value at column 15. A JSON Lines file has one JSON object"),
    "no role": ('{"messages": [{"content": "x"}]}', "message 0 has no role"),
    "no content": ('{"messages": [{"role": "user"}]}', r"message 0 \(user\) has no content"),
    "unknown role": ('{"messages": [{"role": "asistant", "content": "x"}]}', "did you mean 'assistant'"),
    "all masked": ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant message"),
    "an empty answer": ('{"prompt": "x", "completion": " "}', "the answer is empty, so the model would only learn"),
    "columns": ('{"dialog": []}', "needs messages, .* or instruction and output; this one has dialog"),
    "not text": (b'{"text": "caf\xe9"}', "not text: 'utf-8' codec can't decode .* Save the file as UTF-8"),
    "a huge number": ('{"text": ' + "9" * 5000 + "}", "not readable: Exceeds the limit"),
    "deep": ("[" * 99999, "nested too deeply"),
    "deep tools": (
        '{"prompt": "x", "completion": "y", "tools": [{"name": "f", "parameters": '
        + '{"a": ' * 600
        + "1"
        + "}" * 600
        + "}]}",
        "does not render tools|nested too deeply|RecursionError",
    ),
    "half a character": ('{"text": "\\ud83d"}', "half of a surrogate pair"),
    "a number": ("3", "messages must be a list of dicts with role and content, got int"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_raises_with_file_and_line_or_is_skipped_and_counted(
    bad: str, tokenizer: Any, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line, message = BAD[bad]
    good = [json.dumps(row).encode() for row in ROWS[:2]]
    file.write_bytes(b"\n".join([good[0], b"", line if isinstance(line, bytes) else line.encode(), good[1]]))
    for streaming in (False, True):
        with pytest.raises(InvalidDatum, match=rf"chats\.jsonl:3: .*{message}"):
            batches(ChatData(file, tokenizer=tokenizer, streaming=streaming))
    data = ChatData(file, tokenizer=tokenizer, bad_rows="skip", shuffle=False)
    assert batches(data) == [[Datum.from_chat(row, tokenizer) for row in ROWS[:2]]]
    assert data.report["train"]["skipped"] == 1
    assert "chats.jsonl:3 is skipped" in caplog.text
    assert "1 skipped as invalid" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "nowhere.jsonl"}, r"train: there is no file nowhere\.jsonl"),
        ({"train": 3}, "train must be a JSON Lines file, a dataset or a list of rows, got int"),
        ({"train": {"train": ROWS, "test": ROWS}}, "train must be one dataset, got a dict with train, test; pass one"),
        ({"train": [{"text": 3}], "bad_rows": "skip"}, "train: no row is left: .*, 1 skipped as invalid$"),
        ({"train": ROWS, "validation": 1.5}, "a share between 0 and 1, got 1.5"),
        ({"train": ROWS, "validation": 0.1, "streaming": True}, "a share of a stream cannot be held out"),
        ({"train": ROWS[:1], "validation": 0.5}, "leaves none to train on"),
        ({"train": []}, "train: no row is left: 0 rows"),
        ({"train": [], "streaming": True, "num_workers": 2}, "train: no row is left: 0 rows"),
        ({"train": iter(ROWS), "streaming": True}, "train is a list_iterator, which can be read once"),
        ({"train": ROWS, "train_on": "first"}, "train_on must be one of all, last, got 'first'"),
        ({"train": ROWS, "truncate": "both"}, "truncate must be one of error, left, right, drop, got 'both'"),
        ({"train": ROWS, "max_length": 0}, "max_length must be at least 2, got 0"),
        ({"train": ROWS, "batch_size": 0}, "batch_size must be at least 1"),
        ({"validation": ROWS}, r"there is no data to fit: pass train=\.\.\. to ChatData"),
        ({"train": ROWS, "renderer": "qwen3"}, "needs the package tinker-cookbook. Install it with"),
    ],
)
def test_mistakes_in_arguments(arguments: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match=message):
        batches(ChatData(**{"tokenizer": tokenizer, **arguments}))


def test_files_of_other_formats_name_the_loader_for_them(tmp_path: Path) -> None:
    for name, builder in (("a.parquet", "parquet"), ("a.csv", "csv"), ("a.jsonl.gz", "json")):
        (tmp_path / name).touch()
        with pytest.raises(
            InvalidInput, match=rf"{name} is not a JSON Lines file.*load_dataset\('{builder}', data_files"
        ):
            ChatData(tmp_path / name)


def test_a_datum_without_weights_or_that_is_too_long(tokenizer: Any) -> None:
    with pytest.raises(InvalidDatum, match=r"row 0: none of its tokens has a weight, so there is nothing to train on$"):
        batches(ChatData([Datum.from_tokens([1, 2, 3], weights=[0, 0, 0])], tokenizer=tokenizer, max_length=9))
    assert batches(ChatData([Datum.from_tokens([1] * 9)], tokenizer=tokenizer, max_length=8))
    message = (
        "row 0: the datum has 9 input tokens, but max_length is 8. Build it from fewer tokens, because a datum is not "
        "cut, or pass truncate='drop' to leave out such rows."
    )
    with pytest.raises(TooLong, match=f"^{re.escape(message)}$"):
        batches(ChatData([Datum.from_tokens([1] * 10)], tokenizer=tokenizer, max_length=8))
    long = {"prompt": "x" * 90, "completion": "y"}
    with pytest.raises(
        InvalidDatum, match=r"within max_length=60, .* Cut the other side \(truncate='left'\), or pass bad"
    ):
        batches(ChatData([long], tokenizer=tokenizer, max_length=60, truncate="right"))


def test_an_empty_file_is_named(tokenizer: Any, file: Path) -> None:
    file.write_text("\n")
    with pytest.raises(InvalidInput, match=r"train \(.*chats\.jsonl\): no row is left: 0 rows"):
        batches(ChatData(file, tokenizer=tokenizer))


def test_lengths_are_checked_against_the_context_before_training(service: ServiceClient) -> None:
    module = new(service, RemoteModule)
    long = [*ROWS, {"prompt": "x" * 3000, "completion": "y"}]
    message = r"row 12: it has 30\d\d tokens, but max_length is 2048\. Pass .* to cut it, or 'drop' to leave out such"
    with pytest.raises(TooLong, match=message):
        quiet().fit(module, ChatData(long))
    with pytest.raises(InvalidInput, match="max_length=4096 exceeds the context of the model, 2048 tokens"):
        quiet().fit(module, ChatData(ROWS, max_length=4096))
    with pytest.raises(InvalidInput, match="to use ChatData without a RemoteModule"):
        ChatData(ROWS).setup("fit")


def test_another_tokenizer_converts_the_rows_again(tokenizer: Any) -> None:
    data = ChatData(ROWS[:1], tokenizer=tokenizer)
    ((first,),) = batches(data)
    other = copy.copy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{{ 'assistant' * (add_generation_prompt or 0) }}"
    )
    data._tokenizer = other
    ((second,),) = batches(data)
    assert (first.model_input, second.model_input) == (
        Datum.from_chat(ROWS[0], tokenizer).model_input,
        Datum.from_chat(ROWS[0], other).model_input,
    )
    template = ChatData(ROWS[:1], tokenizer=tokenizer, chat_template=other.chat_template)
    assert batches(template) == [[second]]


def test_a_chat_template_of_a_file_takes_tools(tokenizer: Any, file: Path, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
    row: Any = {"messages": [{"role": "user", "content": "When?"}, call], "tools": [{"name": "now", "parameters": {}}]}
    file.write_text(json.dumps(row))
    (tmp_path / "own.jinja").write_text(HERMES)
    options: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": tmp_path / "own.jinja"}
    with pytest.raises(
        InvalidDatum, match=r"chats\.jsonl:1: the chat template of this tokenizer does not render tool_calls"
    ):
        batches(ChatData(file, tokenizer=tokenizer))
    expected = Datum.from_chat(row, with_template(tokenizer, HERMES))
    assert batches(ChatData(file, **options)) == [[expected]]
    (prompt,) = batches(ChatData(file, **options), "predict")[0]
    assert expected.model_input.to_ints()[: prompt.length] == prompt.to_ints()
    assert batches(PromptData(file, **options), "predict")[0][0]["prompt"] == prompt
    pair = {"prompt": row["messages"][:1], "chosen": [call], "rejected": "No.", "tools": row["tools"]}
    assert batches(PreferenceData([pair], **options))[0][0][0] == expected
    (tmp_path / "own.jinja").write_text(HERMES.replace("message.tool_calls", "message.calls"))
    with pytest.raises(InvalidDatum, match=r"the chat template of .*own\.jinja does not render tool_calls"):
        batches(ChatData(file, **options))
    with pytest.raises(InvalidInput, match=r"chat_template: cannot read the file nowhere\.jinja"):
        ChatData(file, chat_template="nowhere.jinja")


def test_the_report_names_the_formats(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    alpaca, text = {"instruction": "Hi", "output": "Hello."}, {"text": "Hello."}
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    for rows, formats in (
        ([alpaca] * 4, "Alpaca"),
        ([sharegpt, text, sharegpt], "texts, ShareGPT"),
        (ROWS, "messages"),
    ):
        data = ChatData(rows, 0.3, tokenizer=tokenizer)
        with caplog.at_level(logging.INFO, "tinker_lightning"):
            data.setup("fit")
        assert data.report["train"]["format"] == data.report["validation"]["format"] == formats
        assert f"rows ({formats}) with" in caplog.text
    asked = [{"instruction": "Hi", "input": "", "answer": 3}, sharegpt, {"prompt": "Hi"}]
    prompts: Any = PromptData(asked, tokenizer=tokenizer)
    (found,) = batches(prompts, "predict")
    assert found[0]["prompt"] == found[1]["prompt"] == found[2]["prompt"]
    assert found[0]["answer"] == 3
    assert prompts.report["predict"]["format"] == "prompts, ShareGPT, Alpaca"


def test_batches_have_similar_lengths(tokenizer: Any) -> None:
    rows = ["x" * (1 + 37 * i % 101) for i in range(101)]
    data = ChatData(rows, tokenizer=tokenizer, batch_size=4, group_by_length=True)
    data.setup("fit")
    torch.manual_seed(3)
    first, second = batches(data), batches(data)
    for epoch in (first, second):
        assert [len(batch) for batch in epoch] == [4] * 25 + [1]
        lengths = [[datum.model_input.length for datum in batch] for batch in epoch]
        assert sorted(itertools.chain(*lengths)) == list(range(1, 102))
        assert all(max(batch) - min(batch) == 3 for batch in lengths[:-1])
    assert first != second
    torch.manual_seed(3)
    assert batches(data) == first
    for options in ({"streaming": True}, {"shuffle": False}):
        with pytest.raises(InvalidInput, match="group_by_length orders all rows"):
            ChatData(rows, group_by_length=True, **options)  # type: ignore[arg-type]


def test_pairs_and_prompts(tokenizer: Any) -> None:
    (pairs,) = batches(PreferenceData(PAIRS, tokenizer=tokenizer, shuffle=False))
    assert [len(pair) for pair in pairs] == [2] * len(PAIRS)
    with pytest.raises(InvalidDatum, match="row 6: chosen and rejected are equal"):
        batches(PreferenceData([*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "b"}], tokenizer=tokenizer))
    with pytest.raises(InvalidDatum, match="row 0: chosen and rejected are equal"):
        batches(PreferenceData([("b", "b")], tokenizer=tokenizer))
    chosen: Any = None
    rejected: Any = None
    for _ in range(100_000):
        chosen, rejected = [chosen], [rejected]
    with pytest.raises(InvalidDatum, match="row 0: it is nested too deeply"):
        batches(PreferenceData([{"prompt": "a", "chosen": chosen, "rejected": rejected}], tokenizer=tokenizer))
    long = {"prompt": "a", "chosen": "x" * 90 + "y", "rejected": "x" * 90 + "z"}
    with pytest.raises(InvalidDatum, match="row 0: chosen and rejected are equal within max_length=60"):
        batches(PreferenceData([long], tokenizer=tokenizer, max_length=60, truncate="right"))
    rows = [{"prompt": "One?", "answer": 1}, {"prompt": [{"role": "user", "content": "One?"}], "answer": 2}, "One?"]
    ((first, second, third),) = batches(PromptData(rows, tokenizer=tokenizer), "predict")
    assert (first["answer"], second["answer"]) == (1, 2)
    assert isinstance(first["prompt"], ModelInput)
    assert first["prompt"] == second["prompt"] == third["prompt"]
    assert tokenizer.decode(first["prompt"].to_ints()).endswith("One?<|im_end|>\n<|im_start|>assistant\n")


def test_predict_answers_the_prompts(service: ServiceClient) -> None:
    answers: Any = quiet().predict(new(service, RemoteModule), PromptData(["One?", "Two?"], batch_size=1))
    assert [len(batch) for batch in answers] == [1, 1]
    with pytest.raises(InvalidInput, match="there is no data to validate: pass validation="):
        quiet().validate(new(service, RemoteModule), PromptData(["One?"]))


def test_predict_answers_what_precedes_the_last_answer(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "a"}] * 2
    expected = ModelInput.from_ints(generation_prompt(turns[:3], tokenizer))
    for streaming in (False, True):
        data = ChatData([{"messages": turns}], tokenizer=tokenizer, streaming=streaming)
        assert batches(data, "predict") == [[expected]]
    prompt = {"prompt": turns[:3], "chosen": "b", "rejected": "c"}
    assert batches(PreferenceData([prompt], tokenizer=tokenizer), "predict") == [[expected]]
    text = ModelInput.from_ints(tokenizer.encode("Once upon"))
    assert batches(ChatData(["Once upon"], tokenizer=tokenizer), "predict") == [[text]]


@pytest.mark.parametrize("streaming", [False, True])
def test_predict_never_sees_the_answer(streaming: bool, tokenizer: Any) -> None:
    options = {"tokenizer": tokenizer, "streaming": streaming, "max_length": 20, "truncate": "left"}
    row = {"prompt": "A?", "completion": "y" * 90}
    (end,) = batches(ChatData([row], **options), "predict")[0]
    prompt = generation_prompt([{"role": "user", "content": "A?"}], tokenizer)
    assert end.to_ints() == prompt[-20:]
    pair = {"prompt": "A?", "chosen": "y" * 90, "rejected": "z" * 90}
    assert batches(PreferenceData([pair], **options), "predict") == [[end]]
    one_token = {"prompt": "A", "completion": "b"}
    assert batches(ChatData([one_token], as_text=True, **options), "predict") == [
        [ModelInput.from_ints(tokenizer.encode("A"))]
    ]
    datum = Datum.from_tokens([1, 2, 3, 4], weights=[0, 0, 1, 1])
    assert batches(ChatData([datum], **options), "predict") == [[ModelInput.from_ints([1, 2])]]


def test_predict_takes_the_held_out_rows(tokenizer: Any) -> None:
    limit = 45  # which the prompts of all rows fit in, but not all answers
    data = ChatData(iter(ROWS), 0.25, tokenizer=tokenizer, max_length=limit, truncate="drop", batch_size=12)
    (train,) = batches(data)
    (held_out,) = data.val_dataloader()
    assert len(train) + len(held_out) < len(ROWS)
    (prompts,) = batches(data, "predict")
    assert [
        datum.model_input.to_ints()[: len(prompt.to_ints())] for datum, prompt in zip(held_out, prompts, strict=True)
    ] == [prompt.to_ints() for prompt in prompts]
    assert data.report["predict"]["rows"] == len(held_out)
    with pytest.raises(InvalidInput, match=r"there is no data to validate: pass train=\.\.\. to ChatData"):
        ChatData(None, 0.25, tokenizer=tokenizer).setup("validate")


class Sums(ChatData):
    """Rows of another kind."""

    def convert(self, row: Any, rows: Any) -> Any:
        if row["as_datum"]:
            return Datum.from_chat(self._chat(row), rows.tokenizer)
        return super().convert(self._chat(row), rows)

    def _chat(self, row: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["sum"]}, {"role": "assistant", "content": row["result"]}]


def test_predict_takes_rows_of_another_kind(tokenizer: Any) -> None:
    rows = [{"sum": "1 + 1", "result": "2", "as_datum": as_datum} for as_datum in (False, True)]
    prompt = ModelInput.from_ints(generation_prompt([{"role": "user", "content": "1 + 1"}], tokenizer))
    assert batches(Sums(rows, tokenizer=tokenizer), "predict") == [[prompt, prompt]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in memory", marks=pytest.mark.soak),
        pytest.param({"streaming": True, "shuffle_buffer": 5}, id="streaming"),
        pytest.param({"group_by_length": True}, id="by length"),
    ],
)
def test_a_run_resumes_at_the_batch_where_it_stopped(
    options: dict[str, Any], service: ServiceClient, file: Path, tmp_path: Path
) -> None:  # R5.3
    import lightning.pytorch as pl

    def fit(steps: int, checkpoint: str | None = None) -> tuple[Any, RemoteModule]:
        pl.seed_everything(3)
        module = new(service, RemoteModule)
        trainer = quiet(max_steps=steps, accumulate_grad_batches=2)
        trainer.fit(module, ChatData(file, batch_size=2, **options), ckpt_path=checkpoint)
        return trainer, module

    whole = logprobs_of(fit(5)[1])
    stopped, _ = fit(2)
    stopped.save_checkpoint(tmp_path / "middle.ckpt")
    assert logprobs_of(fit(5, str(tmp_path / "middle.ckpt"))[1]).equal(whole)
