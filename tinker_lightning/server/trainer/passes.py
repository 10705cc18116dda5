"""The passes of a model, with built-in and uploaded losses, each charged before it starts.

A pass with a loss of each datum pauses between model calls when it is the turn of another session.

A forward pass may be retained: its activations are kept until its gradient arrives, so that no second forward is
needed.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput, MemoryLimitExceeded, NotRetained
from tinker_lightning.lossgraph.server_loss import PythonLoss
from tinker_lightning.server.engine.interface import RETURNED_BYTES, Activations
from tinker_lightning.server.trainer.jobs import ModelJobs
from tinker_lightning.server.trainer.loss_registry import CUSTOM, LossRegistry
from tinker_lightning.server.trainer.memory import Charge, MemoryBudget
from tinker_lightning.server.trainer.registry import Registry
from tinker_lightning.server.trainer.sizes import data_bytes, dense_bytes, pass_result_bytes
from tinker_lightning.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from tinker_lightning.lossgraph.graph_loss import Source
    from tinker_lightning.server.engine.interface import Adapter, BaseModel
    from tinker_lightning.server.trainer.jobs import Job
    from tinker_lightning.types import requests as rq

    Slices: TypeAlias = Generator[None, None, ForwardBackwardOutput]

# Forwards of one model without a step between them. Their datums are small, but their number must be bounded.
MAX_FORWARDS = 256


@dataclass(eq=False, slots=True)
class RetainedForward:
    """The datums of a forward pass and, unless they were evicted, its activations."""

    data: list[Datum]
    activations: Activations | None
    charge: Charge | None = None  # for the activations
    data_charge: Charge | None = None

    def take(self) -> Activations | None:
        """Returns the activations, which can be used once; without them the forward has to run again."""
        activations, self.activations = self.activations, None
        if self.charge is not None:
            self.charge.release()
        return activations

    def release(self) -> None:
        """Frees a forward that is no longer kept."""
        self.take()
        if self.data_charge is not None:
            self.data_charge.release()


class RetainedForwards:
    """The retained forwards of all models. All methods are thread-safe.

    Activations are evicted, the oldest first, beyond the limit and when other work needs their memory. The datums are
    kept, so a backward still needs no tokens, and it gives the same bits because the forward runs again on them.

    Args:
        memory: The memory of the trainer, a quarter of which they may take.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self.limit = memory.limit // 4
        self._memory = memory
        self._lock = threading.Lock()
        self._forwards: dict[tuple[str, int], RetainedForward] = {}

    def add(self, model_id: str, number: int, forward: RetainedForward) -> None:
        """Keeps the forward with this number of a model, if there is memory for its datums."""
        key = (model_id, number)
        try:
            forward.data_charge = self._memory.charge(
                "the datums of a retained forward",
                data_bytes(forward.data),
                "messages",
                owner=model_id.partition(":")[0],
                evict=lambda: self._forget(key),
                expendable=True,
            )
        except MemoryLimitExceeded:
            return  # the client sends the datums with the gradient
        if forward.activations is not None:
            size = forward.activations.size
            try:
                forward.charge = self._memory.charge("a retained forward", size, evict=forward.take)
            except MemoryLimitExceeded:
                forward.activations = None
        with self._lock:
            self._forwards[key] = forward
            own = [key for key in self._forwards if key[0] == model_id]
            for old in own[:-MAX_FORWARDS]:
                self._forwards.pop(old).release()
            self._make_room()

    def find(self, model_id: str, number: int) -> RetainedForward:
        """Returns a forward; raises `NotRetained` if it is unknown or no longer kept."""
        with self._lock:
            forward = self._forwards.get((model_id, number))
        if forward is None:
            raise NotRetained(f"forward {number} of {model_id} is not retained; send its datums with the gradient")
        return forward

    def drop(self, model_id: str) -> None:
        """Frees the forwards of a model, whose weights have changed."""
        with self._lock:
            for key in [key for key in self._forwards if key[0] == model_id]:
                self._forwards.pop(key).release()

    def _forget(self, key: tuple[str, int]) -> None:
        with self._lock:
            forward = self._forwards.pop(key, None)
        if forward is not None:
            forward.release()

    def _make_room(self) -> None:
        total = 0
        for forward in reversed(self._forwards.values()):
            if forward.activations is not None:
                total += forward.activations.size
                if total > self.limit:
                    forward.take()


