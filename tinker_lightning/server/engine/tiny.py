"""`tiny`: a small random Llama with a byte tokenizer, for tests and first steps. Built locally, never downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.server.engine.pretrained import without_bars

if TYPE_CHECKING:
    from pathlib import Path

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build(folder: Path) -> None:
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
    with without_bars():
        model.save_pretrained(folder)


def _byte_alphabet() -> dict[str, int]:
    """Maps the printable character that byte-level tokenizers use for each byte to this byte, which is the token id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return {chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)}
