"""A causal language model that is loaded once and shared by all adapters and samplers."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine import batch_pass, datum_pass
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.server.engine.logprobs import chunk_rows, target_logprobs
from tinker_lightning.server.engine.lora import LoraHost, Matrices
from tinker_lightning.server.engine.sampler import CachedSampler
from tinker_lightning.wire.hub import without_progress_bars

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tinker_lightning.lossgraph.graph_loss import Source
    from tinker_lightning.types import LoraConfig


@dataclass(frozen=True, slots=True)
class CallSize:
    """The size of the calls of a model on a CPU. Other numbers give other bits.

    Args:
        tokens: The token budget: the number of positions per call, including padding. Activations take about 2 MB per
            position for a model with 135M parameters, and matrix products get no faster beyond 512. Checkpoints record
            it.
        overhead: The cost of a call apart from its positions, in positions: reading the weights, and Python between
            kernels.
    """

    tokens: int = 512
    overhead: int = 16


# By base model; others have the default.
CALL_SIZES: Mapping[str, CallSize] = {"tiny": CallSize(overhead=512), "smollm2-135m": CallSize()}


class CausalLM:
    """A frozen model with its tokenizer and LoRA layers, from a folder or a hub id. Not thread-safe."""

    def __init__(self, name: str, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name = name
        self.tokenizer_id = str(path)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        with without_progress_bars():
            self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model.eval().requires_grad_(False)
        config = self.model.config
        self.arch = str(config.model_type)
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.max_context_length = int(getattr(config, "max_position_embeddings", 2048))
        self.eos_token_ids = _eos_token_ids(self.model, self.tokenizer)
        self._call_size = CALL_SIZES.get(name, CallSize())
        self._layers = decoder_layers(self.model.get_decoder())
        self.lora = LoraHost(self.model, str(path))
        self._check_head()

    # Functions in modules of their own, with the model as their first argument.
    start_pass = datum_pass.start_pass
    run_batch_pass = batch_pass.run_batch_pass

    def new_adapter(self, config: LoraConfig) -> LoraAdapter:
        """Creates an adapter with initial weights, which has no effect yet."""
        return LoraAdapter(self.lora.new_weights(config), self.token_budget)

    def new_sampler(self) -> CachedSampler:
        """Creates a sampler."""
        return CachedSampler(self)

    @property
    def token_budget(self) -> int:
        """The number of positions per model call, unless a single sequence is longer."""
        return self._call_size.tokens

    def set_token_budget(self, tokens: int | None) -> None:
        """Sets the number of positions per model call; None restores the default of this model."""
        size = CALL_SIZES.get(self.name, CallSize())
        self._call_size = size if tokens is None else replace(size, tokens=tokens)

    def calls(self, lengths: Sequence[int], token_budget: int | None = None) -> list[list[int]]:
        """Returns the indices of the sequences that each model call of a pass takes, given all lengths."""
        return group_by_length(lengths, replace(self._call_size, tokens=token_budget or self.token_budget))

    def hidden_states(self, tokens_BT: Tensor) -> Tensor:
        """Returns the decoder's output, before the output matrix.

        No attention mask is passed: attention is causal and padding is on the right, so real tokens never attend to
        padding, and torch can use its fast causal kernel. A call with more positions than the token budget, which is a
        single long sequence, keeps the activations of as many layers as fit into the memory of a full call, and
        computes the others again in the backward pass. This gives the same bits.
        """
        with recompute(self._layers[: self._recomputed_layers(tokens_BT.numel())]):
            hidden_BTD: Tensor = self.model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return hidden_BTD

    def head(self, hidden: Tensor) -> Tensor:
        """Returns the logits of hidden states."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def target_logprobs(self, hidden_ND: Tensor, targets_NK: Tensor) -> Tensor:
        """Returns the log-probabilities of the targets at these positions."""
        return target_logprobs(self._head, hidden_ND, targets_NK)

    def activation_bytes(self, positions: int) -> int:
        """Estimates the memory that a model call keeps for its backward pass: 2 MB per position for 135M parameters."""
        width, inner, layers = self._sizes()
        recomputed = self._recomputed_layers(positions)
        per_position = (layers - recomputed) * (14 * width + 5 * inner) + recomputed * width
        logits = 0 if positions > self._logits_rows else positions * self.vocab_size * self.head_itemsize
        return positions * per_position * int(self.model.dtype.itemsize) + logits

    def forward_bytes(self, positions: int) -> int:
        """Estimates the memory of a forward pass without gradients: one layer and its input."""
        width, inner, _ = self._sizes()
        return positions * (8 * width + 4 * inner) * int(self.model.dtype.itemsize)

    def pass_bytes(
        self, lengths: Sequence[int], *, backward: bool, token_budget: int | None = None, source: Source = "datum"
    ) -> int:
        """Estimates the memory that a pass takes at its peak, without its inputs and the tensors of the loss.

        Args:
            lengths: The number of tokens of each datum.
            backward: Whether it has a backward pass.
            token_budget: The adapter's token budget, if it is not the model's.
            source: The model output that the loss is computed from.
        """
        size = self._call_bytes(lengths, token_budget, backward=backward)
        if source == "datum":
            return size
        if backward:
            size = max(size, min(self.kept_bytes(lengths, token_budget), batch_pass.KEPT_BYTES + size))
        # The outputs of the model, a copy for the loss, and in a backward pass their gradient.
        width = self.vocab_size if source == "logits" else 1
        return size + 4 * len(lengths) * max(lengths, default=0) * width * self.head_itemsize

    def _call_bytes(self, lengths: Sequence[int], token_budget: int | None, *, backward: bool) -> int:
        """Estimates the memory of the largest model call of a pass."""
        positions = max(self._positions(lengths, token_budget), default=0)
        width, inner, _ = self._sizes()
        # A chunk of logits and a copy of it. A backward pass computes a layer again, and its gradients.
        working = 2 * min(positions, self._logits_rows) * self.vocab_size * self.head_itemsize
        if not backward:
            return working + self.forward_bytes(positions)
        layer = (18 * width + 7 * inner) * int(self.model.dtype.itemsize)
        return working + positions * layer + self.activation_bytes(positions)

    def kept_bytes(self, lengths: Sequence[int], token_budget: int | None = None) -> int:
        """Estimates the memory of the activations of a whole batch."""
        return sum(map(self.activation_bytes, self._positions(lengths, token_budget)))

    @property
    def head_itemsize(self) -> int:
        """Size of a log-probability in bytes; half precision is computed in float32."""
        return int(torch.promote_types(self.model.dtype, torch.float32).itemsize)

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def cache_bytes(self, positions: int) -> int:
        """Returns the size of the key-value cache for this many positions."""
        config = self.model.config
        heads = int(getattr(config, "num_attention_heads", 16))
        width = int(getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", 1024)) // heads)
        kept = int(getattr(config, "num_key_value_heads", None) or heads)
        _, _, layers = self._sizes()
        return positions * layers * 2 * kept * width * int(self.model.dtype.itemsize)

    def _sizes(self) -> tuple[int, int, int]:
        """Returns the width of the model, the width of its MLP, and the number of its layers."""
        config = self.model.config
        width = int(getattr(config, "hidden_size", 1024))
        inner = int(getattr(config, "intermediate_size", None) or 4 * width)
        return width, inner, len(self._layers) or int(getattr(config, "num_hidden_layers", 24))

    def _positions(self, lengths: Sequence[int], token_budget: int | None) -> list[int]:
        """Returns the number of positions of each model call."""
        return [len(call) * max(lengths[i] for i in call) for call in self.calls(lengths, token_budget)]

    def _recomputed_layers(self, positions: int) -> int:
        """Returns how many layers are computed again in the backward pass of a call."""
        if positions <= self.token_budget:
            return 0
        # One layer's activations exist while it is computed again.
        kept = len(self._layers) * self.token_budget // positions - 1
        return len(self._layers) - max(0, kept)

    @property
    def _head(self) -> Matrices:
        return Matrices.from_layer(self.model.get_output_embeddings())

    @property
    def _logits_rows(self) -> int:
        return chunk_rows(self._head, self.model.dtype)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Rejects architectures that scale or cap the logits, because log-probabilities would be silently wrong.

        The output of the matrix is replaced by large numbers, because the small logits of an untrained model would not
        reveal a cap. The model must return these numbers as logits, and the input of the matrix must be the decoder's
        output.
        """
        if type(self.model.get_output_embeddings()) is not nn.Linear:
            kind = type(self.model.get_output_embeddings()).__name__
            raise InvalidInput(f"{self.name}: the output matrix of {self.arch} models is a {kind}, not a linear layer")
        tokens_BT = torch.arange(4).remainder(self.vocab_size)[None]
        inputs: list[Tensor] = []

        def answer(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            inputs.append(args[0])
            return torch.linspace(-100, 100, output.numel(), dtype=output.dtype).view_as(output)

        with self.model.get_output_embeddings().register_forward_hook(answer):
            logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        expected_BTV = torch.linspace(-100, 100, logits_BTV.numel(), dtype=logits_BTV.dtype).view_as(logits_BTV)
        same_input = torch.allclose(inputs[0], self.hidden_states(tokens_BT), rtol=1e-3, atol=1e-5)
        if not (same_input and torch.equal(logits_BTV, expected_BTV)):
            raise InvalidInput(
                f"{self.name}: {self.arch} models scale or cap their logits, which is not supported. Use another "
                "architecture, such as Llama or Qwen."
            )


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def group_by_length(lengths: Sequence[int], size: CallSize) -> list[list[int]]:
    """Splits indices into batches within the token budget including padding, longest sequences first.

    Among all splits of the sorted sequences, it is the one with the least padding, where a batch counts as much as its
    overhead. A sequence that exceeds the budget gets its own batch. Sequences of equal length keep their order, so the
    result is deterministic.

    >>> group_by_length([36, 200, 40, 36], CallSize(tokens=400, overhead=16))
    [[1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # best[k] is the lowest cost of the sequences from k on, and ends[k] where their first batch ends.
    best, ends = [0] * (len(order) + 1), [0] * len(order)
    for start in reversed(range(len(order))):
        longest = lengths[order[start]]
        most = max(1, size.tokens // max(1, longest))
        cost, end = min(
            ((end - start) * longest + size.overhead + best[end], -end)
            for end in range(start + 1, min(len(order), start + most) + 1)
        )
        best[start], ends[start] = cost, -end
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : ends[start]])
        start = ends[start]
    return batches


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Returns the layers that transformers can recompute, in the order in which they run."""
    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recompute(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Makes these layers keep only their inputs in a forward pass with gradients.

    transformers does this for models in training mode only, in which dropout is active too.
    """
    layers = layers if torch.is_grad_enabled() else []
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
