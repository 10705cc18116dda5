"""Uploading losses by the wire: what is kept, for whom, and what is refused."""

from __future__ import annotations

import base64
import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.graph_messages import graph, node, ref
from tinker_lightning import LossFnOutput
from tinker_lightning.lossgraph.graph import MAX_NODES
from tinker_lightning.lossgraph.trace import trace_batch_loss
from tinker_lightning.server.endpoints import training as routes
from tinker_lightning.server.trainer import loss_registry

if TYPE_CHECKING:
    import torch

    from tests.helpers.api import Api
    from tinker_lightning.server import EmbeddedTrainer

NLL = graph(
    node("mul", "operator.mul", ref("logprobs"), ref("weights")),
    node("total", "sum", ref("mul"), op="call_method"),
    node("loss", "operator.neg", ref("total")),
    node("mean", "mean", ref("logprobs"), op="call_method"),
    output={"tuple": [ref("loss"), {"dict": {"custom/logprob:mean": ref("mean"), "custom/nll:sum": ref("loss")}}]},
    inputs=("logprobs", "weights"),
)
EXT = "http://embedded/ext/v1"
INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]


def upload(session: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    body = {"session_id": session, "custom_loss_seq_id": number, "name": "nll", "inputs": INPUTS, "graph": NLL}
    return {**body, "type": "create_custom_loss", **changes}


def custom(api: Api, model: str, seq: int, loss_id: Any) -> dict[str, Any]:
    body = copy.deepcopy(api.train(model, seq))
    body["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    return body


def minimal(model_outputs: torch.Tensor, loss_fn_inputs: Any, attention_mask: torch.Tensor) -> LossFnOutput:
    """Minimal."""
    return LossFnOutput((model_outputs.square().mean(-1) * attention_mask).sum())


def register(api: Api, session: str, **changes: Any) -> Any:
    loss = {**trace_batch_loss(minimal, "minimal", "logits").encode(), **changes}
    return api.post(f"{EXT}/losses", {"session_id": session, "loss": loss})


def named(api: Api, model: str, seq: int, loss: str, **changes: Any) -> dict[str, Any]:
    body = copy.deepcopy(api.train(model, seq))
    body["forward_backward_input"] |= {"loss_fn": loss, **changes}
    return body


def test_the_flag_is_on_and_the_extension_announced(shared_api: Api) -> None:
    assert shared_api.post("client/config", {}).json()["custom_loss_server_side"] is True
    assert "server_losses" in shared_api.request("GET", "get_server_capabilities").json()["extensions"]


def test_an_uploaded_loss_trains_like_the_built_in_one(api: Api) -> None:  # R3.7
    session = api.session()
    loss_id = api.run("create_custom_loss", upload(session))["loss_id"]
    models = [api.model(session, number) for number in (0, 1)]
    results = [
        api.run("forward_backward", body) for body in (custom(api, models[0], 1, loss_id), api.train(models[1], 1))
    ]
    assert api.state(models[0]) == api.state(models[1])
    assert results[0]["metrics"]["loss:sum"] == pytest.approx(results[1]["metrics"]["loss:sum"])
    assert results[0]["loss_fn_outputs"] == results[1]["loss_fn_outputs"]
    logprobs = results[0]["loss_fn_outputs"][0]["logprobs"]["data"]
    assert results[0]["metrics"]["custom/logprob:mean"] == pytest.approx(sum(logprobs) / len(logprobs))
    assert results[0]["metrics"]["custom/nll:sum"] == pytest.approx(-sum(logprobs))


def test_a_mean_is_over_datums(api: Api) -> None:
    session = api.session()
    loss_id = api.run("create_custom_loss", upload(session))["loss_id"]
    body = custom(api, api.model(session), 1, loss_id)
    body["forward_backward_input"]["data"] *= 3
    metrics = api.run("forward_backward", body)["metrics"]
    assert metrics["custom/nll:sum"] == pytest.approx(metrics["loss:sum"])
    assert metrics["custom/logprob:mean"] == pytest.approx(-metrics["loss:sum"] / 30)


def test_an_upload_may_be_repeated(api: Api) -> None:
    session = api.session()
    first, second = api.submit("create_custom_loss", upload(session)), api.submit("create_custom_loss", upload(session))
    assert first == second
    assert api.result(first) == {"loss_id": f"{session}:loss:0", "type": "create_custom_loss"}
    other = api.post("create_custom_loss", upload(session, name="other"))
    assert other.status_code == 409
    assert "custom_loss_seq_id: 0 of this session was already used for the loss nll" in other.text


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"graph": {}}, "a graph must be an object with a list of nodes"),
        ({"graph": graph(node("a", "os.system", "true"))}, "'os.system' is not among"),
        ({"inputs": []}, "the first input must be logprobs"),
        ({"inputs": INPUTS[:1]}, "the graph reads 'weights', which is not one of its inputs"),
        ({"inputs": INPUTS[::-1]}, "the first input must be logprobs"),
        (
            {"inputs": [INPUTS[0], {"name": "weights", "rank": 3}]},
            "weights: the number of dimensions",
        ),
        ({"inputs": [INPUTS[0], {"name": "__class__", "rank": 1}]}, "the graph reads 'weights', which is not one"),
        ({"inputs": [INPUTS[0], {"name": "A b", "rank": 1}]}, "invalid input name 'A b'"),
        ({"inputs": [{"name": "logprobs", "rank": 0}]}, "logprobs, with 1 dimension"),
        ({"inputs": [*INPUTS, *({"name": f"x{i}", "rank": 1} for i in range(16))]}, "at most 16 inputs, got 18"),
        ({"inputs": "x"}, "inputs: must be a list"),
        ({"custom_loss_seq_id": -1}, "custom_loss_seq_id must be at least 0"),
        ({"session_id": "nobody"}, "there is no session 'nobody'"),
    ],
)
def test_uploads_that_are_rejected(shared_api: Api, changes: dict[str, Any], because: str) -> None:
    answer = shared_api.post("create_custom_loss", upload(shared_api.session(), **changes))
    assert answer.status_code in (400, 404)
    assert because in answer.json()["detail"]


