"""Converts rows of datasets (texts, chats, dicts) to datums, pairs and prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from typing_extensions import override

from tinker_lightning.errors import InvalidDatum, TooLong
from tinker_lightning.rows.columns import standard_columns
from tinker_lightning.types import Datum, ModelInput, chat
from tinker_lightning.types.chat import Truncate
from tinker_lightning.types.datum import check_not_mapped, to_datum
from tinker_lightning.types.model_input import to_model_input

if TYPE_CHECKING:
    from tinker_lightning.types.chat import Message, TokensAndWeights

# The columns by which a dict is recognized as a row.
COLUMNS = ("messages", "prompt", "completion", "text", "chosen", "rejected", "conversations", "instruction")


@runtime_checkable
class DatumLike(Protocol):
    """A datum of this library or of the official SDK."""

    model_input: Any
    loss_fn_inputs: Any


@runtime_checkable
class PromptLike(Protocol):
    """A model input of this library or of the official SDK."""

    chunks: Any


def is_chat(value: Any) -> bool:
    """Returns whether a value is a list of messages, which may lack a role or content by mistake."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(each, Mapping) and ("role" in each or "content" in each) for each in value)


def is_row(value: Any) -> bool:
    """Returns whether a value is one row of a dataset: a text, a chat, or a dict with one of the known columns."""
    if isinstance(value, Mapping):
        return any(name in value for name in COLUMNS)
    return isinstance(value, str) or is_chat(value)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Converts rows of a dataset to datums, pairs and prompts.

    Args:
        tokenizer: The tokenizer of the model.
        max_length: The maximum number of tokens of a row.
        truncate: How to treat longer rows: `error` raises `TooLong`, `left` and `right` cut that side.
        system: A system message for chats that have none.
        as_text: Whether strings under `prompt`, `completion`, `chosen` and `rejected` are plain text. By default they
            are messages of the user and the assistant.
        only_last: Whether to train on the last assistant message of a chat only.
        renderer: A renderer of `tinker_cookbook`, in place of the tokenizer's chat template.
        count: Called with the format of each row, and with `truncated` for each row that is cut.
    """

    tokenizer: Any
    max_length: int | None = None
    truncate: Truncate = "error"
    system: str | None = None
    as_text: bool = False
    only_last: bool = False
    renderer: Any = None
    count: Callable[[str], None] = lambda _: None

    def datum(self, row: Any) -> Datum:
        """Returns the datum of a text, a chat, or a dict: see `ChatData` for its columns."""
        if isinstance(row, DatumLike):
            self.count("datums")
            return self._check_datum(to_datum(row))
        check_not_mapped(row)
        if isinstance(row, str):
            row = {"text": row}
        name, row = standard_columns(row if isinstance(row, Mapping) else {"messages": row})
        if "functions" in row and "messages" in row:
            raise InvalidDatum("the row has functions, OpenAI's former tools. Write tools in place of it")
        if isinstance(row.get("label"), bool | np.bool_) and not row["label"]:
            raise InvalidDatum(
                "the label of the row is false, so its answer is undesirable, but would be trained. Use KTO with "
                "PreferenceData, leave the row out, or remove the column 'label' if it means something else"
            )
        if "messages" in row:
            self._check_answers(row["messages"])
            datum = self._chat_datum(row["messages"], 0, row.get("tools"))
        elif "prompt" in row and "completion" in row:
            self._check_answers(_messages(row["completion"], "assistant"))
            datum = self._answer_datum(row["prompt"], row["completion"], row.get("tools"))
        elif isinstance(row.get("text"), str):
            datum = self._text_datum(row["text"])
        else:
            raise InvalidDatum(
                "a row to train on needs messages, prompt and completion, text, conversations, or instruction and "
                f"output; this one has {', '.join(map(str, row)) or 'no columns'}"
                + (". Pairs of answers are for DPO." if "chosen" in row else "")
            )
        self.count(name)
        return datum

    def pair(self, row: Any) -> tuple[Datum, Datum]:
        """Returns the chosen and the rejected datum of a dict with `chosen`, `rejected` and usually `prompt`.

        Without a prompt, the answers must be whole chats, whose common start is the prompt.
        """
        if not isinstance(row, Mapping):
            if isinstance(row, list | tuple) and len(row) == 2:
                return self._check_pair(self.datum(row[0]), self.datum(row[1]))
            raise InvalidDatum(f"a pair must be a dict with prompt, chosen and rejected, got {type(row).__name__}")
        name, row = standard_columns(row)
        if missing := [name for name in ("chosen", "rejected") if name not in row]:
            raise InvalidDatum(
                f"the pair has no {missing[0]!r}; it has {', '.join(map(str, row)) or 'no columns'}"
                + (". Answers with a label are for KTO." if "label" in row else "")
            )
        prompt, answers = row.get("prompt"), [row["chosen"], row["rejected"]]
        if answers[0] == answers[1]:
            raise InvalidDatum("chosen and rejected are equal, so there is no preference to learn")
        if prompt is None and any(isinstance(answer, str) for answer in answers):
            raise InvalidDatum("the pair has no 'prompt'; only pairs of whole chats can do without")
        if not any(isinstance(answer, str) for answer in answers):
            chosen, rejected = (chat.check_messages(answer) for answer in answers)
            # Whole chats may come with a prompt as a string, which is their first message.
            if prompt is None or (isinstance(prompt, str) and chosen and chosen[0]["role"] != "assistant"):
                same = [a == b for a, b in zip(chosen, rejected, strict=False)]
                shared = same.index(False) if False in same else len(same)
                prompt, answers = chosen[:shared], [chosen[shared:], rejected[shared:]]
        chosen_datum, rejected_datum = (self._answer_datum(prompt, answer, row.get("tools")) for answer in answers)
        pair = self._check_pair(chosen_datum, rejected_datum)
        self.count(name)
        return pair

    def preference(self, row: Any) -> Datum | tuple[Datum, Datum]:
        """Returns the datum of an answer with `label`, 1.0 if it is true, or the datums of a pair.

        The answer is `completion`, or the last answer of `messages`.
        """
        if not isinstance(row, Mapping) or row.get("chosen") is not None or not {"label", "completion"} & row.keys():
            return self.pair(row)
        label = row.get("label")
        if not isinstance(label, bool | np.bool_):
            if label is None:
                raise InvalidDatum(
                    f"a row of preferences needs prompt, chosen and rejected, or for KTO prompt, completion and label; "
                    f"this one has {', '.join(row)}. Answers without a preference are for SFT with ChatData."
                )
            raise InvalidDatum(
                f"the label of an answer must be true (desirable) or false (undesirable), but it is {label!r}"
            )
        rows = self if row.get("completion") is not None else replace(self, only_last=True)
        answer = {name: value for name, value in row.items() if name != "label"}
        return self._with_label(rows.datum(answer), float(label))

    def prompt(self, row: Any) -> ModelInput:
        """Returns the prompt of a text, a chat, or a dict with `prompt`, or with messages in any format.

        A trailing assistant message is dropped.
        """
        if isinstance(row, PromptLike):
            return to_model_input(row)
        if not isinstance(row, Mapping):
            return self._prompt(row, None)
        name, columns = standard_columns(row)
        value = columns.get("prompt", columns.get("messages"))
        if value is None:
            raise InvalidDatum(f"the row has no 'prompt'; it has {', '.join(map(str, row)) or 'no columns'}")
        if isinstance(value, str) and not self.as_text:
            value = [{"role": "user", "content": value}]
        prompt = to_model_input(value) if isinstance(value, PromptLike) else self._prompt(value, columns.get("tools"))
        self.count(name)
        return prompt

    def _prompt(self, value: Any, tools: Any) -> ModelInput:
        """Returns the prompt of a text or a chat."""
        if isinstance(value, str):
            ids = chat.encode(self.tokenizer, value)
        else:
            messages = self._with_system(chat.messages_to_answer(value))
            if self.renderer is not None:
                _check_renderer(messages, tools)
                ids = self.renderer.build_generation_prompt(messages).to_ints()
            else:
                ids = chat.generation_prompt(messages, self.tokenizer, tools=tools)
        return ModelInput.from_ints(self._truncated(ids, np.zeros(len(ids), np.float32))[0])

    def _check_answers(self, messages: Any) -> None:
        """Raises `InvalidDatum` if the answers to train on have no content, so that only their ends would count."""
        answers = [each for each in chat.check_messages(messages) if chat.is_trained(each)]
        trained = answers[-1:] if self.only_last else answers
        if trained and not any(each.get("tool_calls") or each["content"].strip() for each in trained):
            raise InvalidDatum(
                "the answer is empty, so the model would only learn to end at once. Leave the row out, or pass "
                "bad_rows='skip' to a data module to skip and count such rows"
            )

    def _check_pair(self, chosen: Datum, rejected: Datum) -> tuple[Datum, Datum]:
        """Returns a pair; raises if it is of equal texts, or of texts that were cut to equal ones."""
        names = ("target_tokens", "weights")
        inputs = [
            [each.loss_fn_inputs[name].tolist() for name in names if name in each.loss_fn_inputs]
            for each in (chosen, rejected)
        ]
        if inputs[0] == inputs[1] and chosen.model_input.to_ints() == rejected.model_input.to_ints():
            within = "" if self.max_length is None else f" within max_length={self.max_length}"
            raise InvalidDatum(f"chosen and rejected are equal{within}, so there is no preference to learn")
        return chosen, rejected

    def _with_label(self, datum: Datum, label: float) -> Datum:
        return datum.with_inputs(label=label)

    def _answer_datum(self, prompt: Any, answer: Any, tools: Any) -> Datum:
        if self.as_text and isinstance(prompt, str) and isinstance(answer, str):
            before = chat.encode(self.tokenizer, prompt)
            after = self._with_end(chat.encode(self.tokenizer, answer, add_special_tokens=False))
            return self._token_datum([*before, *after], np.repeat([0, 1], [len(before), len(after)]).astype(np.float32))
        messages = _messages(prompt, "user")
        return self._chat_datum([*messages, *_messages(answer, "assistant")], len(messages), tools)

    def _chat_datum(self, messages: Any, first: int, tools: Any) -> Datum:
        return self._token_datum(*self._chat(messages, first, tools))

    def _chat(self, messages: Any, first: int, tools: Any) -> TokensAndWeights:
        checked = chat.check_messages(messages)
        messages = self._with_system(checked)
        first += len(messages) - len(checked)
        if self.renderer is None:
            return chat.render(messages, self.tokenizer, first=first, only_last=self.only_last, tools=tools)
        _check_renderer(messages, tools)
        what = "last_assistant_message" if self.only_last else "all_assistant_messages"
        tokens, weights = self.renderer.build_supervised_example(messages, train_on_what=what)
        weights = torch.as_tensor(weights, dtype=torch.float32).numpy().copy()
        if first:
            weights[: self.renderer.build_generation_prompt(messages[:first]).length] = 0
        return tokens.to_ints(), weights

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _text_datum(self, text: str) -> Datum:
        ids = self._with_end(chat.encode(self.tokenizer, text))
        return self._token_datum(ids, np.ones(len(ids), np.float32))

    def _with_end(self, ids: list[int]) -> list[int]:
        """Adds the end-of-text token, so that the model learns to stop."""
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _token_datum(self, ids: list[int], weights: Any) -> Datum:
        short, weights = self._truncated(ids, weights)
        if not weights[1:].any():  # the first token is not predicted
            within = f" within max_length={self.max_length}" if len(short) < len(ids) else ""
            raise _no_weight(within, cut_right=bool(within) and self.truncate == "right")
        return Datum.from_tokens(short, weights)

    def _truncated(self, ids: list[int], weights: Any) -> TokensAndWeights:
        if self.truncate == "error" and self.max_length is not None and len(ids) > self.max_length:
            raise TooLong(
                f"it has {len(ids)} tokens, but max_length is {self.max_length}. Pass truncate='left' or 'right' to "
                "cut it, or 'drop' to leave out such rows."
            )
        short = chat.shorten(ids, weights, self.max_length, self.truncate)
        if len(short[0]) < len(ids):
            self.count("truncated")
        return short

    def _check_datum(self, datum: Datum) -> Datum:
        """Returns a datum that was built elsewhere; raises if it is too long or has no weight."""
        weights = datum.loss_fn_inputs.get("weights")
        if weights is not None and not weights.to_numpy().any():
            raise _no_weight()
        # Its input alone counts: a block that was packed to fill the context has a target for each of its positions.
        if self.max_length is not None and datum.model_input.length > self.max_length:
            raise TooLong(
                f"the datum has {datum.model_input.length} input tokens, but max_length is {self.max_length}. Build it "
                "from fewer tokens, because a datum is not cut, or pass truncate='drop' to leave out such rows."
            )
        return datum


@dataclass(frozen=True, slots=True)
class PromptFormat(RowFormat):
    """Converts rows to prompts: a chat or pair without its last answer, or a text to continue."""

    @override
    def _check_answers(self, messages: Any) -> None:
        """Accepts any answer, which is left out."""

    @override
    def _check_pair(self, chosen: Any, rejected: Any) -> Any:
        del rejected  # both are the prompt of the pair
        return chosen

    @override
    def _with_label(self, datum: Any, label: float) -> Any:
        del label
        return datum

    @override
    def _answer_datum(self, prompt: Any, answer: Any, tools: Any) -> Any:
        if self.as_text and isinstance(prompt, str) and isinstance(answer, str):
            return self._prompt(prompt, None)
        return RowFormat._answer_datum(self, prompt, answer, tools)

    @override
    def _chat_datum(self, messages: Any, first: int, tools: Any) -> Any:
        del first  # only the last answer is left out
        return self._prompt(messages, tools)

    @override
    def _text_datum(self, text: str) -> Any:
        return self._prompt(text, None)

    @override
    def _check_datum(self, datum: Datum) -> Any:
        weights = RowFormat._check_datum(self, datum).loss_fn_inputs.get("weights")
        if weights is None:
            return datum.model_input
        trained = np.flatnonzero(weights.to_numpy())
        start = trained[np.flatnonzero(np.diff(trained, prepend=-2) > 1)[-1]]
        # A text, whose tokens all have a weight, is continued.
        return ModelInput.from_ints(datum.model_input.tokens()[: start + 1]) if start else datum.model_input


def _no_weight(within: str = "", *, cut_right: bool = False) -> InvalidDatum:
    fix = ". Cut the other side (truncate='left'), or pass bad_rows='skip' to a data module to skip and count such rows"
    return InvalidDatum(f"none of its tokens has a weight{within}, so there is nothing to train on{fix * cut_right}")


def _check_renderer(messages: list[Message], tools: Any) -> None:
    answers = [each for each in messages if each["role"] == "assistant"]
    if tools or any(each.get("tool_calls") or not chat.is_trained(each) for each in answers):
        raise InvalidDatum("a renderer takes no tools, tool_calls, weight and train. Use a chat template for such rows")


def _messages(value: Any, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else chat.check_messages(value)
