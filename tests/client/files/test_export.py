"""Exports the trained adapter as a local PEFT folder, atomically, with the same log-probabilities."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import httpx
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.backends import QUICK, recording
from tests.helpers.client_data import DATA, TEXTS, nll
from tinker_lightning import AdamParams
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.files import download
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.errors import ConnectionDropped, InvalidInput, MessageTooLarge, NotFound, OperationFailed
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.backends import Backend, Running
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer

FILES = ["adapter_config.json", "adapter_model.safetensors"]
EXPORTED = ["README.md", *FILES]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_RETRY_POLICY", RetryPolicy(1.0, first_delay=0.001, longest_delay=0.001))


def trained(model: Any) -> Any:
    for _ in range(3):
        model.forward_backward_custom(DATA, nll)
        model.optim_step(AdamParams(learning_rate=1e-2))
    return model


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def kept(trainer: EmbeddedTrainer, model: Any) -> list[str]:
    """What the server still keeps of a model."""
    return [summary.tinker_path for summary in trainer.store.listing(model.model_id)]


def logprobs(folder: Path, trainer: EmbeddedTrainer) -> list[list[float]]:
    """What peft makes of an exported adapter, on the base model of any other program."""
    base = AutoModelForCausalLM.from_pretrained(trainer.catalog.get("tiny").tokenizer_id)
    loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    found = []
    for text in TEXTS:
        ids = torch.tensor([list(text.encode())])
        with torch.no_grad():
            logits = loaded(input_ids=ids[:, :-1]).logits
        found.append(logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0].tolist())
    return found


def test_peft_loads_what_was_exported_and_gives_the_same_logprobs(backend: Backend, tmp_path: Path) -> None:
    model = trained(backend.model())
    folder = model.export_adapter(tmp_path / "new" / "adapter")
    assert folder == tmp_path / "new" / "adapter"
    assert names(folder) == EXPORTED
    assert names(tmp_path / "new") == ["adapter"]
    outputs = model.forward(DATA, "cross_entropy").result().loss_fn_outputs
    for ours, theirs in zip(outputs, logprobs(folder, backend.trainer), strict=True):
        assert ours["logprobs"].tolist() == pytest.approx(theirs, abs=1e-5)
    assert kept(backend.trainer, model) == []


def test_pending_losses_are_part_of_a_save_and_training_continues(backend: Backend, tmp_path: Path) -> None:
    model = trained(backend.model())
    model.forward_backward_custom(DATA, nll)  # not stepped: no weight has moved
    first = load_file(model.export_adapter(tmp_path / "first") / FILES[1])
    model.optim_step(AdamParams(learning_rate=1e-2))
    second = load_file(model.export_adapter(tmp_path / "second") / FILES[1])
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert backend.kinds(model).count("save_weights_external") == 2


def test_a_folder_that_is_not_empty_is_left_alone_by_default(model: TrainingClient, tmp_path: Path) -> None:
    trained(model)
    folder = tmp_path / "adapter"
    folder.mkdir()
    model.export_adapter(folder)  # empty is as good as new
    before = (folder / FILES[1]).read_bytes()
    trained(model)
    with pytest.raises(InvalidInput, match=r"is not empty. Choose another folder, or set overwrite=True"):
        model.export_adapter(folder)
    assert (folder / FILES[1]).read_bytes() == before
    assert model.export_adapter(str(folder), overwrite=True) == folder
    assert (folder / FILES[1]).read_bytes() != before
    assert names(tmp_path) == ["adapter"]


def test_overwriting_never_removes_a_folder_without_an_adapter(model: TrainingClient, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInput, match=r"contains no adapter .* Choose another folder"):
        model.export_adapter(tmp_path, overwrite=True)
    with pytest.raises(InvalidInput, match="is a file; pass a folder"):
        model.export_adapter(tmp_path / "thesis.tex", overwrite=True)
    with pytest.raises(InvalidInput, match=r"cannot be written: .* Choose another folder"):
        model.export_adapter(tmp_path / "thesis.tex" / "adapter")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_link_to_a_folder_leads_to_it(model: TrainingClient, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert model.export_adapter(tmp_path / "link") == tmp_path / "disk"
    assert names(tmp_path / "link") == EXPORTED


class Downloads(httpx.AsyncBaseTransport):
    """Leads to a trainer; lets a test look at and spoil downloads on their way."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner
        self.seen: list[httpx.Request] = []
        self.answers: list[Any] = []  # for the first downloads, in place of the true ones; None leaves one alone

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if "/signed/" not in request.url.path:
            return await self.inner.handle_async_request(request)
        self.seen.append(request)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return await self.inner.handle_async_request(request) if answer is None else answer