@dataclass(frozen=True, slots=True)
class Passes:
    """Turns requests for passes into jobs. Each method returns immediately; the job provides the result."""

    _jobs: ModelJobs
    _registry: Registry
    _losses: LossRegistry
    _retained: RetainedForwards
    _memory: MemoryBudget

    def forward_backward(self, request: rq.ForwardBackwardRequest, *, counted_only: bool = False) -> Job:
        """Runs a forward pass, and a backward pass unless the request is `forward_only`.

        With `counted_only`, log-probabilities are computed only where a built-in loss depends on them.
        """
        config = dict(request.loss_fn_config)
        loss_id = config.pop("loss_id", None) if request.loss_fn == CUSTOM else None
        session_id = self._registry.model(request.model_id).session_id
        # Looked up now and not when the job runs: by then the name may refer to another loss.
        resolve = self._losses.find(session_id, request.loss_fn, loss_id)

        def run(base: BaseModel, adapter: Adapter) -> Slices:
            loss = resolve()
            options: Any = {"forward_only": request.forward_only, "scale": request.scale}
            if isinstance(loss, PythonLoss) or (loss is not None and loss.source != "datum"):
                backward = not request.forward_only
                inputs = 8 * sum(math.prod(each.shape) for each in request.loss_fn_inputs.values())
                charge = self._work(base, adapter, request.data, backward=backward, source=loss.source, extra=inputs)
                with charge as work:
                    return base.run_batch_pass(
                        adapter,
                        request.data,
                        loss,
                        config,
                        request.loss_fn_inputs,
                        reserve=_extra_charge(work),
                        **options,
                    )
            if request.loss_fn_inputs:
                raise InvalidInput(
                    f"loss_fn_inputs: {request.loss_fn} reads its inputs from each datum; only registered batch-level "
                    "losses take inputs for the whole batch"
                )
            if loss is not None and config:
                raise InvalidInput(f"loss_fn_config: unknown setting {next(iter(config))!r}; use only loss_id")
            with self._work(base, adapter, request.data, backward=not request.forward_only) as work:
                return (
                    yield from base.start_pass(
                        adapter,
                        request.data,
                        loss or request.loss_fn,
                        config,
                        counted_only=counted_only,
                        reserve=_extra_charge(work),
                        should_pause=self._jobs.should_pause,
                        **options,
                    )
                )

        kind = "forward" if request.forward_only else "forward_backward"
        tokens = sum(datum.model_input.length for datum in request.data if datum.model_input.is_text)
        size = data_bytes(request.data, request.loss_fn_inputs)
        returned = pass_result_bytes(request.data) + RETURNED_BYTES * tokens
        return self._jobs.submit(
            request,
            kind,
            run,
            can_pause=True,
            request_bytes=size,
            result_bytes=returned,
            datums=len(request.data),
            tokens=tokens,
        )

    def retained_forward(self, request: rq.ForwardBackwardRequest) -> Job:
        """Runs a forward pass and keeps its activations for `retained_backward`, as far as memory allows.

        Its datums need no weights, which are the gradient that follows.
        """

        def run(base: BaseModel, adapter: Adapter) -> Slices:
            size = base.kept_bytes(_lengths(base, request.data), adapter.token_budget)
            activations = Activations() if size <= self._retained.limit else None
            with self._work(base, adapter, request.data, backward=False) as work:
                # Not before they are charged: a few bytes of sparse rows can declare any number of targets.
                data = [_with_weights(datum) for datum in request.data]
                if activations is not None:
                    try:
                        work.resize(work.size + size)
                    except MemoryLimitExceeded:
                        activations = None
                output = yield from base.start_pass(
                    adapter,
                    data,
                    request.loss_fn,
                    {},
                    forward_only=True,
                    activations=activations,
                    should_pause=self._jobs.should_pause,
                )
            self._retained.add(request.model_id, request.seq_id, RetainedForward(data, activations))
            return output

        return self._jobs.submit(
            request,
            "forward",
            run,
            can_pause=True,
            request_bytes=data_bytes(request.data),
            result_bytes=pass_result_bytes(request.data),
            datums=len(request.data),
        )

    def retained_backward(self, request: rq.ForwardBackwardRequest) -> Job:
        """Accumulates the gradient that belongs to the log-probabilities of an earlier `retained_forward`.

        The result has metrics only, because the client has the log-probabilities already.

        Raises:
            NotFound: If there is no such model.
            NotRetained: If the forward is no longer kept. The number is not used up then.
        """
        self._registry.model(request.model_id)
        earlier = self._jobs.get(request.model_id, request.seq_id)
        if earlier is not None:
            return earlier
        number = request.loss_fn_config.get("forward")
        if not isinstance(number, float | int) or not float(number).is_integer():
            raise InvalidInput(f"loss_fn_config: forward must be the number of a retained forward, got {number!r:.80}")
        forward = self._retained.find(request.model_id, int(number))
        if len(request.data) != len(forward.data):
            raise InvalidInput(f"data: forward {number:g} has {len(forward.data)} datums, got {len(request.data)}")
        kept = forward.data
        gradients = [_gradient(i, *each) for i, each in enumerate(zip(request.data, kept, strict=True))]

        def run(base: BaseModel, adapter: Adapter) -> Slices:
            activations = forward.take()
            with self._work(base, adapter, kept, backward=True) as work:
                # Sparse gradients are made dense after they are charged.
                weights = [TensorData.wrap(-gradient.to_numpy()) for gradient in gradients]
                data = [datum.with_inputs(weights=each) for datum, each in zip(kept, weights, strict=True)]
                if activations is not None:
                    try:
                        work.resize(work.size + activations.size)
                    except MemoryLimitExceeded:
                        activations = None  # the forward runs again, in parts
                output = yield from base.start_pass(
                    adapter,
                    data,
                    "cross_entropy",
                    {},
                    activations=activations,
                    should_pause=self._jobs.should_pause,
                )
            return replace(output, loss_fn_outputs=[{} for _ in data])

        tokens = sum(datum.model_input.length for datum in kept)
        # The datums too, because they are needed even if the forward is no longer kept.
        size = data_bytes(request.data) + data_bytes(kept)
        return self._jobs.submit(
            request, "forward_backward", run, can_pause=True, request_bytes=size, datums=len(kept), tokens=tokens
        )

    def _work(
        self,
        base: BaseModel,
        adapter: Adapter,
        data: Sequence[Datum],
        *,
        backward: bool,
        source: Source = "datum",
        extra: int = 0,
    ) -> Charge:
        """Charges a pass without the tensors that an uploaded loss computes."""
        size = base.pass_bytes(
            _lengths(base, data), backward=backward, token_budget=adapter.token_budget, source=source
        )
        size += dense_bytes(data) + extra
        size += 3 * adapter.weights.nbytes if backward else 0  # the gradient, and its sum with earlier ones
        what = f"{'forward_backward' if backward else 'forward'} of {len(data)} datums"
        return self._memory.charge(what, size, fix="Send fewer or shorter datums at once.")


def _lengths(base: BaseModel, data: Sequence[Datum]) -> list[int]:
    """Returns the lengths of datums; the pass rejects those that are longer than the context."""
    inputs = [datum.model_input for datum in data]
    return [min(each.length, base.max_context_length) if each.is_text else 0 for each in inputs]


def _extra_charge(work: Charge) -> Callable[[int], None]:
    """Returns a function that charges memory in addition to the work itself."""
    size = work.size
    return lambda extra: work.resize(max(work.size, size + extra))


def _with_weights(datum: Datum) -> Datum:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None or "weights" in datum.loss_fn_inputs:
        return datum
    return datum.with_inputs(weights=TensorData.wrap(np.zeros(targets.shape, np.float32)))


def _gradient(index: int, datum: Datum, retained: Datum) -> TensorData:
    gradient = datum.loss_fn_inputs.get("gradient")
    if gradient is None:
        raise InvalidDatum(f"datum {index}: gradient: missing")
    entries, targets = (math.prod(each.shape) for each in (gradient, retained.loss_fn_inputs["target_tokens"]))
    if entries != targets:
        raise InvalidDatum(f"datum {index}: gradient has {entries} entries but target_tokens has {targets}")
    return gradient
