"""The seam between the trainer and an engine: Protocols of base models, adapters and samplers, and what they exchange.

    trainer ──► Engine(names) ──► ModelCatalog ── get(name) ──► BaseModel ─┬─ new_adapter(config) ──► Adapter
                                                                           ├─ start_pass(adapter, data, loss)
                                                                           └─ new_sampler() ──► Sampler
                                                                                  admit · step · cancel

The trainer and the endpoints import nothing else from this folder but the default engine. Another engine implements
these Protocols and is passed as `EmbeddedTrainer(engine=)`. The trainer calls the methods of a model, an adapter and a
sampler on a single thread. Catalogs, and the attributes of a model, are used by any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor
from typing_extensions import TypeVar

from tinker_lightning.types import LoraConfig, ModelInput, SamplingParams, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    import torch

    from tinker_lightning.lossgraph.graph_loss import GraphLoss, Source
    from tinker_lightning.lossgraph.server_loss import RegisteredLoss
    from tinker_lightning.types import AdamParams, Datum, ForwardBackwardOutput, SampleResponse

    Tensors: TypeAlias = Mapping[str, Tensor]

# The most log-probabilities that a sampling result contains in addition to one for each token.
MAX_SCORES = 1 << 20
# The most bytes of log-probabilities that a loss may return for each token, in addition to one for each target.
RETURNED_BYTES = 256


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The config and the tensors of an adapter, with the names that peft uses in files."""

    config: LoraConfig
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copy(self) -> AdapterWeights:
        """Returns a deep copy."""
        return AdapterWeights(self.config, {name: tensor.detach().clone() for name, tensor in self.tensors.items()})


class Activations:
    """The autograd graph of a forward pass: a later backward pass takes it instead of running the forward again."""

    def __init__(self) -> None:
        self.size = 0  # an estimate of the memory in bytes
        self._logprobs: dict[tuple[int, ...], list[Tensor]] = {}  # by group of datums

    def keep(self, group: Sequence[int], logprobs: list[Tensor], size: int) -> None:
        """Keeps the log-probabilities of a group of datums, with their graph."""
        self._logprobs[tuple(group)] = logprobs
        self.size += size

    def take(self, group: Sequence[int]) -> list[Tensor] | None:
        """Returns the log-probabilities of a group, whose graph can be used once."""
        return self._logprobs.pop(tuple(group), None)


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """The scores of a prompt to return, by default none. `last_n` limits `logprobs` and `topk`."""

    logprobs: bool = False
    last_n: int | None = None
    topk: int = 0
    targets: TensorData | None = None
    alt_tokens: int = 0

    def __bool__(self) -> bool:
        return self.logprobs or bool(self.topk or self.alt_tokens) or self.targets is not None


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A group of sequences that continue one prompt with the weights of one adapter.

    Temperature, top-k and top-p affect the choice of tokens but not the returned log-probabilities, which are
    comparable with the log-probabilities of a forward pass.

    Args:
        request_id: The id of the request, unique among those admitted to a sampler.
        prompt: The prompt, which is processed once for all sequences.
        params: The length, the choice of tokens, and where sequences stop.
        weights: The weights of an adapter, or None for the base model.
        num_samples: The number of sequences.
        scoring: The scores of the prompt to return.
        topk_sample_logprobs: The number of most likely tokens to return for each sampled one.
        fallback_seed: Decides the draws of a request whose `params` have no seed; None makes them random.
        wave: The most sequences that are sampled at a time, by default all. Each has its own random numbers, so that
            they do not depend on the waves.
    """

    request_id: str
    prompt: ModelInput
    params: SamplingParams
    weights: AdapterWeights | None = None
    num_samples: int = 1
    scoring: PromptScoring = PromptScoring()  # immutable
    topk_sample_logprobs: int = 0
    fallback_seed: str | None = None
    wave: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingMemory:
    """The memory that a sampling request needs, in bytes."""

    prompt: int  # the pass over the prompt, and its scores
    sequence: int  # the cache of a sequence at its full length, and its logits

    def wave(self, num_samples: int, memory: int) -> int:
        """Returns how many sequences fit into the memory at a time, at least one."""
        return max(1, min(num_samples, (memory - self.prompt) // self.sequence))

    def bytes(self, wave: int) -> int:
        """Returns the memory of a request that runs in waves of this size."""
        return self.prompt + wave * self.sequence


class Sampler(Protocol):
    """Decodes any number of requests, each of them a group of rows with the weights of one adapter.

    An engine is free to decode the rows of all admitted requests together.
    """

    def memory(self, prompt_tokens: int, max_tokens: int | None) -> SamplingMemory:
        """Estimates the memory of a request."""

    def admit(self, request: SamplingRequest) -> None:
        """Accepts a request; raises `InvalidInput` if the model cannot run it."""

    def step(
        self, request_ids: Collection[str] | None = None, should_stop: Callable[[], bool] = lambda: True
    ) -> Mapping[str, SampleResponse | Exception]:
        """Advances requests, and returns and forgets the outcomes of those that have ended.

        Args:
            request_ids: The requests to advance, by default all. Others may advance with them.
            should_stop: Called after each token: a request advances by one token, and on until this returns True.
        """

    def cancel(self, request_id: str) -> None:
        """Frees the memory of a request. Does nothing if it is not admitted."""


class Adapter(Protocol):
    """Weights in training. Every method either succeeds or leaves the adapter unchanged.

    Passes of the model that created it add to `gradient`, and a step clears it. `token_budget` is the number of
    positions per model call; None stands for the model's.
    """

    weights: AdapterWeights
    gradient: dict[str, Tensor]
    token_budget: int | None

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken."""

    def step(self, params: AdamParams) -> dict[str, float]:
        """Takes an AdamW step with the accumulated gradient and returns the metrics."""

    def training_state(self) -> dict[str, Tensor]:
        """Returns the optimizer's state and the accumulated gradient, for an exact resume."""

    def load(self, weights: AdapterWeights, training_state: Tensors | None) -> None:
        """Loads weights and the training state; without a training state, the optimizer is reset."""


