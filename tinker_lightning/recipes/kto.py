"""Preference optimization on single answers, each with a label."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from tinker_lightning import losses
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.losses.library import check_settings
from tinker_lightning.recipes.references import References, check_reference, whole_sequence
from tinker_lightning.rows.batches import convert_row
from tinker_lightning.rows.formats import DatumLike, RowFormat
from tinker_lightning.types import Datum
from tinker_lightning.types.datum import to_datum

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from tinker_lightning.lightning.hyperparameters import ModelSettings, Unpack
_NO_OTHER = (
    "but KTO scores each prompt with the answer of another row. Choose another batch_size, of at least 2, or pass "
    "drop_last=True to the DataLoader, or kl=False to KTO"
)


class KTO(RemoteModule):
    """Trains a model on answers that are desirable or undesirable, without pairs (arXiv:2402.01306).

    Takes batches of `PreferenceData`, and loaders of dicts with `prompt`, `completion` and `label` (true or false), or
    of datums with an input `label` (1 or 0). Of a pair, the chosen answer is desirable and the rejected one not.
    Override `loss(self, data, logprobs)` to train with another loss; its datums have `reference_logprobs`.

    An answer is compared with `z₀`, an estimate of how far the model has moved from the reference: each prompt of a
    micro-batch is also scored with the answer of the next row. These tokens are part of the forward pass and of its
    cost, and have no gradient. A micro-batch needs at least two rows, better eight.

    ```text
    prompt 1, answer 1 ──► gain 1 ──┐            prompt 1, answer 2 ──┐
    prompt 2, answer 2 ──► gain 2 ──┼─► loss ◄── prompt 2, answer 3 ──┼── z₀: their mean gain, at least 0
    prompt 3, answer 3 ──► gain 3 ──┘            prompt 3, answer 1 ──┘
    ```

    The reference log-probabilities are requested together with the forward pass of the model.

    Logs `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`, `chosen_nll` and `kl`, which is
    `z₀`, for each step, and the same with `val_` in front as means over the validation batches.

    Args:
        model: The name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
        beta: The strength of the pull towards the reference.
        desirable_weight: The weight of desirable answers.
        undesirable_weight: The weight of undesirable answers. Choose the weights so that weight times number of answers
            is about equal for both.
        kl: Whether to estimate `z₀`; without it, it is 0, as with `loss_type="apo_zero_unpaired"` of TRL.
        reference: `base` for the base model, or the `tinker://` path of saved sampler weights.
        reference_cache: A file that keeps the reference log-probabilities by content, for other runs on the same data.
        **settings: The other arguments of `RemoteModule`: `rank`, `learning_rate`, `schedule`, `predict` and others.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        kl: bool = True,
        reference: str = "base",
        reference_cache: str | Path | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(model, **settings)
        self._kl = kl
        self._kto = functools.partial(
            losses.kto, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight, kl=kl
        )
        try:
            check_settings(self._kto, {})
        except InvalidInput as error:
            raise InvalidInput(str(error).removeprefix("loss_fn_config: ")) from None
        check_reference(reference)
        self._references = References(self.lm, reference, reference_cache)

    @override
    def on_fit_start(self) -> None:
        """Opens the reference model before the first step."""
        self._references.open()

    @override
    def on_train_start(self) -> None:
        """Checks the batches and labels of training rows that are in memory."""
        loader = self.trainer.train_dataloader
        self._check_last_batches(loader, [self.trainer.num_training_batches])
        rows: Any = getattr(loader, "dataset", None)
        labels = set().union(*map(_labels, rows)) if isinstance(rows, Sequence) else set()
        if len(labels) == 1:
            warnings.warn(
                f"all {len(rows)} training rows are {'desirable' if labels.pop() else 'undesirable'}, but KTO learns "
                "from the difference. Add rows with the other label; to train on desirable answers alone, use SFT.",
                stacklevel=2,
            )

    @override
    def on_validation_start(self) -> None:
        """Checks the validation batches before the first one."""
        self._check_last_batches(self.trainer.val_dataloaders, self.trainer.num_val_batches)

    @override
    def on_test_start(self) -> None:
        """Checks the test batches before the first one."""
        self._check_last_batches(self.trainer.test_dataloaders, self.trainer.num_test_batches)

    @override
    def datums(self, batch: Any) -> list[Any]:
        """Returns the datums of a batch, each answer followed by its mismatched one, and requests their references."""
        items = batch if isinstance(batch, Sequence) and not isinstance(batch, str) else [batch]
        if not items:
            raise InvalidDatum("the batch has no answers; drop empty batches in the loader")
        answers = [self._answers(i, item) for i, item in enumerate(items)]
        if self._kl and len(answers) == 1:
            raise InvalidDatum(f"the micro-batch has one row, {_NO_OTHER}")
        # The chosen answers of pairs precede the rejected ones, so that the next answer has another prompt.
        data = [each for column in itertools.zip_longest(*answers) for each in column if each is not None]
        if self._kl:
            following = [*data[1:], data[0]]
            data = [each for pair in zip(data, following, strict=True) for each in self._with_mismatched(*pair)]
        self._references.request(data)
        return data

    @override
    def loss(self, data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
        """Returns the loss of answers, each followed by its mismatched one, and their rewards. Override it."""
        return self._kto(self.with_references(data), logprobs)

    def with_references(self, data: list[Any]) -> list[Any]:
        """Returns datums with `reference_logprobs`; waits for pending requests."""
        return self._references.add_to(data)

    @functools.cached_property
    def _context(self) -> int | None:
        return self.lm.backend.max_context_length()

    def _check_last_batches(self, loaders: Any, limits: Sequence[float]) -> None:
        """Raises `InvalidInput` if a loader will end with a micro-batch of one row."""
        for loader, limit in zip(loaders if isinstance(loaders, list) else [loaders], limits, strict=False):
            rows, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
            if not self._kl or not isinstance(rows, Sequence) or not size or loader.drop_last:
                continue
            if len(rows) % size == 1 and limit == len(loader):
                raise InvalidInput(
                    f"the last of {len(loader)} micro-batches has one of the {len(rows)} rows, {_NO_OTHER}"
                )

    def _answers(self, index: int, item: Any) -> list[Datum]:
        """Returns the answer of a row, or the chosen and the rejected one of a pair, with their labels."""
        if isinstance(item, Mapping):
            item = convert_row(index, RowFormat(self.tokenizer).preference, item)
        if isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(each, DatumLike) for each in item):
            return [to_datum(each).with_inputs(label=label) for each, label in zip(item, (1.0, 0.0), strict=True)]
        if not isinstance(item, DatumLike):
            raise InvalidDatum(
                f"row {index} of the batch must be a dict with prompt, completion and label, a datum with an input "
                f"label, or a pair, got {type(item).__name__}. Use PreferenceData, or pass "
                "collate_fn=tinker_lightning.collate to the DataLoader."
            )
        if "label" not in item.loss_fn_inputs:
            raise InvalidDatum(
                f"row {index} of the batch is a datum without a label. Use PreferenceData with rows that have prompt, "
                "completion and label, or add one: datum.with_inputs(label=1.0), or 0.0 if it is undesirable."
            )
        datum = to_datum(item)
        if "weights" not in datum.loss_fn_inputs or not datum.loss_fn_inputs["weights"].to_numpy().any():
            raise InvalidDatum(
                f"row {index} of the batch: none of its tokens has a weight. Build it with "
                "Datum.from_tokens(tokens, weights): 0 on the prompt, 1 on the answer."
            )
        return [datum]

    def _with_mismatched(self, answer: Datum, following: Datum) -> list[Datum]:
        """Returns an answer, and its prompt with the following answer, cut to the context of the model."""
        (tokens, weights, start), (other, other_weights, other_start) = map(_split, (answer, following))
        mixed = np.concatenate([tokens[: start + 1], other[other_start + 1 :]])[: self._context]
        mixed_weights = np.concatenate([np.zeros(start, np.float32), other_weights[other_start:]])[: len(mixed) - 1]
        mismatched = Datum.from_targets(
            mixed[:-1],
            mixed[1:],
            weights=np.zeros_like(mixed_weights),
            kl_weights=mixed_weights,
            label=answer.loss_fn_inputs["label"],
        )
        return [answer.with_inputs(kl_weights=np.zeros_like(weights)), mismatched]


def _labels(row: Any) -> set[bool]:
    """Returns the labels of a training row; both for a pair, and for a row that will raise when it is converted."""
    if isinstance(row, DatumLike):
        return {bool(row.loss_fn_inputs["label"].tolist())} if "label" in row.loss_fn_inputs else set()
    label = row.get("label") if isinstance(row, Mapping) else None
    return {label} if isinstance(label, bool) else {True, False}


def _split(datum: Datum) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
    """Returns the tokens of an answer with its prompt, the weights of its targets, and the first target with one."""
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    return whole_sequence(datum), weights, int(np.flatnonzero(weights)[0])
