"""The size of the package, and the files that one micro-batch of a fit with a custom loss passes through.

    python -m benchmarks.structure [--names]

Code lines are lines with code: blank lines, comments, docstrings, lone `@override`s and generated files do not count.
The path of a micro-batch is seen by `sys.setprofile` on the main thread: the files of the package that are entered, and
how often a call moves from one of them to another.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tempfile
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

import tinker_lightning
from tinker_lightning import Datum, RemoteModule, collate

PACKAGE = Path(tinker_lightning.__file__).parent
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Returns the number of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    text = source.splitlines()
    return sum(text[line - 1].strip() != "@override" for line in lines)


def modules_by_name(package: Path) -> dict[str, Path]:
    """Returns the modules of a package by their dotted names, without generated ones."""
    root = package.parent
    files = sorted(file for file in package.rglob("*.py") if not file.stem.endswith("_pb2"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def importers(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Returns which modules import each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for target in targets:
                if target in modules and target != name:
                    found[target].add(name)
    return found


def report_size(package: Path = PACKAGE) -> None:
    """Prints the figures of the package's size."""
    modules = modules_by_name(package)
    sizes = {name: len(file.read_text().splitlines()) for name, file in modules.items()}
    plain = {name: size for name, size in sizes.items() if modules[name].name != "__init__.py"}
    found = importers(modules)
    drawers = sorted((plain[name], name) for name in plain if len(found[name]) == 1)
    print(f"files: {len(modules)}, of them modules: {len(plain)}, median length: {statistics.median(plain.values())}")
    print(f"code lines: {sum(code_lines(file.read_text()) for file in modules.values())}")
    print(f"modules with one importer: {len(drawers)}")
    print(f"longest: {', '.join(f'{name} ({size})' for name, size in sorted(sizes.items(), key=lambda x: -x[1])[:5])}")


class MicroBatches(pl.Callback):
    """Records the files of the package that each micro-batch enters on the main thread."""

    def __init__(self) -> None:
        self.batches: list[tuple[set[str], int]] = []
        self._files: list[str] = []

    def profile(self, frame: Any, event: str, _: Any) -> None:
        """Notes the file of a Python function that is called."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and (not self._files or self._files[-1] != file):
            self._files.append(file)

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._files = []

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.batches.append((set(self._files), len(self._files) - 1))


class Brevity(RemoteModule):
    """A custom loss, which is evaluated here."""

    @override
    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        nll = -torch.cat(logprobs).mean()
        return nll, {"perplexity": nll.exp().detach()}


def report_path(names: bool) -> None:
    """Prints the files and the file changes of micro-batches in the middle of a fit."""
    datums: Any = [Datum.from_tokens([1, 2, 3, 4, 5, index]) for index in range(64)]
    loader: DataLoader[Any] = DataLoader(datums, batch_size=2, collate_fn=collate)
    seen = MicroBatches()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy="tinker",
            max_epochs=1,
            accumulate_grad_batches=2,
            callbacks=[seen],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )
        sys.setprofile(seen.profile)
        try:
            trainer.fit(Brevity("tiny", rank=4, base_url="embedded"), loader)
        finally:
            sys.setprofile(None)
    middle = seen.batches[6:10]
    print("files of a micro-batch:", ", ".join(str(len(files)) for files, _ in middle))
    print("file changes of a micro-batch:", ", ".join(str(changes) for _, changes in middle))
    if names:
        for file in sorted(set().union(*(files for files, _ in middle))):
            print("   ", Path(file).relative_to(PACKAGE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="accepted like by the other benchmarks")
    parser.add_argument("--names", action="store_true", help="also print the names of the files")
    arguments = parser.parse_args()
    report_size()
    report_path(arguments.names)
