"""Teaches SmolLM2-135M to prefer an answer with a measure, "for 6 minutes", to one without, "it depends".

Direct preference optimization on 48 pairs of answers; 16 more are held out. Run it with `tox -e dpo`, or
`python examples/dpo.py [FOLDER]`. Like the quickstart it needs no account and no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from tinker_lightning import Datum, RemoteLM, RemoteModule, collate, losses

DATA = Path(__file__).parent / "data"
BETA = 0.1
Pair: TypeAlias = tuple[Datum, Datum]  # chosen, rejected


class Preferences(RemoteModule):
    loss: Any = losses.dpo  # the library's: a server that takes losses computes it in one pass
    loss_config = {"beta": BETA}  # noqa: RUF012

    def datums(self, batch: list[Pair]) -> list[Datum]:
        return [datum for pair in batch for datum in pair]

    def validation_step(self, batch: list[Pair], batch_idx: int, dataloader_idx: int = 0) -> None:
        del batch_idx, dataloader_idx
        data = self.datums(batch)
        scores = score(data, self.lm(data))
        self.log_dict({f"val_{name}": value for name, value in scores.items()})


def score(data: list[Datum], logprobs: list[Tensor]) -> dict[str, Tensor]:
    """Returns the reward metrics of the chosen answers, and how often they have the higher mean log-probability."""
    _, gained = losses.dpo(data, logprobs, beta=BETA)
    _, likelier = losses.dpo(data, logprobs, reference_free=True, length_normalized=True)
    names = ("reward_accuracy", "reward_margin", "chosen_nll")
    return {name: gained[name] for name in names} | {"chosen_likelier": likelier["reward_accuracy"]}


def main(
    folder: Path | str = "runs/dpo",
    model: str = "smollm2-135m",
    *,
    count: int | None = None,
    max_epochs: int = 2,
    learning_rate: float = 2e-4,
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the scores of the held-out pairs before and after; `count` limits the number of pairs of each part."""
    pl.seed_everything(0)
    table = CSVLogger(folder, name="")
    trainer = pl.Trainer(
        strategy="tinker",
        max_epochs=max_epochs,
        logger=table,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with Preferences(model, rank=16, learning_rate=learning_rate, base_url="embedded") as module:
        tokenizer = module.lm.backend.get_tokenizer()
        parts = [read_pairs(part, tokenizer)[:count] for part in ("train", "validation")]
        lessons, held_out = (with_reference(pairs, module.lm) for pairs in parts)
        data = module.datums(held_out)
        reference = [datum.loss_fn_inputs["reference_logprobs"].to_torch() for datum in data]
        # The reference has gained nothing on itself: every pair is a tie.
        before = {name: value.item() for name, value in score(data, reference).items()} | {"reward_accuracy": 0.5}
        trainer.fit(
            module,
            DataLoader(lessons, batch_size=4, shuffle=True, collate_fn=collate),
            DataLoader(held_out, batch_size=16, collate_fn=collate),
        )
        after = {name: trainer.callback_metrics[f"val_{name}"].item() for name in before}

    print(f"\n{len(held_out)} held-out pairs  before  after")
    for name in before:
        print(f"{name:16}  {before[name]:6.2f} {after[name]:6.2f}")
    print(f"\nEvery step and every epoch is in {table.log_dir}/metrics.csv.")
    return before, after


def read_pairs(part: str, tokenizer: Any) -> list[Pair]:
    """Reads pairs, one per line: `{"prompt": ..., "chosen": ..., "rejected": ...}`; the answers have weight 1."""

    def answered(prompt: str, answer: str) -> Datum:
        roles = {"system": "Answer briefly.", "user": prompt, "assistant": answer}
        return Datum.from_chat([{"role": role, "content": content} for role, content in roles.items()], tokenizer)

    lines = (DATA / f"preferences_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(answered(row["prompt"], row["chosen"]), answered(row["prompt"], row["rejected"])) for row in rows]


@torch.no_grad()
def with_reference(pairs: list[Pair], untrained: RemoteLM) -> Any:
    """Adds `reference_logprobs` to pairs. A new adapter changes nothing, so the model is its own reference."""
    data = [datum for pair in pairs for datum in pair]
    known = [
        Datum(datum.model_input, {**datum.loss_fn_inputs, "reference_logprobs": logprobs})
        for datum, logprobs in zip(data, untrained(data), strict=True)
    ]
    return list(zip(known[::2], known[1::2], strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
