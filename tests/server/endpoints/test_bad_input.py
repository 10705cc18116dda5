"""Bad input is refused with what is wrong and where; the server lives and the model is as it was, bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning.types import Datum
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helpers.api import Api

PROTOBUF = "application/x-protobuf"


@pytest.fixture(scope="module")
def trained(shared_api: Api) -> Iterator[str]:
    """A model in the middle of its training, which must be able to go on after all the tests."""
    api = shared_api
    model = api.model()
    api.run("forward_backward", api.train(model, 1))
    api.run("optim_step", api.step(model, 2))
    api.run("forward_backward", api.train(model, 3))
    before = api.state(model)
    yield model
    assert "metrics" in api.run("optim_step", api.step(model, next_number(api, model)))
    assert api.state(model) != before


@pytest.fixture
def model(shared_api: Api, trained: str) -> Iterator[str]:
    """The same model, which must come out of the test as it was."""
    before = shared_api.state(trained)
    yield trained
    assert shared_api.state(trained) == before


@pytest.fixture
def seq(shared_api: Api, trained: str) -> int:
    """The model's next number."""
    return next_number(shared_api, trained)


def next_number(api: Api, model: str) -> int:
    return api.trainer.scheduler._queues[model].last + 1


def refusal(api: Api, path: str, body: Any) -> tuple[int, str]:
    """How a request is refused: at once with a 4xx, or by a failed future (then 200)."""
    response = api.post(path, body)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        assert int(response.headers["content-length"]) > 0
        return response.status_code, str(response.json()["detail"])
    result = api.result(response.json()["request_id"])
    assert result.get("category") == "user", result
    return 200, str(result["error"])


