"""`val_loss` is the module's own loss on validation data, averaged over batches as the loss reduces."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.loss_cases import batch
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import Datum, LossFnOutput, Regularizer, RemoteModule, collate, custom_loss, losses
from tinker_lightning.errors import InvalidLoss, LossNotFinite
from tinker_lightning.losses import regularizers
from tinker_lightning.losses.regularizers import composition

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

# Datums of different lengths; two to a batch, and one batch of two pairs.
DATA = [*batch(0)[0], *batch(1)[0]][:6]
TEXTS = [Datum.from_tokens(list(f"text {i}: {'hello ' * (3 * i)}".encode())) for i in range(3)]


def made(service: ServiceClient, **attributes: Any) -> RemoteModule:
    kind: type[RemoteModule] = type("Module", (RemoteModule,), attributes)
    return new(service, kind)


def validated(module: RemoteModule, data: list[Datum], size: int = 2) -> dict[str, float]:
    loader: Any = DataLoader(data, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]
    (scores,) = quiet().validate(module, loader, verbose=False)
    (tested,) = quiet().test(module, loader, verbose=False)
    assert tested == pytest.approx({name.replace("val_", "test_", 1): score for name, score in scores.items()})
    return dict(scores)


def logprobs_of(module: RemoteModule, data: list[Datum]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(module.lm(data))


def token_mean(total: torch.Tensor, data: list[Datum]) -> float:
    weight = sum(float(datum.loss_fn_inputs["weights"].to_torch().sum()) for datum in data)
    return total.item() / weight


@pytest.mark.parametrize("route", ["auto", "two-pass"])
@pytest.mark.parametrize("loss", [None, "cross_entropy", losses.cross_entropy], ids=["default", "name", "library"])
def test_a_mean_over_tokens_is_one_over_all_tokens(service: ServiceClient, loss: Any, route: str) -> None:
    module = made(service, route=route, **({} if loss is None else {"loss": loss}))
    scores = validated(module, TEXTS)
    expected = token_mean(losses.cross_entropy(TEXTS, logprobs_of(module, TEXTS))[0], TEXTS)
    assert scores["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert scores["val_nll"] == pytest.approx(expected, rel=1e-5)
    assert scores.keys() == {"val_loss", "val_nll", "val_perplexity", "val_tokens"}
    assert scores["val_tokens"] == sum(datum.model_input.length for datum in TEXTS)


@pytest.mark.parametrize("route", ["auto", "two-pass"])
def test_action_tokens_weigh_the_batches_of_a_policy_loss(service: ServiceClient, route: str) -> None:
    module = made(service, loss="ppo", route=route)
    silent = [datum.with_inputs(advantages=torch.zeros(datum.model_input.length)) for datum in DATA[:2]]
    scores = validated(module, [*DATA, *silent])  # whose batch does not count
    total, metrics = losses.ppo(DATA, logprobs_of(module, DATA))
    assert scores["val_loss"] == pytest.approx(total.item() / int(metrics["action_tokens"]), rel=1e-4)
    for name in ("ratio", "kl_old_new", "clip_fraction", "action_tokens"):
        assert scores[f"val_{name}"] == pytest.approx(metrics[name].item(), rel=1e-4), name


@pytest.mark.parametrize("loss", [losses.dpo, losses.grpo, losses.reinforce])
def test_pairs_and_sequences_weigh_the_batches_of_other_losses(service: ServiceClient, loss: Any) -> None:
    settings = {"baseline": 0.0} if loss is losses.reinforce else {}
    module = made(service, loss=loss, loss_config=settings)
    scores = validated(module, DATA, size=4)  # and a batch of two
    expected, _ = loss(DATA, logprobs_of(module, DATA), **settings)
    assert scores["val_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert scores["val_loss"] != pytest.approx(scores["val_nll"], rel=1e-2)


def test_a_custom_loss_is_weighed_by_datum(service: ServiceClient) -> None:
    def loss(_: Any, data: Any, logprobs: Any) -> Any:
        worst = torch.stack([-each.min() for each in logprobs])
        return worst.mean(), {"spread": worst.max() - worst.min()}

    module = made(service, loss=loss)
    scores = validated(module, DATA, size=4)
    expected = torch.stack([-each.min() for each in logprobs_of(module, DATA)]).mean()
    assert scores["val_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert "val_spread" in scores


def test_regularizers_are_part_of_it(service: ServiceClient) -> None:  # R2.4
    terms = (Regularizer(regularizers.sparsity, 0.5, "sparsity"),)
    for attributes in ({"route": "two-pass"}, {"route": "builtin", "loss": "cross_entropy"}):
        module = made(service, regularizers=terms, **attributes)
        scores = validated(module, TEXTS[:2])
        logprobs = logprobs_of(module, TEXTS[:2])
        base = token_mean(losses.cross_entropy(TEXTS[:2], logprobs)[0], TEXTS[:2])
        with torch.no_grad():
            total, telemetry = composition.evaluate(TEXTS[:2], logprobs, None, terms, step=0)
        assert scores["val_loss"] == scores["val_loss_total"] == pytest.approx(base + total.item(), rel=1e-5)
        assert scores["val_base_loss/value"] == pytest.approx(base, rel=1e-5)
        told = telemetry["regularizers"]["sparsity"]
        assert scores["val_regularizers/sparsity/custom/active"] == pytest.approx(told["custom"]["active"], rel=1e-5)


@pytest.mark.parametrize("regularized", [False, True])
def test_a_loss_on_logits_is_evaluated_on_the_server(service: ServiceClient, regularized: bool) -> None:
    @custom_loss(service, name=f"brevity_{regularized}".lower())
    def brevity(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        loss = -(logprobs * attention_mask).sum()
        return LossFnOutput(loss, logprobs, {"total": loss.item()})

    terms = (Regularizer(regularizers.sparsity, 0.5, "sparsity"),) if regularized else ()
    module = made(service, loss=brevity, regularizers=terms)
    scores = validated(module, TEXTS[:2])
    base = -torch.cat(logprobs_of(module, TEXTS[:2])).sum().item()
    added = scores["val_regularizer_total"] if regularized else 0.0
    assert scores["val_loss"] == pytest.approx(base + added, rel=1e-5)
    assert scores["val_base_loss/total" if regularized else "val_total"] == pytest.approx(base, rel=1e-5)


def by_key(_: Any, data: Any, logprobs: Any) -> Any:
    references = [datum.loss_fn_inputs["reference_logprobs"].to_torch() for datum in data]
    return (torch.cat(references) - torch.cat(logprobs)).sum()


def by_get(_: Any, data: Any, logprobs: Any) -> Any:
    references = [datum.loss_fn_inputs.get("reference_logprobs").to_torch() for datum in data]
    return (torch.cat(references) - torch.cat(logprobs)).sum()


def by_attribute(_: Any, data: Any, logprobs: Any) -> Any:
    return torch.stack([datum.reward * each.sum() for datum, each in zip(data, logprobs, strict=True)]).sum()


def of_batch(_: Any, batch: Any) -> Any:
    return {"advantages": torch.stack([datum.advantages for datum in batch])}


def of_rows(_: Any, batch: Any) -> Any:
    return {"advantages": torch.stack([datum.loss_fn_inputs["advantages"].to_torch() for datum in batch])}


MISSING: dict[str, dict[str, Any]] = {
    "by name": {"loss": "ppo"},
    "library": {"loss": losses.dpo},
    "key": {"loss": by_key},
    "get": {"loss": by_get},
    "attribute": {"loss": by_attribute},
    "regularizer": {"regularizers": (Regularizer(lambda data, lp: by_key(None, data, lp), 0.1, "kl"),)},
    "batch": {"loss": "ppo", "loss_fn_inputs": of_batch},
    "rows of the batch": {"loss": "ppo", "loss_fn_inputs": of_rows},
    "unknown to the server": {"loss": "unknown_loss"},
}


@pytest.mark.parametrize("kind", MISSING)
def test_data_without_an_input_of_the_loss_have_no_val_loss_and_one_warning(service: ServiceClient, kind: str) -> None:
    module = made(service, **MISSING[kind])
    loader: Any = DataLoader(TEXTS, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="val_loss is not logged, because the loss cannot be evaluated on") as caught:
        (scores,) = quiet().validate(module, loader, verbose=False)
    assert len([each for each in caught if "val_loss" in str(each.message)]) == 1
    assert scores.keys() == {"val_nll", "val_perplexity"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        quiet().validate(module, loader, verbose=False)


def test_a_server_that_returns_no_value_has_no_val_loss(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    @custom_loss(service, name="valueless")
    def valueless(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        return LossFnOutput(-(logprobs * attention_mask).sum(), logprobs, {})

    module = made(service, loss=valueless)
    forward = type(module.lm.backend).forward

    def without_value(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).then(lambda output: replace(output, metrics={}))

    monkeypatch.setattr(type(module.lm.backend), "forward", without_value)
    loader: Any = DataLoader(TEXTS, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="val_loss is not logged, because .*: .* does not return its value") as caught:
        (scores,) = quiet().validate(module, loader, verbose=False)
    assert len([each for each in caught if "val_loss" in str(each.message)]) == 1
    assert scores.keys() == {"val_nll", "val_perplexity"}


BUGS: dict[str, Any] = {
    "KeyError": lambda _, logprobs: {"nll": torch.cat(logprobs).sum()}["loss"],
    "AttributeError": lambda _, logprobs: torch.cat(logprobs).summ(),  # type: ignore[attr-defined]
    "TypeError": lambda _, logprobs: torch.cat(logprobs) * [None],
    "InvalidInput": lambda _, logprobs: losses.kl_estimate(logprobs[0], logprobs[0], "k4"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_loss_raises(service: ServiceClient, name: str, optional: bool) -> None:
    def loss(_: Any, data: Any, logprobs: Any) -> Any:
        if optional:
            assert data[0].loss_fn_inputs.get("reference_logprobs") is None
        return BUGS[name](data, logprobs)

    with pytest.raises(Exception) as caught:  # noqa: PT011
        validated(made(service, loss=loss), TEXTS)
    assert type(caught.value).__name__ == name


@pytest.mark.parametrize("bug", [KeyError(), KeyError("advantages")])
def test_a_bug_of_the_inputs_raises(service: ServiceClient, bug: KeyError) -> None:
    def inputs(_: Any, batch: Any) -> Any:
        raise bug  # of a dict of the user's, not of the batch

    with pytest.raises(KeyError) as caught:
        validated(made(service, loss="ppo", loss_fn_inputs=inputs), TEXTS)
    assert caught.value is bug


def test_a_bug_of_a_loss_on_the_server_raises(service: ServiceClient) -> None:
    @custom_loss(service, name="broken", trace=False)
    def broken(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        raise RuntimeError("a bug")

    with pytest.raises(InvalidLoss, match="it raised RuntimeError: a bug"):
        validated(made(service, loss=broken), TEXTS)


@pytest.mark.parametrize("first", [True, False])
def test_a_single_batch_without_an_input_leaves_out_val_loss(service: ServiceClient, first: bool) -> None:
    mixed = [*TEXTS[:2], *DATA[:2]] if first else [*DATA[:2], *TEXTS[:2]]
    module = made(service, loss=by_key)
    others: Any = DataLoader(DATA[:4], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    loader: Any = DataLoader(mixed, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    trainer = quiet()
    with pytest.warns(UserWarning, match="val_loss is not logged"):
        (scores,) = trainer.validate(module, loader, verbose=False)
    assert scores.keys() == trainer.callback_metrics.keys() == {"val_nll", "val_perplexity"}
    (_, scores) = quiet().validate(module, [loader, others], verbose=False)
    assert {"val_loss/dataloader_idx_1", "val_nll/dataloader_idx_1"} <= scores.keys()
    assert "val_loss" in quiet().validate(module, others, verbose=False)[0]


def test_a_loss_that_is_not_finite_raises_in_validation_too(service: ServiceClient) -> None:
    module = made(service, loss=lambda _, logprobs: torch.cat(logprobs).sum() / 0.0)
    with pytest.raises(LossNotFinite):
        validated(module, TEXTS)
