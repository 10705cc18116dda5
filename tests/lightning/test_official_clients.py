"""What `Trainer.fit` does with the official SDK's clients uses nothing that the SDK has announced for removal."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import tinker
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.backends import SDK_KEY
from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import RemoteModule, SamplingParams
from tinker_lightning.callbacks import ExportAdapter, GenerationEval
from tinker_lightning.recipes import GRPO
from tinker_lightning.rl import RolloutLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = SMALL

SHORT = SamplingParams(max_tokens=4)
ROWS = [{"prompt": f"{i} + {i}?", "answer": 2 * i} for i in range(2)]


@pytest.fixture(scope="module")
def service(served: Any) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=served.url, api_key=SDK_KEY) as client:
        yield client


def fit(client: Any, folder: Path) -> None:
    files = ModelCheckpoint(folder, save_last=True)
    trainer = quiet(callbacks=[files], enable_checkpointing=True)
    module = RemoteModule(client, learning_rate=1e-2)
    trainer.fit(module, loader(), loader(2, 2))
    trainer.validate(module, loader(2, 2), verbose=False)


def resume(client: Any, folder: Path) -> None:
    files = ModelCheckpoint(folder, monitor="train_loss", save_last=True)
    module = RemoteModule(client, learning_rate=1e-2)
    quiet(max_epochs=1, callbacks=[files], enable_checkpointing=True).fit(module, loader())
    trainer = quiet(max_epochs=2)
    trainer.test(module, loader(2, 2), ckpt_path=files.best_model_path, verbose=False)
    trainer.fit(module, loader(), ckpt_path=files.last_model_path)
    module.load_state_dict(module.state_dict())
    assert trainer.global_step == 8
    # The object that the user has goes along, and saves what was trained.
    theirs = client.result() if isinstance(client, tinker.APIFuture) else client
    backend: Any = module.lm.backend
    assert theirs.save_state("after").result().path.split("/")[2] == backend.model_id


def grpo(client: Any, _: Path) -> None:
    module = GRPO(client, learning_rate=1e-2)
    tasks = RolloutLoader(ROWS, lambda _, text: float(len(text)), group_size=2, batch_size=2, sampling_params=SHORT)
    quiet(max_steps=2).fit(module, tasks)


def generation_eval(client: Any, _: Path) -> None:
    scored = GenerationEval(lambda text, _: len(text), ROWS, sampling_params=SHORT)
    trainer = quiet(max_epochs=1, callbacks=[scored])
    trainer.fit(RemoteModule(client, learning_rate=1e-2), loader(), loader(2, 2))
    assert trainer.callback_metrics["score"] >= 0


def export_adapter(client: Any, folder: Path) -> None:
    export = ExportAdapter(folder / "adapter")
    quiet(callbacks=[export]).fit(RemoteModule(client, learning_rate=1e-2), loader())
    assert (folder / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("use", [fit, resume, grpo, generation_eval, export_adapter])
@pytest.mark.parametrize("is_awaited", [True, False], ids=["client", "future of a client"])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.filterwarnings("ignore:adapter_config.json names the base model")  # a folder on this machine
def test_no_future_warning(
    service: tinker.ServiceClient, tmp_path: Path, use: Callable[[Any, Path], None], is_awaited: bool
) -> None:  # R5.4, R5.17
    with warnings.catch_warnings(record=True) as caught:  # those of other threads, which as errors would be lost, too
        warnings.simplefilter("always", FutureWarning)
        client: Any = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
        use(client.result() if is_awaited else client, tmp_path)
    assert [str(each.message) for each in caught if each.category is FutureWarning] == []
