"""The ways in which Tinker-API servers differ, as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Normalization: TypeAlias = Literal["sum", "weighted_sum", "length", "mean", "masked_mean", "sequence_mean"]


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """What a kind of server does. The defaults are those of a lenient server that speaks JSON.

    Where a server crashes, the answer is a plain-text 500, and the connection is closed.

    Args:
        name: The name of the kind.
        title: The title in `openapi.json`.
        version: The version in `openapi.json`.
        described: Paths in `openapi.json` that do not belong to the Tinker API.
        lacks: Endpoints that answer 404.
        client_config: The answer of `client/config`.
        encoding: The only content type of passes.
        wrong_encoding: The status of a pass in another encoding; 500 is a crash.
        newest_fields: The SDK version whose request fields are the newest ones known; later and unknown fields are
            rejected with 422. None ignores unknown fields.
        required: Fields that this server needs, by endpoint, in addition to those that all servers need.
        api_key: The key that clients must send as `X-API-Key`; None allows all clients.
        statuses: The statuses of successful answers that are not 200, by endpoint.
        model_id, session_id, sampler_id, future_id: Templates of ids, with `{hex}`, `{uuid}` and `{number}`.
        receipt: Further fields of the answer to a submission; a `{request_id}` in a value is filled in.
        receipt_names_model: Whether the answer to a submission names the model.
        echoes_model: Whether the answer to `create_model` repeats the request.
        rejects_colons: Whether ids of samplers with a colon are rejected with 400.

        order: Whether requests of a model run in order of arrival, in order of their numbers (waiting for missing
            ones), or `strict`ly: a number other than the next one fails with 409, where a number may be skipped only
            after its operation has failed, and a rejected request does not count.
        spends_rejected: Whether the number of a rejected request cannot be used again.
        doubles_repeats: Whether a repeated submission runs again; otherwise it gets the answer of the first one.
        delay: How many seconds an operation takes at least.
        hold: How many seconds a poll waits for a result that is not ready.
        pending_status: The status of a poll whose result is not ready.
        failure: The form of a failed operation: 400 or 422 with `detail`, 200 with `error`, or 400 with
            `error_message`.
        knows_futures: Whether the poll of an unknown result is 404; otherwise it is pending.
        unknown_id: The status of `session_heartbeat`, `get_info`, `weights_info` and deletion for unknown ids; 500 is
            a crash, also of the listing of an unknown model, which is otherwise empty.
        late_errors: Whether unknown models and samplers are reported by the result, and not at submission.
        needs_created_model: Whether a pass that is sent before the model exists fails, instead of waiting for it.

        losses: The names of the losses.
        unknown_loss: Whether other names are rejected with 422 or computed as `cross_entropy`.
        rejects_loss_config: Whether unknown settings of a loss are rejected with 422.
        clip: The default thresholds of ppo and cispo.
        cross_entropy: How `cross_entropy` is normalized: a plain sum; for each sequence divided by its length; a mean
            over the tokens of the call; a mean over the tokens of the call whose weight is not 0, where all weights
            count as 1; or for each sequence divided by `max(sum of its weights, 1e-9)`.
        importance_sampling: The same for losses with advantages, where `weights` may be given, too.
        importance_sampling_is_clipped: Whether `importance_sampling` is in fact ppo.
        even_batches: Whether `importance_sampling` fails for an odd number of sequences.
        window_mean: Whether the gradient is divided by the number of sequences since the last step, over all calls.
        metrics: The metrics of a pass: `loss:sum`, `loss:mean` over sequences, or `loss:avg`, the loss itself.
        output_type: The `loss_fn_output_type` of a pass; `{loss_fn}` is filled in.
        elementwise_loss: Whether passes also return the loss of each token.
        lacks_backward_logprobs: Whether `forward_backward` returns no log-probabilities.
        masks_forward: Whether `forward` returns 0.0 for tokens whose weight is 0.
        missing_inputs: Whether the weights, log-probabilities and advantages that a datum lacks are zeros (weights
            are ones), fail as in our trainer (where weights are ones, too), or are all `rejected`.
        out_of_range: Whether a target outside the vocabulary fails or leads to NaN, on which polls crash.

        step_metrics: The names of the metrics of a step, by our names; None for no metrics at all.
        needs_gradient: Whether a step without a gradient fails.
        ignores_grad_clip: Whether `grad_clip_norm` is ignored.
        lr_zero_moves: Whether a learning rate of 0 is taken for the default.
        fixed_adam: Whether all steps use the betas, epsilon and weight decay of the first one.

        needs_lora_config: Whether `create_model` without `lora_config` is rejected with 400.
        ignores_base_model: Whether every name is the name of the only base model.
        seed_ignored: Whether the seed of the adapter is ignored.
        ignores_lora_flags: Whether attention and MLP layers are trained, and the unembedding is not, in any case.
        info: The fields of `get_info` besides `model_id`.
        load_answer: The fields of the result of `load_weights`.
        announces_tokenizer: Whether `get_info` names a tokenizer.

        state_path, sampler_path: Templates of paths, with `{model}` and `{name}`.
        checkpoint_id: The template of ids in listings, with `{kind}` and `{name}`.
        checkpoint_name: The pattern of the names of checkpoints; other names are rejected with 422.
        existing_checkpoint: Whether saving under an existing name is a 409 at submission, overwrites, or does what
            the flag `overwrite` says.
        checks_early: Whether a missing checkpoint is reported at submission, and not by the result.
        weights_info_of_run: Whether `weights_info` answers for missing checkpoints of a model, too.
        saves_optimizer: Whether states contain the optimizer.
        ignores_optimizer_on_load: Whether the optimizer is restored even if that was not requested.
        keeps_deleted: Whether deleted checkpoints stay.
        keeps_gradient_on_load: Whether the accumulated gradient survives loading.

        sampling_moves_weights: Whether sampling from a checkpoint puts its weights into the model in training.
        samples_base: Whether sampling uses the base model without the adapter.
        samples_live: Whether sampling uses the weights in training instead of those that were saved.
        lacks_sample_logprobs: Whether samples come without log-probabilities.
        ignores_sampling_seed: Whether samples do not depend on their seed.
        short_prompt_logprobs: Whether prompt log-probabilities lack the entry of the first token.
        eos_stops: Whether the end-of-text token ends a sequence.
        needs_max_tokens: Whether sampling without `max_tokens` is rejected with 400.
        drops_answers: Which requests to an endpoint, counted from 1, run but lose their answer.
    """

    name: str
    title: str = "FastAPI"
    version: str = "0.1.0"
    described: Collection[str] = ()
    lacks: Collection[str] = ()
    client_config: Mapping[str, Any] = field(default_factory=dict)
    encoding: Literal["json", "protobuf"] = "json"
    wrong_encoding: int = 422
    newest_fields: tuple[int, int] | None = None
    required: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    statuses: Mapping[str, int] = field(default_factory=dict)
    model_id: str = "{uuid}"
    session_id: str = "{uuid}"
    sampler_id: str = "{uuid}"
    future_id: str = "{uuid}"
    receipt: Mapping[str, str] = field(default_factory=dict)
    receipt_names_model: bool = True
    echoes_model: bool = False
    rejects_colons: bool = False

    order: Literal["arrival", "number", "strict"] = "arrival"
    spends_rejected: bool = False
    doubles_repeats: bool = True
    delay: float = 0.0
    hold: float = 30.0
    pending_status: Literal[200, 408] = 200
    failure: Literal["400", "422", "error", "error_message"] = "error"
    knows_futures: bool = True
    unknown_id: Literal[404, 500] = 404
    late_errors: bool = False
    needs_created_model: bool = False

    losses: Collection[str] = ("cross_entropy", "importance_sampling", "ppo")
    unknown_loss: Literal["rejected", "cross_entropy"] = "rejected"
    rejects_loss_config: bool = False
    clip: tuple[float, float] = (0.8, 1.2)
    cross_entropy: Normalization = "sum"
    importance_sampling: Normalization = "sum"
    importance_sampling_is_clipped: bool = False
    even_batches: bool = False
    window_mean: bool = False
    metrics: Collection[str] = ("loss:sum",)
    output_type: str = "ArrayRecord"
    elementwise_loss: bool = False
    lacks_backward_logprobs: bool = False
    masks_forward: bool = False
    missing_inputs: Literal["zeros", "fail", "rejected"] = "fail"
    out_of_range: Literal["fails", "nan"] = "fails"

    step_metrics: Mapping[str, str] | None = None
    needs_gradient: bool = False
    ignores_grad_clip: bool = False
    lr_zero_moves: bool = False
    fixed_adam: bool = False

    needs_lora_config: bool = False
    ignores_base_model: bool = False
    seed_ignored: bool = False
    ignores_lora_flags: bool = False
    info: Collection[str] = ("model_data", "model_name", "is_lora", "lora_rank", "type")
    load_answer: Collection[str] = ("path", "type")
    announces_tokenizer: bool = True

    state_path: str = "tinker://{model}/weights/{name}"
    sampler_path: str = "tinker://{model}/sampler_weights/{name}"
    checkpoint_id: str = "{kind}/{name}"
    checkpoint_name: str = r"[^/]+"
    existing_checkpoint: Literal["conflict", "overwritten", "flag"] = "overwritten"
    checks_early: bool = False
    weights_info_of_run: bool = False
    saves_optimizer: bool = True
    ignores_optimizer_on_load: bool = False
    keeps_deleted: bool = False
    keeps_gradient_on_load: bool = False

    sampling_moves_weights: bool = False
    samples_base: bool = False
    samples_live: bool = False
    lacks_sample_logprobs: bool = False
    ignores_sampling_seed: bool = False
    short_prompt_logprobs: bool = False
    eos_stops: bool = True
    needs_max_tokens: bool = False
    drops_answers: Mapping[str, Collection[int]] = field(default_factory=dict)
