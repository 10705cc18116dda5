"""Draws the curves of `docs/recipes.md` from the tables that `tox -e sft` and `tox -e dpo` have written.

Run it with `python docs/images/render.py sft runs/sft/version_0`, or `dpo` and its folder.
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
    """Returns the values of a metric, and how many steps the model had taken when it was measured."""
    with (folder / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    rows = [(int(row["step"]), float(row[name])) for row in table if row.get(name)]
    if not name.startswith("val_"):
        return rows
    first, *later = rows  # the first one is before training
    steps = 1 + max(int(row["step"]) for row in table if row.get("train_loss"))
    return [(0, first[1]), *{min(step + 1, steps): value for step, value in later}.items()]  # the last is repeated


def draw(axes: Axes, folder: Path, name: str, ylabel: str) -> None:
    """Draws a metric of the training steps and of the validations."""
    axes.plot(*zip(*column(folder, name), strict=True), ".-", alpha=0.6, label="training")
    axes.plot(*zip(*column(folder, f"val_{name}"), strict=True), "o-", linewidth=2, label="held out")
    axes.set(xlabel="optimizer steps taken", ylabel=ylabel)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def main(recipe: str, folder: str) -> None:
    """Writes sft.png or dpo.png."""
    names = {"sft": ["nll"], "dpo": ["rewards/accuracies", "rewards/margins"]}[recipe]
    figure = Figure(figsize=(1.5 + 4.2 * len(names), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        draw(axes, Path(folder), name, "nll (nats per token)" if name == "nll" else name)
    figure.savefig(HERE / f"{recipe}.png", dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