@pytest.mark.parametrize(
    ("output", "because"),
    [
        (ref("loss"), "must return (loss, metrics)"),
        ({"tuple": [1.0, {"dict": {}}]}, "must return (loss, metrics)"),
        ({"tuple": [ref("loss"), ref("mean")]}, "its metrics as a dict"),
        ({"tuple": [ref("loss"), {"dict": {"loss:sum": ref("loss")}}]}, "must be called custom/<name>:sum"),
        ({"tuple": [ref("loss"), {"dict": {"custom/x:max": ref("loss")}}]}, "must be called custom/<name>:sum"),
        ({"tuple": [ref("loss"), {"dict": {"custom/x:sum": 1.0}}]}, "must be a tensor"),
    ],
)
def test_outputs_that_are_rejected(shared_api: Api, output: Any, because: str) -> None:
    changed = copy.deepcopy(NLL)
    changed["nodes"][-1]["args"] = [output]
    answer = shared_api.post("create_custom_loss", upload(shared_api.session(), graph=changed))
    assert answer.status_code == 400
    assert because in answer.json()["detail"]


def test_a_body_of_megabytes_is_not_read(shared_api: Api) -> None:
    body = upload(shared_api.session(), graph={"nodes": [node("a", "x" * 100)] * 100_000})
    answer = shared_api.post("create_custom_loss", body)
    assert answer.status_code == 413
    assert f"exceeds the limit of {routes.MAX_LOSS_BYTES} bytes; send less" in answer.json()["detail"]
    assert len(str(node("a", "x" * 100))) * MAX_NODES < routes.MAX_LOSS_BYTES


@pytest.mark.parametrize(
    ("loss_id", "because"),
    [("nobody", "this session has no loss 'nobody'"), (1.0, "has no loss '1.0'"), ("", "has no loss ''")],
)
def test_a_loss_that_is_not_there(shared_api: Api, loss_id: Any, because: str) -> None:  # R3.6
    model = shared_api.model()
    failed = shared_api.run("forward_backward", custom(shared_api, model, 1, loss_id))
    assert failed["category"] == "user"
    assert because in failed["error"]


def test_a_loss_belongs_to_its_session(api: Api) -> None:
    loss_id = api.run("create_custom_loss", upload(api.session()))["loss_id"]
    failed = api.run("forward_backward", custom(api, api.model(), 1, loss_id))
    assert "this session has no loss" in failed["error"]
    session = api.session()
    assert register(api, session).status_code == 200
    failed = api.run("forward_backward", named(api, api.model(), 1, "minimal"))
    assert "loss_fn 'minimal' is not registered" in failed["error"]
    model = api.model(session)
    assert "metrics" in api.run("forward_backward", named(api, model, 1, "minimal"))
    api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    api.trainer.scheduler.find(f"{session}:finish").future.result(60)
    assert api.request("GET", f"{EXT}/losses?session_id={session}").json()["available_loss_functions"][-1] == "gspo"
    assert register(api, session).status_code == 400


