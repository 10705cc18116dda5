"""What one session's losses can take from a server, and from other sessions: bounded time and memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.graph_messages import graph, node, ref
from tests.helpers.soaking import first_only
from tinker_lightning import Datum, LossFnOutput, connect, custom_loss, losses
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.lightning import routes
from tinker_lightning.server.engine import batch_pass
from tinker_lightning.server.engine.batch_pass import stack_inputs
from tinker_lightning.server.trainer import loss_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.helpers.api import Api

EXT = "http://embedded/ext/v1"
SUM = node("loss", "sum", ref("logprobs"), op="call_method")


def upload(
    api: Api, session: str, *calls: dict[str, Any], number: int = 0, metrics: Mapping[str, str] | None = None
) -> str:
    """The id of a loss whose value is the node `loss`; metrics name nodes."""
    named = {f"custom/{name}:sum": ref(value) for name, value in (metrics or {}).items()}
    body = {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": "crafted",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": graph(*calls, SUM, output={"tuple": [ref("loss"), {"dict": named}]}),
        "type": "create_custom_loss",
    }
    return str(api.run("create_custom_loss", body)["loss_id"])


def trained(api: Api, model: str, loss_id: str, seq: int = 1, datums: int = 1) -> Any:
    """What a pass with an uploaded loss gives."""
    body = api.train(model, seq)
    body["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    body["forward_backward_input"]["data"] *= datums
    return api.run("forward_backward", body)


def crafted(api: Api, *calls: dict[str, Any], **metrics: str) -> Any:
    """What a pass with such a loss gives, in a session of its own."""
    session = api.session()
    return trained(api, api.model(session), upload(api, session, *calls, metrics=metrics))


def doubling(first: Any, times: int) -> list[dict[str, Any]]:
    """Tuples that hold the one before twice."""
    nodes = [node("t0", "operator.add", {"tuple": [first]}, {"tuple": []})]
    for i in range(1, times):
        nodes.append(node(f"t{i}", "operator.add", {"tuple": [ref(f"t{i - 1}")] * 2}, {"tuple": []}))
    return nodes


WIDE = {"tuple": [1] * 64}
SEQUENCES: dict[str, list[dict[str, Any]]] = {
    "numbers, doubled": doubling(1, 60),
    "tensors, doubled": doubling(ref("logprobs"), 60),
    "very deep": [
        node("t0", "operator.add", WIDE, {"tuple": []}),
        *(node(f"t{i}", "operator.add", {"tuple": [ref(f"t{i - 1}")]}, {"tuple": []}) for i in range(1, 1500)),
    ],
    "wide, cut out of an argument": [
        node("t0", "operator.add", WIDE, {"tuple": []}),
        node("t1", "operator.getitem", {"tuple": [{"tuple": [ref("t0")] * 10_000}]}, 0),
        node("t2", "operator.getitem", {"tuple": [{"tuple": [ref("t1")] * 10_000}]}, 0),
    ],
    "a sequence of sequences": [
        node("t0", "operator.add", {"tuple": [1]}, {"tuple": []}),
        node("t1", "operator.getitem", {"tuple": [ref("t0"), ref("t0")]}, {"slice": [None, None, None]}),
    ],
    "more values than are looked at": [
        node("t0", "torch.broadcast_tensors", *[ref("logprobs")] * 5_000),
    ],
    "the same values again and again": [
        node("t0", "torch.broadcast_tensors", *[ref("logprobs")] * 1_000),
        *(node(f"t{i}", "torch.stack", ref("t0")) for i in range(1, 4_000)),
    ],
}


@pytest.mark.parametrize("name", first_only(SEQUENCES, 6))  # the last one takes seconds
def test_sequences_cannot_grow(api: Api, name: str) -> None:  # R3.7
    """A few kilobytes never keep the thread that all sessions share."""
    started = time.process_time()
    result = crafted(api, *SEQUENCES[name])
    assert result["category"] == "user"
    assert "node 't" in result["error"]
    assert time.process_time() - started < 12


def test_shapes_can_still_be_joined(api: Api) -> None:
    shape = node("shape", "getattr", ref("logprobs"), "shape")
    joined = node("joined", "operator.add", ref("shape"), {"tuple": [2]})
    zeros = node("zeros", "new_ones", ref("logprobs"), ref("joined"), op="call_method")
    total = node("total", "sum", ref("zeros"), op="call_method")
    assert crafted(api, shape, joined, zeros, total, ones="total")["metrics"]["custom/ones:sum"] == 20


def one_token(**inputs: Any) -> list[Datum]:
    datums = []
    for k in range(1, 5):
        named: dict[str, Any] = {name: [k * each] for name, each in inputs.items()}
        datums.append(Datum.from_targets([k], [k + 1], **named))
    return datums


@pytest.mark.parametrize("loss", [losses.kl_regularized, losses.dpo])
def test_datums_of_one_token_have_the_loss_that_a_client_computes(loss: Any) -> None:  # R3.7
    """What is one number for each token stays so, also where every datum has only one."""
    client = connect("embedded").create_lora_training_client("tiny", rank=4, seed=0)
    data = one_token(weights=1.0, reference_logprobs=-1.0)
    on_server = routes.choose(loss, {}, "server", lambda: client).loss
    expected = client.forward_backward_custom(data, loss).result().metrics["loss:sum"]
    assert client.forward_backward(data, on_server).result().metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_an_input_that_can_be_meant_in_two_ways() -> None:
    client = connect("embedded").create_lora_training_client("tiny", rank=4, seed=0)

    def urgent(data: Any, logprobs: Any) -> Any:
        return (data["urgency"] * logprobs).sum(), {}

    loss = custom_loss(client, name="urgent", on="logprobs")(urgent)
    with pytest.raises(InvalidInput, match="urgency: every datum has one token and one number"):
        client.forward_backward(one_token(urgency=1.0), loss).result()
    urgency = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    given = client.forward_backward(one_token(), loss, loss_fn_inputs={"urgency": urgency}).result()
    logprobs = [each["logprobs"].to_numpy() for each in given.loss_fn_outputs]
    assert given.metrics["loss:sum"] == pytest.approx(float((urgency * logprobs).sum()), rel=1e-5)


def test_a_number_for_each_datum_of_one_token() -> None:
    """A reward is one, whatever the datum's length."""
    datums = one_token(reward=1.0)
    stacked = stack_inputs(datums, {}, ["reward"], [1] * 4, torch.float32, 100)["reward"]
    assert stacked.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("shape", [[], [1], [2]], ids=str)
