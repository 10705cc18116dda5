"""The fields of requests: which SDK sent them first, and which are required."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.helpers.imitations.behavior import Behavior

# By endpoint, and for objects within requests by `endpoint.field`. `!` marks required fields, `@` the SDK version that
# sent a field first, if it is later than the oldest server that is imitated. A required `user_metadata` may be null.
_FIELDS = {
    "client/config": "sdk_version",
    "create_session": "tags user_metadata sdk_version project_id type display_name@0.26",
    "session_heartbeat": "session_id! type",
    "create_model": ("session_id! model_seq_id base_model! user_metadata lora_config type optimizer_config@0.30"),
    "create_model.lora_config": "rank! seed train_unembed train_mlp train_attn",
    "get_info": "model_id! type",
    "unload_model": "model_id! type",
    "weights_info": "tinker_path!",
    "forward": "forward_input! model_id! seq_id",
    "forward.forward_input": "data! loss_fn! loss_fn_config",
    "forward_backward": "forward_backward_input! model_id! seq_id",
    "forward_backward.forward_backward_input": "data! loss_fn! loss_fn_config",
    "optim_step": "model_id! seq_id adam_params type optimizer_params@0.30",
    "optim_step.adam_params": "learning_rate beta1 beta2 eps weight_decay grad_clip_norm",
    "save_weights": "model_id! path seq_id ttl_seconds user_metadata type overwrite@0.20",
    "load_weights": (
        "model_id! seq_id path! optimizer type weights_access_token@0.18 session_id@0.24 model_seq_id@0.24 "
        "base_model@0.24 user_metadata@0.24 optimizer_config@0.30"
    ),
    "save_weights_for_sampler": "model_id! path seq_id sampling_session_seq_id ttl_seconds user_metadata type",
    "create_sampling_session": "session_id! sampling_session_seq_id! base_model model_path type",
    "asample": (
        "sampling_session_id seq_id base_model model_path num_samples prompt! sampling_params! prompt_logprobs "
        "topk_prompt_logprobs type record_stability_info@0.26 topk_sample_logprobs@0.29 target_prompt_logprobs@0.30 "
        "prompt_alt_tokens_k@0.31 prompt_logprobs_last_n@0.33"
    ),
    "asample.sampling_params": "max_tokens seed stop temperature top_k top_p",
    "retrieve_future": "request_id! allow_metadata_only",
}


def faults(behavior: Behavior, endpoint: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what is wrong with the fields of a request, in the form of FastAPI's 422 responses."""
    return list(_faults(behavior, endpoint, body, ("body",)))


def _faults(
    behavior: Behavior, endpoint: str, body: Mapping[str, Any], where: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    if endpoint not in _FIELDS:
        return
    known: dict[str, tuple[int, ...]] = {}
    required = set(behavior.required.get(endpoint, "").split())
    for entry in _FIELDS[endpoint].split():
        name, _, version = entry.rstrip("!").partition("@")
        known[name] = tuple(map(int, (version or "0.0").split(".")))
        if entry.endswith("!"):
            required.add(name)
    for name in known:
        if name in required and body.get(name) is None and not (name == "user_metadata" and name in body):
            yield {"type": "missing", "loc": [*where, name], "msg": "Field required", "input": dict(body)}
    for name, value in body.items():
        newest = behavior.newest_fields
        if newest is not None and known.get(name, (99,)) > newest:
            message = "Extra inputs are not permitted"
            yield {"type": "extra_forbidden", "loc": [*where, name], "msg": message, "input": value}
        elif isinstance(value, dict):
            yield from _faults(behavior, f"{endpoint}.{name}", value, (*where, name))
