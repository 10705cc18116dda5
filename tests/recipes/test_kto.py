"""KTO: mismatched answers, z₀, labels, and errors that help."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import Datum, collate
from tinker_lightning.callbacks import CostMonitor
from tinker_lightning.data import PreferenceData
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.recipes import DPO, KTO

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

ROWS: list[dict[str, Any]] = [
    {"prompt": "How long?", "completion": "For 6 minutes.", "label": True},
    {"prompt": "How hot is it?", "completion": "Hot.", "label": False},
    {"prompt": "How much?", "completion": "About 10 g.", "label": True},
    {"prompt": "How far?", "completion": "Some way.", "label": False},
]
PRICES = {"*": {"train": 1.0, "prefill": 1.0, "sample": 1.0}}
PAIRS = [
    {"prompt": "How long?", "chosen": "For 6 minutes.", "rejected": "It depends."},
    {"prompt": "How hot?", "chosen": "At 200 degrees.", "rejected": "Rather hot."},
]


@pytest.fixture(scope="module")
def module(service: ServiceClient) -> KTO:
    return new(service, KTO)


def weighted(datum: Datum, name: str) -> list[int]:
    targets, weights = (datum.loss_fn_inputs[each].tolist() for each in ("target_tokens", name))
    return [token for token, weight in zip(targets, weights, strict=True) if weight]


def whole(datum: Datum) -> list[int]:
    return [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]


def expected_text(prompt: str, answer: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def texts(module: KTO, data: list[Datum]) -> list[tuple[str, str, str, float]]:
    """Of each datum the whole text, what is trained, what z₀ reads, and the label."""
    decode = module.tokenizer.decode
    return [
        (
            decode(whole(datum)),
            decode(weighted(datum, "weights")),
            decode(weighted(datum, "kl_weights")),
            datum.loss_fn_inputs["label"].tolist(),
        )
        for datum in data
    ]


def test_each_answer_is_followed_by_its_prompt_with_the_answer_of_the_next_row(module: KTO) -> None:  # R3.5
    expected = []
    for row, following in zip(ROWS, [*ROWS[1:], ROWS[0]], strict=True):
        answer, other = row["completion"], following["completion"]
        expected.append((expected_text(row["prompt"], answer), f"{answer}<|im_end|>", "", float(row["label"])))
        expected.append((expected_text(row["prompt"], other), "", f"{other}<|im_end|>", float(row["label"])))
    assert texts(module, module.datums(ROWS)) == expected
    assert texts(module, module.datums(module.datums(ROWS)[::2])) == expected  # of datums with a label


def test_trl_chats_and_labeled_messages_are_the_same_rows(module: KTO) -> None:
    def chats(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        asked = [{"role": "user", "content": row["prompt"]}]
        answered = [{"role": "assistant", "content": row["completion"]}]
        trl = {"prompt": asked, "completion": answered, "label": row["label"], "chosen": None}
        return trl, {"messages": asked + answered, "label": row["label"]}

    for rows in zip(*map(chats, ROWS), strict=True):
        assert module.datums(list(rows)) == module.datums(ROWS)


def test_the_label_of_a_chat_is_that_of_its_last_answer(module: KTO) -> None:
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    data = module.datums([{"messages": messages, "label": True}, ROWS[0]])
    assert module.tokenizer.decode(weighted(data[0], "weights")) == "d<|im_end|>"


def test_of_a_pair_one_answer_is_desirable_and_no_prompt_meets_its_own_other_answer(module: KTO) -> None:
    data = texts(module, module.datums(PAIRS))
    assert [(trained, label) for _, trained, _, label in data[::2]] == [
        ("For 6 minutes.<|im_end|>", 1.0),
        ("At 200 degrees.<|im_end|>", 1.0),
        ("It depends.<|im_end|>", 0.0),
        ("Rather hot.<|im_end|>", 0.0),
    ]
    mixed = [("How long?", "At 200 degrees."), ("How hot?", "It depends.")]
    mixed += [("How long?", "Rather hot."), ("How hot?", "For 6 minutes.")]
    assert [text for text, *_ in data[1::2]] == [expected_text(*each) for each in mixed]
    (loaded,) = (PreferenceData(PAIRS, tokenizer=module.tokenizer, shuffle=False),)
    loaded.setup("fit")
    assert texts(module, module.datums(next(iter(loaded.train_dataloader())))) == data


def test_a_mismatched_answer_is_cut_to_the_context(module: KTO) -> None:
    context = module.lm.backend.max_context_length()
    assert context is not None
    rows = [
        {"prompt": "a" * (context // 2), "completion": "b", "label": True},
        {"prompt": "c", "completion": "d" * (context - 60), "label": False},
    ]
    _, mismatched, _, short = module.datums(rows)
    assert len(whole(mismatched)) == context
    assert module.tokenizer.decode(weighted(mismatched, "kl_weights")) == "d" * len(weighted(mismatched, "kl_weights"))
    assert module.tokenizer.decode(whole(short)) == expected_text("c", "b")


def test_kto_learns_and_counts_the_tokens_of_its_estimate(service: ServiceClient) -> None:  # R5.9
    costs = []
    for kl in (True, False):
        trainer = quiet(max_epochs=20, num_sanity_val_steps=0, callbacks=[CostMonitor(PRICES)])
        module = new(service, KTO, kl=kl, beta=0.5, learning_rate=5e-3)
        trainer.fit(module, PreferenceData(ROWS, ROWS, batch_size=4))
        found = trainer.callback_metrics
        assert ("val_kl" in found) == kl
        assert found["val_rewards/accuracies"] == 1
        assert found["val_rewards/chosen"] > found["val_rewards/rejected"]
        assert found["val_loss"] < 0.3  # 0.5 at the reference
        costs.append(found["cost/tokens_trained"].item())
    assert costs[0] > 1.8 * costs[1]


def test_validation_and_predictions_take_labeled_rows(service: ServiceClient, tmp_path: Path) -> None:
    with KTO("tiny", rank=2, beta=0.3, kl=False, base_url="embedded") as module:
        trainer = quiet(max_steps=1)
        data = PreferenceData(ROWS, PAIRS, test=ROWS, batch_size=2)
        trainer.fit(module, data)
        trainer.save_checkpoint(tmp_path / "kto.ckpt")
        with KTO.load_from_checkpoint(tmp_path / "kto.ckpt") as loaded:
            assert dict(loaded.hparams) == dict(module.hparams)
            assert loaded.hparams["kl"] is False
        assert "test_rewards/margins" in quiet().test(module, data, verbose=False)[0]
        predicted = quiet().predict(module, data)
    assert predicted is not None
    assert sum(map(len, predicted)) == len(ROWS)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([{**ROWS[0], "label": 1}, ROWS[1]], "row 0 of the batch: the label of an answer must be true .* but it is 1"),
        ([{**ROWS[0], "label": "yes"}, ROWS[1]], "but it is 'yes'"),
        (
            [ROWS[1], {"prompt": "a", "completion": "b"}],
            "row 1 of the batch: .* for KTO prompt, completion and label",
        ),
        ([ROWS[0]], "the micro-batch has one row, but KTO scores each prompt with the answer of another row"),
        (PAIRS[:1], "the micro-batch has one row"),
        ([], "the batch has no answers"),
        ([Datum.from_tokens([1, 2, 3])] * 2, r"row 0 of the batch is a datum without a label\. Use PreferenceData"),
        ([Datum.from_tokens([1, 2], [0, 0]).with_inputs(label=1.0)] * 2, "row 0 .* none of its tokens has a weight"),
        (["text", "text"], "row 0 of the batch must be a dict with prompt, completion and label, .* got str"),
        ({"prompt": ["a"], "completion": ["b"], "label": [True]}, "torch's default collate_fn has turned rows into"),
    ],
)
def test_batches_that_are_no_labeled_answers(batch: Any, message: str, module: KTO) -> None:
    with pytest.raises(InvalidDatum, match=message):
        module.datums(batch)


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_last_batch_of_one_row_raises_before_the_first_step(part: str, service: ServiceClient) -> None:
    module = new(service, KTO)
    parts = {"train": ROWS, "validation": ROWS, "test": ROWS, part: ROWS[:3]}
    data = PreferenceData(**parts, batch_size=2)  # type: ignore[arg-type]
    message = "the last of 2 micro-batches has one of the 3 rows, .*batch_size, .*drop_last=True .*kl=False"
    with pytest.raises(InvalidInput, match=message):
        (quiet().test if part == "test" else quiet().fit)(module, data)
    assert module.global_step == 0
    new_module = new(service, KTO, kl=False)
    (quiet().test if part == "test" else quiet().fit)(new_module, data)
    if part == "train":
        dropped: Any = DataLoader(ROWS[:3], batch_size=2, drop_last=True, collate_fn=collate)  # type: ignore[arg-type]
        quiet(max_epochs=1).fit(module, dropped)


@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_labels_that_are_all_equal_are_a_warning(label: bool, loaded: bool, service: ServiceClient) -> None:
    rows = [{**row, "label": label} for row in ROWS]
    loader: Any = DataLoader(rows, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    name = "desirable" if label else "undesirable"
    with pytest.warns(UserWarning, match=f"all 4 training rows are {name}, but KTO learns from the difference"):
        quiet(max_steps=1).fit(new(service, KTO), PreferenceData(rows, batch_size=2) if loaded else loader)


def test_bad_rows_of_a_file_are_named_or_skipped(module: KTO) -> None:
    rows = [*ROWS, {**ROWS[0], "label": "good"}]
    with pytest.raises(InvalidDatum, match="row 4: the label of an answer must be true"):
        PreferenceData(rows, tokenizer=module.tokenizer).setup("fit")
    data = PreferenceData(rows, tokenizer=module.tokenizer, bad_rows="skip")
    data.setup("fit")
    assert (data.report["train"]["rows"], data.report["train"]["skipped"]) == (4, 1)


def test_dpo_names_the_recipe_of_labeled_answers(service: ServiceClient, module: KTO) -> None:
    for batch in (module.datums(ROWS)[::2], ROWS):
        with pytest.raises(InvalidDatum, match=re.escape("row 0 of the batch")) as caught:
            new(service, DPO).datums(batch)
        assert "KTO" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, "^kto: beta must be above 0, got 0"),
        ({"undesirable_weight": -1.0}, "^kto: desirable_weight and undesirable_weight must be at least 0, got 1.0 and"),
        ({"kl": "no"}, "^kl of kto must be True or False, got 'no'"),
        ({"reference": "mine"}, "reference must be 'base' or the tinker:// path of saved sampler weights, got 'mine'"),
    ],
)
def test_options_that_do_not_exist(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        KTO("tiny", **settings)


def test_the_estimate_has_no_gradient(module: KTO) -> None:
    data = module.with_references(module.datums(ROWS))
    logprobs = [
        each.loss_fn_inputs["reference_logprobs"].to_torch().clone().requires_grad_() + 0.1 * (i % 2)
        for i, each in enumerate(data)
    ]
    loss, metrics = module.loss(data, logprobs)
    gradients = torch.autograd.grad(loss, logprobs)
    assert metrics["kl"] > 0
    assert [bool(gradient.any()) for gradient in gradients] == [True, False] * len(ROWS)
