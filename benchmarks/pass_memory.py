"""Peak memory of a fresh server that trains smollm2-135m on one datum, by the length of the datum.

Each server is a process of its own, started with `--memory-limit 6G`. Its peak includes the model and the libraries.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from tinker_lightning import Datum, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "smollm2-135m"
LIMIT = "6G"
LENGTHS = (512, 2048, 8192)


@contextlib.contextmanager
def server(folder: str) -> Iterator[tuple[str, int]]:
    """Runs `tinker-lightning serve`; yields its URL and the id of its process."""
    options = ["--model", MODEL, "--port", "0", "--memory-limit", LIMIT, "--data-dir", folder]
    command = [sys.executable, "-m", "tinker_lightning", "serve", *options]
    log = Path(folder) / "log"
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while not (found := re.search(r"http://[\w.:]+", log.read_text())):
            if child.poll() is not None:
                raise RuntimeError(f"the server has ended:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[0], child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait()


def peak(pid: int) -> float:
    """Returns the most memory that a process has had so far, in megabytes."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) / 1024


def measure(length: int) -> dict[str, Any]:
    """Returns the peak of a server after one forward and backward pass, and the time of the pass."""
    with tempfile.TemporaryDirectory() as folder, server(folder) as (url, pid), connect(url) as service:
        client = service.create_lora_training_client(MODEL, rank=32)
        start = time.perf_counter()
        client.forward_backward(
            [Datum.from_tokens([1 + i % 1000 for i in range(length + 1)])], "cross_entropy"
        ).result()
        return {"tokens": length, "peak, MB": peak(pid), "seconds": time.perf_counter() - start}


def main() -> None:
    options = report.arguments(__doc__)
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: list[dict[str, Any]] = []
    for length in LENGTHS[:2] if options.quick else LENGTHS:
        row = measure(length)
        row["times the first"] = row["peak, MB"] / (rows[0] if rows else row)["peak, MB"]
        rows.append(row)
        report.show(rows[-1:])
    report.show(rows)
    report.write(options.json, {"pass memory": rows})


if __name__ == "__main__":
    main()
