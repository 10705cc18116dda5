"""`tinker-lightning chat` with base models and trained weights."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinker_lightning import cli, connect
from tinker_lightning.cli.chat import stream_answer
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.errors import ServerUnreachable
from tinker_lightning.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest

    from tinker_lightning.client import ServiceClient

OPTIONS = ["--base-url", "embedded", "--max-tokens", "8", "--seed", "1"]


def chat(text: str, source: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return cli.main(["chat", source, *OPTIONS, *options])


def test_every_kind_of_model_answers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect("embedded") as service:  # an adapter that was not trained changes nothing
        client = service.create_lora_training_client("tiny", rank=4)
        saved = client.save_state("chat").result().path, client.save_weights_for_sampler("chat").result().path
        folder = client.export_adapter(tmp_path / "adapter")
    answers = []
    for source in ("tiny", *map(str, saved), str(folder)):
        assert chat("Hello\n", source, monkeypatch) == 0
        answers.append(capfd.readouterr().out)
    assert len(set(answers)) == 1
    assert answers[0].strip()


def test_a_chat_remembers_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    sample = SamplingClient.sample

    def watched(sampler: SamplingClient, prompt: Any, *args: Any) -> Any:
        lengths.append(prompt.length)
        return sample(sampler, prompt, *args)

    monkeypatch.setattr(SamplingClient, "sample", watched)
    assert chat("Hi\n\nHi\n/reset\nHi\n/quit\nnever read\n", "tiny", monkeypatch) == 0
    assert chat("Hi\n", "tiny", monkeypatch, "--system", "Be brief.") == 0
    first, second, after_reset, with_system = lengths
    assert first == after_reset < min(second, with_system)


def test_a_chat_beyond_the_context_drops_its_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    long = "a" * 600 + "\n"  # tiny has a token for each byte and a context of 2,048
    assert chat(4 * long, "tiny", monkeypatch, "--temperature", "0") == 0
    assert "the oldest 1 of 3 earlier turns no longer fit" in capfd.readouterr().err
    assert chat("a" * 2048, "tiny", monkeypatch) == 2
    assert "Send a shorter message." in capfd.readouterr().err
    shown = talk(Terminal("a" * 2048, "Hi"), monkeypatch)  # a terminal goes on
    assert shown.count("> ") == 3
    assert "Send a shorter message." in capfd.readouterr().err


def test_an_unknown_model_is_one_message(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert chat("Hi\n", "tinny", monkeypatch) == 2
    assert "there is no model 'tinny'" in capfd.readouterr().err


class Terminal(io.StringIO):
    """A terminal that types the given lines, and Ctrl-C for an exception among them."""

    def __init__(self, *lines: str | BaseException) -> None:
        super().__init__()
        self._lines = list(lines)

    def isatty(self) -> bool:
        return True

    def input(self, prompt: str) -> str:
        self.write(prompt)
        line = self._lines.pop(0) if self._lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


def talk(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setattr("builtins.input", terminal.input)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    assert cli.main(["chat", "tiny", *OPTIONS, *options]) == 0
    return terminal.getvalue()


def test_a_terminal_explains_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = talk(Terminal("/help"), monkeypatch)
    assert shown.count("/reset starts a new chat") == 2
    assert shown.count("> ") == 2


def test_chunks_are_the_answer(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    prompt = ModelInput.from_ints(list(b"Once"))
    for params in (SamplingParams(max_tokens=13, temperature=0), SamplingParams(max_tokens=13, seed=3)):
        chunks = list(stream_answer(sampler, prompt, params, [2, 4]))
        assert [len(chunk) for chunk in chunks] == [2, 4, 4, 3]
        assert list(stream_answer(sampler, prompt, params, [2, 4])) == chunks
        if params.temperature == 0:
            assert joined(chunks) == sampler.sample(prompt, 1, params).result().sequences[0].tokens
    # Each chunk has a seed of its own: with one seed for all, each would begin with the same draw.
    hot = SamplingParams(max_tokens=8, seed=3)
    (whole,) = stream_answer(sampler, prompt, hot, [8])
    assert joined(stream_answer(sampler, prompt, hot, [1])) != whole[:1] * 8
    # An answer ends with its stop.
    stop = replace(params, temperature=0, stop=[whole_greedy(sampler, prompt)[3]])
    ended = joined(stream_answer(sampler, prompt, stop, [2, 4]))
    assert ended == whole_greedy(sampler, prompt)[: len(ended)]
    assert len(ended) <= 4


def joined(chunks: Iterable[list[int]]) -> list[int]:
    return [token for chunk in chunks for token in chunk]


def whole_greedy(sampler: SamplingClient, prompt: ModelInput) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0)
    return sampler.sample(prompt, 1, params).result().sequences[0].tokens


def test_a_terminal_shows_an_answer_while_it_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    sample = SamplingClient.sample

    def watched(sampler: SamplingClient, prompt: Any, number: int, params: SamplingParams) -> Any:
        lengths.append(params.max_tokens or 0)
        return sample(sampler, prompt, number, params)

    monkeypatch.setattr(SamplingClient, "sample", watched)
    shown = talk(Terminal("Hello"), monkeypatch, "--max-tokens", "14")
    assert lengths[:3] == [4, 8, 2][: len(lengths)]
    assert shown.startswith("Type a message.")


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    greedy = ["--temperature", "0", "--max-tokens", "14"]
    assert chat("Hi\n", "tiny", monkeypatch, *greedy) == 0
    answer = capfd.readouterr().out
    assert "\x03" in answer
    assert answer.replace("\x03", "") in talk(Terminal("Hi"), monkeypatch, *greedy)
    assert capfd.readouterr().err == "Loading tiny ...\n"


def test_ctrl_c_stops_the_answer_and_not_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, prompts = SamplingClient.sample, list[int]()

    def interrupted(sampler: SamplingClient, prompt: Any, number: int, params: SamplingParams) -> Any:
        prompts.append(prompt.length)
        if len(prompts) == 2:
            raise KeyboardInterrupt
        return sample(sampler, prompt, number, replace(params, stop=[]))

    monkeypatch.setattr(SamplingClient, "sample", interrupted)
    shown = talk(Terminal("Hello", KeyboardInterrupt(), "Again", "/quit"), monkeypatch, "--temperature", "0")
    assert " …\n" in shown
    assert "/quit or Ctrl-D ends.\n" in shown
    assert len(prompts) == 4  # two chunks of each answer, the first of them cut short
    assert prompts[2] > prompts[1]  # what was shown of it is part of the chat


def test_an_error_leaves_the_chat_as_it_was(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> Any:
        raise ServerUnreachable("nothing answers")

    monkeypatch.setattr(SamplingClient, "sample", fails)
    assert chat("Hi\n", "tiny", monkeypatch) == 2
    assert "nothing answers" in capfd.readouterr().err


def test_a_folder_is_its_newest_checkpoint_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert chat("Hi\n", str(tmp_path), monkeypatch) == 2
    assert "has neither checkpoint files" in capfd.readouterr().err
    for i, name in enumerate(("old.ckpt", "new.ckpt")):
        (tmp_path / name).write_text("not a checkpoint")
        os.utime(tmp_path / name, (i, i))
    assert chat("Hi\n", str(tmp_path), monkeypatch) == 2
    assert "new.ckpt cannot be read as a checkpoint" in capfd.readouterr().err
