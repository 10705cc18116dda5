"""The command line: what it says when it is used wrongly, without starting anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning import cli
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server import serve as serve_module

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize("arguments", [[], ["serve"], ["nonsense"], ["serve", "--model", "tiny", "--port", "x"]])
def test_wrong_usage_shows_how_and_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: tinker-lightning" in capsys.readouterr().err


def test_the_installed_command_and_the_module_are_the_same() -> None:
    script = Path(sys.executable).with_name("tinker-lightning")
    for command in ([str(script)], [sys.executable, "-m", "tinker_lightning"]):
        answer = subprocess.run([*command, "serve", "--help"], capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0
        assert answer.stdout.startswith("usage: tinker-lightning serve")


def test_serve_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def serve(models: Sequence[str], **options: Any) -> None:
        given.update(models=models, **options)

    monkeypatch.setattr(serve_module, "serve", serve)
    arguments = ["serve", "--model", "a", "--model", "b", "--port", "0", "--api-key", "k", "--data-dir", "d"]
    arguments += ["--token-budget", "512", "--api-key-file", "f"]
    assert cli.main(arguments) == 0
    named = {
        "models": ["a", "b"],
        "host": "127.0.0.1",
        "port": 0,
        "api_key": "k",
        "api_key_file": Path("f"),
        "ssl_certfile": None,
        "ssl_keyfile": None,
        "data_dir": Path("d"),
        "sampling_seed": None,
        "memory_limit": None,
        "token_budget": 512,
        "disk_limit": None,
    }
    assert given == {**named, "allow_pickled_losses": False}
    assert cli.main([*arguments, "--allow-pickled-losses"]) == 0
    assert given == {**named, "allow_pickled_losses": True}


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(InvalidInput("what, where, fix"), 2, "tinker-lightning: what, where, fix\n"), (KeyboardInterrupt(), 130, "")],
)
def test_errors_become_a_line_and_an_exit_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(serve_module, "serve", serve)
    assert cli.main(["serve", "--model", "tiny"]) == code
    assert capsys.readouterr().err == said


def test_a_missing_dependency_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tinker_lightning.server.serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "--model", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "the embedded trainer needs uvicorn, which is not installed" in said
    assert "python -m pip install 'tinker-lightning[embedded]'" in said


@pytest.mark.parametrize("url", ["http://[::1", "http://a:65536", "http://a\nb", "nonsense"])
def test_the_doctor_reports_an_address_that_is_not_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", url]) == 2
    assert capsys.readouterr().err.startswith(f"tinker-lightning: {url!r} is not the URL of a server")
