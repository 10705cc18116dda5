"""Adapters: which layers they sit on, that a seed makes them, and that many of them share one base untouched."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.helpers.engine_passes import run_pass
from tests.helpers.fuzzing import LONG
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine import catalog
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.server.engine.interface import AdapterWeights
from tinker_lightning.types import AdamParams, Datum, LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def hugging_face(base: CausalLM) -> Any:
    return AutoModelForCausalLM.from_pretrained(base.tokenizer_id, dtype=torch.float32).eval()


@torch.no_grad()
def logits(base: CausalLM, weights: AdapterWeights | None) -> Tensor:
    with base.lora.use(weights):
        return base.head(base.hidden_states(TOKENS))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_seed_reproduces_the_weights(tiny: CausalLM) -> None:
    config = LoraConfig(rank=4, seed=11)
    first = tiny.lora.new_weights(config).tensors
    torch.rand(1)  # whatever else is drawn meanwhile
    assert same(first, tiny.lora.new_weights(config).tensors)


def test_different_seeds_differ_in_every_matrix(tiny: CausalLM) -> None:
    one, two = (tiny.lora.new_weights(LoraConfig(rank=4, seed=seed)).tensors for seed in (1, 2))
    assert all(not torch.equal(one[name], two[name]) for name in one if "lora_A" in name)


def test_no_seed_is_the_seed_zero(tiny: CausalLM) -> None:
    assert same(
        tiny.lora.new_weights(LoraConfig(rank=4)).tensors, tiny.lora.new_weights(LoraConfig(rank=4, seed=0)).tensors
    )


def test_new_weights_have_the_distribution_of_peft(tiny: CausalLM) -> None:
    weights = tiny.lora.new_weights(LoraConfig(rank=64, seed=3))
    plain: Any = peft.PeftModel(hugging_face(tiny), tiny.lora.peft_config(weights.config))
    parameters = plain.named_parameters()
    expected = {name.replace(".default.", "."): tensor.detach() for name, tensor in parameters if "lora_" in name}
    assert expected.keys() == weights.tensors.keys()
    for name, tensor in weights.tensors.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
        if "lora_B" in name:
            assert not tensor.any()
        else:  # thousands of uniform draws each: the ranges agree to 1 %, the spreads to a few
            torch.testing.assert_close(tensor.abs().max(), expected[name].abs().max(), rtol=0.01, atol=0)
            torch.testing.assert_close(tensor.std(), expected[name].std(), rtol=0.1, atol=0)
            assert tensor.mean().abs() < 0.1 * tensor.std()


def test_nothing_is_drawn_from_the_global_generator(tmp_path: Path) -> None:
    """Neither building a model, nor loading it, nor adapters of a first and of a second shape."""
    before = torch.get_rng_state()
    catalog.build_tiny(tmp_path)
    base = CausalLM("tiny", tmp_path)
    for rank in (4, 8):
        base.lora.new_weights(LoraConfig(rank=rank, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


ROUNDS = 24 if LONG else 3


@pytest.mark.fuzz
def test_trainers_at_the_same_time_make_the_same_weights_as_alone(tiny: CausalLM) -> None:
    """Two trainers and the user's own drawing on three threads: nobody sees the others (issue 10, defect 10)."""
    config = LoraConfig(rank=4, seed=11)
    expected = tiny.lora.new_weights(config).tensors
    user = torch.Generator().manual_seed(5)
    drawn_alone = torch.rand(250 * ROUNDS, generator=user)
    start = threading.Barrier(3)

    def train_somewhere(_: int) -> list[dict[str, Tensor]]:
        start.wait(30)
        made = []
        for _ in range(ROUNDS):
            base = CausalLM("tiny", tiny.tokenizer_id)
            made += [base.lora.new_weights(config).tensors for _ in range(3)]
        return made

    with ThreadPoolExecutor(2) as threads, torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        results = [threads.submit(train_somewhere, i) for i in range(2)]
        start.wait(30)
        drawn: list[Tensor] = []
        while len(drawn) < len(drawn_alone):
            drawn.append(torch.rand(1))
            assert nn.Linear(1, 1, device="meta").weight.dtype == torch.float32
            time.sleep(0.0002)
        made = [tensors for result in results for tensors in result.result()]
    assert len(made) == 2 * 3 * ROUNDS
    assert all(same(tensors, expected) for tensors in made)
    assert torch.equal(torch.cat(drawn), drawn_alone)


