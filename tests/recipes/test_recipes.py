"""SFT, DPO and KTO: exact gradients, one wait a step, references that are scored once, and errors that help."""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import huggingface_hub.constants
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader

from tests.helpers.reference import gathered, lora_model
from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, new, quiet
from tests.helpers.waits import Distant, Trace
from tinker_lightning import Datum, RemoteModule, collate
from tinker_lightning.callbacks import CostMonitor, RemoteMonitor
from tinker_lightning.client import ServiceClient
from tinker_lightning.data import ChatData, PreferenceData, RolloutData
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.recipes import DPO, GRPO, KTO, SFT, recommended_lr
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = SMALL

PAIRS = [
    {"prompt": "How long?", "chosen": "For 6 minutes.", "rejected": "It depends."},
    {"prompt": "How hot?", "chosen": "At 200 degrees.", "rejected": "Rather hot."},
    {"prompt": "How much?", "chosen": "About 10 g.", "rejected": "To your taste, as always."},
]
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTED = (DOCS / "recipes.md").read_text(encoding="utf-8") + (DOCS / "callbacks.md").read_text(encoding="utf-8")
LABELED: list[dict[str, Any]] = [
    {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
    for pair, name in zip(PAIRS, ("chosen", "rejected", "chosen"), strict=True)
]
CHATS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]


@pytest.fixture(scope="module")
def trainer64(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("recipes"), dtype=torch.float64)
    yield trainer
    trainer.close()


@contextlib.contextmanager
def logprobs_of(trainer: EmbeddedTrainer, model_id: str, data: list[Datum]) -> Iterator[tuple[list[Tensor], Any]]:
    """What plain torch computes for the model with its current adapter, which a gradient needs to be in use."""
    base, adapter = lora_model(trainer, model_id)
    with base.lora.use(adapter.weights) as parameters:
        logprobs = []
        for datum in data:
            logits = base.model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0]
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            logprobs.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
        yield logprobs, parameters


def weights_of(datum: Datum) -> Tensor:
    return datum.loss_fn_inputs["weights"].to_torch().double()


def sft(data: list[Datum], p: list[Tensor], _: list[Tensor]) -> Tensor:
    w = torch.cat([weights_of(datum) for datum in data])
    return -(w * torch.cat(p)).sum() / w.sum()


def scores(data: list[Datum], values: list[Tensor], *, mean: bool) -> list[Tensor]:
    answers = [value[weights_of(datum) > 0] for datum, value in zip(data, values, strict=True)]
    return [answer.mean() if mean else answer.sum() for answer in answers]


def dpo(data: list[Datum], p: list[Tensor], r: list[Tensor]) -> Tensor:
    gains = scores(data, [a - b for a, b in zip(p, r, strict=True)], mean=False)
    wins = [0.3 * (c - d) - 0.2 for c, d in zip(gains[::2], gains[1::2], strict=True)]
    return -torch.stack([0.9 * logsigmoid(win) + 0.1 * logsigmoid(-win) for win in wins]).mean()


def ipo(data: list[Datum], p: list[Tensor], r: list[Tensor]) -> Tensor:
    gains = scores(data, [a - b for a, b in zip(p, r, strict=True)], mean=True)
    return torch.stack([(c - d - 5.0) ** 2 for c, d in zip(gains[::2], gains[1::2], strict=True)]).mean()


def simpo(data: list[Datum], p: list[Tensor], _: list[Tensor]) -> Tensor:
    means = scores(data, p, mean=True)
    return -torch.stack([logsigmoid(2 * (c - d) - 1) for c, d in zip(means[::2], means[1::2], strict=True)]).mean()


def orpo(data: list[Datum], p: list[Tensor], _: list[Tensor]) -> Tensor:
    means = scores(data, p, mean=True)
    odds = [mean - torch.log(1 - mean.exp()) for mean in means]
    ratios = [logsigmoid(c - d) for c, d in zip(odds[::2], odds[1::2], strict=True)]
    return -(0.1 * torch.stack(ratios) + torch.stack(means[::2])).mean()


