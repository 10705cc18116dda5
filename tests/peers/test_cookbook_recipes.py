"""`Trainer.fit` with SFT and DPO takes the same steps as the loops of `tinker-cookbook` with the official SDK.

The same data, order, settings and initial weights, on one trainer. It prints how long each takes, at round trips of 0
and 100 ms. Run it with `tox -e cookbook`.
"""

from __future__ import annotations

import asyncio
import csv
import inspect
import json
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import tinker
from lightning.pytorch.loggers import CSVLogger
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from tests.helpers.cookbook import KEY, common, comparisons, conversations, seeded, write_rows
from tinker_lightning.client import connect
from tinker_lightning.recipes import DPO, SFT
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    Show: TypeAlias = Callable[[str, float, float], None]

EPOCHS = 3
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-8}  # the rate at the start; betas are the same by default
ROUND_TRIPS = (0.0, 0.1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


@pytest.fixture(scope="module", params=ROUND_TRIPS, ids=lambda seconds: f"{1000 * seconds:.0f} ms")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, running: Any
) -> Iterator[tuple[str, float]]:
    """The URL of a trainer, and how long each of its answers takes."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("trainer"))
    app = create_app(trainer)

    async def distant(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and request.param:
            await asyncio.sleep(request.param)
        await app(scope, receive, send)

    with running(distant) as url, connect(url) as service:
        tokenizer = service.create_lora_training_client("tiny", rank=1).get_tokenizer()
        register_tokenizer("tiny", lambda: tokenizer)  # any other name is looked for on the hub
        yield url, request.param
        unregister_tokenizer("tiny")
    trainer.close()


def theirs(main: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], float]:
    """Runs a loop of the cookbook with the official SDK; returns the metrics of each step, and the seconds."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(tinker, "ServiceClient", seeded(tinker.ServiceClient))
    started = time.perf_counter()
    running = main(config)
    if inspect.isawaitable(running):
        asyncio.run(awaited(running))
    seconds = time.perf_counter() - started
    with open(f"{config.log_path}/metrics.jsonl") as file:
        return [json.loads(line) for line in file], seconds


async def awaited(running: Any) -> None:
    await running


def fit(recipe: Any, url: str, dataset: Any, folder: Path, **options: Any) -> tuple[list[dict[str, Any]], float]:
    """Runs a recipe on the same batches; returns the metrics of each step, and the seconds."""
    batches = []
    for epoch in range(EPOCHS):
        dataset.set_epoch(seed=epoch)
        batches += [dataset.get_batch(i) for i in range(len(dataset))]

    class Decaying(recipe):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            linear = LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}

    logger = CSVLogger(folder, name="", version="")
    started = time.perf_counter()
    trainer = pl.Trainer(
        strategy="tinker",
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with connect(url) as service:
        client = service.create_lora_training_client("tiny", rank=8, seed=5)
        trainer.fit(Decaying(client, **SETTINGS, **options), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        trainer.save_checkpoint(folder / "last.ckpt")  # as the loops of the cookbook do
    seconds = time.perf_counter() - started
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "train_loss" in row], seconds


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], server: tuple[str, float]) -> Show:
    """Prints how long a loop and a recipe took, whether or not pytest captures the output."""

    def show(name: str, theirs: float, ours: float) -> None:
        with capsys.disabled():
            print(
                f"\n{name}, {4 * EPOCHS} steps at a round trip of {1000 * server[1]:.0f} ms: "
                f"tinker-cookbook {theirs:.1f} s, Trainer.fit {ours:.1f} s"
            )

    return show


def settings(url: str, log_path: Path, name: str) -> dict[str, Any]:
    return {
        "log_path": str(log_path),
        "recipe_name": name,
        "learning_rate": 1e-2,
        "num_epochs": EPOCHS,
        "base_url": url,
        "save_every": 0,
        "eval_every": 0,
        "infrequent_eval_every": 0,
        "model_name": "tiny",
        "renderer_name": "role_colon",
        "lora_rank": 8,
    }


def test_sft(
    server: tuple[str, float], show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.4, R5.9
    file = write_rows(tmp_path / "conversations.jsonl", conversations() * 2)
    builder = FromConversationFileBuilder(file_path=file, common_config=common(batch_size=2), test_size=0)
    config = supervised.Config(dataset_builder=builder, **settings(server[0], tmp_path / "theirs", "sft"))
    expected, slow = theirs(supervised.main, config, monkeypatch)
    found, fast = fit(SFT, server[0], builder()[0], tmp_path / "ours", reduction="sum")
    assert len(found) == len(expected) == 4 * EPOCHS
    for ours, step in zip(found, expected, strict=True):
        assert ours["nll"] == pytest.approx(step["train_mean_nll"], abs=1e-4)
        assert ours["learning_rate"] == pytest.approx(step["learning_rate"])
    assert expected[-1]["train_mean_nll"] < 0.9 * expected[0]["train_mean_nll"]
    show("SFT", slow, fast)


def test_dpo(
    server: tuple[str, float], show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.4, R5.9
    rows = write_rows(tmp_path / "pairs.jsonl", comparisons() * 2)
    builder = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=rows), common_config=common(batch_size=2)
    )
    config = train_dpo.Config(dataset_builder=builder, **settings(server[0], tmp_path / "theirs", "dpo"))
    expected, slow = theirs(train_dpo.main, config, monkeypatch)
    found, fast = fit(DPO, server[0], builder()[0], tmp_path / "ours", beta=0.1)
    assert len(found) == len(expected) == 4 * EPOCHS
    names = {
        "train_loss": "dpo_loss",
        "rewards/margins": "margin",
        "rewards/chosen": "chosen_reward",
        "rewards/rejected": "rejected_reward",
    }
    for ours, step in zip(found, expected, strict=True):
        for mine, name in names.items():
            assert ours[mine] == pytest.approx(step[name], abs=1e-4), name
    assert expected[-1]["dpo_loss"] < 0.9 * expected[0]["dpo_loss"]
    show("DPO", slow, fast)
