"""Every code block of the README and the docs, and every example, runs."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinker_lightning import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Those with tests of their own, in which they train less.
OWN_TESTS = (
    *("accelerate_loop", "distill", "dpo", "fabric", "generation_eval", "grpo", "judge", "kto", "multi_turn"),
    *("quickstart", "sft"),
)
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / f"{name}.py" for name in OWN_TESTS})
# Lightning has advice for loaders and loggers as small as these. No page and no example uses what the official SDK has
# announced for removal.
QUIET = pytest.mark.filterwarnings("default", r"error:.*(tinker|\.result\(\)):FutureWarning")


def code_blocks(page: Path) -> str:
    """The page's Python, its other lines left blank, so that a traceback points at the right one.

    On the page of the command line, commands are code, too: each is a call of its function.
    """
    lines, language = [], ""
    for line in page.read_text().splitlines():
        fence = re.match(r"```(\w*)", line)
        is_command = language == "bash" and page.name == "cli.md"
        lines.append("" if fence or not (language == "python" or is_command) else _call(line) if is_command else line)
        if fence:
            language = fence[1]
    return "\n".join(lines)


def _call(command: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "tinker-lightning"
    return f"from tinker_lightning import cli; assert cli.main({arguments!r}) == 0"


@QUIET
@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page).strip()], ids=lambda page: page.name)
def test_code_blocks_run(page: Path, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    exec(compile(code_blocks(page), page, "exec"), {"__name__": "__main__"})  # noqa: S102


@QUIET
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_run(example: Path, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", served.url)  # for the official client; the others use "embedded"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_gives_the_command_that_is_checked() -> None:
    assert "python -m pip install -c constraints.txt tox && python -m tox\n" in (ROOT / "README.md").read_text()
    assert "python -m pip install -c constraints.txt tox && python -m tox\n" in (ROOT / ".ci" / "run").read_text()


def test_every_promise_of_the_security_page_has_its_tests() -> None:  # R5.18
    written = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    page = (ROOT / "docs" / "security.md").read_text()
    tables = re.findall(r"^\| promise \| test \|\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row.rsplit(" | ", 1)[1])
        assert names, row
        assert set(names) <= written, row


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze, of systemd, checks the unit")
def test_the_unit_for_systemd_is_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```ini\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    (unit,) = blocks
    file = tmp_path / "tinker-lightning.service"
    file.write_text(unit.replace("/opt/tinker-lightning/bin/tinker-lightning", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(file)],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=60,
    )
    about = [line for line in checked.stderr.splitlines() if "tinker-lightning" in line]  # and not about other units
    assert (checked.returncode, about) == (0, []), checked.stderr
    command = re.search(r"ExecStart=\S+ (.*?)\nEnv", unit, re.DOTALL)
    assert command is not None
    options = cli._parser().parse_args(shlex.split(command[1].replace("\\\n", " ")))
    assert options.model == ["smollm2-135m"]
