"""The same calls send the same requests as the official SDK 0.38.0, field by field."""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import pytest
import tinker
import torch
from tinker import types as sdk

from tests.helpers.backends import SDK_KEY
from tests.helpers.client_data import TEXTS
from tinker_lightning.client import ServiceClient, TrainingClient, as_backend
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server import create_app
from tinker_lightning.server.endpoints import handshake
from tinker_lightning.testing import RecordedRequest
from tinker_lightning.types import requests as rq

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.helpers.backends import Running
    from tinker_lightning.server import EmbeddedTrainer

# What only the SDK sends: flags that may change during a run, reports about itself, a second look at the configuration
# by the part of it that needs no session, and one poll for all samples of a sampler.
ONLY_THEIRS = {"client/dynamic_config", "telemetry", "retrieve_futures"}
# What only we ask: whether the server has extensions, and which optimizer a state has.
ONLY_OURS = {"get_server_capabilities", "weights_info"}
# Where we say something else on purpose, and why.
DIFFERENT = {
    # The SDK asks for the size of a large result first, to bound its memory.
    "retrieve_future": {"allow_metadata_only"},
    # Absent is the same as false, and servers of another generation do not know it.
    "asample": {"record_stability_info"},
    # No "detail" is the same as one that is null.
    "finish": {"detail"},
}


class Recorder:
    """Middleware that keeps what reaches an app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.requests: list[RecordedRequest] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append(RecordedRequest(scope["method"], scope["path"], headers, body))
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def messages(self) -> dict[str, list[Any]]:
        """The requests in order, by endpoint, with normalized ids."""
        found: dict[str, list[Any]] = defaultdict(list)
        for request in self.requests:
            endpoint = re.sub(r"^/(api|ext)/v1/", "", request.path)
            endpoint = "finish" if endpoint.endswith("/finish") else alike(endpoint)
            endpoint = "forward_backward" if endpoint == "retained_forward" else endpoint
            message = request.message
            message = asdict(message) if is_dataclass(message) and not isinstance(message, type) else message
            for name in DIFFERENT.get(endpoint, ()):
                message.pop(name, None)
            found[endpoint].append(alike(message))
        return found


def alike(value: Any) -> Any:
    """The same without the random part of ids."""
    if isinstance(value, str):
        return re.sub(r"session-[0-9a-f]+", "session", value)
    if isinstance(value, list):
        return [alike(each) for each in value]
    if isinstance(value, dict):
        return {name: alike(each) for name, each in value.items()}
    return value


def datums() -> list[sdk.Datum]:
    """Dense and sparse targets, several chunks, and spans."""
    made = []
    for text in TEXTS:
        ids = list(text.encode())
        inputs: Any = {"target_tokens": ids[1:], "weights": [0.5] * (len(ids) - 1)}
        made.append(sdk.Datum(model_input=sdk.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    ids = list(TEXTS[0].encode())
    two = sdk.ModelInput(chunks=[sdk.EncodedTextChunk(tokens=ids[:3]), sdk.EncodedTextChunk(tokens=ids[3:-1])])
    wide: Any = {
        "target_tokens": torch.tensor([[i, 0, 0, 0] for i in ids[1:]]),
        "weights": torch.ones(len(ids) - 1, 4),
    }
    made.append(sdk.Datum(model_input=two, loss_fn_inputs=wide))
    spans: Any = [sdk.PromptProvenanceSpan(sequence_id="a", offset=0, length=len(ids) - 1)]
    sampled: Any = [sdk.SampledProvenanceSpan(sequence_id="b", offset=3, length=len(ids) - 1)]
    made[0] = made[0].with_provenance(spans, sampled)
    return made


def squares(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = sum(((each**2).sum() for each in logprobs), torch.zeros(()))
    return loss, {"loss": loss.item()}


def created(client: Any) -> Any:
    """The client, of which the SDK returns a future."""
    return client.result() if isinstance(client, tinker.APIFuture) else client


def use_everything(service: Any) -> None:
    """The same calls for either client."""
    data = datums()
    created(service.create_lora_training_client("tiny", 8, train_mlp=False, user_metadata={"a": "b"}))
    model = created(service.create_lora_training_client("tiny", rank=4, seed=3))
    model.forward(data, "cross_entropy").result()
    model.forward_backward(data, "cross_entropy").result()
    policy: Any = {"target_tokens": [3, 4], "logprobs": [-1.0, -2.0], "advantages": [1.0, -0.5]}
    datum = sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2]), loss_fn_inputs=policy)
    model.forward_backward([datum], "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}).result()
    model.forward_backward([datum], "dro", {"beta": 0.05}).result()
    model.forward_backward_custom(data, squares).result()
    model.optim_step(sdk.AdamParams(learning_rate=0.02, weight_decay=0.1, grad_clip_norm=1.0)).result()
    model.get_info()
    saved = model.save_state("one", ttl_seconds=7200, user_metadata={"x": "y"}).result().path
    model.save_state("one", overwrite=True).result()
    model.save_weights_for_sampler("two", ttl_seconds=7200, user_metadata={"x": "y"}).result()
    sampler = created(model.save_weights_and_get_sampling_client())
    created(service.create_sampling_client(base_model="tiny"))
    path = model.save_weights_for_sampler("three").result().path
    other = created(service.create_sampling_client(model_path=path))
    prompt = sdk.ModelInput.from_ints([1, 2, 3])
    settings = sdk.SamplingParams(max_tokens=3, seed=4, temperature=0.5, top_k=7, top_p=0.9, stop=["x", "yz"])
    sampler.sample(prompt, 2, settings, include_prompt_logprobs=True).result()
    other.sample(prompt, 1, sdk.SamplingParams(max_tokens=2, stop=[0])).result()
    other.sample(prompt, num_samples=1, sampling_params=sdk.SamplingParams(max_tokens=2, stop="q")).result()
    other.compute_logprobs(prompt).result()
    other.compute_logprobs(prompt, 2).result()
    targets = sdk.TensorData.from_torch_sparse(torch.tensor([[5, -1, 6]] * (prompt.length - 1)), pad_value=-1)
    other.sample(prompt, 1, sdk.SamplingParams(max_tokens=2), True, 3, 2, targets, 4, 1).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the SDK loads into new models only, and we into all of them
        model.load_state(saved).result()
        model.load_state_with_optimizer(saved).result()
    model.optim_step(sdk.AdamParams()).result()
    assert model.get_tokenizer()
    assert other.get_tokenizer()
    if (closing := service.close("success")) is not None:
        closing.result()  # the SDK says farewell in the background


@pytest.fixture(scope="module", params=["extended", "plain"])
def conversations(
    request: pytest.FixtureRequest, shared: EmbeddedTrainer, running: Running
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """What we and what the SDK said to the same app, which asks versions before 0.38 to load states as that does."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(handshake.CLIENT_CONFIG, "create_model_via_load_weights", True)
        for kind in ("ours", "theirs"):
            recorder = Recorder(create_app(shared, extended=request.param == "extended"))
            with running(recorder) as url:
                use_everything(
                    ServiceClient(base_url=url)
                    if kind == "ours"
                    else tinker.ServiceClient(base_url=url, api_key=SDK_KEY)
                )
            said.append(recorder.messages())
    return said[0], said[1]


