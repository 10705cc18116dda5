"""Functions of lists, as local losses are, have the same value on the stacked tensors of a server, or tracing raises.

A stacked tensor has zeros after the end of shorter datums, and a list has none.
"""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tinker_lightning import Datum, losses
from tinker_lightning.errors import LossNotTraceable
from tinker_lightning.lossgraph.program import Limits
from tinker_lightning.lossgraph.trace import trace_batch_loss

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (5, 2, 3, 2)
DATA = [
    Datum.from_targets([1] * n, [2] * n, weights=np.ones(n, np.float32), reward=[float(i == 1)])
    for i, n in enumerate(LENGTHS)
]
LOGPROBS = [-torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def unpacks(data: Any, logprobs: Any) -> Any:
    first, second, *_ = logprobs
    return first.mean() - second.mean()


def unpacks_two(data: Any, logprobs: Any) -> Any:
    first, second = logprobs[:2]
    return first.mean() - second.mean()


def replaces(data: Any, logprobs: Any) -> Any:
    logprobs = logprobs[:]
    logprobs[0] = torch.zeros(5)
    return losses.Batch(data, logprobs).logprobs.sum()


def best(data: Any, logprobs: Any) -> Any:
    return logprobs[losses.Batch(data, logprobs).sequences("reward").argmax()].mean()


def with_a_setting(data: Any, logprobs: Any, which: int = 1) -> Any:
    return logprobs[which].mean()


REJECTED: dict[str, Callable[..., Any]] = {
    "an index": lambda data, logprobs: logprobs[0].mean() - logprobs[1].mean(),
    "the last of them": lambda data, logprobs: logprobs[-1].mean(),
    "the last token": lambda data, logprobs: logprobs[1][-1],
    "an index of numpy's": lambda data, logprobs: logprobs[np.int64(1)].mean(),
    "True": lambda data, logprobs: logprobs[True].mean(),
    "a setting": with_a_setting,
    "a tensor": best,
    "an index of a slice": lambda data, logprobs: logprobs[::2][1].mean() + logprobs[1::2][0].mean(),
    "in a comprehension": lambda data, logprobs: sum(logprobs[i].mean() for i in range(2)),
    "by a function": lambda data, logprobs: operator.getitem(logprobs, 1).mean(),
    "names for each": unpacks,
    "names for two": unpacks_two,
    "arguments": lambda data, logprobs: max(*(each.sum() for each in logprobs)),
    "a loop": lambda data, logprobs: sum(each.mean() for each in logprobs),
    "a loop over a slice": lambda data, logprobs: sum(each.mean() for each in logprobs[::2]),
    "a list": lambda data, logprobs: torch.cat(list(logprobs)).mean(),
    "reversed": lambda data, logprobs: next(reversed(logprobs)).mean(),
    "a count": lambda data, logprobs: losses.Batch(data, logprobs).logprobs.sum() / len(logprobs),
    "cat": lambda data, logprobs: torch.cat(logprobs).mean(),
    "cat of a slice": lambda data, logprobs: torch.cat(logprobs[1::2]).mean(),
    "cat of two": lambda data, logprobs: torch.cat(logprobs[::2] + logprobs[1::2]).mean(),
    "stack": lambda data, logprobs: torch.stack(logprobs[1::2]).mean(),
    "vstack": lambda data, logprobs: torch.vstack(logprobs[1::2]).mean(),
    "hstack": lambda data, logprobs: torch.hstack(logprobs).mean(),
    "padding of its own": lambda data, logprobs: pad_sequence(logprobs, padding_value=1.0).mean(),
    "an item set": replaces,
    "datums": lambda data, logprobs: sum(d.loss_fn_inputs["weights"].to_torch().sum() for d in data),
    "a pair": lambda data, logprobs: sum(
        (d.loss_fn_inputs["weights"].to_torch() * each).sum() for d, each in zip(data, logprobs, strict=True)
    ),
    "a part of the batch": lambda data, logprobs: losses.Batch(data[::2], logprobs[::2]).logprobs.mean(),
    "a count of datums": lambda data, logprobs: losses.Batch(data, logprobs).logprobs.sum() / len(data),
}
SAME: dict[str, Callable[..., Any]] = {
    "weights": lambda data, logprobs: (
        (losses.Batch(data, logprobs).weights() * losses.Batch(data, logprobs).logprobs).sum(1).exp().mean()
    ),
    "a row of a batch": lambda data, logprobs: losses.Batch(data, logprobs).logprobs[1].mean(),
    "rows of a batch": lambda data, logprobs: losses.Batch(data, logprobs, rank=1).logprobs[1:][0].mean(),
    "a mean over a batch": lambda data, logprobs: losses.Batch(data, logprobs).logprobs.mean(),
    "how many": lambda data, logprobs: (lambda x: x.sum() / x.shape[0])(losses.Batch(data, logprobs).logprobs),
    "whole": lambda data, logprobs: losses.Batch(data, logprobs[:]).logprobs.sum(),
    "a loss of the library": lambda data, logprobs: losses.cross_entropy(data, logprobs)[0],
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_would_read_the_padding_raises(name: str) -> None:
    assert torch.isfinite(torch.as_tensor(REJECTED[name](DATA, list(LOGPROBS))))  # where it is called with lists
    with pytest.raises(LossNotTraceable, match=rf"(?s){__file__}:\d+: .*on a server|it loops over a tensor"):
        trace_batch_loss(REJECTED[name], "mine", "logprobs", takes_lists=True)


def test_the_workarounds_are_named() -> None:
    with pytest.raises(LossNotTraceable) as raised:
        trace_batch_loss(REJECTED["an index"], "mine", "logprobs", takes_lists=True)
    assert "it takes the log-probabilities of datum 0, but on a server they are one tensor, [B, T]" in str(raised.value)
    assert "with zeros after the end of shorter datums" in str(raised.value)
    fix = (
        "losses.Batch(data, logprobs), whose tensors are the same everywhere, and its weights; or use route='two-pass'."
    )
    assert str(raised.value).endswith(fix)


@pytest.mark.parametrize("name", SAME)
def test_what_is_traced_has_the_same_value(name: str) -> None:
    traced = trace_batch_loss(SAME[name], "mine", "logprobs", takes_lists=True)
    stacked = {"weights": pad_sequence([torch.ones(n) for n in LENGTHS], batch_first=True)}
    output = traced({"logprobs": pad_sequence(LOGPROBS, batch_first=True)}, stacked, traced.settings({}), Limits())
    torch.testing.assert_close(output.loss, SAME[name](DATA, LOGPROBS))


def test_who_knows_the_layout_is_free() -> None:
    """What `custom_loss(on="logprobs")` takes is written for one tensor."""
    for name in ("an index", "the last token", "an index of a slice"):
        trace_batch_loss(REJECTED[name], "mine", "logprobs")
    # A list has no such index.
    trace_batch_loss(lambda data, logprobs: logprobs[:, 0].sum(), "mine", "logprobs", takes_lists=True)