def change(body: Any, path: str, value: Any) -> Any:
    """The body with the entry at a path such as `data.0.weights` replaced, or deleted if the value is `...`."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = body
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return body


DATUM = "forward_backward_input.data.1"
TOKENS = f"{DATUM}.model_input.chunks.0.tokens"
INPUTS = f"{DATUM}.loss_fn_inputs"


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (
            TOKENS,
            [1, 2, 259, 4, 5, 6, 7, 8, 9, 10],
            "datum 1: model_input: the token at [2] is 259, but the vocabulary",
        ),
        (TOKENS, [1, -2, 3, 4, 5, 6, 7, 8, 9, 10], "datum 1: model_input"),
        (TOKENS, [2**40, 2, 3, 4, 5, 6, 7, 8, 9, 10], "datum 1: model_input"),
        (TOKENS, [1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10], "datum 1: model_input"),
        (TOKENS, [], "datum 1: "),
        (TOKENS, "text", "datum 1: model_input.chunks[0].tokens"),
        (TOKENS, [[1]], "datum 1: model_input"),
        (TOKENS, [None] * 10, "datum 1: model_input"),
        (f"{DATUM}.model_input", None, "datum 1: model_input"),
        (f"{DATUM}.model_input.chunks", [], "datum 1: "),
        (f"{DATUM}.model_input.chunks.0", {}, "datum 1: model_input.chunks[0]"),
        (f"{DATUM}.model_input.chunks.0", {"type": "image", "data": "!", "format": "png"}, "datum 1: model_input"),
        (f"{DATUM}.model_input.chunks.0", {"location": "x", "format": "png"}, "datum 1: model_input"),
        (DATUM, 7, "datum 1: must be an object"),
        (INPUTS, [], "datum 1: loss_fn_inputs: must be an object"),
        (f"{INPUTS}.target_tokens", ..., "datum 1: target_tokens: missing"),
        (f"{INPUTS}.target_tokens.data", [300] * 10, "datum 1: target_tokens: the token at [0] is 300"),
        (f"{INPUTS}.target_tokens.data", [1] * 9, "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens.shape", [5], "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens.shape", [-1], "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens.shape", [2**62, 2**62], "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens.shape", "10", "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens.dtype", "float64", "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens", {"data": [0.5] * 10, "dtype": "float32"}, "datum 1: target_tokens"),
        (f"{INPUTS}.target_tokens", {"data": [1] * 9, "dtype": "int64"}, "datum 1: target_tokens has 9 entries"),
        (f"{INPUTS}.weights", {"data": [1.0] * 9, "dtype": "float32"}, "datum 1: weights has 9 entries"),
        (f"{INPUTS}.weights.data", [1.0] * 9 + [None], "datum 1: weights"),
        (f"{INPUTS}.weights.data", [1.0] * 9 + [1e39], "datum 1: weights"),
        (f"{INPUTS}.weights.data", [1.0] * 9 + ["nan"], "datum 1: weights"),
        (f"{INPUTS}.weights.data", [3e38] * 10, "datum 1: cross_entropy: the loss is inf"),
        (f"{INPUTS}.weights.sparse_crow_indices", [0, 99], "datum 1: weights"),
        (f"{INPUTS}.weights.sparse_col_indices", [0], "datum 1: weights"),
        ("forward_backward_input.data", [], "data: the batch is empty"),
        ("forward_backward_input.data", {}, "data: must be a list"),
        ("forward_backward_input.data", ..., "data: missing"),
        ("forward_backward_input.loss_fn", "nonsense", "loss_fn 'nonsense' is not registered; available losses:"),
        ("forward_backward_input.loss_fn", 1, "loss_fn: must be a string"),
        ("forward_backward_input.loss_fn", "ppo", "datum 0: logprobs: missing; ppo needs target_tokens"),
        ("forward_backward_input.loss_fn_config", {"x": 1}, "loss_fn_config: cross_entropy has no setting 'x'"),
        ("forward_backward_input.loss_fn_config", [1], "loss_fn_config: must be an object"),
        ("forward_backward_input", ..., "forward_backward_input: must be an object"),
        ("model_id", "nobody", "there is no model 'nobody'; call create_model first"),
        ("model_id", "../../etc", "there is no model"),
        ("model_id", 7, "model_id: must be a string"),
        ("model_id", ..., "model_id: missing"),
        ("seq_id", 0, "seq_id must lie in 1.."),
        ("seq_id", -1, "seq_id must lie in 1.."),
        ("seq_id", 2**31, "seq_id must lie in 1.."),
        ("seq_id", 10**30, "seq_id: must be an integer"),
        ("seq_id", "4", "seq_id: must be an integer"),
        ("seq_id", 4.0, "seq_id: must be an integer"),
        ("seq_id", True, "seq_id: must be an integer"),
        ("seq_id", ..., "seq_id: missing"),
    ],
)
def test_a_bad_pass_is_rejected_by_datum_and_field(
    shared_api: Api, model: str, seq: int, where: str, value: Any, said: str
) -> None:
    body = shared_api.train(model, seq)
    body["forward_backward_input"]["data"] *= 2
    body = change(json.loads(json.dumps(body)), where, value)
    assert said in refusal(shared_api, "forward_backward", body)[1]


def test_a_prompt_beyond_the_context_is_rejected(shared_api: Api, model: str, seq: int) -> None:
    said = refusal(shared_api, "forward_backward", shared_api.train(model, seq, "x" * 2050))[1]
    assert "datum 0: model_input: 2049 tokens, but tiny takes at most 2048. Truncate it." in said


def test_nan_and_infinite_weights_are_rejected_in_protobuf_too(shared_api: Api, model: str, seq: int) -> None:
    for i, value in enumerate((float("nan"), float("inf"))):
        data = [Datum.from_tokens([1, 2, 3]), Datum.from_tokens([1, 2, 3], [1.0, 1.0, value])]
        body = protobuf.encode_forward_backward(ForwardBackwardRequest(model, seq + i, data, "cross_entropy"))
        response = shared_api.request("POST", "forward_backward", content=body, headers={"content-type": PROTOBUF})
        result = shared_api.result(response.json()["request_id"])
        assert result["category"] == "user"
        assert "datum 1: weights: the entry at [1] is" in result["error"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate must be"),
        ("optim_step", {"adam_params": {"learning_rate": "x"}}, "adam_params.learning_rate: must be a number"),
        ("optim_step", {"adam_params": {"beta1": 1}}, "adam_params.beta1 must lie in [0, 1)"),
        ("optim_step", {"adam_params": {"learning_rate": 1e300}}, "not finite"),
        ("optim_step", {"adam_params": []}, "adam_params: must be an object"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "only adamw is supported"),
        ("save_weights", {"path": "x", "ttl_seconds": -1}, "ttl_seconds must lie between"),
        ("save_weights", {"path": "x", "ttl_seconds": 10**12}, "ttl_seconds must lie between"),
        ("save_weights", {"path": "x", "ttl_seconds": 1.5}, "ttl_seconds: must be an integer"),
        ("save_weights", {"path": 5}, "path: must be a string"),
        ("save_weights", {"path": "x", "user_metadata": {"a": 1}}, "user_metadata.a: must be a string"),
        ("save_weights_for_sampler", {}, "give a path"),
        ("load_weights", {}, "path: missing"),
        ("load_weights", {"path": "x"}, "tinker://<run>/<kind>/<name>"),
        ("load_weights", {"path": "tinker://run/weights/none"}, "there is no such checkpoint"),
        ("load_weights", {"path": "tinker://run/other/none"}, "unknown checkpoint kind 'other'"),
        ("load_weights", {"path": "tinker://run/weights/x", "optimizer": 1}, "optimizer: must be true or false"),
        ("load_weights", {"path": "tinker://../weights/x"}, "there is no training run '..'"),
        ("load_weights", {"path": "tinker://run/../x"}, "unknown checkpoint kind '..'"),
        ("load_weights", {"path": "tinker://run/weights/.."}, "is not a valid checkpoint name"),
        ("load_weights", {"path": "tinker://run/weights/../../../etc/passwd"}, "tinker://<run>/<kind>/<name>"),
        ("load_weights", {"path": "tinker://a\0b/weights/x"}, "there is no training run"),
    ],
)
def test_bad_operations_are_rejected(shared_api: Api, model: str, seq: int, path: str, body: Any, said: str) -> None:
    assert said in refusal(shared_api, path, {"model_id": model, "seq_id": seq, **body})[1]


NAMES = ["../x", "a/b", "", ".", "..", ".hidden", "-x", "x" * 300, "überall", "a\0b", "a\nb", "a b", "C:\\x", "/etc/x"]


@pytest.mark.parametrize("name", NAMES)
def test_what_could_lead_out_of_the_folder_is_no_name(shared_api: Api, model: str, seq: int, name: str) -> None:
    for path in ("save_weights", "save_weights_for_sampler"):
        status, said = refusal(shared_api, path, {"model_id": model, "seq_id": seq, "path": name})
        assert status == 400
        assert "is not a valid checkpoint name" in said
    assert not shared_api.trainer.store.root.exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_config": {"rank": 0}}, "lora_config.rank must be at least 1, got 0"),
        ({"lora_config": {"rank": 10**9}}, "a rank of 1000000000 makes the adapter larger than the layers it adapts"),
        ({"lora_config": {"rank": "4"}}, "lora_config.rank: must be an integer"),
        ({"lora_config": {"seed": 2**64}}, "lora_config.seed: must be an integer"),
        ({"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, "trains nothing"),
        ({"base_model": "nonsense"}, "base_model 'nonsense' is not served; available models: tiny"),
        ({"base_model": "../tiny"}, "is not served"),
        ({"session_id": "nobody"}, "there is no session 'nobody': it has ended"),
        ({"model_seq_id": -1}, "model_seq_id must be at least 0"),
        ({"optimizer_config": {"type": "dimuon"}}, "only adamw is supported, not 'dimuon'"),
        ({"optimizer_config": {"type": ["x"]}}, "only adamw is supported"),
    ],
)
def test_bad_models_are_rejected(shared_api: Api, body: Any, said: str) -> None:
    whole = {"session_id": shared_api.session(), "model_seq_id": 0, "base_model": "tiny", **body}
    assert said in refusal(shared_api, "create_model", whole)[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"sampling_session_id": "nobody"}, "there is no sampler 'nobody'"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"num_samples": 10**6}, "num_samples: 1000000 exceeds the"),
        ({"prompt": {"chunks": []}}, "prompt: no tokens"),
        ({"prompt": {"chunks": [{"tokens": [259]}]}}, "the token at [0] is 259"),
        ({"prompt": {"chunks": [{"tokens": [1] * 3000}]}}, "3000 tokens, but tiny takes at most 2048"),
        ({"prompt": 5}, "prompt: must be an object with a list of chunks"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens must be at least 1"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature must be at least 0"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p must lie in (0, 1]"),
        ({"sampling_params": {"top_k": 0}}, "sampling_params.top_k must be"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop contains an empty string"),
        ({"sampling_params": {"stop": 5}}, "sampling_params.stop"),
        ({"sampling_params": None}, "sampling_params: missing"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs must be at least 0, got -1"),
        ({"topk_prompt_logprobs": 10**7}, "topk_prompt_logprobs: 20000000 log-probabilities exceed the maximum"),
        ({"topk_sample_logprobs": 10**7}, "topk_sample_logprobs: 40000000 log-probabilities exceed the maximum"),
        ({"prompt_alt_tokens_k": 10**7}, "prompt_alt_tokens_k: 20000000 log-probabilities exceed the maximum"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n limits prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "must lie in 1..2 for this prompt, got 3"),
        ({"target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64"}}, "an int64 tensor of shape [2, K]"),
        (
            {"target_prompt_logprobs": {"data": [-1, 999], "dtype": "int64", "shape": [2, 1]}},
            "target_prompt_logprobs: token 999 is not in 0..258",
        ),
        (
            {"target_prompt_logprobs": {"data": [-1, -1], "dtype": "int64", "shape": [2, 1]}},
            "target_prompt_logprobs: names no token",
        ),
        ({"seq_id": None}, "seq_id: missing"),
    ],
)
def test_bad_samples_are_rejected(shared_api: Api, body: Any, said: str) -> None:
    assert said in refusal(shared_api, "asample", {**shared_api.sample(shared_api.sampler(), 0), **body})[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "give either base_model or model_path"),
        ({"base_model": "tiny", "model_path": "tinker://a/weights/b"}, "give either base_model or model_path"),
        ({"base_model": "nonsense"}, "is not served"),
        ({"model_path": "tinker://a/weights/b"}, "there is no such checkpoint"),
        ({"model_path": "file:///etc/passwd"}, "tinker://<run>/<kind>/<name>"),
        ({"base_model": "tiny", "session_id": "nobody"}, "there is no session"),
    ],
)
def test_bad_samplers_are_rejected(shared_api: Api, body: Any, said: str) -> None:
    whole = {"session_id": shared_api.session(), "sampling_session_seq_id": 0, **body}
    assert said in refusal(shared_api, "create_sampling_session", whole)[1]