def test_the_same_endpoints_are_used(conversations: tuple[dict[str, list[Any]], dict[str, list[Any]]]) -> None:
    ours, theirs = conversations
    fetching = {"retrieve_future", "tokenizer"}  # ours needs not fetch what the submission answers
    assert set(ours) - ONLY_OURS - {"retained_backward"} - fetching == set(theirs) - ONLY_THEIRS - fetching


@pytest.mark.parametrize(
    "endpoint",
    [
        "create_session",
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
        "save_weights_for_sampler",
        "create_sampling_session",
        "asample",
        "get_info",
        "finish",
    ],
)
def test_requests_are_equal(conversations: tuple[dict[str, list[Any]], dict[str, list[Any]]], endpoint: str) -> None:
    ours, theirs = (each[endpoint] for each in conversations)
    if endpoint == "forward_backward" and len(ours) < len(theirs):
        # Of the backward of the custom loss ours sends the gradient only, and of its forward no weights.
        *theirs, forward, _ = theirs
        bare = [
            datum.with_only_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]})
            for datum in forward["data"]
        ]
        theirs.append({**forward, "data": bare})
    if endpoint == "get_info":  # sent at each use, and by the SDK after each creation
        ours, theirs = ours[:1], [each for each in theirs if each == ours[0]]
    assert ours == theirs
    assert ours


def test_the_adapter_sends_what_the_sdk_sends(shared: EmbeddedTrainer, running: Running) -> None:
    """Through `as_backend` the SDK's client says the same as alone, from our types too."""
    said = []
    for wrap in (as_backend, lambda client: client):
        recorder = Recorder(create_app(shared))
        with running(recorder) as url, tinker.ServiceClient(base_url=url, api_key=SDK_KEY) as service:
            model: Any = wrap(service.create_lora_training_client("tiny", rank=4, seed=3).result())
            model.forward_backward(datums(), "cross_entropy").result()
            model.forward_backward_custom(datums(), squares).result()
            model.optim_step(sdk.AdamParams(learning_rate=0.02)).result()
            model.save_state("adapter", overwrite=True).result()
        said.append(recorder.messages())
    for endpoint in ("create_model", "forward_backward", "optim_step", "save_weights"):
        assert said[0][endpoint] == said[1][endpoint]


def test_another_optimizer_is_named_as_the_sdk_names_it(shared: EmbeddedTrainer, running: Running) -> None:
    said: list[dict[str, list[Any]]] = []
    for kind in ("ours", "theirs"):
        recorder = Recorder(create_app(shared, extended=False))
        with running(recorder) as url:
            client: Any = tinker.ServiceClient(base_url=url, api_key=SDK_KEY)
            with client if kind == "theirs" else ServiceClient(base_url=url) as service:
                params = sdk.DimuonParams(learning_rate=0.02, grad_clip_norm=1.5, beta1=0.8)
                with pytest.raises((InvalidInput, tinker.TinkerError), match="only adamw is supported, not 'dimuon'"):
                    created(service.create_lora_training_client("tiny", rank=4, optimizer=sdk.DimuonOptimizerConfig()))
                model = created(service.create_lora_training_client("tiny", rank=4))
                if kind == "ours":
                    with pytest.raises(InvalidInput, match="the settings are for dimuon, but this model was"):
                        model.optim_step(params)
                    created_with = rq.CreateModelRequest(
                        "", 0, "tiny", optimizer_config={"type": "dimuon", "version": 1}
                    )
                    model = TrainingClient(service._channel, service.losses, model.model_id, created_with)
                with pytest.raises((InvalidInput, tinker.TinkerError), match="only adamw is supported, not 'dimuon'"):
                    model.optim_step(params).result()
        creation, *_ = [each for each in recorder.requests if each.path.endswith("create_model")]
        (stepped,) = (each for each in recorder.requests if each.path.endswith("optim_step"))
        parts = {"optimizer_config": creation.body, "optimizer_params": stepped.body}
        # Fields and their order; white space is httpx's.
        said.append({name: list(json.loads(body)[name].items()) for name, body in parts.items()})
    ours, theirs = said
    assert ours == theirs
    assert all(theirs.values())
