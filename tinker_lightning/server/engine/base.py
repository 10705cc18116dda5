"""A causal language model that is loaded once and shared by everything trained or sampled on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine.logprobs import target_logprobs
from tinker_lightning.server.engine.lora import LoraHost
from tinker_lightning.server.engine.pretrained import load_model

if TYPE_CHECKING:
    from pathlib import Path


class BaseModel:
    """A frozen model, its tokenizer, and the adapters that can be put on it. Used by one thread at a time.

    Args:
        name: What clients call it.
        path: The folder it was loaded from, or its hub id.
        dtype: What it computes in. float64 is for checking numerics.
    """

    def __init__(self, name: str, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoTokenizer

        self.name = name
        self.tokenizer_id = str(path)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = load_model(path, dtype).eval().requires_grad_(False)
        config = self.model.config
        self.arch = str(config.model_type)
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.max_context_length = int(getattr(config, "max_position_embeddings", 2048))
        self.eos_token_ids = _eos_token_ids(self.model, self.tokenizer)
        self.lora = LoraHost(self.model, str(path))
        self._check_head()

    def hidden_states(self, tokens_BT: Tensor) -> Tensor:
        """The decoder's output, before the output matrix.

        No attention mask is passed: attention is causal and padding stands on the right, so that no real token ever
        sees it, and torch's fast causal kernel applies.
        """
        hidden_BTD: Tensor = self.model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return hidden_BTD

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def target_logprobs(self, hidden_ND: Tensor, targets_NK: Tensor) -> Tensor:
        """Log-probabilities of the targets at these positions."""
        return target_logprobs(self.head, hidden_ND, targets_NK, self.vocab_size)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some architectures scale or cap around the output matrix; their log-probabilities would be silently wrong.

        The matrix's answer is replaced by large numbers, because a cap cannot be seen on the small logits of an
        untrained model: they must come out as the logits, and the matrix must have been given the decoder's output.
        """
        tokens_BT = torch.arange(4).remainder(self.vocab_size)[None]
        given: list[Tensor] = []

        def answer(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            given.append(args[0])
            return torch.linspace(-100, 100, output.numel(), dtype=output.dtype).view_as(output)

        with self.model.get_output_embeddings().register_forward_hook(answer):
            logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        expected_BTV = torch.linspace(-100, 100, logits_BTV.numel(), dtype=logits_BTV.dtype).view_as(logits_BTV)
        same_input = torch.allclose(given[0], self.hidden_states(tokens_BT), rtol=1e-3, atol=1e-5)
        if not (same_input and torch.equal(logits_BTV, expected_BTV)):
            raise InvalidInput(
                f"{self.name}: a {self.arch} model scales or caps around its output matrix, which this trainer does "
                "not reproduce. Use a model of another architecture, such as Llama or Qwen."
            )


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])
