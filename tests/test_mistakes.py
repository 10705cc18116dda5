"""The mistakes that users make, and what they are told. The table in `docs/errors.md` is made from this list.

`UPDATE_DOCS=1 pytest tests/test_mistakes.py` regenerates it.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch

from tinker_lightning import AdamParams, Datum, LossFnOutput, Regularizer, custom_loss, losses
from tinker_lightning.callbacks import GenerationEval
from tinker_lightning.client import ServiceClient, TrainingClient
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.data import ChatData, PreferenceData
from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.lightning import checks
from tinker_lightning.recipes import DPO, SFT
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers.api import Served

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
DATA = [Datum.from_tokens(list(b"All happy families are alike")) for _ in range(2)]
OTHER_PROMPTS = [Datum.from_tokens(list(text), [0.0] * 7 + [1.0] * 2) for text in (b"2 + 2? 4.", b"3 + 4? 7.")]
BEGIN, END = "<!-- the table -->\n", "<!-- its end -->\n"


@dataclass(frozen=True)
class Stage:
    service: ServiceClient
    client: TrainingClient
    http_url: str

    def custom(self, loss: Any, **more: Any) -> None:
        self.client.forward_backward_custom(DATA, loss, **more).result()

    def preferences(self, targets: Any = (2, 3, 4), **inputs: Any) -> None:
        shaped = {"weights": torch.ones(torch.tensor(targets).shape), **inputs}
        data = [Datum.from_targets([1, 2, 3], targets, **shaped)] * 2
        self.client.forward_backward_custom(data, partial(losses.dpo, reference_free=True)).result()


@pytest.fixture(scope="module")
def stage(served: Served) -> Iterator[Stage]:
    with embedded_service() as service:
        yield Stage(service, service.create_lora_training_client("tiny", rank=2), served.url)


def total(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(logprobs).sum()


def minimal(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
    logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
    return LossFnOutput(loss=-(logprobs * attention_mask * loss_fn_inputs["urgency"]).sum(), logprobs=logprobs)


def branches(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
    if model_outputs.sum() > 0:
        return LossFnOutput(loss=model_outputs.sum(), logprobs=model_outputs[..., 0])
    return LossFnOutput(loss=-model_outputs.sum(), logprobs=model_outputs[..., 0])


HELD = torch.ones(3)
CALL = '{"prompt": "2 + 2?", "completion": [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}]}'
ANSWER = '{"prompt": "2 + 2?", "completion": "4."}'
EQUAL = '{"prompt": "2 + 2?", "chosen": "4.", "rejected": "4."}'


def captures(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
    return LossFnOutput(loss=(model_outputs.sum() * HELD).sum(), logprobs=model_outputs[..., 0])


def on_server(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def mine(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        return LossFnOutput(change(model_outputs.log_softmax(-1)[..., 0] * attention_mask))

    with embedded_service() as service:  # a session of its own, whose losses the others do not list
        custom_loss(service, name="mine")(mine)
        service.create_lora_training_client("tiny", rank=2).forward_backward(DATA, "mine").result()


def of_datums_on_server(stage: Stage, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def mine(logprobs: Any) -> Any:
        return change(logprobs), {}

    handle = stage.service.create_custom_loss(mine, {"logprobs": 1}).result()
    stage.client.forward_backward(DATA, handle).result()


def overflows(stage: Stage) -> None:
    ones, far = [1.0] * 27, [-1000.0] * 27
    tokens = list(b"All happy families are alike")
    data = [Datum.from_targets(tokens[:-1], tokens[1:], advantages=ones, logprobs=far)]
    stage.client.forward_backward(data, "importance_sampling").result()


def missing_input(stage: Stage) -> None:
    custom_loss(stage.service, name="urgent")(minimal)
    stage.client.forward_backward(DATA, "urgent").result()


def unreachable(_: Stage) -> None:
    service = ServiceClient(base_url="http://127.0.0.1:9", retry_policy=RetryPolicy(0.0))
    custom_loss(service, name="urgent")(minimal)


def distances(stage: Stage) -> None:
    data = [Datum.from_targets([1, 2], [2, 3], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])]
    stage.client.forward_backward(data, "ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}).result()


def unread(stage: Stage) -> None:
    with embedded_service() as service:
        client = service.create_lora_training_client("tiny", rank=2)
        client.forward_backward(DATA, "no_such_loss").wait()  # nobody reads the result
        client.optim_step(AdamParams())


def rows(stage: Stage, *lines: str, kind: Any = ChatData, **options: Any) -> None:
    """Reads a file with these lines, after one that is good."""
    good = '{"prompt": "2 + 2?", "completion": "4.", "chosen": "4.", "rejected": "5."}'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("\n".join([good, *lines]))
        kind(file, tokenizer=stage.client.get_tokenizer(), **options).setup("fit")


def closed(_: Stage) -> None:
    module = SFT("tiny", base_url="embedded")
    module.close()
    module.datums(["a text"])


def bare_list(stage: Stage) -> None:
    trainer = pl.Trainer(strategy="tinker", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(SFT(stage.client), ["a text", "another"])


def other_trainer(_: Stage) -> None:
    import pytorch_lightning

    checks.register_elsewhere("tinker")  # as importing this library does if that package was imported before
    pytorch_lightning.Trainer(strategy="tinker")


def folder_of_data(_: Stage) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        Path("chats").mkdir()
        Path("chats", "train.jsonl").touch()
        ChatData("chats")


def folder_as_checkpoint(_: Stage) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        Path("runs").mkdir()
        SFT.load_from_checkpoint("runs")


def other_column(stage: Stage) -> None:
    SFT(stage.client).predict_step([{"question": "2 + 2?"}], 0)


def misread_column(_: Stage) -> None:
    score = GenerationEval(lambda text, row: text == row["anwser"], [{"prompt": "2 + 2?", "answer": "4."}])
    score.on_samples(pl.Trainer(barebones=True), SFT("tiny"), [[{"text": "4."}]], in_epoch=False)


def https(stage: Stage) -> None:
    url = stage.http_url.replace("http://", "https://")
    ServiceClient(base_url=url, retry_policy=RetryPolicy(0.0)).get_server_capabilities()


def no_model(_: Stage) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TINKER_BASE_MODEL", raising=False)
        SFT(base_url="embedded").datums(["a text"])


MISTAKES: list[tuple[str, str, Callable[[Stage], object]]] = [
    ("R1.9", "a loss with one value per token", lambda s: s.custom(lambda _, p: (torch.cat(p), {}))),
    ("R1.9", "a loss that is a Python number", lambda s: s.custom(lambda _, p: (total(p).item(), {}))),
    ("R1.9", "a loss that is NaN", lambda s: s.custom(lambda _, p: (total(p) * torch.nan, {}))),
    ("R1.9", "a loss whose gradient is not finite", lambda s: s.custom(lambda _, p: ((total(p) * 0).sqrt(), {}))),
    ("R1.9, R4.5", "a loss computed from detached tensors", lambda s: s.custom(lambda _, p: (total(p).detach(), {}))),
    ("R1.9, R4.5", "a loss that does not use the log-probabilities", lambda s: s.custom(lambda *_: (HELD.sum(), {}))),
    ("R1.9", "the same on the server: one value per token", lambda _: on_server(lambda p: p)),
    ("R1.9", "the same on the server: NaN", lambda _: on_server(lambda p: p.sum() * torch.nan)),
    ("R1.9", "the same on the server: a gradient that is not finite", lambda _: on_server(_root)),
    ("R1.9", "the same on the server: detached", lambda _: on_server(lambda p: p.detach().sum())),
    ("R1.9", "the same in a per-datum loss: one value per token", lambda s: of_datums_on_server(s, lambda p: p)),
    ("R1.9", "the same in a per-datum loss: NaN", lambda s: of_datums_on_server(s, lambda p: p.sum() * torch.nan)),
    ("R1.9", "the same in a per-datum loss: detached", lambda s: of_datums_on_server(s, lambda p: p.detach().sum())),
    ("R1.9", "a built-in loss that overflows", overflows),
    ("R1.7", "a metric that is not a number", lambda s: s.custom(lambda _, p: (total(p), {"text": "fine"}))),
    ("R2.1", "two regularizers with the same name", lambda s: s.custom(None, regularizers=[_term("a"), _term("a")])),
    ("R2.1", "a regularizer's weight that is NaN", lambda s: s.custom(None, regularizers=[_term("a", float("nan"))])),
    ("R2.2", "a regularizer that fails", lambda s: s.custom(None, regularizers=[Regularizer(_failing, 1.0, "rank")])),
    ("R3.6", "a loss for the server that branches on a value", lambda s: custom_loss(s.service)(branches)),
    ("R3.6", "a loss for the server that holds a tensor", lambda s: custom_loss(s.service)(captures)),
    ("R3.6", "a loss that the server does not know", lambda s: s.client.forward_backward(DATA, "urgnt").result()),
    ("R3.6", "a datum without an input that the loss reads", missing_input),
    ("R3.6", "an unreachable server", unreachable),
    ("R3.6", "https on a port of http", https),
    ("R4.2", "a library loss without its input", lambda s: s.custom(losses.dpo)),
    ("R4.5", "a library loss on a batch without weights", lambda s: s.preferences(weights=[0.0] * 3)),
    ("R4.5", "several targets per position for a loss on sequences", lambda s: s.preferences([[2, 3], [3, 4], [4, 5]])),
    ("R4.5", "distances instead of the bounds of a ratio", distances),
    ("R4.5", "tokens and weights of different lengths", lambda _: Datum.from_tokens([1, 2, 3], [0.0, 1.0])),
    ("R4.5", "a per-token input of a different length", lambda _: Datum.from_targets([1, 2], [2, 3], advantages=[1.0])),
    ("R4.5", "a failed pass whose result nobody reads", unread),
    ("R4.1", "a line of a data file that is not JSON", lambda s: rows(s, '{"messages": [')),
    ("R4.1", "a message without a role", lambda s: rows(s, '{"messages": [{"content": "4."}]}')),
    ("R4.1", "a misspelled role", lambda s: rows(s, '{"messages": [{"role": "asistant", "content": "4."}]}')),
    ("R4.1", "a chat without an answer", lambda s: rows(s, '{"messages": [{"role": "user", "content": "2 + 2?"}]}')),
    ("R4.1", "a row with other columns", lambda s: rows(s, '{"question": "2 + 2?", "answer": "4."}')),
    ("R5.13", "a tool call that the chat template does not render", lambda s: rows(s, CALL)),
    ("R4.1", "a folder as a data file", folder_of_data),
    ("R4.1", "a row that is too long", lambda s: rows(s, max_length=8)),
    ("R4.3", "a pair whose answers are equal", lambda s: rows(s, EQUAL, kind=PreferenceData)),
    ("R4.3", "a batch that is half a pair", lambda s: DPO(s.client).datums(DATA[:1])),
    ("R4.3", "chats in place of pairs", lambda s: DPO(s.client).datums(OTHER_PROMPTS)),
    ("R5.3", "an empty dataset", lambda s: ChatData([], tokenizer=s.client.get_tokenizer()).setup("fit")),
    ("R5.3", "a list in place of a loader", bare_list),
    ("R5.3", "no model", no_model),
    ("R5.3", "a model in this process", lambda _: SFT(torch.nn.Linear(2, 2))),
    ("R5.3", "a learning rate that is a string", lambda _: SFT("tiny", learning_rate="1e-4")),  # type: ignore[arg-type]
    ("R5.3", "a Trainer of pytorch_lightning", other_trainer),
    ("R5.3", "an optimizer that no server has", lambda _: SFT("tiny", optimizer="sgd")),  # type: ignore[arg-type]
    ("R5.3", "a warmup that is a string", lambda _: SFT("tiny", warmup="10%")),  # type: ignore[arg-type]
    ("R5.3", "options of predict that are no dict", lambda _: SFT("tiny", predict=8)),  # type: ignore[arg-type]
    ("R5.3", "a batch size that is a string", lambda _: ChatData([], batch_size="4")),
    ("R5.3", "a folder as a checkpoint", folder_as_checkpoint),
    ("R4.3", "answers without a preference", lambda s: rows(s, ANSWER, kind=PreferenceData)),
    ("R5.3", "prompts in another column", other_column),
    ("R5.3", "a score that reads a column that no row has", misread_column),
    ("R5.3", "a module that was closed", closed),
]


def _root(logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * 0).sum().sqrt()


def _term(name: str, weight: float = 1.0) -> Regularizer:
    return Regularizer(lambda _, p: (total(p), {}), weight, name)


def _failing(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def told(mistake: Callable[[Stage], object], stage: Stage) -> tuple[str, str]:
    """The error's name, and its text without what differs from run to run."""
    with pytest.raises(TinkerLightningError) as raised:
        mistake(stage)
    text = str(raised.value)
    text = re.sub(r"/\S*/(rows\.jsonl)", r"\1", text)
    text = re.sub(r"(https://127\.0\.0\.1):\d+", r"\1:8000", text)
    text = re.sub(r"/\S*/(tests/\S+?\.py):\d+", r"\1:…", text)
    text = re.sub(r" \(forward_backward \d+ of \S+, request \S+\)$", "", text)
    return type(raised.value).__name__, " ".join(text.split())


@pytest.mark.parametrize(("what", "mistake"), [each[1:] for each in MISTAKES], ids=[each[1] for each in MISTAKES])
def test_the_error_says_what_is_in_the_docs(stage: Stage, what: str, mistake: Callable[[Stage], object]) -> None:
    name, text = told(mistake, stage)
    row = f"| {what} | `{name}` | {text.replace('|', chr(92) + '|')} |\n"
    page = PAGE.read_text()
    if os.environ.get("UPDATE_DOCS"):
        head, _, rest = page.partition(BEGIN)
        table, _, tail = rest.partition(END)
        rows = {line.split("|")[1].strip(): line for line in table.splitlines(keepends=True)[2:]}
        rows[what] = row
        known = [line for _, key, _ in MISTAKES if (line := rows.get(key))]
        PAGE.write_text(head + BEGIN + "| mistake | error | message |\n|---|---|---|\n" + "".join(known) + END + tail)
    assert row in PAGE.read_text()


def test_the_docs_have_no_other_rows() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [what for _, what, _ in MISTAKES]
