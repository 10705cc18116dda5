"""The numbered jobs of a model: passes, optimizer steps, saving and loading."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput, MemoryLimitExceeded
from tinker_lightning.server.core.checkpoint_store import CheckpointStore, CheckpointSummary, TinkerPath
from tinker_lightning.server.core.jobs import Job
from tinker_lightning.server.core.loss_registry import CUSTOM, LossRegistry
from tinker_lightning.server.core.registry import Model, Registry, Sampler
from tinker_lightning.server.core.retained import RetainedForward, RetainedForwards
from tinker_lightning.server.core.sizes import data_bytes, dense_bytes, pass_result_bytes
from tinker_lightning.server.core.sizes import result_bytes as measure_result
from tinker_lightning.server.engine.adapter import Adapter
from tinker_lightning.server.engine.batch_pass import RETURNED_BYTES, batch_pass_bytes, run_batch_pass
from tinker_lightning.server.engine.bound_loss import BoundGraph
from tinker_lightning.server.engine.passes import Activations, run_pass
from tinker_lightning.server.engine.python_loss import PythonLoss
from tinker_lightning.types import AdamParams, ForwardBackwardOutput, LoraConfig, OptimStepResponse, TensorData
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tinker_lightning.lossgraph.graph_loss import GraphLoss
    from tinker_lightning.server.core.memory import Charge, MemoryBudget
    from tinker_lightning.server.core.scheduler import Scheduler
    from tinker_lightning.server.engine.base import BaseModel
    from tinker_lightning.server.engine.catalog import Catalog
    from tinker_lightning.types import Datum


class Training:
    """Turns requests into jobs. Each method returns immediately; the job provides the result."""

    def __init__(
        self,
        registry: Registry,
        catalog: Catalog,
        store: CheckpointStore,
        scheduler: Scheduler,
        losses: LossRegistry,
        retained: RetainedForwards,
        memory: MemoryBudget,
    ) -> None:
        self._registry = registry
        self._losses = losses
        self._catalog = catalog
        self._store = store
        self._scheduler = scheduler
        self._retained = retained
        self._memory = memory

    def create_model(self, request: rq.CreateModelRequest) -> Job:
        """Creates an adapter on a base model."""
        if request.model_seq_id < 0:
            raise InvalidInput(f"model_seq_id must be at least 0, got {request.model_seq_id}")
        optimizer = (request.optimizer_config or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise InvalidInput(f"optimizer_config: only adamw is supported, not {optimizer!r}")
        config = request.lora_config or LoraConfig()
        session = self._registry.session(request.session_id, must_be_open=True)
        self._catalog.check(request.base_model)
        model_id = f"{session.session_id}:train:{request.model_seq_id}"

        def run() -> rs.CreateModelResponse:
            base = self._catalog.get(request.base_model)
            # The weights, their gradient and two moments of the optimizer.
            size = 4 * base.lora.weights_bytes(config)
            fix = "Use a smaller rank, or unload models that are no longer needed."
            charge = self._memory.charge(f"an adapter of rank {config.rank}", size, "weights", fix=fix)
            adapter = Adapter(base.lora.new_weights(config), base.token_budget)
            model.charge, model.base, model.adapter = charge, base, adapter
            return rs.CreateModelResponse(model_id)

        creation = Job(
            f"{model_id}:create",
            "create_model",
            run,
            owner=session.session_id,
            model=model_id,
            base=request.base_model,
            rank=config.rank,
        )
        model = Model(model_id, session.session_id, request.base_model, config, request.user_metadata, creation)
        return self._scheduler.submit(self._registry.add_model(model).creation)

    def unload_model(self, request: rq.UnloadModelRequest) -> Job:
        """Frees the memory of a model after the jobs that were submitted before."""
        model = self._registry.model(request.model_id)

        def run() -> rs.UnloadModelResponse:
            model.unload()
            self._retained.drop(model.model_id)
            return rs.UnloadModelResponse(model.model_id)

        job = Job(f"{model.model_id}:unload", "unload_model", run, owner=model.session_id, model=model.model_id)
        return self._scheduler.submit(job, frees_memory=True)

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
        return self._submit(
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

        return self._submit(
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
        known = self._scheduler.known(f"{request.model_id}:{request.seq_id}")
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
                # Made dense when they are charged.
                weights = [TensorData.of_array(-gradient.to_numpy()) for gradient in gradients]
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
        return self._submit(request, "forward_backward", run, request_bytes=size, datums=len(kept), tokens=tokens)

    def optim_step(self, request: rq.OptimStepRequest) -> Job:
        """Takes an AdamW step with the accumulated gradient."""
        if request.optimizer_params is not None:
            kind = request.optimizer_params.get("type")
            raise InvalidInput(f"optimizer_params: only adamw is supported, not {kind!r}; send adam_params")
        params = request.adam_params or AdamParams()

        def run(_: BaseModel, adapter: Adapter) -> OptimStepResponse:
            self._retained.drop(request.model_id)
            # A copy of the weights and the moments, in case the step has to be undone, and the clipped gradient.
            with self._memory.charge("optim_step", 5 * adapter.weights.nbytes):
                return OptimStepResponse(adapter.step(params))

        return self._submit(request, "optim_step", run)

    def save_weights(self, request: rq.SaveWeightsRequest) -> Job:
        """Saves weights and optimizer state under a name."""
        name = f"checkpoint-{request.seq_id:06d}" if request.path is None else request.path
        path = TinkerPath(request.model_id, "weights", name)

        def run(base: BaseModel, adapter: Adapter) -> rs.SaveWeightsResponse:
            self._save(path, base, adapter, request, adapter.training_state())
            return rs.SaveWeightsResponse(str(path))

        return self._submit(request, "save_weights", run)

    def load_weights(self, request: rq.LoadWeightsRequest) -> Job:
        """Loads saved weights into a model, optionally with the optimizer state."""
        path = TinkerPath.parse(request.path)

        def run(base: BaseModel, adapter: Adapter) -> rs.LoadWeightsResponse:
            # The weights and the state of the optimizer, as they are loaded.
            with self._memory.charge("load_weights", 4 * adapter.weights.nbytes):
                saved = self._store.load(path, training_state=request.optimizer)
            if saved.base_model != base.name:
                raise InvalidInput(f"path: {path} was trained on {saved.base_model}, but this model is {base.name}")
            loaded, own = saved.weights.config, adapter.weights.config
            for name in ("rank", "train_unembed", "train_mlp", "train_attn"):
                if getattr(loaded, name) != getattr(own, name):
                    raise InvalidInput(
                        f"path: {path} has {name}={getattr(loaded, name)}, but this model has {getattr(own, name)}. "
                        "Create a model from the state instead."
                    )
            base.lora.check(saved.weights)
            self._retained.drop(request.model_id)
            adapter.load(saved.weights, saved.training_state)
            if saved.training_state is not None and saved.token_budget is not None:
                adapter.token_budget = saved.token_budget  # so that a resumed run rounds as it did before
            return rs.LoadWeightsResponse(str(path), request.model_id)

        return self._submit(request, "load_weights", run)

    def save_weights_for_sampler(self, request: rq.SaveWeightsForSamplerRequest) -> Job:
        """Saves weights for sampling: under a name on disk, or without a name in memory as a new sampler."""
        model = self._registry.model(request.model_id)
        # A retry has the same seq_id but a new sampling_session_seq_id, so the sampler is named after the former.
        sampler_id = f"{model.model_id}:sample:{request.seq_id}"
        path = None if request.path is None else TinkerPath(model.model_id, "sampler_weights", request.path)

        def run(base: BaseModel, adapter: Adapter) -> rs.SaveWeightsForSamplerResponse:
            if path is not None:
                self._save(path, base, adapter, request, None)
                return rs.SaveWeightsForSamplerResponse(path=str(path))
            sampler = Sampler(sampler_id, model.base_model, adapter.weights.copy())
            self._registry.add_sampler(model.session_id, sampler)
            return rs.SaveWeightsForSamplerResponse(sampling_session_id=sampler_id)

        return self._submit(request, "save_weights_for_sampler", run)

    def save_weights_external(self, request: rq.SaveWeightsExternalRequest) -> Job:
        """Saves weights for download under a name."""
        if request.age_encryption_recipients:
            raise InvalidInput("age_encryption_recipients is not supported, because weights are not encrypted; omit it")
        path = TinkerPath(request.model_id, "external_weights", request.path)

        def run(base: BaseModel, adapter: Adapter) -> rs.SaveWeightsExternalResponse:
            saved = self._save(path, base, adapter, request, None)
            return rs.SaveWeightsExternalResponse(str(path), saved.size_bytes)

        return self._submit(request, "save_weights_external", run)

    def skip_number(self, model_id: str, number: int) -> None:
        """Marks the number of a rejected request as skipped, because the client continues with the next one."""
        if self._registry.has_model(model_id):
            self._scheduler.free(model_id, number)

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

    def _submit(
        self,
        request: Any,
        kind: str,
        run: Callable[[BaseModel, Adapter], Any],
        *,
        request_bytes: int = 0,
        result_bytes: int = 0,
        **labels: object,
    ) -> Job:
        model = self._registry.model(request.model_id)
        model.last_request_time = datetime.now(UTC)
        job = Job(
            f"{model.model_id}:{request.seq_id}",
            kind,
            lambda: run(*model.ready()),
            owner=model.session_id,
            request_bytes=request_bytes,
            result_bytes=result_bytes,
            measure=measure_result,
            model=model.model_id,
            seq=request.seq_id,
            **labels,
        )
        return self._scheduler.submit(job, line=model.model_id, number=request.seq_id)

    def _save(
        self,
        path: TinkerPath,
        base: BaseModel,
        adapter: Adapter,
        request: rq.SaveWeightsRequest | rq.SaveWeightsForSamplerRequest | rq.SaveWeightsExternalRequest,
        training_state: Mapping[str, Tensor] | None,
    ) -> CheckpointSummary:
        return self._store.save(
            path,
            base_model=base.name,
            weights=adapter.weights,
            peft_config=base.lora.peft_config(adapter.weights.config),
            steps=adapter.steps,
            token_budget=adapter.token_budget,
            training_state=training_state,
            ttl_seconds=request.ttl_seconds,
            overwrite=isinstance(request, rq.SaveWeightsRequest) and request.overwrite,
            user_metadata=None if isinstance(request, rq.SaveWeightsExternalRequest) else request.user_metadata,
        )


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
    return datum.with_inputs(weights=TensorData.of_array(np.zeros(targets.shape, np.float32)))


def _gradient(index: int, given: Datum, retained: Datum) -> TensorData:
    gradient = given.loss_fn_inputs.get("gradient")
    if gradient is None:
        raise InvalidDatum(f"datum {index}: gradient: missing")
    entries, targets = (math.prod(each.shape) for each in (gradient, retained.loss_fn_inputs["target_tokens"]))
    if entries != targets:
        raise InvalidDatum(f"datum {index}: gradient has {entries} entries but target_tokens has {targets}")
    return gradient