@pytest.fixture
def spoiled(shared: EmbeddedTrainer) -> Iterator[tuple[ServiceClient, Downloads]]:
    downloads = Downloads(httpx.ASGITransport(create_app(shared, api_key="tml-secret")))
    with ServiceClient(
        base_url="http://embedded", api_key="tml-secret", transport=downloads, retry_policy=QUICK
    ) as service:
        yield service, downloads


async def _breaks_off() -> Any:
    yield b"half"
    raise httpx.ReadError("gone")


def test_downloads_that_fail_are_tried_again_with_new_addresses(
    spoiled: tuple[ServiceClient, Downloads], shared: EmbeddedTrainer, tmp_path: Path
) -> None:
    service, downloads = spoiled
    model = trained(service.create_lora_training_client("tiny", rank=4, seed=1))
    downloads.answers = [
        httpx.ConnectError("no"),
        httpx.Response(503),
        httpx.Response(403),
        httpx.Response(200, content=_breaks_off()),
    ]
    folder = model.export_adapter(tmp_path / "adapter")
    model.save_state("same").result()
    saved = shared.store.root / model.model_id.replace(":", "+") / "weights" / "same"
    for name in FILES:
        assert (folder / name).read_bytes() == (saved / name).read_bytes()
    assert len(downloads.seen) == 6
    assert not any("x-api-key" in request.headers for request in downloads.seen)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.ConnectError("no"), ConnectionDropped),
        (httpx.Response(403), OperationFailed),
        (httpx.Response(404), NotFound),
    ],
)
def test_what_fails_leaves_nothing_behind_on_either_side(
    spoiled: tuple[ServiceClient, Downloads],
    shared: EmbeddedTrainer,
    tmp_path: Path,
    answer: Any,
    error: type[Exception],
) -> None:
    service, downloads = spoiled
    model = trained(service.create_lora_training_client("tiny", rank=4))
    downloads.answers = [None, *[answer] * 10]
    with pytest.raises(error) as caught:
        model.export_adapter(tmp_path / "adapter")
    assert "signature" not in str(caught.value)
    assert names(tmp_path) == []
    assert kept(shared, model) == []
    downloads.answers = []
    assert names(model.export_adapter(tmp_path / "adapter")) == EXPORTED


def test_an_old_adapter_stays_if_the_new_one_fails(spoiled: tuple[ServiceClient, Downloads], tmp_path: Path) -> None:
    service, downloads = spoiled
    model = trained(service.create_lora_training_client("tiny", rank=4))
    folder = model.export_adapter(tmp_path / "adapter")
    before = (folder / FILES[1]).read_bytes()
    trained(model)
    downloads.answers = [None, *[httpx.ReadError("no")] * 10]
    with pytest.raises(ConnectionDropped):
        model.export_adapter(folder, overwrite=True)
    assert (folder / FILES[1]).read_bytes() == before


def test_an_interrupt_leaves_nothing_behind_either(
    spoiled: tuple[ServiceClient, Downloads], shared: EmbeddedTrainer, tmp_path: Path
) -> None:
    service, downloads = spoiled
    model = service.create_lora_training_client("tiny", rank=4)

    async def interrupted() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            yield b""
            await asyncio.sleep(0.01)

    downloads.answers = [httpx.Response(200, content=interrupted())]
    with pytest.raises(KeyboardInterrupt):
        model.export_adapter(tmp_path / "adapter")
    assert names(tmp_path) == []
    assert kept(shared, model) == []
    assert names(model.export_adapter(tmp_path / "adapter")) == EXPORTED


def test_a_server_that_sends_without_end_does_not_fill_the_disk(
    spoiled: tuple[ServiceClient, Downloads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, downloads = spoiled
    model = service.create_lora_training_client("tiny", rank=4)

    async def endless() -> Any:
        while True:
            yield bytes(1 << 16)

    monkeypatch.setattr(download, "MAX_BYTES", 1 << 20)
    downloads.answers = [httpx.Response(200, content=endless())]
    with pytest.raises(MessageTooLarge, match="larger than the limit of 1048576 bytes"):
        model.export_adapter(tmp_path / "adapter")
    assert names(tmp_path) == []


def test_over_the_network_with_a_key(shared: EmbeddedTrainer, running: Running, tmp_path: Path) -> None:
    with (
        running(create_app(shared, api_key="tml-right")) as url,
        ServiceClient(base_url=url, api_key="tml-right") as service,
    ):
        model = trained(service.create_lora_training_client("tiny", rank=4))
        assert names(model.export_adapter(tmp_path / "adapter")) == EXPORTED


def test_stale_addresses_are_requested_again(
    shared: EmbeddedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_lightning.server.endpoints.checkpoints.VALID_SECONDS", 30)
    with recording(create_app(shared)) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        model.export_adapter(tmp_path / "adapter")
        assert recorded.paths().count("external_weights_urls") == 1 + len(FILES)