def test_a_failed_first_adapter_leaves_the_model_usable(tiny: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    base = CausalLM("tiny", tiny.tokenizer_id)
    expected = logits(base, None)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("after the layers were replaced")

    with monkeypatch.context() as patch:
        patch.setattr(peft.tuners.lora.LoraModel, "_cast_adapter_dtype", fail)
        with pytest.raises(RuntimeError, match="after the layers were replaced"):
            base.lora.new_weights(LoraConfig(rank=4, seed=11))
    assert torch.equal(logits(base, None), expected)
    config = LoraConfig(rank=4, seed=11)
    weights = base.lora.new_weights(config)
    assert same(weights.tensors, tiny.lora.new_weights(config).tensors)
    assert torch.equal(logits(base, weights), expected)


def test_a_new_adapter_changes_nothing_yet(tiny: CausalLM) -> None:
    weights = tiny.lora.new_weights(LoraConfig(rank=4))
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in weights.tensors.items())
    assert torch.equal(logits(tiny, weights), logits(tiny, None))


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (LoraConfig(), ATTENTION | MLP | {"lm_head"}),
        (LoraConfig(train_unembed=False), ATTENTION | MLP),
        (LoraConfig(train_unembed=False, train_mlp=False), ATTENTION),
        (LoraConfig(train_unembed=False, train_attn=False), MLP),
        (LoraConfig(train_attn=False, train_mlp=False), {"lm_head"}),
    ],
    ids=["all", "no unembedding", "attention", "mlp", "unembedding"],
)
def test_the_config_chooses_the_layers(tiny: CausalLM, config: LoraConfig, modules: set[str]) -> None:
    names = tiny.lora.new_weights(config).tensors
    assert {name.split(".")[-3] for name in names} == modules
    per_layer = len(modules - {"lm_head"}) * 2  # two layers
    assert len(names) == 2 * (per_layer + ("lm_head" in modules))
    assert set(tiny.lora.peft_config(config).target_modules or "") == modules


@pytest.mark.parametrize("rank", [1, 3, 64])
def test_rank_and_alpha(tiny: CausalLM, rank: int) -> None:
    config = LoraConfig(rank=rank)
    for name, tensor in tiny.lora.new_weights(config).tensors.items():
        assert tensor.shape[0 if "lora_A" in name else 1] == rank
    assert tiny.lora.peft_config(config).lora_alpha == 32


@pytest.mark.parametrize("config", [{"rank": 4}, {"rank": 2, "train_unembed": False, "train_mlp": False}], ids=str)
def test_the_tensors_are_pefts_own(tiny: CausalLM, make_adapter: Any, config: dict[str, Any]) -> None:
    """Loaded by name into plain peft they give the same model, scaling included."""
    weights = make_adapter(tiny, **config).weights
    plain = peft.PeftModel(hugging_face(tiny), tiny.lora.peft_config(weights.config))
    loaded: Any = peft.set_peft_model_state_dict(plain, weights.tensors)
    assert loaded.unexpected_keys == []
    with torch.no_grad():
        expected = plain.eval()(input_ids=TOKENS, use_cache=False).logits
    got = logits(tiny, weights)
    torch.testing.assert_close(got, expected)
    assert (got - logits(tiny, None)).abs().max() > 1e-3


