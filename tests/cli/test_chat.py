"""`tinker-lightning chat` with base models and trained weights."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from tinker_lightning import cli, connect
from tinker_lightning.client.sampling import SamplingClient

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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


def test_an_unknown_model_is_one_message(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert chat("Hi\n", "tinny", monkeypatch) == 2
    assert "there is no model 'tinny'" in capfd.readouterr().err