class PeftConfig(Protocol):
    """A config that peft loads."""

    def save_pretrained(self, save_directory: str) -> None:
        """Writes `adapter_config.json`."""


class AdapterFormat(Protocol):
    """The format of a model's adapters: sizes, names and shapes of their tensors, and their description in files."""

    def weights_bytes(self, config: LoraConfig) -> int:
        """Returns the size of the weights of such an adapter."""

    def check(self, weights: AdapterWeights) -> None:
        """Raises `InvalidInput` if the weights belong to another model or have another rank."""

    def import_weights(self, tensors: Tensors, scaling: float) -> AdapterWeights:
        """Returns weights that compute the same as a PEFT adapter whose product is multiplied by `scaling`."""

    def peft_config(self, config: LoraConfig) -> PeftConfig:
        """Returns the config that is saved with the tensors of such an adapter."""


A = TypeVar("A", bound=Adapter, default=Any)  # an engine gets its own adapters back


class BaseModel(Protocol[A]):
    """A frozen model with its tokenizer, which adapters and samplers share. Not thread-safe."""

    name: str
    arch: str
    tokenizer: Any  # of transformers
    tokenizer_id: str
    vocab_size: int
    max_context_length: int

    @property
    def lora(self) -> AdapterFormat:
        """The format of its adapters."""

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""

    def new_adapter(self, config: LoraConfig) -> A:
        """Creates an adapter that has no effect yet."""

    def new_sampler(self) -> Sampler:
        """Creates a sampler, which any number of requests share."""

    def start_pass(
        self,
        adapter: A,
        data: Sequence[Datum],
        loss_fn: str | GraphLoss,
        loss_fn_config: Mapping[str, float | str],
        *,
        forward_only: bool = False,
        scale: float = 1.0,
        activations: Activations | None = None,
        counted_only: bool = False,
        reserve: Callable[[int], None] | None = None,
        should_pause: Callable[[], bool] = lambda: False,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Runs a pass with a loss of each datum, built-in or uploaded; see `datum_pass.start_pass`.

        Yields where it pauses, if `should_pause` returns True between two model calls.
        """

    def run_batch_pass(
        self,
        adapter: A,
        data: Sequence[Datum],
        loss: RegisteredLoss,
        loss_fn_config: Mapping[str, float | str],
        loss_fn_inputs: Mapping[str, TensorData],
        *,
        forward_only: bool = False,
        scale: float = 1.0,
        reserve: Callable[[int], None] | None = None,
    ) -> ForwardBackwardOutput:
        """Runs a pass with a loss of the whole batch; see `batch_pass.run_batch_pass`."""

    def pass_bytes(
        self, lengths: Sequence[int], *, backward: bool, token_budget: int | None = None, source: Source = "datum"
    ) -> int:
        """Estimates the memory that a pass takes at its peak, without its inputs and the loss."""

    def kept_bytes(self, lengths: Sequence[int], token_budget: int | None = None) -> int:
        """Estimates the memory of the activations of a whole batch."""


class ModelCatalog(Protocol):
    """The base models of a trainer. All methods are thread-safe."""

    @property
    def names(self) -> list[str]:
        """Names of the available models."""

    def loaded(self, name: str) -> BaseModel | None:
        """Returns the model if it is in memory."""

    def resolve(self, name: str) -> str:
        """Returns the name of a model that is given by name or folder; raises `ModelNotFound` if it is not served."""

    def get(self, name: str) -> BaseModel:
        """Returns the model and loads it on first use."""


class Engine(Protocol):
    """Creates the catalog of a trainer; the class of a catalog is one."""

    def __call__(
        self,
        names: Sequence[str] | None,
        *,
        dtype: torch.dtype,
        on_load: Callable[[BaseModel], object],
        token_budget: int | None,
    ) -> ModelCatalog:
        """Creates a catalog.

        Args:
            names: The models that clients may use, or None for all.
            dtype: The dtype of the models.
            on_load: Called with each model when it is loaded. May raise, then the model is not kept.
            token_budget: The number of positions per model call, or None for the default of each model.
        """
