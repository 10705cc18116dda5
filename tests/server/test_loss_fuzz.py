"""Damaged graphs: none is answered with a 5xx, crashes, takes long, or runs anything that is not on the list."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tinker_lightning.lossgraph
from tests.helpers import damaged_graphs
from tests.helpers.damaged_graphs import Fuzzer, fuzz, is_import_by_torch, memory
from tests.helpers.fuzzing import LONG
from tinker_lightning import errors
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graph_loss import GraphLoss

if TYPE_CHECKING:
    from tests.helpers.api import Api


def test_damaged_graphs_harm_nobody(api: Api) -> None:  # R3.7
    before = memory()
    counts = fuzz(api, 0, 60)  # ten thousand in tox -e soak
    assert counts["upload 400"] > 10, counts
    assert counts["trained"] > 2, counts
    assert counts["failed"] > 6, counts
    assert memory() - before < 1 << 30


@pytest.mark.fuzz
def test_nothing_but_torch_and_the_runner_runs() -> None:  # R3.7
    """Every Python function that damaged graphs make run is of torch, of the runner, or of what these use."""
    fuzzer, ran, places = Fuzzer(1), 0, Counter[str]()

    allowed = (torch.__path__[0], tinker_lightning.lossgraph.__path__[0], os.path.dirname(contextlib.__file__), "<")

    def note(frame: Any, event: str, arg: Any) -> None:
        place = ""
        if event == "call" and not frame.f_code.co_filename.startswith(allowed):
            place = frame.f_code.co_filename
        elif event == "c_call" and getattr(arg, "__name__", "") in ("eval", "exec", "compile", "open", "system"):
            place = f"builtin {arg.__name__}"
        if place and not is_import_by_torch():
            places[place] += 1

    for _ in range(900 if LONG else 200):
        path, body = fuzzer.upload()
        if path != "create_custom_loss":
            continue
        try:
            inputs = {each["name"]: each["rank"] for each in body["inputs"]}
            loss = GraphLoss.decode({**body, "source": "datum", "inputs": inputs}, ("datum",))
        except (InvalidLoss, KeyError, TypeError):
            continue
        values = {name: torch.randn(6) for name in inputs if name != "logprobs"}
        gc.disable()  # whose callbacks are others' code
        sys.setprofile(note)
        try:
            loss({"logprobs": torch.randn(6, requires_grad=True)}, values)
            ran += 1
        except InvalidLoss:
            pass
        finally:
            sys.setprofile(None)
            gc.enable()
    assert ran > 3
    assert set(places) <= {__file__, damaged_graphs.__file__, errors.__file__}
