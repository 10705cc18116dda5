"""Chat templates: of SmolLM2, in the style of Hermes with tools, and plain ones with a tokenizer of bytes."""

from __future__ import annotations

import copy
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|s|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|e|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|e|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
)
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    f"{{{{ '<|im_start|>system\n{SMOLLM2_SYSTEM}<|im_end|>\n' }}}}{{% endif %}}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{% endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool.function | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def with_template(tokenizer: Any, template: str) -> Any:
    """A copy of a tokenizer with another chat template."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def tokenizer(template: str | None = PLAIN, end: str | None = "<|e|>") -> Any:
    """Bytes, and one token for two line breaks, which crosses the start of an answer that begins with one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, "ĊĊ"])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|s|>", "<|e|>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, chat_template=template)


def trained(ids: list[int], weights: Any, by: Any) -> str:
    text: str = by.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    return text
