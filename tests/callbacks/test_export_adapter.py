"""`ExportAdapter` leaves a folder that peft loads, of the last or the best weights."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.trainers import DATA, SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule, cli
from tinker_lightning.callbacks import ExportAdapter, GenerationEval, export_adapter
from tinker_lightning.client.files.peft_folder import vllm_problems
from tinker_lightning.data import ChatData
from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.recipes import SFT

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


def logprobs(model: Any) -> torch.Tensor:
    found = []
    for datum in DATA:
        ids = torch.tensor([datum.model_input.to_ints()])
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0].log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.filterwarnings("ignore:adapter_config.json names the base model")  # a folder on this machine
def test_peft_and_transformers_load_the_export(service: ServiceClient, tmp_path: Path) -> None:
    export = ExportAdapter(tmp_path / "adapter", merged=tmp_path / "merged")
    module = new(service, RemoteModule)
    quiet(strategy="auto", accelerator="cpu", devices=1, callbacks=[export]).fit(module, loader())
    assert export.folder == tmp_path / "adapter"
    ours = logprobs_of(module)
    base = json.loads((export.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(export.folder)).eval()
    torch.testing.assert_close(logprobs(loaded), ours, atol=1e-4, rtol=0)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logprobs(merged), ours, atol=1e-4, rtol=0)
    for folder in ("adapter", "merged"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder)("text")["input_ids"] == list(b"text")


def test_the_best_is_exported_and_the_last_weights_stay(service: ServiceClient, tmp_path: Path) -> None:
    class Trained(pl.Callback):
        logprobs: torch.Tensor

        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            del trainer
            self.logprobs = logprobs_of(pl_module)

    scores, trained = iter([1.0, 2.0, 0.0, 0.0]), Trained()
    best = ModelCheckpoint(tmp_path / "files", "{step}", monitor="score", mode="max")
    export = ExportAdapter(tmp_path / "adapter", "best", base_model="organization/model")
    callbacks = [export, trained, GenerationEval(lambda *_: next(scores), "text"), best]
    module = new(service, RemoteModule)
    trainer = quiet(max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, loader(8))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "organization/model"
    last = logprobs_of(module)
    assert torch.equal(last, trained.logprobs)
    assert module.lm.handle.remote.steps == 3
    trainer.validate(module, loader(2, 2), ckpt_path=best.best_model_path, verbose=False)
    assert best.best_model_path.endswith("step=2.ckpt")
    tuned = service.create_lora_training_client_from_adapter(tmp_path / "adapter", "tiny")
    outputs = tuned.forward(DATA, "cross_entropy").result().loss_fn_outputs
    exported = torch.cat([output["logprobs"].to_torch() for output in outputs])
    torch.testing.assert_close(exported, logprobs_of(module), atol=1e-5, rtol=0)
    assert not torch.allclose(exported, last, atol=1e-3)


def test_mistakes_are_found_before_training(service: ServiceClient, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="which must be 'last' or 'best', got 'worst'"):
        ExportAdapter(tmp_path, "worst")  # type: ignore[arg-type]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    module = new(service, RemoteModule)
    for callback, message in (
        (ExportAdapter(tmp_path / "taken"), "is not empty"),
        (ExportAdapter(tmp_path / "new", merged=tmp_path / "taken"), "is not empty"),
        (ExportAdapter(tmp_path / "new", merged=tmp_path / "taken", overwrite=True), "contains no model"),
        (ExportAdapter(tmp_path / "new", "best"), "needs a ModelCheckpoint that monitors a metric"),
    ):
        with pytest.raises(InvalidInput, match=message):
            quiet(callbacks=[callback]).fit(module, loader())
    assert module.lm.handle.remote.steps == 0


@pytest.mark.filterwarnings("ignore:adapter_config.json names the base model")
def test_an_adapter_that_does_not_fit_is_reported(service: ServiceClient, tmp_path: Path) -> None:
    export = ExportAdapter(tmp_path / "adapter", check=False)
    quiet(max_steps=1, callbacks=[export]).fit(new(service, RemoteModule), loader())
    folder = tmp_path / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    export_adapter._check_loads(folder, config["base_model_name_or_path"])
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 2}))
    with pytest.raises(OperationFailed, match=r"the adapter does not fit .* with shape"):
        export_adapter._check_loads(folder, config["base_model_name_or_path"])
    with pytest.warns(UserWarning, match="not checked: its base model '/nowhere' is not available"):
        export_adapter._check_loads(folder, "/nowhere")


@pytest.mark.filterwarnings("ignore:adapter_config.json names the base model")
def test_the_card_says_what_was_trained_and_keeps_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"{i}?", "completion": f"{i}."}) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    best = ModelCheckpoint(tmp_path / "files", "best", monitor="val_nll", every_n_epochs=1)
    exports = [ExportAdapter("last"), ExportAdapter("best", "best", base_model="organization/model")]
    trainer = quiet(max_epochs=2, callbacks=[*exports, best], enable_checkpointing=True)
    with SFT("tiny", rank=4, seed=3, base_url="embedded", api_key="tml-very-secret") as module:
        trainer.fit(module, ChatData("rows.jsonl", validation=0.25, batch_size=2))
    last, chosen = ((tmp_path / name / "README.md").read_text() for name in ("last", "best"))
    for card in (last, chosen):
        for row in ("| rank | 4 |", "| seed | 3 |", "| learning_rate | 0.0001 |", "| epochs | 2 |", "| torch | "):
            assert row in card
        assert re.search(
            r"\| train \| source: rows\.jsonl, format: .*, rows: 6, tokens: \d+, trained tokens: \d+ \|", card
        )
        assert "| validation | source: 0.25 of rows.jsonl, " in card
        assert "--max-lora-rank 8 " in card
        assert "very-secret" not in card
        assert str(tmp_path) not in card
        assert "embedded" in card
    assert re.search(r"\| val_nll \| [\d.]+ \|", last)
    assert re.search(r"\| val_nll \| [\d.]+ \|", chosen)
    assert chosen.startswith("---\nbase_model: organization/model\n")
    assert cli.main(["export", str(tmp_path / "files" / "best.ckpt"), "again", "--no-check"]) == 0
    again = (tmp_path / "again" / "README.md").read_text()
    assert "| seed | 3 |\n| reduction | mean |\n| epochs | 2 |\n| optimizer steps | 6 |\n" in again
    assert (
        again.partition("## Scores")[2].partition("## Use")[0]
        == chosen.partition("## Scores")[2].partition("## Use")[0]
    )


NAME = "base_model.model.model.layers.0.self_attn.q_proj"
HEAD = ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"]
VLLM: list[tuple[dict[str, Any], list[str], list[str], str | None]] = [
    ({}, [f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"], ["Qwen2ForCausalLM"], None),
    ({}, [f"{NAME}.lora_embedding_A", f"{NAME}.lora_embedding_B"], [], None),
    ({}, HEAD, ["LlamaForCausalLM"], None),
    ({}, HEAD, [], None),  # nothing is known of the model class
    ({}, HEAD, ["Qwen2ForCausalLM"], "for Qwen2ForCausalLM it takes no adapter of lm_head; train with train_unembed"),
    ({}, [f"{NAME}.lora_A.weight"], [], "q_proj has only one of its two matrices"),
    ({}, [f"{NAME}.lora_A.default.weight", f"{NAME}.lora_B.default.weight"], [], "does not know the tensor .*default"),
    ({}, ["q_proj.lora_A.weight", "q_proj.lora_B.weight"], [], "does not know the tensor q_proj"),
    ({"bias": "all"}, [], [], "bias is 'all'"),
    ({"use_dora": True}, [], [], "use_dora is True"),
    ({"modules_to_save": ["lm_head"]}, [], [], "modules_to_save is"),
    ({"r": 1024}, [], [], "its rank is 1024"),
]


@pytest.mark.parametrize(("config", "tensors", "architectures", "problem"), VLLM)
def test_what_vllm_would_not_load_is_named(
    config: dict[str, Any], tensors: list[str], architectures: list[str], problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 32, **config}))
    save_file({name: torch.zeros(1) for name in tensors}, tmp_path / "adapter_model.safetensors")
    problems = vllm_problems(tmp_path, architectures)
    assert problems == [] if problem is None else re.search(problem, " ".join(problems))
