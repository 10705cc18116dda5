"""Prints results and writes them to a file."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def arguments(description: str | None) -> argparse.Namespace:
    """Parses the options of every benchmark: `--quick` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    return parser.parse_args()


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows with the same keys as a Markdown table."""
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    print(flush=True)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Adds results and a description of the machine to a JSON file."""
    if path is not None:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        others = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**others, "machine": machine, **results}, indent=2) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
