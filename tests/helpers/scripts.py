"""Runs scripts as `python -c` does, but makes their imports only once: each script is a fork of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """The exit code of a script and what it has printed."""

    returncode: int
    stdout: str
    stderr: str


def run_scripts(imports: str, *scripts: str) -> list[Ended]:
    """Runs scripts one after the other, each in a process of its own in which the imports have been made."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps([folder, imports, *(textwrap.dedent(script) for script in scripts)])
        command = [sys.executable, "-m", "tests.helpers.scripts"]
        done = subprocess.run(command, input=job, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = [[Path(folder, f"{i}.{n}").read_text() for n in (1, 2)] for i in range(len(scripts))]
        return [Ended(code, *texts) for code, texts in zip(json.loads(done.stdout), printed, strict=True)]


def main() -> None:
    """Reads a job from stdin, and prints the exit codes."""
    folder, imports, *scripts = json.load(sys.stdin)
    names = {"__name__": "__main__"}
    exec(imports, names)  # noqa: S102
    codes = []
    for i, script in enumerate(scripts):
        pid = os.fork()
        if pid == 0:
            for number in (1, 2):
                os.dup2(os.open(Path(folder, f"{i}.{number}"), os.O_WRONLY | os.O_CREAT), number)
            exec(compile(script, "<script>", "exec"), names)  # noqa: S102
            return  # the interpreter ends as it does after any script
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
