"""Preference optimization: DPO, IPO, SimPO and ORPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from tinker_lightning import losses
from tinker_lightning.errors import InvalidDatum, InvalidInput, check_choice
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.losses.library import check_settings
from tinker_lightning.recipes.references import References, check_reference
from tinker_lightning.rows.batches import convert_row
from tinker_lightning.rows.formats import DatumLike, RowFormat
from tinker_lightning.types.datum import to_datum

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from tinker_lightning.lightning.hyperparameters import ModelSettings, Unpack
    from tinker_lightning.types import Datum

LOSSES: dict[str, Callable[..., Any]] = {
    "dpo": losses.dpo,
    "ipo": losses.ipo,
    "simpo": partial(losses.dpo, beta=2.0, margin=1.0, length_normalized=True, reference_free=True),
    "orpo": losses.orpo,
}
_WITH_REFERENCE = ("dpo", "ipo")


class DPO(RemoteModule):
    """Trains a model to prefer the chosen of two answers to the rejected one.

    Takes batches of `PreferenceData`, and loaders of dicts with `prompt`, `chosen` and `rejected`, of pairs of datums,
    or of datums in the order chosen, rejected. Override `loss(self, data, logprobs)` to train with another loss of the
    pairs; its datums have `reference_logprobs`.

    The reference log-probabilities are requested together with the forward pass of the model, so that a step waits
    once, and each answer is scored once per run. Datums that have `reference_logprobs` keep their own.

    Logs `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies` and `chosen_nll` for each step,
    and the same with `val_` in front over all validation pairs.

    Args:
        model: The name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
        loss_type: `dpo`; `ipo`, a bounded gap; `simpo` and `orpo`, which need no reference. See `losses.dpo`,
            `losses.ipo` and `losses.orpo`; SimPO is `losses.dpo` with length normalization and without a reference.
        beta: The strength of the pull towards the reference, or, in ORPO, the weight of the preferences. By default
            0.1, for SimPO 2.
        margin: The margin by which the chosen reward must win: by default 0, for SimPO 1. Not for IPO and ORPO.
        label_smoothing: The share of pairs whose labels may be wrong. Not for IPO and ORPO.
        length_normalized: Whether to divide each answer's gain by its length: by default no, for IPO and SimPO yes.
            Not for ORPO.
        reference: `base` for the base model, or the `tinker://` path of saved sampler weights.
        reference_cache: A file that keeps the reference log-probabilities by content, for other runs on the same data.
        **settings: The other arguments of `RemoteModule`: `rank`, `learning_rate`, `schedule`, `predict` and others.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        loss_type: Literal["dpo", "ipo", "simpo", "orpo"] = "dpo",
        beta: float | None = None,
        margin: float | None = None,
        label_smoothing: float | None = None,
        length_normalized: bool | None = None,
        reference: str = "base",
        reference_cache: str | Path | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(model, **settings)
        check_choice("loss_type", loss_type, LOSSES)
        options = {
            "beta": beta,
            "margin": margin,
            "label_smoothing": label_smoothing,
            "length_normalized": length_normalized,
        }
        loss_settings = {name: value for name, value in options.items() if value is not None}
        try:
            check_settings(LOSSES[loss_type], loss_settings)
        except InvalidInput as error:
            raise InvalidInput(str(error).removeprefix("loss_fn_config: ")) from None
        check_reference(reference)
        self._preference_loss = partial(LOSSES[loss_type], **loss_settings)
        self._references: References | None = None
        if loss_type in _WITH_REFERENCE:
            self._references = References(self.lm, reference, reference_cache)

    @override
    def on_fit_start(self) -> None:
        """Opens the reference model before the first step."""
        if self._references is not None:
            self._references.open()

    @override
    def datums(self, batch: Any) -> list[Any]:
        """Returns the datums of a batch of pairs, chosen and rejected in turn, and requests their references."""
        items = batch if isinstance(batch, Sequence) and not isinstance(batch, str) else [batch]
        if not items:
            raise InvalidDatum("the batch has no pairs; drop empty batches in the loader")
        data = [datum for i, item in enumerate(items) for datum in self._pair_datums(i, item)]
        if len(data) % 2:
            raise InvalidDatum(
                f"the batch has {len(data)} datums, which are not pairs of chosen and rejected. Let each row of the "
                "loader be a pair, and shuffle those."
            )
        for i in range(0, len(data), 2):
            if not _same_prompt(to_datum(data[i]), to_datum(data[i + 1])):
                raise InvalidDatum(
                    f"datums {i} and {i + 1} of the batch are not a chosen and a rejected answer: their tokens before "
                    "the first weight differ. Use PreferenceData, or rows with prompt, chosen and rejected; with pairs "
                    "of datums, pass collate_fn=tinker_lightning.collate to the DataLoader."
                )
        if self._references is not None:
            self._references.request(data)
        return data

    @override
    def loss(self, data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
        """Returns the loss of pairs, chosen and rejected in turn, and their rewards. Override it."""
        return self._preference_loss(self.with_references(data), logprobs)  # type: ignore[no-any-return]

    def with_references(self, data: list[Any]) -> list[Any]:
        """Returns datums with `reference_logprobs`; waits for pending requests."""
        return data if self._references is None else self._references.add_to(data)

    def _pair_datums(self, index: int, item: Any) -> Sequence[Any]:
        if isinstance(item, DatumLike):
            if "label" in item.loss_fn_inputs:
                raise InvalidDatum(f"row {index} of the batch is an answer with a label, which only KTO trains on")
            return [item]
        if isinstance(item, list | tuple) and item and all(isinstance(one, DatumLike) for one in item):
            if len(item) != 2:
                raise InvalidDatum(
                    f"row {index} of the batch has {len(item)} datums instead of a chosen and a rejected one. Pass "
                    "collate_fn=tinker_lightning.collate to the DataLoader: torch's default one transposes pairs."
                )
            return item
        return convert_row(index, RowFormat(self.tokenizer).pair, item)


def _same_prompt(chosen: Datum, rejected: Datum) -> bool:
    """Returns whether two answers have the same prompt, of which each may have lost the start by truncation."""
    prompts = _prompt(chosen), _prompt(rejected)
    common = min(map(len, prompts))
    return common == 0 or np.array_equal(prompts[0][-common:], prompts[1][-common:])


def _prompt(datum: Datum) -> NDArray[np.int32]:
    """Returns the tokens before the first one that has a weight; none if all have."""
    weights = datum.loss_fn_inputs.get("weights")
    weighted = [0] if weights is None else np.flatnonzero(weights.to_numpy())
    return datum.model_input.tokens()[: weighted[0] + 1 if len(weighted) and weighted[0] else 0]