def test_datums_that_a_loss_cannot_take(shared_api: Api) -> None:  # R3.6
    session = shared_api.session()
    loss_id = shared_api.run("create_custom_loss", upload(session))["loss_id"]
    model = shared_api.model(session)
    changes: list[tuple[Any, str]] = [
        (lambda inputs: inputs.pop("weights"), "datum 0: weights: missing; nll reads it"),
        (
            lambda inputs: [each.update(data=each["data"] * 2, shape=[10, 2]) for each in inputs.values()],
            "datum 0: target_tokens: has the shape [10, 2], but nll takes 1 dimensions",
        ),
        (lambda inputs: inputs.pop("target_tokens"), "target_tokens: missing"),
    ]
    for seq, (change, because) in enumerate(changes, start=1):
        body = custom(shared_api, model, seq, loss_id)
        change(body["forward_backward_input"]["data"][0]["loss_fn_inputs"])
        failed = shared_api.run("forward_backward", body)
        assert because in failed["error"]
        assert failed["category"] == "user"


def test_a_sparse_input_that_claims_to_be_huge(shared_api: Api) -> None:
    session = shared_api.session()
    summed = graph(
        node("big", "sum", ref("table"), op="call_method"),
        node("small", "sum", ref("logprobs"), op="call_method"),
        node("loss", "operator.mul", ref("big"), ref("small")),
        inputs=("logprobs", "table"),
    )
    inputs = [INPUTS[0], {"name": "table", "rank": 2}]
    loss_id = shared_api.run("create_custom_loss", upload(session, inputs=inputs, graph=summed))["loss_id"]
    body = custom(shared_api, shared_api.model(session), 1, loss_id)
    table = {
        "data": [1.0],
        "dtype": "float32",
        "shape": [1, 2**27],
        "sparse_crow_indices": [0, 1],
        "sparse_col_indices": [0],
    }
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["table"] = table
    failed = shared_api.run("forward_backward", body)
    assert "it would create a tensor of 1.34e+08 elements" in failed["error"]


def test_inputs_of_the_batch_and_a_scale_are_only_for_those_who_know_them(shared_api: Api) -> None:
    model = shared_api.model()
    once = {"extra": {"data": [1.0], "dtype": "float32", "shape": [1]}}
    failed = shared_api.run("forward_backward", named(shared_api, model, 1, "cross_entropy", loss_fn_inputs=once))
    assert "cross_entropy reads its inputs from each datum" in failed["error"]
    answer = shared_api.post("forward_backward", named(shared_api, model, 2, "cross_entropy", scale=None))
    assert answer.status_code == 400
    assert "scale: must be a finite number" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"name": "a b"}, "invalid loss name 'a b'"),
        ({"name": None}, "invalid loss name None"),
        ({"name": "cross_entropy"}, "it is reserved for a built-in loss"),
        ({"name": "custom"}, "it is reserved for a built-in loss"),
        ({"source": "weights"}, "source must be one of logits, logprobs"),
        ({"source": "logprobs"}, "the graph reads 'model_outputs', which is not one of its inputs"),
        ({"inputs": "x"}, "inputs must be an object"),
        ({"inputs": {f"x{i}": None for i in range(65)}}, "at most 64 inputs, got 65"),
        ({"inputs": {"__class__.x": None}}, "invalid input name '__class__.x'; use letters"),
        ({"inputs": {"x": 1}}, "x: the number of dimensions of an input must be null, not 1"),
        ({"graph": None}, "a graph must be an object with a list of nodes"),
        ({"graph": graph(node("a", "torch.load", "x"))}, "'torch.load' is not among"),
        ({"hyperparameters": []}, "hyperparameters must be an object"),
        ({"hyperparameters": {"a b": {}}}, "must be a valid name, and its value an object"),
        ({"hyperparameters": {"a": {"default": []}}}, "default must be a number or string"),
        ({"hyperparameters": {"a": {"default": "x"}}}, "only numbers can change between calls"),
        ({"description": 1}, "description must be a string"),
    ],
)
def test_registrations_that_are_rejected(shared_api: Api, changes: dict[str, Any], because: str) -> None:
    answer = register(shared_api, shared_api.session(), **changes)
    assert answer.status_code == 400
    assert because in answer.json()["detail"]