@pytest.mark.parametrize("name", ["reference_logprobs", "teacher_logprobs"])
def test_what_a_token_has_is_never_spread_over_a_datum(name: str, shape: list[int]) -> None:  # R5.7
    """One number for a whole datum would be added to each of its tokens, and nobody would see it."""
    values: dict[str, Any] = {name: np.zeros(shape, np.float32)}
    datums = [Datum.from_targets([1, 2, 3], [2, 3, 4], **values) for _ in range(2)]
    with pytest.raises(InvalidDatum, match=rf"datum 0: {name} has the shape .* one row for each of the 3 tokens"):
        stack_inputs(datums, {}, [name], [3, 3], torch.float32, 100)


def test_no_session_takes_the_losses_of_another(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:  # R3.7
    """However much one uploads: only its own make room, and those not used for longest go first."""
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 40)
    victim, attacker = api.session(), api.session()
    kept = upload(api, victim)
    ids = [upload(api, attacker, node("x", "torch.tensor", [1] * 10), number=number) for number in range(8)]
    assert "metrics" in trained(api, api.model(victim), kept)
    model = api.model(attacker)
    assert "this session has no loss" in trained(api, model, ids[0])["error"]
    assert "metrics" in trained(api, model, ids[-1], seq=2)


def test_what_a_loss_returns_is_counted_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:  # R3.7
    session = api.session()
    upload(api, session, metrics={f"m{i}": "loss" for i in range(256)})
    assert api.trainer.losses._sessions[session].size > 256
    refused = {f"custom/m{i}:sum": ref("loss") for i in range(257)}
    body = {
        "session_id": session,
        "custom_loss_seq_id": 1,
        "name": "crafted",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": graph(SUM, output={"tuple": [ref("loss"), {"dict": refused}]}),
        "type": "create_custom_loss",
    }
    assert "a loss returns at most 256 metrics, got 257" in api.post("create_custom_loss", body).json()["detail"]
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 1000)
    ids = [upload(api, session, number=2 + i, metrics={f"m{k}": "loss" for k in range(200)}) for i in range(6)]
    model = api.model(session)
    assert "this session has no loss" in trained(api, model, ids[0])["error"]
    assert "metrics" in trained(api, model, ids[-1], seq=2)


def registered(api: Api, session: str, name: str, values: int) -> Any:
    """The answer to the registration of a loss with constants."""
    calls = [node("x", "torch.tensor", [1] * values), SUM]
    output: Any = {"tuple": [ref("loss"), {"dict": {}}]}
    loss = {
        "name": name,
        "source": "logprobs",
        "hyperparameters": {},
        "inputs": {},
        "graph": graph(*calls, output=output),
    }
    return api.post(f"{EXT}/losses", {"session_id": session, "loss": loss})


