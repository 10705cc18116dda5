"""Names and arguments of our client against those of the official SDK: each difference has a reason."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import tinker

import tinker_lightning
import tinker_lightning.client as ours
from tests.helpers.sdk_signatures import CLIENTS, FOLDER, RESULTS, arguments, signatures
from tinker_lightning import errors, types
from tinker_lightning.types import responses

RECORDED = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
# Where ours has another name.
RENAMED = {
    "APIFuture": "TinkerFuture",
    "CheckpointsListResponse": "CheckpointsList",
    "GetServerCapabilitiesResponse": "ServerCapabilities",
    "ListSessionsResponse": "SessionsList",
    "TrainingRunsResponse": "TrainingRunsList",
}
ERRORS = "see errors.py; `except tinker.TinkerError` does not see the errors of another client"
SDK_TYPES = "types of the SDK, which our client accepts as they are"
HOSTED = "accounts, projects, sharing and billing of hosted Tinker"
CONSOLE = "pages of hosted Tinker"
TELEMETRY = "this client reports nothing about itself"
TOP_K = "pairs of padded arrays; the lists without `_np` have the same content"
# What the SDK has and ours does not, by reason.
LEFT_OUT: dict[str, dict[str, str]] = {
    "tinker": {
        ERRORS: (
            "APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError AuthenticationError "
            "BadRequestError BillingError ConflictError ExperimentalWarning InternalServerError NotFoundError "
            "PermissionDeniedError RateLimitError RequestFailedError TinkerError UnprocessableEntityError"
        ),
        SDK_TYPES: (
            "AdamOptimizerConfig CheckpointType DimuonOptimizerConfig ModelID OptimParams OptimStepRequest "
            "ParsedCheckpointTinkerPath PerDatumLossFn PromptProvenanceSpan SampleRequest SampledProvenanceSpan "
            "StopReason TensorDtype"
        ),
        HOSTED: "AdminClient auth",
        "clients are their own futures": "BackcompatSamplingClientFuture BackcompatTrainingClientFuture",
        "`RetryPolicy` and the timeouts of `result`": "RequestOptions Timeout",
    },
    "ServiceClient": {
        HOSTED: "copy_weights",
        CONSOLE: "get_console_url",
        TELEMETRY: "get_telemetry",
        "private": "holder",
    },
    "TrainingClient": {CONSOLE: "get_console_url", TELEMETRY: "get_telemetry"},
    "SamplingClient": {TELEMETRY: "get_telemetry", "states of queues are logged": "on_queue_state_change"},
    "RestClient": {
        HOSTED: (
            "assign_session_project assign_session_project_async copy_weights copy_weights_async export_session_trace "
            "export_session_trace_async get_audit_log get_audit_log_async get_billing_usage get_billing_usage_async "
            "get_current_checkpoint_storage_usage get_current_checkpoint_storage_usage_async "
            "publish_checkpoint_from_tinker_path publish_checkpoint_from_tinker_path_async search_sessions "
            "search_sessions_async unpublish_checkpoint_from_tinker_path unpublish_checkpoint_from_tinker_path_async "
            "whoami"
        ),
        TELEMETRY: "get_telemetry",
    },
    "SampleResponse": {TOP_K: "topk_prompt_logprobs_np"},
    "SampledSequence": {TOP_K: "topk_logprobs_np"},
    "SaveWeightsForSamplerResponse": {CONSOLE: "get_console_url get_playground_url"},
    "SaveWeightsResponse": {CONSOLE: "get_console_url"},
    "TensorData": {"`Datum.from_tokens` and the codecs make sparse targets": "from_torch_sparse"},
}
# Arguments that differ, by method: those of the SDK that ours does not take.
LEFT_OUT_ARGUMENTS = {
    "ServiceClient.__init__": {"**kwargs"},  # the SDK ignores them with a warning; ours raises a TypeError
    "RestClient.__init__": {"holder", "_holder="},  # private; ours has its own channel there
}


def our_class(kind: str) -> Any:
    """Our class for one of the SDK."""
    name = RENAMED.get(kind, kind)
    return next(getattr(each, name) for each in (ours, responses, types) if hasattr(each, name))


def has(kind: str, name: str) -> bool:
    """Whether ours has a public name of a class, or of the package."""
    if kind == "tinker":
        places: Any = tinker_lightning, ours, types, responses, errors
        return any(hasattr(each, RENAMED.get(name, name)) for each in places)
    return hasattr(our_class(kind), name) or name in getattr(our_class(kind), "__dataclass_fields__", ())


def test_the_installed_release_is_the_recorded_one() -> None:  # R5.17
    """Otherwise, `python -m tests.helpers.sdk_signatures` writes what the new release has."""
    assert RECORDED[tinker.__version__] == signatures()


@pytest.mark.parametrize("release", RECORDED)
@pytest.mark.parametrize("kind", ["tinker", *CLIENTS, *RESULTS])
def test_every_public_name_of_the_sdk_exists(release: str, kind: str) -> None:  # R5.4, R5.17
    left_out = {name for names in LEFT_OUT.get(kind, {}).values() for name in names.split()}
    assert {name for name in RECORDED[release][kind] if not has(kind, name)} == left_out & set(RECORDED[release][kind])


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_left_out_is_of_a_release(kind: str) -> None:
    left_out = {name for names in LEFT_OUT[kind].values() for name in names.split()}
    assert left_out <= {name for recorded in RECORDED.values() for name in recorded[kind]}


@pytest.mark.parametrize("release", RECORDED)
@pytest.mark.parametrize("kind", CLIENTS)
def test_arguments_have_the_names_and_order_of_the_sdk(release: str, kind: str) -> None:  # R5.4, R5.17
    for name, expected in RECORDED[release][kind].items():
        if expected is None or not has(kind, name):
            continue
        method = getattr(our_class(kind), name)
        theirs = [each for each in expected if each not in LEFT_OUT_ARGUMENTS.get(f"{kind}.{name}", ())]
        mine = arguments(method)
        accepted = {each.strip("*=") for each in mine}
        assert {each.strip("*=") for each in theirs} <= accepted, name
        positional = [each.strip("=") for each in theirs if not each.startswith("*")]
        assert [each.strip("=") for each in mine if not each.startswith("*")][: len(positional)] == positional, name
        # Every argument that the SDK allows to leave out may be left out, and so may those that only ours has.
        required = {each for each in theirs if not each.endswith("=")}
        assert {each for each in mine if not each.endswith("=")} <= required, name
        # In 0.38, wrappers around coroutine functions are none for `inspect`.
        assert inspect.iscoroutinefunction(method) == (name.endswith("_async") or name == "coroutine"), name
