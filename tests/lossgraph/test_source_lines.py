"""Errors while tracing name the line of the user's code, also if they happen inside a library."""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

import functools
import inspect
import json
import statistics
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinker_lightning import LossFnOutput, losses
from tinker_lightning.errors import LossNotTraceable
from tinker_lightning.lossgraph import source_lines
from tinker_lightning.lossgraph.graph import find_lines
from tinker_lightning.lossgraph.trace import trace_batch_loss, trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def line_of(fn: Callable[..., Any]) -> str:
    """The start of the message for the body of a function."""
    return f"{__file__}:{inspect.getsourcelines(fn)[1] + 1}: return LossFnOutput("


def by_numpy(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
    return LossFnOutput(torch.as_tensor(np.mean(outputs)))


def by_json(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
    return LossFnOutput(outputs.sum() * len(json.dumps(outputs.shape)))


def by_statistics(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
    return LossFnOutput(statistics.mean(outputs))


@pytest.mark.parametrize(
    ("fn", "library", "because"),
    [
        (by_numpy, "numpy", "the argument 'out' is not supported"),
        (by_json, "json", "it asks for the type of a number, a size or a tuple"),
        (by_statistics, "statistics", "it loops over a tensor"),
    ],
)
def test_a_library_is_named_with_the_line_that_calls_it(fn: Any, library: str, because: str) -> None:  # R3.6
    with pytest.raises(LossNotTraceable) as raised:
        trace_batch_loss(fn, "mine", "logits")
    assert str(raised.value).startswith(line_of(fn))
    assert f"it passes a tensor to {library}, and there {because}" in str(raised.value)


def installed(folder: Path, name: str) -> types.ModuleType:
    """A module in a folder that packages are installed in."""
    package = folder / "site-packages" / name
    package.mkdir(parents=True)
    file = package / "__init__.py"
    file.write_text("def positive(x):\n    if x > 0:\n        return x\n    return -x\n")
    module = types.ModuleType(name)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)  # noqa: S102  # written above
    return module


def test_a_library_whose_name_begins_as_torchs(tmp_path: Path) -> None:
    library = installed(tmp_path, "torchlike")

    def mine(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
        return LossFnOutput(library.positive(outputs.sum()))

    with pytest.raises(LossNotTraceable, match="it passes a tensor to torchlike, and there it branches") as raised:
        trace_batch_loss(mine, "mine", "logits")
    assert str(raised.value).startswith(line_of(mine))
    assert not source_lines.is_outside(torch.nn.functional.__file__)
    assert source_lines.is_outside(torch.__path__[0] + "metrics/functional.py")


def test_a_librarys_own_loss_has_its_own_lines(tmp_path: Path) -> None:
    library = installed(tmp_path, "lossy")
    own = compile("def loss(o, i, m):\n    return positive(o.sum())", library.positive.__code__.co_filename, "exec")
    exec(own, library.__dict__)  # noqa: S102  # written here
    with pytest.raises(LossNotTraceable, match=r"lossy/__init__\.py:2: if x > 0:\n    it branches"):
        trace_batch_loss(library.loss, "mine", "logits")


@pytest.mark.parametrize(
    ("filename", "library"),
    [
        (np.__file__, "numpy"),
        (json.__file__, "json"),
        (statistics.__file__, "statistics"),
        (pytest.__file__, "pytest"),
        (losses.__file__, "tinker_lightning"),
        ("<frozen abc>", "abc"),
        ("<string>", ""),
        ("<ipython-input-3-5f>", ""),
        (__file__, ""),
    ],
)
def test_whose_a_file_is(filename: str, library: str) -> None:
    assert source_lines.library_name(filename) == library


def test_every_call_has_its_line() -> None:
    def mine(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
        with torch.no_grad():
            weights = inputs["weights"].clone()
            weights += 1
        return LossFnOutput((outputs.sum(-1) * weights).sum(), None, {"mean": weights.mean().item()})

    graph = trace_batch_loss(mine, "mine", "logits").program.graph
    lines = {node.name: graph.lines.get(node.name, "") for node in graph.calls}
    assert all(f"{__file__}:" in line for line in lines.values())
    assert find_lines(f"mine: node {graph.calls[0].name!r}: clone failed", [graph, graph]) == [lines["clone"]]
    assert lines["clone"].endswith('weights = inputs["weights"].clone()')
    assert find_lines("node 'nothing': failed", [graph]) == find_lines("failed", [graph]) == []
    assert "lines" not in graph.encode()


def cast(outputs: Any, inputs: Any, mask: Any, on: bool = True) -> LossFnOutput:
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        weights = inputs["weights"]
        product = outputs @ outputs.mT
    return LossFnOutput((product * weights).sum())


def test_autocast_inside_a_loss_raises() -> None:
    with pytest.raises(LossNotTraceable, match=r"outputs @ outputs\.mT\n    it computes under torch\.autocast"):
        trace_batch_loss(cast, "mine", "logits")
    trace_batch_loss(cast, "mine", "logits", {"on": False})


def test_autocast_around_the_tracing_does_not_matter() -> None:
    def plain(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
        return LossFnOutput((outputs @ outputs.mT).sum())

    expected = trace_batch_loss(plain, "mine", "logits").digest
    with torch.autocast("cpu", torch.bfloat16):
        assert trace_batch_loss(plain, "mine", "logits").digest == expected
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(LossNotTraceable, match="autocast"):
            trace_batch_loss(cast, "mine", "logits")
    assert not torch.is_autocast_enabled("cpu")


def test_pythons_round_raises_in_plain_words() -> None:
    def rounds(outputs: Any, inputs: Any, mask: Any) -> LossFnOutput:
        return LossFnOutput(outputs.sum(), None, {"mean": round(outputs.mean().item(), 3)})

    message = r"it rounds a value with round\(\); remove the call, or use torch.round"
    with pytest.raises(LossNotTraceable, match=message):
        trace_batch_loss(rounds, "mine", "logits")
    trace_batch_loss(
        lambda o, i, m: LossFnOutput(o.sum(), None, {"mean": torch.round(o.mean().item(), decimals=3)}),
        "mine",
        "logits",
    )
    settled = trace_batch_loss(lambda o, i, m, k=2.0: LossFnOutput(o.sum() * round(k)), "mine", "logits")
    assert settled.hyperparameters["k"].fixed


def test_what_a_function_returns_is_named_with_the_function() -> None:
    def mine(outputs: Any, inputs: Any, mask: Any) -> Any:
        return outputs.sum()

    with pytest.raises(LossNotTraceable) as raised:
        trace_batch_loss(mine, "other", "logits")
    told = "mine must return a LossFnOutput(loss, logprobs, diagnostics), but returned Tensor"
    line = inspect.getsourcelines(mine)[1]
    assert str(raised.value) == (
        f"{__file__}:{line}: def mine(outputs: Any, inputs: Any, mask: Any) -> Any:\n    {told}"
    )


def test_what_a_function_calls_its_numbers_is_reported_with_its_line() -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]

    @functools.lru_cache  # a line that does not tell the function
    def plain(outputs: Any, inputs: Any, mask: Any) -> Any:
        return LossFnOutput(outputs.sum(), None, {1: outputs.sum()})  # type: ignore[dict-item]

    function = plain.__wrapped__
    with pytest.raises(LossNotTraceable) as raised:
        trace_batch_loss(function, "mine", "logits")
    assert str(raised.value).startswith(f"{__file__}:{line + 1}: def plain(outputs: Any, inputs: Any, mask: Any)")
    assert "invalid metric name 1; use a string" in str(raised.value)
    with pytest.raises(LossNotTraceable, match=rf"{__file__}:\d+: .*\n    invalid metric name 1; use a string"):
        trace_datum_loss(lambda logprobs: (logprobs.sum(), {1: logprobs.sum()}), {"logprobs": 1})


def test_no_diagnostics_may_be_none() -> None:
    nothing: Any = None
    traced = trace_batch_loss(lambda o, i, m: LossFnOutput(o.sum(), diagnostics=nothing), "mine", "logits")
    assert traced.program.graph.output[1] == {}


def test_the_frames_behind_the_tracing_are_not_the_functions() -> None:
    """A place is looked for inside of what is traced only."""
    namespace: dict[str, Any] = {}
    exec(compile("fn = lambda o, i, m: o.sum() > 0 and o", "<frozen elsewhere>", "exec"), namespace)  # noqa: S102
    with pytest.raises(LossNotTraceable) as raised:
        trace_batch_loss(namespace["fn"], "mine", "logits")
    assert str(raised.value).startswith("<frozen elsewhere>:1: ")