class Bomb:
    """Loading it runs code."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('loaded')",)


def test_nothing_is_unpickled_unless_the_owner_allows_it(shared_api: Api) -> None:  # R3.7
    pickled = base64.b64encode(pickle.dumps(Bomb())).decode()
    body = {"session_id": shared_api.session(), "loss": {"name": "bomb"}, "pickled": pickled}
    answer = shared_api.post(f"{EXT}/losses", body)
    assert answer.status_code == 400
    assert "--allow-pickled-losses and --api-key" in answer.json()["detail"]


def test_what_cannot_be_unpickled(api: Api) -> None:
    api.trainer.losses = loss_registry.LossRegistry(allow_pickled=True)
    session = api.session()
    for pickled, because in ((b"x", "cannot be loaded here"), (pickle.dumps(3), "must be a function, got int")):
        body = {"session_id": session, "loss": {"name": "mine"}, "pickled": base64.b64encode(pickled).decode()}
        answer = api.post(f"{EXT}/losses", body)
        assert answer.status_code == 400
        assert because in answer.json()["detail"]
    body["loss"]["source"] = "x"  # type: ignore[index]
    assert "source must be one of logits, logprobs" in api.post(f"{EXT}/losses", body).json()["detail"]


def test_losses_not_used_for_long_make_room(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 40)
    session = api.session()
    ids = [api.run("create_custom_loss", upload(session, number))["loss_id"] for number in range(4)]
    model = api.model(session)
    assert "this session has no loss" in api.run("forward_backward", custom(api, model, 1, ids[0]))["error"]
    assert "metrics" in api.run("forward_backward", custom(api, model, 2, ids[-1]))


def test_a_function_of_this_process_is_for_one_session(trainer: EmbeddedTrainer, api: Api) -> None:
    session, other = api.session(), api.session()
    trainer.losses.register_function("plain", minimal, "logits", session)
    listed = api.request("GET", f"{EXT}/losses?session_id={session}").json()
    assert listed["descriptions"]["plain"] == "Minimal."
    assert "metrics" in api.run("forward_backward", named(api, api.model(session), 1, "plain"))
    assert "not registered" in api.run("forward_backward", named(api, api.model(other), 1, "plain"))["error"]


def test_losses_of_a_session_that_there_is_not(api: Api) -> None:
    answer = api.request("GET", f"{EXT}/losses?session_id=session-of-nobody")
    assert answer.status_code == 404
    assert "there is no session 'session-of-nobody'" in answer.json()["detail"]


def test_diagnostics_have_names_that_the_protocol_allows(api: Api) -> None:
    """Each metric's name has exactly one colon, else the official SDK raises."""

    def diagnosed(outputs: torch.Tensor, inputs: Any, mask: torch.Tensor) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, {"plain": outputs.mean(), "ended:max": outputs.max(), "number": 1})

    session = api.session()
    api.trainer.losses.register_function("diagnosed", diagnosed, "logits", session)
    metrics = api.run("forward_backward", named(api, api.model(session), 1, "diagnosed"))["metrics"]
    assert set(metrics) == {"plain:unique", "ended:max", "number:unique", "loss:sum", "tokens:sum"}


def test_a_loss_of_a_batch_whose_logits_would_not_fit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_lightning.server.engine.batch_pass.MAX_LOGITS", 100)
    session = api.session()
    api.trainer.losses.register_function("plain", minimal, "logits", session)
    failed = api.run("forward_backward", named(api, api.model(session), 1, "plain"))
    assert "logits of shape [1, 10, 259] exceed 100 elements. Send fewer or shorter datums." in failed["error"]


def test_registrations_are_found_by_their_latest(api: Api) -> None:
    session = api.session()
    first = register(api, session).json()["loss_id"]
    other = trace_batch_loss(lambda o, i, m: LossFnOutput(o.sum() * 2), "minimal", "logits").encode()  # noqa: ARG005
    second = api.post(f"{EXT}/losses", {"session_id": session, "loss": other}).json()["loss_id"]
    assert first != second
    assert register(api, session).json()["loss_id"] == first  # the same contents have the same id
    model = api.model(session)
    losses = [
        api.run("forward_backward", named(api, model, seq, name))["metrics"]["loss:sum"]
        for seq, name in enumerate(("minimal", first, second), start=1)
    ]
    assert losses[0] == losses[1] != losses[2]