def test_a_loss_that_has_no_room_is_rejected(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 100)
    monkeypatch.setattr(loss_registry, "MAX_TOTAL_VALUES", 150)
    first, second = api.session(), api.session()
    assert "a session may store at most 100" in registered(api, first, "wide", 120).json()["detail"]
    assert registered(api, first, "a", 60).status_code == 200
    refused = registered(api, second, "b", 85)
    assert refused.status_code == 400
    assert "exceed the memory limit of this server" in refused.json()["detail"]
    assert registered(api, first, "a", 60).status_code == 200  # a repeat takes no more
    registry = api.trainer.losses
    registry.free(first)
    assert registered(api, second, "b", 85).status_code == 200
    assert registry._size == registry._sessions[second].size


def test_a_name_goes_with_its_loss(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 100)
    session = api.session()
    for name in ("a", "b", "c"):
        registered(api, session, name, 30)
    listed = api.trainer.losses.listing(session)
    assert "a" not in listed
    assert {"b", "c"} <= set(listed)
    assert "'a' is not registered" in api.run("forward_backward", named(api, api.model(session), "a"))["error"]


def named(api: Api, model: str, loss: str) -> dict[str, Any]:
    body = api.train(model, 1)
    body["forward_backward_input"] |= {"loss_fn": loss}
    return body


