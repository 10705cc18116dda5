"""Models from a folder: other architectures train exactly or are refused, never silently wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    modeling_gguf_pytorch_utils,
)

from tests.helpers.engine_passes import run_pass
from tests.helpers.sampling import sample
from tests.helpers.soaking import first_only
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.server.engine.catalog import Catalog
from tinker_lightning.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from tinker_lightning.server.engine.causal_lm import CausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = GPT2Config(
    vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0
)


def save(folder: Path, config: Any, tokenizer: Any) -> str:
    """A folder with a random model of this config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, final_logit_softcapping=30.0),
        GraniteConfig(**SIZES, logits_scaling=4.0),
        CohereConfig(**SIZES, logit_scale=0.25),
        Cohere2Config(**SIZES, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_that_are_rescaled_behind_the_output_matrix_are_rejected(
    tiny: CausalLM, tmp_path: Path, config: Any
) -> None:
    path = save(tmp_path, config, tiny.tokenizer)
    with pytest.raises(InvalidInput, match=f"{config.model_type} models scale or cap their logits"):
        Catalog().get(path)


@pytest.mark.parametrize(
    "config",
    first_only(
        [
            GPT2,
            Qwen2Config(**SIZES, tie_word_embeddings=True),
            Gemma2Config(**SIZES, final_logit_softcapping=None),
            Qwen2Config(**SIZES),
            MistralConfig(**SIZES, sliding_window=4),
            GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 4}),
            OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
        ],
        3,
    ),
    ids=lambda config: f"{config.model_type}{'-tied' if config.tie_word_embeddings else ''}",
)
def test_other_architectures_train_exactly(  # R5.5
    tiny: CausalLM,
    tmp_path: Path,
    make_adapter: Any,
    make_reference: Callable[[str, torch.dtype], Any],
    assert_same_gradient: Any,
    config: Any,
) -> None:
    path = save(tmp_path, config, tiny.tokenizer)
    base = Catalog(dtype=torch.float64).get(path)
    reference = make_reference(path, torch.float64)
    sequences = [torch.tensor(tokens) for tokens in ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [5, 8, 9], [7, 9, 3, 2, 3])]
    adapter = make_adapter(base)

    def loss(logprobs_TV: Callable[[Tensor], Tensor]) -> Tensor:
        return -sum(
            (logprobs_TV(tokens[:-1]).gather(-1, tokens[1:, None]).sum() for tokens in sequences),
            torch.zeros((), dtype=torch.float64),
        )

    # Gemma normalizes and weighs attention in float32 whatever the model's own precision.
    rtol = 1e-6 if config.model_type == "gemma2" else 1e-9
    value, gradient = reference.gradient(adapter, loss)
    output = run_pass(base, adapter, [Datum.from_tokens(tokens) for tokens in sequences], "cross_entropy", {})
    assert output.metrics["loss:sum"] == pytest.approx(value, rel=rtol)
    assert_same_gradient(adapter.gradient, gradient, rtol)
    assert {"attn", "mlp", "head"} == {part_of(name) for name in gradient}

    adapter.step(AdamParams(learning_rate=1e-3))
    after = run_pass(base, adapter, [Datum.from_tokens(tokens) for tokens in sequences], "cross_entropy", {})
    assert after.metrics["loss:sum"] < value


def part_of(tensor_name: str) -> str:
    if "attn" in tensor_name or "attention" in tensor_name:
        return "attn"
    return "mlp" if ".layers." in tensor_name or ".h." in tensor_name else "head"


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (LoraConfig(train_mlp=False, train_unembed=False), {"attn.c_attn", "attn.c_proj"}),
        (LoraConfig(train_attn=False, train_unembed=False), {"mlp.c_fc", "mlp.c_proj"}),
        (LoraConfig(train_unembed=False), {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ],
    ids=["attention", "mlp", "both"],
)
def test_layers_of_one_name_in_two_places_are_distinguished(
    tiny: CausalLM, tmp_path: Path, config: LoraConfig, modules: set[str]
) -> None:
    base = Catalog().get(save(tmp_path, GPT2, tiny.tokenizer))
    names = base.lora.new_weights(config).tensors
    assert {".".join(name.split(".")[-4:-2]) for name in names} == modules
    assert len(names) == 2 * 2 * len(modules)


def test_loading_draws_no_bar_and_leaves_those_of_others(
    tiny: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, GPT2, tiny.tokenizer)
    load = AutoModelForCausalLM.from_pretrained

    def with_gguf_bar(*args: Any, **options: Any) -> Any:
        assert list(modeling_gguf_pytorch_utils.tqdm([1])) == [1]  # as for the tensors of a GGUF file
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", with_gguf_bar)
    capfd.readouterr()
    Catalog([path]).get(path)
    assert capfd.readouterr().err == ""
    assert list(modeling_gguf_pytorch_utils.tqdm([1])) == [1]
    assert "1/1" in capfd.readouterr().err
    AutoModelForCausalLM.from_pretrained(path)
    assert "Loading weights" in capfd.readouterr().err


def test_a_folder_is_sampled_like_any_model(tiny: CausalLM, tmp_path: Path) -> None:
    path = save(tmp_path, GPT2, tiny.tokenizer)
    base = Catalog([path]).get(path)
    assert (base.name, base.arch, base.vocab_size, base.max_context_length) == (path, "gpt2", 67, 64)
    assert base.eos_token_ids == {2}
    LoraAdapter(base.lora.new_weights(LoraConfig(rank=2)))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    prompt = torch.tensor([[3, 1, 4]])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    assert sample(base, None, ModelInput.from_ints([3, 1, 4]), params).sequences[0].tokens == expected[0, 3:].tolist()
