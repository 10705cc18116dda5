"""Sessions, models, passes and optimizer steps of an imitated server, which may normalize losses in its own way."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.helpers.imitations.state import Failure, Model, Refusal
from tinker_lightning.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, TensorData
from tinker_lightning.types import requests as rq
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.helpers.imitations.behavior import Normalization
    from tests.helpers.imitations.state import State
    from tests.helpers.imitations.submissions import Submissions

Array = npt.NDArray[np.float64]


class Models:
    """Creates models and trains them."""

    def __init__(self, state: State, submissions: Submissions) -> None:
        self._state = state
        self._submissions = submissions
        self._behavior = state.behavior
        self._trainer = state.trainer

    def create_session(self, _: dict[str, Any]) -> dict[str, Any]:
        """Opens a session."""
        session_id = self._state.new_id(self._behavior.session_id)
        self._state.sessions.add(session_id)
        return {"type": "create_session", "session_id": session_id}

    def session_heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Confirms that a session exists."""
        self._state.check_session(body, self._behavior.unknown_id)
        return {"type": "session_heartbeat"}

    def create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the creation of a model."""
        b = self._behavior
        self._state.check_session(body)
        if not b.ignores_base_model and body["base_model"] not in self._trainer.catalog.names:
            raise Refusal(404, f"Failed to create model: Unknown model: {body['base_model']}")
        if b.needs_lora_config and not body.get("lora_config"):
            raise Refusal(400, "Missing LoRA config")
        lora = wire_json.parse(LoraConfig, wire_json.dumps(body.get("lora_config") or {}))
        if b.seed_ignored:
            lora = replace(lora, seed=secrets.randbits(31))  # without a seed, ours would be the same each time
        if b.ignores_lora_flags:
            lora = replace(lora, train_unembed=False, train_mlp=True, train_attn=True)
        model = Model(self._state.new_id(b.model_id), body["base_model"], lora)
        base = self._state.base if b.ignores_base_model else body["base_model"]

        def run() -> dict[str, Any]:
            number = next(self._state.count)
            request = rq.CreateModelRequest(self._state.session, number, base, lora)
            model.inner_id = self._trainer.training.create_model(request).future.result().model_id
            return {"model_id": model.model_id, "type": "create_model"}

        self._state.models[model.model_id] = model
        key = ("create_model", body["session_id"], body.get("model_seq_id"))
        receipt = self._submissions.submit("create_model", key, run, model_id=model.model_id)
        if b.echoes_model:
            echo = {"base_model": body["base_model"], "lora_config": body.get("lora_config"), "status": "created"}
            return {"request_id": receipt["request_id"], "model_id": model.model_id, **echo}
        return receipt

    def get_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """Describes a model."""
        model = self._state.model(body, self._behavior.unknown_id)
        data: dict[str, Any] = {"model_name": model.base_model}
        if self._behavior.announces_tokenizer:
            data["tokenizer_id"] = self._trainer.catalog.get(self._state.base).tokenizer_id
        if self._behavior.echoes_model:
            data |= {"base_model": model.base_model, "lora_config": {"rank": model.lora.rank, "seed": None}}
        info = {
            "model_data": data,
            "model_name": model.base_model,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "status": "created",
            "type": "get_info",
        }
        return {"model_id": model.model_id, **{name: info[name] for name in self._behavior.info}}

    def unload_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the removal of a model."""
        model = self._state.model(body)

        def run() -> dict[str, Any]:
            self._trainer.training.unload_model(rq.UnloadModelRequest(self._state.inner(model))).future.result()
            del self._state.models[model.model_id]
            return {"model_id": model.model_id, "type": "unload_model"}

        return self._submissions.submit("unload_model", None, run, model_id=model.model_id)

    def run_pass(self, request: rq.ForwardBackwardRequest, number: int | None) -> dict[str, Any]:
        """Submits a pass; `number` is the one that the client sent, if any."""
        b = self._behavior
        if request.loss_fn not in b.losses and b.unknown_loss == "cross_entropy":
            request = replace(request, loss_fn="cross_entropy")
        model = self._state.model({"model_id": request.model_id})
        is_late = b.needs_created_model and not model.inner_id

        def run() -> ForwardBackwardOutput | Failure:
            if is_late:
                return Failure(f"Model {model.model_id} not loaded")
            if b.even_batches and request.loss_fn == "importance_sampling" and len(request.data) % 2:
                return Failure(f"Batch size {len(request.data)} must be divisible by 2")
            vocabulary = self._trainer.catalog.get(self._state.base).vocab_size
            if b.out_of_range == "nan" and not _is_in_range(request, vocabulary):
                # The server also adds the gradient of the other tokens, which is left out here.
                model.sequences += 0 if request.forward_only else len(request.data)
                return Failure("NaN", 500)
            return self._pass(model, request)

        kind = "forward" if request.forward_only else "forward_backward"
        return self._submissions.submit_numbered(kind, model, number, run)

    def _pass(self, model: Model, request: rq.ForwardBackwardRequest) -> ForwardBackwardOutput:
        b, is_entropy = self._behavior, request.loss_fn == "cross_entropy"
        if b.missing_inputs == "zeros" and not is_entropy:
            request = replace(request, data=[_filled(datum) for datum in request.data])
        for name in ("weights",) if is_entropy else ("logprobs", "advantages"):
            if b.missing_inputs == "rejected" and any(name not in datum.loss_fn_inputs for datum in request.data):
                raise Refusal(400, f"Missing '{name}' in loss_fn_inputs.")
        data = normalize(request.data, request.loss_fn, b.cross_entropy if is_entropy else b.importance_sampling)
        loss_fn, config = request.loss_fn, dict(request.loss_fn_config)
        if loss_fn == "importance_sampling" and b.importance_sampling_is_clipped:
            loss_fn, config = "ppo", {}
        if loss_fn in ("ppo", "cispo"):
            config = {"clip_low_threshold": b.clip[0], "clip_high_threshold": b.clip[1], **config}
        inner = replace(
            request,
            model_id=self._state.inner(model),
            seq_id=next(model.numbers),
            data=data,
            loss_fn=loss_fn,
            loss_fn_config=config,
        )
        output: ForwardBackwardOutput = self._trainer.passes.forward_backward(inner).future.result()
        if not request.forward_only:
            model.sequences += len(data)
            model.has_gradient = True
        outputs = []
        for datum, tensors in zip(request.data, output.loss_fn_outputs, strict=True):
            logprobs = tensors["logprobs"].to_numpy()
            if b.masks_forward and request.forward_only:
                tensors = {"logprobs": TensorData(logprobs * (weights_of(datum) != 0), "float32")}
            if b.lacks_backward_logprobs and not request.forward_only:
                tensors = {}
            if b.elementwise_loss:
                tensors = {**tensors, "elementwise_loss": elementwise_loss(datum, request.loss_fn, logprobs)}
            outputs.append(tensors)
        kind, total = b.output_type.format(loss_fn=request.loss_fn), output.metrics["loss:sum"]
        losses = {"loss:sum": total, "loss:avg": total, "loss:mean": total / len(data)}
        return ForwardBackwardOutput(outputs, {name: losses[name] for name in b.metrics}, kind)

    def optim_step(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits an optimizer step."""
        b, model = self._behavior, self._state.model(body)
        params = wire_json.parse(AdamParams, wire_json.dumps(body.get("adam_params") or {}))
        if b.ignores_grad_clip:
            params = replace(params, grad_clip_norm=0.0)
        if b.lr_zero_moves and params.learning_rate == 0:
            params = replace(params, learning_rate=AdamParams().learning_rate)

        def run() -> dict[str, Any] | Failure:
            if b.needs_gradient and not model.has_gradient:
                return Failure(f"No accumulated gradients for adapter={model.model_id}; call forward_backward first")
            model.adam = model.adam or params
            first, adapter = model.adam, self._state.adapter(model)
            used = replace(first, learning_rate=params.learning_rate, grad_clip_norm=params.grad_clip_norm)
            if b.window_mean:
                adapter.gradient = {name: g / max(model.sequences, 1) for name, g in adapter.gradient.items()}
            step = rq.OptimStepRequest(self._state.inner(model), next(model.numbers), used if b.fixed_adam else params)
            metrics = self._trainer.training.optim_step(step).future.result().metrics
            model.sequences, model.has_gradient = 0, False
            if b.step_metrics is None:
                return {"metrics": None}
            return {"metrics": {name: metrics[ours] for ours, name in b.step_metrics.items()}}

        return self._submissions.submit_numbered("optim_step", model, body.get("seq_id"), run)


def _filled(datum: Datum) -> Datum:
    zeros = np.zeros(datum.loss_fn_inputs["target_tokens"].shape)
    return Datum(datum.model_input, {"advantages": zeros, "logprobs": zeros, **datum.loss_fn_inputs})


def _is_in_range(request: rq.ForwardBackwardRequest, vocabulary: int) -> bool:
    targets = (datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in request.data)
    return all((each < vocabulary).all() for each in targets)


def weights_of(datum: Datum) -> Array:
    """Returns the weights of a datum, by default ones."""
    inputs = datum.loss_fn_inputs
    if "weights" in inputs:
        return inputs["weights"].to_numpy().astype(np.float64)
    return np.ones(inputs["target_tokens"].shape)


def normalize(data: Sequence[Datum], loss_fn: str, rule: Normalization) -> list[Datum]:
    """Returns datums for which the plain sum of the loss is the normalized loss of the given ones."""
    weights = [weights_of(datum) for datum in data]
    if loss_fn == "cross_entropy":
        return [
            _with(datum, "weights", factor) for datum, factor in zip(data, _weight_factors(weights, rule), strict=True)
        ]
    factors = _advantage_factors(weights, rule)
    return [
        _with(datum, "advantages", datum.loss_fn_inputs["advantages"].to_numpy() * factor)
        if "advantages" in datum.loss_fn_inputs
        else datum
        for datum, factor in zip(data, factors, strict=True)
    ]


def elementwise_loss(datum: Datum, loss_fn: str, logprobs: Array) -> TensorData:
    """Returns the loss of each token before it is normalized; ratios are not clipped."""
    inputs = datum.loss_fn_inputs
    values = logprobs
    if loss_fn != "cross_entropy":
        values = np.exp(logprobs - inputs["logprobs"].to_numpy()) * inputs["advantages"].to_numpy()
    return TensorData(-values * weights_of(datum), "float32")


def _weight_factors(weights: Sequence[Array], rule: Normalization) -> list[Array]:
    if rule == "length":
        return [each / each.size for each in weights]
    if rule == "mean":
        return [each / sum(part.size for part in weights) for each in weights]
    if rule == "masked_mean":
        count = sum(np.count_nonzero(each) for each in weights)
        return [(each != 0) / max(count, 1) for each in weights]
    if rule == "sequence_mean":
        return [each / max(each.sum(), 1e-9) for each in weights]
    return list(weights)


def _advantage_factors(weights: Sequence[Array], rule: Normalization) -> list[Array]:
    if rule == "masked_mean":
        return [(each != 0) / max(np.count_nonzero(each), 1) / len(weights) for each in weights]
    if rule in ("sum", "length", "mean"):  # which do not depend on weights
        return _weight_factors([np.ones_like(each) for each in weights], rule)
    return _weight_factors(weights, rule)


def _with(datum: Datum, name: str, values: npt.NDArray[Any]) -> Datum:
    return Datum(datum.model_input, {**datum.loss_fn_inputs, name: TensorData(values, "float32")})