def test_all_datums_of_a_request_share_one_deadline(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:  # R3.7
    """A thousand datums together may not take what one of them may."""
    ones = node("ones", "new_ones", ref("logprobs"), [1 << 20], op="call_method")
    session = api.session()
    model, loss_id = api.model(session), upload(api, session, ones, node("tan", "torch.tan", ref("ones")))
    assert "metrics" in trained(api, model, loss_id)
    monkeypatch.setattr("tinker_lightning.server.engine.datum_losses.REQUEST_SECONDS", 0.05)
    before = api.state(model)
    failed = trained(api, model, loss_id, seq=2, datums=64)
    assert failed["category"] == "user"
    assert "was stopped" in failed["error"]
    assert api.state(model) == before


NO_NUMBERS: dict[str, tuple[dict[str, Any], ...]] = {
    "a dtype": (node("m", "getattr", ref("logprobs"), "dtype"),),
    "a shape": (node("m", "getattr", ref("logprobs"), "shape"),),
    "a device": (node("m", "getattr", ref("logprobs"), "device"),),
    "a vector": (node("m", "torch.exp", ref("logprobs")),),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_a_metric_that_is_no_number(api: Api, name: str) -> None:
    failed = crafted(api, *NO_NUMBERS[name], odd="m")
    assert failed["category"] == "user"
    assert "metric 'custom/odd:sum' is not a single number" in failed["error"]


def test_a_metric_may_be_a_plain_number(api: Api) -> None:
    rank = node("m", "getattr", ref("logprobs"), "ndim")
    assert crafted(api, rank, rank="m")["metrics"]["custom/rank:sum"] == 1


def test_a_graph_cannot_write_to_what_the_model_returns(api: Api) -> None:  # R3.7
    """Not through a view either: setting an item returns another tensor, and methods in place are not listed."""
    session = api.session()
    plain, other = api.model(session, 0), api.model(session, 1)
    detached = node("d", "detach", ref("logprobs"), op="call_method")
    filled = node("f", "operator.setitem", ref("d"), {"slice": [None, None, None]}, 7.0)
    total = node("total", "sum", ref("f"), op="call_method")
    written = trained(api, plain, upload(api, session, detached, filled, total, metrics={"total": "total"}))
    assert written["metrics"]["custom/total:sum"] == 70
    expected = api.run("forward_backward", api.train(other, 1))
    assert written["loss_fn_outputs"] == expected["loss_fn_outputs"]
    output: Any = {"tuple": [ref("loss"), {"dict": {}}]}
    loss: dict[str, Any] = {
        "name": "writer",
        "source": "logprobs",
        "graph": graph(detached, filled, SUM, output=output),
    }
    assert api.post(f"{EXT}/losses", {"session_id": session, "loss": loss}).status_code == 200
    of_batch = api.run("forward_backward", named(api, api.model(session, 2), "writer"))
    assert of_batch["loss_fn_outputs"] == expected["loss_fn_outputs"]
    in_place = node("f", "torch.Tensor.fill_", ref("d"), 7.0)
    loss |= {"graph": graph(detached, in_place, SUM, output=output)}
    refused = api.post(f"{EXT}/losses", {"session_id": session, "loss": loss})
    assert "the function 'fill_' is not among those" in refused.json()["detail"]


@pytest.mark.parametrize("device", ["meta", "cuda", "cpu", "nowhere", 0])
def test_a_graph_does_not_choose_its_device(api: Api, device: Any) -> None:
    moved = node("m", "to", ref("logprobs"), device, op="call_method")
    made = node("m", "new_ones", ref("logprobs"), [2], op="call_method", device=device)
    like = node("m", "torch.zeros_like", ref("logprobs"), device=device)
    by_name = node("m", "to", ref("logprobs"), op="call_method", device=device)
    for each in (moved, made, like, by_name):
        failed = crafted(api, each)
        assert failed["category"] == "user"
        assert f"node 'm': the device {device!r} is not supported" in failed["error"]


def test_a_device_or_dtype_of_a_tensor_can_be_used(api: Api) -> None:
    device = node("device", "getattr", ref("logprobs"), "device")
    double = node("double", "to", ref("logprobs"), {"dtype": "float64"}, op="call_method")
    moved = node("moved", "to", ref("double"), ref("device"), op="call_method")
    alike = node("alike", "to", ref("moved"), ref("logprobs"), op="call_method")
    total = node("total", "sum", ref("alike"), op="call_method")
    metrics = crafted(api, device, double, moved, alike, total, total="total")["metrics"]
    assert metrics["custom/total:sum"] == pytest.approx(metrics["loss:sum"])


def test_a_loss_of_a_batch_has_a_limit_that_no_batch_raises(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:  # R3.7
    """Bytes are counted of what is new: a chain of results is refused, as many views are not."""
    monkeypatch.setattr(batch_pass, "MAX_LOSS_BYTES", 20 * 10 * 4)  # of 10 log-probabilities
    session = api.session()

    def chain(name: str, target: str, *args: Any) -> Any:
        calls = [node("x0", target, ref("logprobs"), *args, op="call_method")]
        calls += [node(f"x{i}", target, ref(f"x{i - 1}"), *args, op="call_method") for i in range(1, 30)]
        output: Any = {"tuple": [ref("loss"), {"dict": {}}]}
        calls.append(node("loss", "sum", ref("x29"), op="call_method"))
        loss = {"name": name, "source": "logprobs", "graph": graph(*calls, output=output)}
        assert api.post(f"{EXT}/losses", {"session_id": session, "loss": loss}).status_code == 200
        return api.run("forward_backward", named(api, api.model(session, len(name)), name))

    assert "metrics" in chain("views", "transpose", 0, 1)
    failed = chain("results", "sigmoid")
    assert failed["category"] == "user"
    assert "node 'x20': up to here the loss takes" in failed["error"]
    assert batch_pass._limits(1 << 28).total <= 1 << 32


def test_a_loss_returns_no_more_than_its_tokens_can_have(api: Api) -> None:  # R5.11
    """An expanded tensor takes no memory until it is returned, a slice keeps all of the tensor that it is cut from."""

    def returned(logprobs: Callable[[Any], Any]) -> Any:
        def loss(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
            return LossFnOutput(outputs.sum(), logprobs(outputs))

        session = api.session()
        api.trainer.losses.register_function("plain", loss, "logits", session)
        model = api.model(session)
        result = api.run("forward_backward", named(api, model, "plain"))
        kept = api.trainer.scheduler.find(f"{model}:1").future
        return result if kept.exception() else kept.result().loss_fn_outputs[0]["logprobs"]

    wide = returned(lambda outputs: outputs[:, :1, 0].expand(-1, 1 << 23))
    assert "its logprobs have 8388608 elements for 10 tokens; at most 650 are returned" in wide["error"]
    part = returned(lambda outputs: outputs[0, 0, 0].expand(1, 10 << 20).contiguous()[:, :10])
    assert part.shape == [10]
    assert part.values.base is None or part.values.base.nbytes <= 40


def plain(api: Api, names: list[str]) -> Any:
    def loss(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, dict.fromkeys(names, 1.0))

    session = api.session()
    api.trainer.losses.register_function("plain", loss, "logits", session)
    return api.run("forward_backward", named(api, api.model(session), "plain"))


def test_no_diagnostic_takes_the_place_of_another(api: Api) -> None:
    assert "'a' and 'a:unique' would be the same metric" in plain(api, ["a", "a:unique"])["error"]


@pytest.mark.parametrize("name", ["loss:sum", "tokens:sum"])
def test_a_diagnostic_with_a_name_of_the_protocol_is_returned_next_to_it(api: Api, name: str) -> None:
    metrics = plain(api, [name])["metrics"]
    assert metrics[f"loss/{name}"] == 1.0
    assert metrics["loss:sum"] != 1.0
    assert metrics["tokens:sum"] > 1.0


def test_diagnostics_that_would_be_one_metric_are_rejected_at_once(api: Api) -> None:
    output = {"tuple": [ref("loss"), {"dict": {"a": ref("loss"), "a:unique": ref("loss")}}]}
    loss = {"name": "mine", "source": "logprobs", "graph": graph(SUM, output=output)}
    refused = api.post(f"{EXT}/losses", {"session_id": api.session(), "loss": loss})
    assert refused.status_code == 400
    assert "'a' and 'a:unique' would be the same metric" in refused.json()["detail"]