def test_without_an_adapter_it_is_the_untouched_model(tiny: CausalLM, make_adapter: Any) -> None:
    make_adapter(tiny)
    with torch.no_grad():
        expected = hugging_face(tiny)(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(logits(tiny, None), expected)


def test_training_leaves_the_base_as_it_was(tiny: CausalLM, make_adapter: Any) -> None:
    train(tiny, make_adapter(tiny), 0)
    expected = hugging_face(tiny).state_dict()
    found = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in tiny.model.state_dict().items()
        if "lora_" not in name
    }
    assert same(found, expected)


def train(base: CausalLM, adapter: LoraAdapter, step: int) -> None:
    data = [Datum.from_tokens(list(range(step, step + 9))), Datum.from_tokens([7, step, 9])]
    run_pass(base, adapter, data, "cross_entropy", {})
    adapter.step(AdamParams(learning_rate=1e-2))


def test_interleaved_training_is_separate_training(tiny: CausalLM) -> None:
    configs = [
        LoraConfig(rank=4, seed=1),
        LoraConfig(rank=4, seed=2),  # of the same shape
        LoraConfig(rank=8, seed=1),
        LoraConfig(rank=4, seed=1, train_mlp=False),
        LoraConfig(rank=2, seed=1, train_attn=False, train_mlp=False),
    ]

    def fresh() -> list[LoraAdapter]:
        return [LoraAdapter(tiny.lora.new_weights(config)) for config in configs]

    separate, interleaved = fresh(), fresh()
    for adapter in separate:
        for step in range(3):
            train(tiny, adapter, step)
    for step in range(3):
        for adapter in interleaved:
            train(tiny, adapter, step)
            logits(tiny, None)
    for one, other in zip(separate, interleaved, strict=True):
        assert same(one.weights.tensors, other.weights.tensors)
    assert not same(separate[0].weights.tensors, separate[1].weights.tensors)


def test_the_base_keeps_no_memory_of_an_adapter_after_use(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    train(tiny, adapter, 0)
    for name, parameter in tiny.model.named_parameters():
        if "lora_" in name:
            assert parameter.numel() == 0, name
            assert parameter.grad is None, name
    tensors = [weakref.ref(tensor) for tensor in adapter.weights.tensors.values()]
    del adapter
    gc.collect()
    assert not any(tensor() is not None for tensor in tensors)


def test_an_error_inside_does_not_leave_the_adapter_in(tiny: CausalLM, make_adapter: Any) -> None:
    expected = logits(tiny, None)

    def fail() -> None:
        with tiny.lora.use(make_adapter(tiny).weights):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(logits(tiny, None), expected)
    assert all(p.numel() == 0 for name, p in tiny.model.named_parameters() if "lora_" in name)


def test_a_copy_has_memory_of_its_own(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    copy = adapter.weights.copy()
    before = {name: tensor.clone() for name, tensor in copy.tensors.items()}
    train(tiny, adapter, 0)
    assert same(copy.tensors, before)
    assert not same(adapter.weights.tensors, before)


def test_a_rank_beyond_the_layers_is_rejected_before_its_memory_is_taken(tiny: CausalLM) -> None:
    with pytest.raises(InvalidInput, match=r"rank of 1000000000 .* the maximum for this model is 128"):
        tiny.lora.new_weights(LoraConfig(rank=10**9))


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_rejected(tiny: CausalLM, make_adapter: Any, damage: str) -> None:
    weights = make_adapter(tiny).weights
    tiny.lora.check(weights)
    name = "base_model.model.lm_head.lora_A.weight"
    tensors = dict(weights.tensors)
    if damage == "missing":
        del tensors[name]
        message = f"does not match this base model: no tensor {name}"
    elif damage == "unknown":
        tensors["extra"] = torch.zeros(1)
        message = "does not match this base model: unknown tensor extra"
    else:
        tensors[name] = torch.zeros(4, 65)
        message = rf"does not match: {name} has the shape \[4, 65\], not \[4, 64\]"
    with pytest.raises(InvalidInput, match=message):
        tiny.lora.check(AdapterWeights(weights.config, tensors))