def kto(data: list[Datum], p: list[Tensor], r: list[Tensor]) -> Tensor:
    gains = [a - b for a, b in zip(p, r, strict=True)]
    mismatched = [
        gain[datum.loss_fn_inputs["kl_weights"].to_torch() > 0].sum() for datum, gain in zip(data, gains, strict=True)
    ]
    z = torch.stack(mismatched[1::2]).mean().detach().clamp(min=0)
    good, bad, best = scores(data[::2], gains[::2], mean=False)
    return (
        -(
            1.5 * torch.sigmoid(0.3 * (good - z))
            + torch.sigmoid(0.3 * (z - bad))
            + 1.5 * torch.sigmoid(0.3 * (best - z))
        )
        / 3
    )


@pytest.mark.parametrize(
    ("kind", "settings", "rows", "expected"),
    first_only(
        [
            (SFT, {}, CHATS, sft),
            (KTO, {"beta": 0.3, "desirable_weight": 1.5}, LABELED, kto),
            (DPO, {"beta": 0.3, "margin": 0.2, "label_smoothing": 0.1}, PAIRS, dpo),
            (DPO, {"loss_type": "ipo"}, PAIRS, ipo),
            (DPO, {"loss_type": "simpo"}, PAIRS, simpo),
            (DPO, {"loss_type": "orpo"}, PAIRS, orpo),
        ],
        3,
    ),
    ids=["SFT", "KTO", "DPO", "IPO", "SimPO", "ORPO"],
)
def test_a_recipe_trains_with_the_gradient_of_plain_autograd(
    kind: Any, settings: dict[str, Any], rows: Any, expected: Any, trainer64: EmbeddedTrainer
) -> None:  # R4.3, R1.11
    differences: list[float] = []
    with embedded_service(trainer64) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1)
        module = kind(client, learning_rate=1e-2, **settings)
        data = module.datums(rows)
        with torch.no_grad(), logprobs_of(trainer64, client.model_id, data) as (reference, _):
            pass  # a new adapter changes nothing
        step = client.optim_step

        def compared(params: Any = None) -> Any:
            client.forward(data[:1], "cross_entropy").result()  # behind what was sent before
            got = gathered(trainer64, client.model_id).clone()
            with logprobs_of(trainer64, client.model_id, data) as (logprobs, parameters):
                gradients = torch.autograd.grad(expected(data, logprobs, reference), list(parameters.values()))
            wanted = torch.cat([gradient.flatten() for gradient in gradients])
            differences.append(((got - wanted).norm() / wanted.norm()).item())
            return step(params)

        client.optim_step = compared  # type: ignore[method-assign, assignment]
        quiet(max_steps=3).fit(module, DataLoader(rows, batch_size=len(rows), collate_fn=collate))
    assert len(differences) == 3
    assert max(differences) < 1e-5  # the protocol carries float32


@pytest.mark.parametrize("n", first_only([3, 1]))
def test_the_references_cost_no_wait(n: int, tmp_path: Path) -> None:  # R5.6
    server = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    transport = Distant(httpx.ASGITransport(create_app(server)))
    with (
        ServiceClient(base_url="http://embedded", transport=transport) as service,
        pytest.MonkeyPatch.context() as patch,
    ):
        module = DPO(service.create_lora_training_client("tiny", rank=2, seed=1))
        trace = Trace(transport, patch)
        trainer = quiet(max_steps=3, accumulate_grad_batches=n, callbacks=[trace])
        rows: Any = [{**pair, "prompt": f"{pair['prompt']} {i}"} for i in range(n) for pair in PAIRS]
        module.tokenizer  # noqa: B018 which a data module fetches before the first step
        trainer.fit(module, DataLoader(rows, batch_size=1, collate_fn=collate))
    server.close()
    assert trace.steps[:3] == [["forward"]] * 3


