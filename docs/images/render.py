"""Draws the curves of `docs/recipes.md` and `docs/rl.md` from the tables that the examples have written.

Run it with `python docs/images/render.py sft runs/sft/version_0`, or `dpo`, `grpo`, `multi_turn` or `distill` and its
folder. Several folders are runs with other seeds: the mean is drawn, and the range from the lowest to the highest.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
# What each recipe logs, with its label.
METRICS = {
    "sft": {"nll": "nll (nats per token)"},
    "dpo": {"rewards/accuracies": "rewards/accuracies", "rewards/margins": "rewards/margins"},
    "grpo": {"reward": "reward (share of right answers)"},
    "multi_turn": {"reward": "reward", "episodes/found": "share of numbers found"},
    "distill": {"policy/kl_teacher": "policy/kl_teacher (nats per token)"},
}


def column(folder: Path, name: str) -> dict[int, float]:
    """Returns the values of a metric by how many steps the model had taken when it was measured."""
    with (folder / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    rows = [(int(row["step"]), float(row[name])) for row in table if row.get(name)]
    if not name.startswith("val_") or not rows:
        return dict(rows)
    first, *later = rows  # the first one is before training
    steps = 1 + max(int(row["step"]) for row in table if row.get("train_loss") or row.get("reward"))
    return {0: first[1], **{min(step + 1, steps): value for step, value in later}}  # the last is repeated


def draw(axes: Axes, folders: list[Path], name: str, ylabel: str) -> None:
    """Draws a metric of the training steps and of the validations."""
    for key, style, label in ((name, ".-", "training"), (f"val_{name}", "o-", "validation")):
        runs = [column(folder, key) for folder in folders]
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        if not steps:  # not validated
            continue
        values = [[run[step] for run in runs] for step in steps]
        color = "C0" if label == "training" else "C1"
        alpha, width = (0.6, 1.5) if label == "training" else (1.0, 2.0)
        axes.plot(steps, [*map(statistics.mean, values)], style, color=color, alpha=alpha, linewidth=width, label=label)
        if len(runs) > 1:
            axes.fill_between(steps, [*map(min, values)], [*map(max, values)], color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="optimizer steps taken", ylabel=ylabel)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def main(recipe: str, *folders: str) -> None:
    """Writes the picture of a recipe."""
    metrics = METRICS[recipe]
    figure = Figure(figsize=(1.5 + 4.2 * len(metrics), 3.4), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics.items(), strict=True):
        draw(axes, [Path(folder) for folder in folders], name, label)
    figure.savefig(HERE / f"{recipe}.png", dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
