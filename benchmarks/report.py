"""Prints results, and writes them to a file and to pictures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def arguments(description: str | None) -> argparse.Namespace:
    """Parses the options of every benchmark: `--quick`, `--json FILE` and `--plots FOLDER`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw the figures; needs matplotlib")
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


def bars(folder: Path | None, name: str, measure: str, rows: Sequence[dict[str, Any]], *, scale: str = "log") -> None:
    """Draws a bar for each row and number as `name.png`. A row starts with its label."""
    if folder is None:
        return
    columns = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    width = 0.8 / len(rows)
    with _figure(folder / f"{name}.png", measure, scale) as axes:
        for i, row in enumerate(rows):
            places = [j + (i - (len(rows) - 1) / 2) * width for j in range(len(columns))]
            drawn = axes.bar(places, [row[column] for column in columns], width, label=next(iter(row.values())))
            axes.bar_label(drawn, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(columns)), columns)
        axes.margins(y=0.15)


def lines(folder: Path | None, name: str, measure: str, rows: Sequence[dict[str, Any]], label: str) -> None:
    """Draws the columns that are milliseconds of latency, such as `100 ms`, as a line for each row."""
    if folder is None:
        return
    columns = [key for key in rows[0] if key.endswith(" ms")]
    with _figure(folder / f"{name}.png", measure) as axes:
        for row in rows:
            latencies = [int(column.removesuffix(" ms")) for column in columns]
            axes.plot(latencies, [row[column] for column in columns], marker="o", label=row[label])
        axes.set_xlabel("round-trip time, ms")


@contextmanager
def _figure(path: Path, measure: str, scale: str = "log") -> Iterator[Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    yield axes
    axes.set_yscale(scale)
    axes.set_ylabel(measure)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