class Scored:
    """Counts the sequences that a reference scores."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from tinker_lightning.client.sampling import SamplingClient

        self.count = 0
        compute = SamplingClient.compute_logprobs

        def counted(client: Any, prompt: Any) -> Any:
            self.count += 1
            return compute(client, prompt)

        patch.setattr(SamplingClient, "compute_logprobs", counted)


def test_each_answer_is_scored_once_and_never_with_a_cache(
    service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Scored(monkeypatch)
    results = []
    for cache in (None, tmp_path / "reference.sqlite", tmp_path / "reference.sqlite"):
        trainer = quiet(max_epochs=3, num_sanity_val_steps=0)
        module = new(service, DPO, reference_cache=cache)
        trainer.fit(module, PreferenceData(PAIRS, PAIRS, batch_size=2, shuffle=False))
        results.append((scored.count, {name: value.item() for name, value in trainer.callback_metrics.items()}))
        scored.count = 0
    assert [count for count, _ in results] == [6, 6, 0]
    assert results[0][1] == results[1][1] == results[2][1]


def test_dpo_learns_and_logs_what_trl_logs(service: ServiceClient) -> None:  # R3.5, R5.9
    trainer = quiet(max_epochs=15, num_sanity_val_steps=0)
    module = new(service, DPO, beta=0.5)
    trainer.fit(module, PreferenceData(PAIRS, PAIRS, batch_size=3))
    found = trainer.callback_metrics
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert names | {f"val_{name}" for name in names} <= set(found)
    assert found["val_rewards/accuracies"] == 1
    assert found["val_rewards/margins"] > 1
    assert found["val_loss"] < 0.6 * math.log(2)


def test_validation_does_not_depend_on_the_split(service: ServiceClient) -> None:
    module = new(service, DPO)
    quiet(max_steps=3).fit(module, PreferenceData(PAIRS, batch_size=3))
    scores = []
    for size in (1, 2, 3):
        (found,) = quiet().validate(module, PreferenceData(validation=PAIRS, batch_size=size), verbose=False)
        scores.append(found)
    assert "val_chosen_nll" in scores[0]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert scores[0] == pytest.approx(scores[2], rel=1e-5)


def test_a_path_can_be_the_reference(service: ServiceClient) -> None:
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    quiet(max_steps=3).fit(SFT(client, learning_rate=1e-2), ChatData(CHATS))
    path = str(client.save_weights_for_sampler("sft").result().path)
    (found,) = quiet().validate(DPO(client, reference=path), PreferenceData(validation=PAIRS), verbose=False)
    assert found["val_rewards/margins"] == pytest.approx(0, abs=1e-4)  # the model against itself
    (found,) = quiet().validate(DPO(client), PreferenceData(validation=PAIRS), verbose=False)
    assert abs(found["val_rewards/margins"]) > 1e-3  # the model against its base


def test_a_checkpoint_keeps_the_options(tmp_path: Path) -> None:
    with DPO("tiny", rank=2, loss_type="ipo", beta=0.3, base_url="embedded") as module:
        trainer = quiet(max_steps=1)
        trainer.fit(module, PreferenceData(PAIRS))
        trainer.save_checkpoint(tmp_path / "dpo.ckpt")
        with DPO.load_from_checkpoint(tmp_path / "dpo.ckpt") as loaded:
            assert dict(loaded.hparams) == dict(module.hparams)
            assert loaded.hparams["loss_type"] == "ipo"
            data = PreferenceData(validation=PAIRS)
            assert quiet().validate(loaded, data, verbose=False) == quiet().validate(module, data, verbose=False)


def test_sft_lowers_the_loss_of_chats_and_its_loss_can_be_overridden(service: ServiceClient) -> None:
    class Own(SFT):
        def loss(self, data: list[Datum], logprobs: list[Tensor]) -> Any:
            return sft(data, logprobs, [])

    losses = []
    for kind in (SFT, Own):
        trainer = quiet(max_epochs=10, num_sanity_val_steps=0)
        trainer.fit(new(service, kind), ChatData(CHATS, CHATS, batch_size=3, shuffle=False))
        losses.append(trainer.callback_metrics["val_nll"].item())
    assert losses[0] < 4 < math.log(259)  # which is that of a model that knows nothing
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_official_and_flat_datums_are_pairs_too(service: ServiceClient) -> None:
    module = new(service, DPO)
    pairs = module.datums(PAIRS)
    assert module.datums(pairs) == module.datums(list(zip(pairs[::2], pairs[1::2], strict=True))) == pairs
    known = [datum.with_inputs(reference_logprobs=torch.zeros(datum.model_input.length)) for datum in pairs]
    assert module.with_references(known) == known


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([Datum.from_tokens([1, 2, 3])], "the batch has 1 datums, which are not pairs of chosen and rejected"),
        ([{"prompt": "a", "chosen": "x", "rejected": "x"}], "row 0 of the batch: chosen and rejected are equal"),
        ([[Datum.from_tokens([1, 2, 3])] * 4] * 2, "row 0 of the batch has 4 datums .* torch's default one transposes"),
        ([], "the batch has no pairs"),
        ([Datum.from_targets([1, 2], [5, 6], weights=[1, 1])] * 2, "target_tokens are not the next tokens"),
        ({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}, "torch's default collate_fn has turned rows into"),
    ],
)
def test_batches_that_are_no_pairs(batch: Any, message: str, service: ServiceClient) -> None:
    with pytest.raises(InvalidDatum, match=message):
        new(service, DPO).datums(batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "kto"}, "loss_type must be one of dpo, ipo, simpo, orpo, got 'kto'"),
        ({"beta": -0.1}, "dpo: beta must be above 0, got -0.1"),
        ({"loss_type": "orpo", "beta": -0.1}, "orpo: beta must be at least 0, got -0.1"),
        ({"reference": "mine"}, "reference must be 'base' or the tinker:// path of saved sampler weights, got 'mine'"),
        ({"loss_type": "orpo", "margin": 1.0}, "^orpo has no setting 'margin'; it takes beta"),
        ({"label_smoothing": 0.7}, r"label_smoothing must lie in \[0, 0\.5\)"),
    ],
)
def test_options_that_do_not_exist(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        DPO("tiny", **settings)


def test_recommended_learning_rates() -> None:
    assert recommended_lr("meta-llama/Llama-3.2-1B") == pytest.approx(5e-4 * (2000 / 2048) ** 0.781)
    assert recommended_lr("Qwen/Qwen3-8B", batch_size=32) == pytest.approx(5e-4 * (2000 / 4096) ** 0.0775 / 2)
    with pytest.raises(
        InvalidInput, match=r"the configuration of no/such-model cannot be read: .*Choose a learning_rate"
    ):
        recommended_lr("no/such-model")


def test_without_a_network_a_learning_rate_fails_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(InvalidInput, match=r"127\.0\.0\.1:9 cannot be reached .*Choose a learning_rate"):
        recommended_lr("nobody/nothing")


def test_recommended_learning_rates_of_folders(tmp_path: Path) -> None:
    from transformers import GPT2Config, Qwen3Config

    Qwen3Config(hidden_size=1000).save_pretrained(tmp_path / "known")
    GPT2Config().save_pretrained(tmp_path / "unknown")
    assert recommended_lr(str(tmp_path / "known")) == pytest.approx(5e-4 * 2**0.0775)
    with pytest.raises(InvalidInput, match="of the family 'gpt2'; the formula was fitted for llama and qwen"):
        recommended_lr(str(tmp_path / "unknown"))


def test_recipes_are_remote_modules() -> None:
    assert issubclass(SFT, RemoteModule)
    assert issubclass(DPO, RemoteModule)


def test_a_fit_reports_where_its_loss_runs_and_logs_what_the_docs_list(
    service: ServiceClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, retained = RemoteLM.send, list[bool]()

    def watched(lm: RemoteLM, data: Any) -> Any:
        retained.append(lm.retain)
        return sent(lm, data)

    monkeypatch.setattr(RemoteLM, "send", watched)
    rewards = itertools.count()
    prompts = RolloutData(["1?"], rewards=lambda *_, **__: next(rewards), max_tokens=2, group_size=2)
    prices = {"*": {"train": 1.0, "prefill": 1.0, "sample": 1.0}}
    expected = {
        SFT: (ChatData(CHATS, CHATS), "computed on the server in one pass (route 'builtin')"),
        DPO: (PreferenceData(PAIRS, PAIRS), "computed here, from a forward pass that the server keeps"),
        KTO: (PreferenceData(LABELED, LABELED), "computed here, from a forward pass that the server keeps"),
        GRPO: (prompts, "importance_sampling, computed here, from a forward pass that the server keeps"),
    }
    for recipe, (data, line) in expected.items():
        caplog.clear()
        with caplog.at_level("INFO", "tinker_lightning"):
            trainer = quiet(max_steps=1, callbacks=[RemoteMonitor(), CostMonitor(prices)])
            trainer.fit(new(service, recipe), data)
        reports = [record.message for record in caplog.records if record.message.startswith(("Model", "Finished"))]
        assert [line in report for report in reports] == [True, False]
        assert ["$" in report for report in reports] == [True, True]
        if recipe is not GRPO:  # whose metrics are in another page
            named = {f"`{name.removeprefix('val_')}`" for name in trainer.callback_metrics}
            assert {each for each in named if each not in DOCUMENTED} == set()
    assert retained
    assert all(retained)
