"""Fits in processes of their own, which may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Fits:
    """Sends jobs to a script of `tests/helpers`, each of which is a fit in a process of its own.

    Args:
        output: The file for what the fits print.
        script: The name of the script.
    """

    def __init__(self, output: Path, script: str = "killed_fit") -> None:
        self._output = output
        with output.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"tests.helpers.{script}"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(self, folder: Path, kind: str, **kill: int | str) -> bool:
        """Whether a fit has come to its end, and not been killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "kind": kind, "kill": kill}) + "\n")
        self._process.stdin.flush()
        code = os.waitstatus_to_exitcode(json.loads(self._process.stdout.readline()))
        assert code in (0, -signal.SIGKILL), self._output.read_text()[-3000:]
        return code == 0

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
