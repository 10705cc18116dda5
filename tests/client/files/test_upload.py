"""Models that start from a local PEFT folder compute what peft computes with it."""

from __future__ import annotations

import json
import math
import os
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tinker_lightning import Datum
from tinker_lightning.errors import InvalidInput, NotFound, Unsupported
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import AdamParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server.engine.causal_lm import CausalLM

Tensors: TypeAlias = dict[str, torch.Tensor]

TOKENS = list(b"hello world")
DATUM = Datum.from_tokens(TOKENS)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    """A client of a server with extensions."""
    with embedded_service() as service:
        yield service


def write(folder: Path, base: CausalLM, **settings: Any) -> torch.Tensor:
    """Writes a random adapter with peft; returns the log-probabilities of the tokens with it."""
    model = AutoModelForCausalLM.from_pretrained(base.tokenizer_id, dtype=torch.float32).eval()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "init_lora_weights": False, **settings}))
        adapted.save_pretrained(str(folder))
    with torch.no_grad():
        logprobs: torch.Tensor = adapted(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        {"lora_alpha": 2, "target_modules": ["o_proj", "up_proj", "lm_head"], "use_rslora": True},
    ],
)
def test_an_adapter_of_peft_is_the_start(
    service: ServiceClient, tiny: CausalLM, tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected = write(tmp_path, tiny, **settings)
    client = service.create_lora_training_client_from_adapter(tmp_path, "tiny", {"from": "peft"})
    output = client.forward([DATUM], "cross_entropy").result()
    torch.testing.assert_close(output.loss_fn_outputs[0]["logprobs"].to_torch(), expected, rtol=1e-4, atol=1e-4)
    before = output.metrics["loss:sum"]
    client.forward_backward([DATUM], "cross_entropy").result()
    client.optim_step(AdamParams(learning_rate=1e-3)).result()
    assert client.forward([DATUM], "cross_entropy").result().metrics["loss:sum"] < before


def test_an_exported_adapter_comes_back_equal(service: ServiceClient, tmp_path: Path) -> None:
    client = service.create_lora_training_client("tiny", rank=4, seed=3)
    client.forward_backward([DATUM], "cross_entropy").result()
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    folder = client.export_adapter(tmp_path / "adapter")
    again = service.create_lora_training_client_from_adapter(folder, "tiny")
    first, second = (each.forward([DATUM], "cross_entropy").result() for each in (client, again))
    assert first.loss_fn_outputs == second.loss_fn_outputs


def test_what_is_not_a_plain_adapter_of_the_model_raises(
    service: ServiceClient, tiny: CausalLM, tmp_path: Path
) -> None:
    create = service.create_lora_training_client_from_adapter
    with pytest.raises(InvalidInput, match=r"it has no adapter_config\.json"):
        create(tmp_path, "tiny")
    write(tmp_path, tiny, target_modules=["q_proj"])
    with pytest.raises(NotFound, match="'other' is not served"):
        create(tmp_path, "other")
    config = tmp_path / "adapter_config.json"
    original = json.loads(config.read_text())
    config.write_text(json.dumps({**original, "use_dora": True}))
    with pytest.raises(InvalidInput, match="use_dora=True is not supported"):
        create(tmp_path, "tiny")
    config.write_text(json.dumps({**original, "r": None}))
    with pytest.raises(InvalidInput, match="r=None and lora_alpha=8 must be positive"):
        create(tmp_path, "tiny")
    config.write_text(json.dumps(original))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidInput, match="not a safetensors file"):
        create(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\] is not supported"),
        ({"trainable_token_indices": [5]}, r"trainable_token_indices=\[5\] is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"r": True}, "r=True and .* must be positive numbers"),
        ({"r": 10**30}, "must be positive numbers up to 65536"),
        ({"lora_alpha": 1e300}, "must be positive numbers up to 65536"),
        ({"lora_alpha": math.nan}, "must be positive numbers up to 65536"),
        ({"lora_alpha": -1}, "must be positive numbers up to 65536"),
        ({"r": 8}, "says 8, but its tensors have the rank 4, so its scaling is unknown"),
        ({"target_modules": "x" * (1 << 20)}, "which no configuration of an adapter has"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(
    service: ServiceClient, tiny: CausalLM, tmp_path: Path, change: dict[str, Any], because: str
) -> None:
    write(tmp_path, tiny, target_modules=["q_proj"])
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(InvalidInput, match=because):
        service.create_lora_training_client_from_adapter(tmp_path, "tiny")


def drop(kind: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for i, (name, each) in enumerate(tensors.items()) if i > 1 or kind not in name}


def change(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: function(each) if i == 0 else each for i, (name, each) in enumerate(tensors.items())}


@pytest.mark.parametrize(
    ("damage", "because"),
    [
        (drop("lora_A"), r"layers.0.self_attn.q_proj has no lora_A.weight, which would be random"),
        (drop("lora_B"), r"layers.0.self_attn.q_proj has no lora_B.weight, which would be random"),
        (change(lambda each: each * math.nan), r"damaged: .*q_proj.lora_A.weight has entries that are not finite"),
        (change(lambda each: each.to(torch.int32)), r"damaged: .*q_proj.lora_A.weight is torch.int32"),
        (change(lambda each: each.bool()), r"damaged: .*q_proj.lora_A.weight is torch.bool"),
        (lambda _: {f"t{i}": torch.zeros(1) for i in range(9000)}, "9000 tensors; an adapter has at most 8192"),
        (lambda _: {"t" * 3_000_000: torch.zeros(1)}, "its header of .* bytes exceeds"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    service: ServiceClient,
    tiny: CausalLM,
    tmp_path: Path,
    damage: Callable[[Tensors], Tensors],
    because: str,
) -> None:
    write(tmp_path, tiny, target_modules=["q_proj"])
    weights = tmp_path / "adapter_model.safetensors"
    save_file(damage(load_file(weights)), weights)
    with pytest.raises(InvalidInput, match=because):
        service.create_lora_training_client_from_adapter(tmp_path, "tiny")


def test_a_file_that_is_too_large_is_not_read(service: ServiceClient, tiny: CausalLM, tmp_path: Path) -> None:
    """The JSON encoder crashes the process at a gigabyte."""
    write(tmp_path, tiny, target_modules=["q_proj"])
    os.truncate(tmp_path / "adapter_model.safetensors", 1 << 40)
    with pytest.raises(InvalidInput, match=r"has 1,099,511,627,776 bytes, but at most 199,229,440 can be uploaded"):
        service.create_lora_training_client_from_adapter(tmp_path, "tiny")


def test_other_servers_take_no_adapters(tiny: CausalLM, tmp_path: Path) -> None:
    write(tmp_path, tiny, target_modules=["q_proj"])
    with embedded_service(extended=False) as plain, pytest.raises(Unsupported, match="takes no adapters"):
        plain.create_lora_training_client_from_adapter(tmp_path, "tiny")
