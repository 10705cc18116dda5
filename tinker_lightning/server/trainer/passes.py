"""The passes of a model: built-in, uploaded and retained, each charged before it starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput, MemoryLimitExceeded
from tinker_lightning.server.engine.batch_pass import RETURNED_BYTES, batch_pass_bytes, run_batch_pass
from tinker_lightning.server.engine.losses import BoundGraph, PythonLoss
from tinker_lightning.server.engine.passes import Activations, run_pass
from tinker_lightning.server.trainer.loss_registry import CUSTOM, LossRegistry
from tinker_lightning.server.trainer.retained import RetainedForward, RetainedForwards
from tinker_lightning.server.trainer.sizes import data_bytes, dense_bytes, pass_result_bytes
from tinker_lightning.types import ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinker_lightning.lossgraph.graph_loss import GraphLoss
    from tinker_lightning.server.engine.adapter import Adapter
    from tinker_lightning.server.engine.base import BaseModel
    from tinker_lightning.server.trainer.jobs import Job, ModelJobs
    from tinker_lightning.server.trainer.memory import Charge, MemoryBudget
    from tinker_lightning.server.trainer.registry import Registry
    from tinker_lightning.types import Datum
    from tinker_lightning.types import requests as rq


class Passes:
    """Turns requests for passes into jobs. Each method returns immediately; the job provides the result."""

    def __init__(
        self,
        jobs: ModelJobs,
        registry: Registry,
        losses: LossRegistry,
        retained: RetainedForwards,
        memory: MemoryBudget,
    ) -> None:
        self._jobs = jobs
        self._registry = registry
        self._losses = losses
        self._retained = retained
        self._memory = memory

    def forward_backward(self, request: rq.ForwardBackwardRequest, *, counted_only: bool = False) -> Job:
        """Runs a forward pass, and a backward pass unless the request is `forward_only`.

        With `counted_only`, log-probabilities are computed only where a built-in loss depends on them.
        """
        config = dict(request.loss_fn_config)
        loss_id = config.pop("loss_id", None) if request.loss_fn == CUSTOM else None
        session_id = self._registry.model(request.model_id).session_id
        # Looked up now and not when the job runs: by then the name may refer to another loss.
        found = self._losses.find(session_id, request.loss_fn, loss_id)

        def run(base: BaseModel, adapter: Adapter) -> ForwardBackwardOutput:
            loss = found()
            options: Any = {"forward_only": request.forward_only, "scale": request.scale}
            if isinstance(loss, PythonLoss) or (loss is not None and loss.source != "datum"):
                with self._batch_work(base, adapter, request, loss) as work:
                    return run_batch_pass(
                        base,
                        adapter,
                        request.data,
                        loss,
                        config,
                        request.loss_fn_inputs,
                        reserve=_addition(work),
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
                bound = request.loss_fn if loss is None else BoundGraph(loss, _addition(work))
                return run_pass(base, adapter, request.data, bound, config, counted_only=counted_only, **options)

        kind = "forward" if request.forward_only else "forward_backward"
        tokens = sum(datum.model_input.length for datum in request.data if datum.model_input.is_text)
        size = data_bytes(request.data, request.loss_fn_inputs)
        returned = pass_result_bytes(request.data) + RETURNED_BYTES * tokens
        return self._jobs.submit(
            request, kind, run, request_bytes=size, result_bytes=returned, datums=len(request.data), tokens=tokens
        )

    def retained_forward(self, request: rq.ForwardBackwardRequest) -> Job:
        """Runs a forward pass and keeps its activations for `retained_backward`, as far as memory allows.

        Its datums need no weights, which are the gradient that follows.
        """

        def run(base: BaseModel, adapter: Adapter) -> ForwardBackwardOutput:
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
                output = run_pass(base, adapter, data, request.loss_fn, {}, forward_only=True, activations=activations)
            self._retained.add(request.model_id, request.seq_id, RetainedForward(data, activations))
            return output

        return self._jobs.submit(
            request,
            "forward",
            run,
            request_bytes=data_bytes(request.data),
            result_bytes=pass_result_bytes(request.data),
            datums=len(request.data),
        )

    def retained_backward(self, request: rq.ForwardBackwardRequest) -> Job:
        """Accumulates the gradient that belongs to the log-probabilities of an earlier `retained_forward`.

        The result has metrics only, because the client has the log-probabilities already.

        Raises:
            NotRetained: If the forward is no longer kept. The number is not used up then.
        """
        known = self._jobs.known(request.model_id, request.seq_id)
        if known is not None:
            return known
        number = request.loss_fn_config.get("forward")
        if not isinstance(number, float | int) or not float(number).is_integer():
            raise InvalidInput(f"loss_fn_config: forward must be the number of a retained forward, got {number!r:.80}")
        forward = self._retained.find(request.model_id, int(number))
        if len(request.data) != len(forward.data):
            raise InvalidInput(f"data: forward {number:g} has {len(forward.data)} datums, got {len(request.data)}")
        kept = forward.data
        gradients = [_gradient(i, *each) for i, each in enumerate(zip(request.data, kept, strict=True))]

        def run(base: BaseModel, adapter: Adapter) -> ForwardBackwardOutput:
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
                output = run_pass(base, adapter, data, "cross_entropy", {}, activations=activations)
            return replace(output, loss_fn_outputs=[{} for _ in data])

        tokens = sum(datum.model_input.length for datum in kept)
        # The datums too, because they are needed even if the forward is no longer kept.
        size = data_bytes(request.data) + data_bytes(kept)
        return self._jobs.submit(request, "forward_backward", run, request_bytes=size, datums=len(kept), tokens=tokens)

    def _work(self, base: BaseModel, adapter: Adapter, data: Sequence[Datum], *, backward: bool) -> Charge:
        """Charges a pass with a loss for each datum."""
        lengths = _lengths(base, data)
        size = base.pass_bytes(lengths, backward=backward, token_budget=adapter.token_budget) + dense_bytes(data)
        return self._charge_pass(adapter, size, data, backward=backward)

    def _batch_work(
        self, base: BaseModel, adapter: Adapter, request: rq.ForwardBackwardRequest, loss: GraphLoss | PythonLoss
    ) -> Charge:
        """Charges a pass with a loss of the whole batch, without what the loss itself computes."""
        backward = not request.forward_only
        lengths = _lengths(base, request.data)
        budget = adapter.token_budget
        size = batch_pass_bytes(base, lengths, loss.source, backward=backward, token_budget=budget)
        size += dense_bytes(request.data) + 8 * sum(math.prod(each.shape) for each in request.loss_fn_inputs.values())
        return self._charge_pass(adapter, size, request.data, backward=backward)

    def _charge_pass(self, adapter: Adapter, size: int, data: Sequence[Datum], *, backward: bool) -> Charge:
        size += 3 * adapter.weights.nbytes if backward else 0  # the gradient, and its sum with earlier ones
        what = f"{'forward_backward' if backward else 'forward'} of {len(data)} datums"
        return self._memory.charge(what, size, fix="Send fewer or shorter datums at once.")


def _lengths(base: BaseModel, data: Sequence[Datum]) -> list[int]:
    """Returns the lengths of datums; the pass rejects those that are longer than the context."""
    inputs = [datum.model_input for datum in data]
    return [min(each.length, base.max_context_length) if each.is_text else 0 for each in inputs]


def _addition(work: Charge) -> Callable[[int], None]:
    """Returns a function that charges this much in addition to the work itself."""
    size = work.size
    return lambda addition: work.resize(max(work.size, size + addition))


def _with_weights(datum: Datum) -> Datum:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None or "weights" in datum.loss_fn_inputs:
        return datum
    return datum.with_inputs(weights=TensorData.wrap(np.zeros(targets.shape, np.float32)))


def _gradient(index: int, given: Datum, retained: Datum) -> TensorData:
    gradient = given.loss_fn_inputs.get("gradient")
    if gradient is None:
        raise InvalidDatum(f"datum {index}: gradient: missing")
    entries, targets = (math.prod(each.shape) for each in (gradient, retained.loss_fn_inputs["target_tokens"]))
    if entries != targets:
        raise InvalidDatum(f"datum {index}: gradient has {entries} entries but target_tokens has {targets}")
    return gradient
