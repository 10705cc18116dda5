"""Imitated servers normalize losses and ignore settings as the real ones do (PROTOCOL.md §23)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.imitated import KINDS, PROTOBUF, TEXTS, close, datum, ramp
from tinker_lightning import Datum
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.helpers.imitated import Peer
    from tests.helpers.imitations.serving import Kind


def test_tuft_cross_entropy_is_a_plain_sum(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    model = server.create()
    data = [datum(text, ramp(text)) for text in TEXTS]  # opposite signs
    expected = server.plain(*data)
    assert close(server.applied(model, (data[:2], "cross_entropy"), (data[2:], "cross_entropy")), expected)
    data = [server.surrogate(text) for text in TEXTS]
    expected = server.plain(*data, loss_fn="importance_sampling")
    assert close(server.applied(model, (data, "importance_sampling")), expected)


def test_skyrl_cross_entropy_divides_by_weights_and_sequences(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create()
    for scale in (1.0, 2.0, 1e-6):  # the scale of the weights does not matter
        weights = [[scale * (1 + i % 3) for i in range(len(text) - 1)] for text in TEXTS]
        data = [datum(text, each) for text, each in zip(TEXTS, weights, strict=True)]
        parts = [server.plain(each) / sum(given) for each, given in zip(data, weights, strict=True)]
        expected = torch.stack(parts).mean(0)
        assert close(server.applied(model, (data[:1], "cross_entropy"), (data[1:], "cross_entropy")), expected)


def test_skyrl_cross_entropy_blows_up_for_weights_without_a_positive_sum(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create()
    for weights in ([1.0, -1.0] * 5, [-0.1] * 10):
        norm = float(server.plain(datum(weights=weights)).norm())
        server.train(model, [datum(weights=weights)])
        assert server.step(model, learning_rate=0.0)["metrics"]["skyrl.ai/grad_norm"] == pytest.approx(norm * 1e9)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_skyrl_importance_sampling_divides_by_length_and_sequences_of_the_window(
    split: int, peer: Callable[..., Peer]
) -> None:
    server = peer("skyrl")
    model = server.create()
    data = [server.surrogate(text) for text in TEXTS]
    parts = [
        server.plain(each, loss_fn="importance_sampling") / (len(text) - 1)
        for each, text in zip(data, TEXTS, strict=True)
    ]
    calls = [(data[i::split], "importance_sampling") for i in range(split)]
    assert close(server.applied(model, *calls), torch.stack(parts).sum(0) / 3)


def test_skyrl_counts_sequences_of_other_losses(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create()
    one, other = server.surrogate(TEXTS[0]), datum(TEXTS[1])
    expected = (server.plain(one, loss_fn="importance_sampling") / 10 + server.plain(other) / 16) / 2
    assert close(server.applied(model, ([one], "importance_sampling"), ([other], "cross_entropy")), expected)


def test_skyrl_log_probabilities_move_linearly_with_the_advantages(peer: Callable[..., Peer]) -> None:
    """Without a look into the trainer, as a client would measure it."""
    server = peer("skyrl")
    model = server.create()
    state, probe = server.save(model), datum(b"what changes by training")

    def logprobs() -> torch.Tensor:
        outputs = server.train(model, [probe], forward_only=True)["loss_fn_outputs"]
        return torch.tensor(outputs[0]["logprobs"]["data"], dtype=torch.float64)

    def change(*calls: Sequence[Datum]) -> torch.Tensor:
        server.load(model, state)
        for data in calls:
            server.train(model, data, "importance_sampling")
        server.step(model, learning_rate=1e8)
        return logprobs() - start

    start = logprobs()
    data = [server.surrogate(text) for text in TEXTS]
    singles = sum(change([each]) for each in data) / 3
    assert isinstance(singles, torch.Tensor)
    for together in (change(data), change(data[:1], data[1:])):
        assert torch.cosine_similarity(together, singles, dim=0) > 0.9999
        assert together.norm() / singles.norm() == pytest.approx(1, abs=3e-3)


def test_twinkle_cross_entropy_is_a_mean_over_a_mask(peer: Callable[..., Peer]) -> None:
    server = peer("twinkle")
    model = server.create()
    weights = [1.0, -2.0, 0.0, 0.5] + [0.0] * 6
    mask = datum(weights=[1.0, 1.0, 0.0, 1.0] + [0.0] * 6)
    expected = server.plain(mask) / 3
    given = datum(weights=weights)
    assert close(server.applied(model, ([given], "cross_entropy")), expected)
    # The reported loss of each token hides it.
    output = server.train(model, [given])["loss_fn_outputs"][0]
    assert output["elementwise_loss"]["data"] == pytest.approx(
        [-w * p for w, p in zip(weights, output["logprobs"]["data"], strict=True)]
    )


def test_twinkle_importance_sampling_divides_by_length_and_batch(peer: Callable[..., Peer]) -> None:
    server = peer("twinkle")
    model = server.create()
    data = [server.surrogate(text) for text in TEXTS[:2]]
    parts = [
        server.plain(each, loss_fn="importance_sampling") / (len(text) - 1) / 2
        for each, text in zip(data, TEXTS[:2], strict=True)
    ]
    assert close(server.applied(model, (data, "importance_sampling")), torch.stack(parts).sum(0))
    odd = server.poll(server.send(model, data[:1], "importance_sampling").json()["request_id"])
    assert "divisible by 2" in odd.json()["error"]


def test_unknown_losses(peer: Callable[..., Peer]) -> None:
    server = peer("twinkle")
    model = server.create()
    expected = server.plain(datum()) / 10
    assert close(server.applied(model, ([datum()], "invented")), expected)
    for kind in ("skyrl", "tuft", "open-rl"):
        server = peer(kind)
        assert server.send(server.create(), [datum()], "invented").status_code == 422


def test_open_rl_gives_log_probabilities_for_zero_weights(peer: Callable[..., Peer]) -> None:
    server = peer("open-rl")
    model = server.create()
    before = server.weights()
    output = server.train(model, [datum(weights=[0.0] * 10)])
    assert output["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(server.logprobs(datum()))
    assert output["metrics"] == {"loss:mean": 0.0, "loss:sum": 0.0}
    assert server.step(model)["metrics"] == {"grad_norm:mean": 0.0}
    assert torch.equal(before, server.weights())
    data = [datum(text, ramp(text)) for text in TEXTS]
    expected = server.plain(*data)
    assert close(server.applied(model, (data, "cross_entropy")), expected)


def test_open_rl_keeps_the_first_betas(peer: Callable[..., Peer]) -> None:
    server = peer("open-rl")
    model = server.create()
    server.applied(model, ([datum()], "cross_entropy"))
    expected = server.plain(datum())
    assert close(server.applied(model, ([datum()], "cross_entropy"), beta1=0.9, eps=1e-8), expected)


def test_together_masks_the_forward(peer: Callable[..., Peer]) -> None:
    server = peer("together")
    model = server.create()
    weights = [0.0, 1.0] * 5
    expected = [p * w for p, w in zip(server.logprobs(datum()), weights, strict=True)]
    output = server.train(model, [datum(weights=weights)], forward_only=True)
    assert output["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(expected)
    output = server.train(model, [datum(weights=weights)])
    assert output["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(server.logprobs(datum()))


def test_tuft_takes_forwards_as_protobuf_and_answers_in_it(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    model = server.create()
    number = server.send(model, [datum()], forward_only=True).json()["request_id"]
    answer = server.poll(number, f"{PROTOBUF}, application/json")
    assert answer.headers["content-type"] == PROTOBUF
    output = protobuf.decode_output(answer.content)
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(server.logprobs(datum()))
    assert server.step(model)["metrics"] is None
    assert server.poll(number).json()["metrics"] == pytest.approx(output.metrics)


@pytest.mark.parametrize(
    ("kind", "metrics", "step_metrics"),
    [
        ("skyrl", set(), {"skyrl.ai/grad_norm", "skyrl.ai/learning_rate"}),
        ("tuft", {"loss:sum"}, None),
        ("twinkle", {"loss:avg"}, {"grad_norm", "learning rate(param group 1)"}),
        ("open-rl", {"loss:sum", "loss:mean"}, {"grad_norm:mean"}),
    ],
)
def test_metrics(kind: Kind, metrics: set[str], step_metrics: set[str] | None, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    model = server.create()
    assert set(server.train(model, [datum()])["metrics"]) == metrics
    found = server.step(model)["metrics"]
    assert (found if found is None else set(found)) == step_metrics


def test_skyrl_ends_in_nan_for_a_token_out_of_range(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create()
    bad = Datum.from_targets([1, 2, 3], [2, 3, 100_000], weights=[1.0, 1.0, 1.0])
    number = server.send(model, [bad]).json()["request_id"]
    answer = server.poll(number)
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    expected = server.plain(datum()) / 10 / 2  # the sequence is counted
    assert close(server.applied(model, ([datum()], "cross_entropy")), expected)
    tuft = peer("tuft")
    assert tuft.poll(tuft.send(tuft.create(), [bad]).json()["request_id"]).status_code == 422


# Ignored fields


@pytest.mark.parametrize("kind", ["skyrl", "tuft"])
def test_grad_clip_norm(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    model = server.create()
    free = server.applied(model, ([datum()], "cross_entropy")).norm()
    clipped = server.applied(model, ([datum()], "cross_entropy"), grad_clip_norm=1e-3).norm()
    assert free > 2e-3
    assert (float(clipped) == pytest.approx(1e-3, rel=1e-3)) == (kind == "tuft")


def test_skyrl_ignores_the_base_model_and_the_lora_flags(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create("some/name", train_unembed=True)
    full = server.weights()
    server.create(train_unembed=False, train_mlp=False)
    assert torch.equal(full, server.weights())
    info = server.post("get_info", {"model_id": model}).json()
    assert info.keys() == {"model_id", "status", "model_data"}
    assert info["model_data"]["model_name"] == "some/name"
    tuft = peer("tuft")
    body = {"session_id": tuft.session, "model_seq_id": 0, "base_model": "some/name", "lora_config": {"rank": 4}}
    assert tuft.post("create_model", body).status_code == 404


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    server.create(seed=3)
    first = server.weights()
    server.create(seed=3)
    assert torch.equal(first, server.weights()) == (kind not in ("tuft", "twinkle"))
