"""The doctor finds what is wrong with a server, and nothing on a clean one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from tests.helpers.imitated_clients import connected
from tests.helpers.imitations import Behavior, imitate
from tests.helpers.imitations.behavior import Normalization
from tests.helpers.soaking import mostly_soak
from tinker_lightning import AdamParams, Datum, ServiceClient, cli, connect
from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.client.dialects.servers import EMBEDDED, dialect_named
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.doctor import CHECKS, TOKENS, examine
from tinker_lightning.doctor.probe import Check, Finding
from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import RecordingTransport, embedded_service
from tinker_lightning.types.requests import ForwardBackwardRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.imitations import Imitation
    from tinker_lightning.doctor import Report

# A server of an unknown kind that does everything right.
CLEAN = Behavior(
    name="clean",
    order="number",
    doubles_repeats=False,
    losses=("cross_entropy", "importance_sampling", "ppo", "cispo"),
)
BY_NAME = {check.name: check for check in CHECKS}
# SkyRL's normalization, on a server that does not say that it is one.
NORMALISED = {"cross_entropy": "sequence_mean", "importance_sampling": "sequence_mean", "window_mean": True}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("doctor"))
    yield trainer
    trainer.close()


def examined(server: Imitation, *names: str) -> Report:
    with connected(server) as service:
        return examine(service, checks=[BY_NAME[name] for name in names])


# Servers with several defects that do not hide each other, and what each check has to find there.
DEFECTS: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"cross_entropy": "sequence_mean", "samples_base": True},
        {
            "linear": "weights twice as large give a gradient that is 1 times as large",
            "sampler": "log-probabilities of a prompt differ",
        },
    ),
    (
        {"cross_entropy": "masked_mean", "importance_sampling": "masked_mean"},
        {
            "linear": "weights twice as large",
            "advantages": "by the length of each sequence and by the number of sequences of a call",
        },
    ),
    (
        {"cross_entropy": "mean", "importance_sampling": "mean"},
        {
            "batch": "two datums in one call is not a multiple",
            "advantages": r"twice as many sequences, the gradient is 0\.38\d times as large in one call",
        },
    ),
    (
        {"cross_entropy": "length", "importance_sampling": "length"},
        {
            "length": r"in a sequence of 8 tokens is 0\.62\d times that of the same token in a sequence of 5",
            "advantages": "divided by the length of each sequence$",
        },
    ),
    (
        {"importance_sampling": "sequence_mean", "seed_ignored": True, "samples_live": True},
        {
            "advantages": "divided by the length of each sequence",
            "LoRA seed": "same seed have different adapters",
            "weights in training": "samples from those in training",
        },
    ),
    (
        {
            "window_mean": True,
            "doubles_repeats": True,
            "lr_zero_moves": True,
            "ignores_optimizer_on_load": True,
            "keeps_gradient_on_load": True,
            "ignores_lora_flags": True,
            "sampling_moves_weights": True,
        },
        {
            "calls": r"the gradient of two calls is 0\.50\d times their sum",
            "repeats": "a repeated pass runs again",
            "zero rate": "with the learning rate 0 changes log-probabilities",
            "optimizer state": "load_state restores the optimizer",
            "LoRA flags": "train_attn, train_mlp, train_unembed: no effect",
            "weights in training": "replaces those in training",
        },
    ),
    (
        {
            "order": "arrival",
            "client_config": {"parallel_fwdbwd_chunks": True},
            "doubles_repeats": True,
            "spends_rejected": True,
            "ignores_grad_clip": True,
            "saves_optimizer": False,
            "keeps_deleted": True,
        },
        {
            "order": "does not wait for it",
            "repeats": "a repeated pass runs again",
            "rejected numbers": "cannot be used again: .*Sequence conflict",
            "clipping": r"grad_clip_norm=0\.0001 has no effect",
            "optimizer state": "the step after load_state_with_optimizer is another one",
            "deletion": "is still there",
        },
    ),
]


@pytest.mark.parametrize(
    ("defects", "faults"), mostly_soak(DEFECTS, but=DEFECTS[3:4] + DEFECTS[-2:]), ids=lambda given: ", ".join(given)
)
def test_planted_defects_are_found(defects: dict[str, Any], faults: dict[str, str], trainer: EmbeddedTrainer) -> None:
    with imitate(CLEAN, trainer=trainer, **defects) as server:
        report = examined(server, *faults)
    for result, fault in zip(report.results, faults.values(), strict=True):
        assert result.status == "failed", result
        assert result.advice
        assert re.search(fault, result.detail), result.detail
    if "ignores_optimizer_on_load" in defects:
        measured = report.dialect
        assert (measured.resets_optimizer, measured.clears_gradient) == (False, False)


def test_a_defect_is_planted_for_every_check() -> None:
    assert {name for _, faults in DEFECTS for name in faults} == BY_NAME.keys() - {"custom losses"}  # see below
    for loss in "cross_entropy", "importance_sampling":
        planted = {defects[loss] for defects, _ in DEFECTS if loss in defects}
        assert planted == {*get_args(Normalization)} - {"sum", "weighted_sum"}, loss  # which are plain sums here


def test_nothing_is_found_on_the_clean_trainer_and_nothing_is_left(tmp_path: Path) -> None:
    trainer, recorded = EmbeddedTrainer(["tiny"], data_dir=tmp_path), []

    def record(inner: Any) -> RecordingTransport:
        recorded.append(RecordingTransport(inner))
        return recorded[0]

    with embedded_service(trainer, wrap=record) as service:
        report = examine(service)
        assert [result.name for result in report.results if result.status != "ok"] == []
        assert len(report.results) == len(CHECKS)
        assert report.is_healthy
        assert report.left == []
        assert report.dialect == service.session.dialect == EMBEDDED
    trainer.close()
    assert not list(tmp_path.rglob("*.safetensors"))
    # What `doctor` says beforehand that it costs.
    messages = [each.message for each in recorded[0].requests if each.path.endswith(("forward_backward", "asample"))]
    tokens = sum(
        sum(datum.model_input.length for datum in each.data) if isinstance(each, ForwardBackwardRequest) else 20
        for each in messages
    )
    assert TOKENS / 2 < tokens <= TOKENS


def test_what_a_server_lacks_is_not_a_failure(trainer: EmbeddedTrainer) -> None:
    with imitate(CLEAN, trainer=trainer, lacks={"delete", "save_weights_for_sampler"}) as server:
        report = examined(server, "sampler", "weights in training", "deletion", "optimizer state")
    assert [result.status for result in report.results] == ["not offered"] * 3 + ["ok"]
    assert report.is_healthy
    assert not report.dialect.deletes_checkpoints
    assert report.dialect.clears_gradient  # unlike what is assumed of an unknown server
    assert report.left  # nothing could be removed


def test_a_check_that_crashes_is_reported_and_the_rest_continues(trainer: EmbeddedTrainer) -> None:
    def crash(_: Any) -> Any:
        raise KeyError("oops")

    with (
        imitate(CLEAN, trainer=trainer) as server,
        ServiceClient(base_url="http://x", transport=server.transport) as service,
    ):
        report = examine(service, checks=[Check("broken", "nothing", "", crash), BY_NAME["deletion"]])
    assert [(result.name, result.status) for result in report.results] == [("broken", "crashed"), ("deletion", "ok")]
    assert "KeyError: 'oops'" in report.results[0].detail
    assert not report.is_healthy
    assert "CRASHED      broken: nothing" in report.table()


def test_a_server_without_an_exact_loss_trains_no_custom_losses(trainer: EmbeddedTrainer) -> None:
    changes = {"cross_entropy": "masked_mean", "importance_sampling": "mean", "losses": ("cross_entropy",)}
    with imitate(CLEAN, trainer=trainer, **changes) as server:
        report = examined(server, "linear", "advantages", "custom losses")
    assert [result.status for result in report.results] == ["failed", "not offered", "failed"]
    assert report.dialect.surrogate is None
    assert report.dialect.losses == frozenset()


def test_what_was_not_measured_is_left_as_it_was_detected(trainer: EmbeddedTrainer) -> None:
    """Without all checks of cross_entropy, or if one of them crashes, it is not known to be a plain sum."""

    def crash(_: Any) -> Finding:
        raise OperationFailed("out of memory")

    with imitate("skyrl", trainer=trainer, losses=("cross_entropy",)) as server:
        report = examined(server, "advantages")
    assert (report.dialect.surrogate, report.dialect.losses) == (
        dialect_named("skyrl").surrogate,
        dialect_named("skyrl").losses,
    )
    checks = [replace(BY_NAME[name], run=lambda _: Finding()) for name in ("linear", "length", "calls")]
    checks += [replace(BY_NAME["batch"], run=crash), BY_NAME["advantages"]]
    with imitate(CLEAN, trainer=trainer, losses=("cross_entropy",)) as server, connected(server) as service:
        report = examine(service, checks=checks)
    assert [result.status for result in report.results] == ["ok", "ok", "ok", "crashed", "not offered"]
    assert report.dialect.surrogate is None


@pytest.mark.parametrize(("surrogate", "status"), [(Surrogate(), "failed"), (Surrogate("cispo"), "ok")])
def test_custom_losses_are_not_compared_with_a_divided_cross_entropy(
    surrogate: Surrogate, status: str, trainer: EmbeddedTrainer
) -> None:
    assumed = dialect_named("json").but(surrogate=surrogate)
    with imitate(CLEAN, trainer=trainer, cross_entropy="length") as server, connected(server, assumed) as service:
        report = examine(service, checks=[BY_NAME["custom losses"]])
    assert [result.status for result in report.results] == [status], report.results
    assert report.dialect.surrogate == (surrogate if status == "ok" else None)


def moved(service: ServiceClient) -> np.ndarray[Any, Any]:
    """The change of log-probabilities by a custom loss with gradients of both signs, in two calls."""
    data = [Datum.from_tokens([5, 7, 9, 11, 13]), Datum.from_tokens([6, 8, 10])]

    def loss(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([(each * torch.linspace(-1, 2, len(each))).sum() for each in logprobs]).sum(), {}

    client = service.create_lora_training_client("tiny", rank=4, seed=1)

    def logprobs() -> np.ndarray[Any, Any]:
        outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
        return np.concatenate([each["logprobs"].to_numpy() for each in outputs])

    before = logprobs()
    client.forward_backward_custom(data, loss)
    client.forward_backward_custom(data[:1], loss)
    client.optim_step(AdamParams(learning_rate=2e5, beta1=0.0, beta2=0.0, eps=1e9)).result()
    after: np.ndarray[Any, Any] = logprobs() - before
    return after


def test_a_saved_report_is_a_dialect_that_trains_exactly(
    trainer: EmbeddedTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.json"
    names = ["linear", "advantages", "custom losses"]
    with imitate(CLEAN, trainer=trainer, **NORMALISED) as server:
        arguments = [part for name in names for part in ("--check", name)]
        assert cli.main(["doctor", server.url, "--json", "--save", str(path), *arguments]) == 1
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads(path.read_text())
        assert [check["status"] for check in printed["checks"]] == ["failed", "failed", "ok"]
        assert Dialect.load(path).surrogate == Surrogate("cispo", per_length=True, per_batch="window")
        with connect(server.url, dialect=path) as service:
            found = moved(service)
    with embedded_service(trainer) as service:
        expected = moved(service)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-5)


def test_a_healthy_server_exits_with_0(trainer: EmbeddedTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    with imitate(CLEAN, trainer=trainer) as server:
        assert cli.main(["doctor", server.url, "--check", "deletion"]) == 0
        said = capsys.readouterr().out
        assert f"{server.url}: dialect json, JSON passes" in said
        assert "ok           deletion: a checkpoint can be deleted" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["https://tinker.thinkingmachines.dev/services/tinker-prod"], f"up to {TOKENS:,} tokens. Pass --yes"),
        (["https://api.example.com"], "may be a hosted service"),
        (["http://127.0.0.1:1", "--check", "colour"], "there is no check colour; there are linear, length"),
        (["http://127.0.0.1:1", "--dialect", "sky"], "'sky' is unknown"),
    ],
)
def test_what_cannot_be_checked_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_file_without_a_dialect_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(InvalidInput, match=r"dialect: cannot read .*a\.json"):
        Dialect.load(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps(dialect_named("tuft").to_dict()))
    assert Dialect.load(tmp_path / "b.json") == dialect_named("tuft")


def test_a_pass_after_a_rejected_request_has_no_gradient_where_every_pass_has_one(trainer: EmbeddedTrainer) -> None:
    with imitate("open-rl", trainer=trainer) as server:
        (result,) = examined(server, "rejected numbers").results
    assert result.status == "ok", result
