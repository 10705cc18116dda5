"""Draws the curves of `docs/recipes.md` from the tables that `tox -e sft` and `tox -e dpo` have written.

Run it with `python docs/images/render.py runs/sft/version_0 runs/dpo/version_0`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent


def column(folder: Path, name: str) -> list[tuple[int, float]]:
    """Returns the steps and values of a metric; a validation belongs to the end of its step."""
    with (folder / "metrics.csv").open() as file:
        rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]
    if not name.startswith("val_"):
        return [(step + 1, value) for step, value in rows]
    first, *later = rows  # the first one is before training, the last one repeats that of the last epoch
    return [(0, first[1]), *((step + 1, value) for step, value in later[:-1])]


def draw(axes: Axes, folder: Path, name: str, ylabel: str) -> None:
    """Draws a metric of the training steps and of the validations."""
    axes.plot(*zip(*column(folder, name), strict=True), ".-", alpha=0.6, label="training")
    axes.plot(*zip(*column(folder, f"val_{name}"), strict=True), "o-", linewidth=2, label="held out")
    axes.set(xlabel="optimizer steps", ylabel=ylabel)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def main(sft: str, dpo: str) -> None:
    """Writes sft.png and dpo.png."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    draw(axes, Path(sft), "nll", "nll (nats per token)")
    axes.set_ylim(bottom=0)
    figure.savefig(HERE / "sft.png", dpi=110)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw(left, Path(dpo), "rewards/accuracies", "rewards/accuracies")
    draw(right, Path(dpo), "rewards/margins", "rewards/margins")
    figure.savefig(HERE / "dpo.png", dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
