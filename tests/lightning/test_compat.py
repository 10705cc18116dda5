"""Private names of Lightning: all in one file, and all there in the installed release."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, ModelSummary, RichProgressBar
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.io import wrapper as plugin_wrappers
from lightning.pytorch.strategies import launchers
from lightning.pytorch.trainer.connectors import callback_connector
from packaging.version import Version
from torchmetrics import MeanMetric

import tinker_lightning
from tests.helpers.trainers import SMALL, loader, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import IncompatibleLightning
from tinker_lightning.lightning import _compat
from tinker_lightning.lightning._compat import Private

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

ROOT = Path(tinker_lightning.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name not in ("_compat.py", "tinker_pb2.py"))
NAMES = {name: value for name, value in vars(_compat).items() if isinstance(value, Private)}
FORBIDDEN = {name for name in (private.path.split(".")[-1] for private in NAMES.values()) if name.startswith("_")}
# Members of private classes of Lightning, but for the names that other objects have, too.
MEMBERS = {part for each in NAMES.values() if each.owner.startswith("_Result") for part in each.path.split(".")}
MEMBERS -= {"batch", "batch_size", "log", "name", "value", "is_tensor"}
# What torch.nn.Module and argparse define, too.
OTHERS = {"_modules", "_apply"}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def uses_of_private_names(path: Path) -> Iterator[str]:
    """Private attributes that this package does not define, and private names imported from Lightning."""
    text = path.read_text()
    knows_lightning = re.search(r"(from|import) (tinker_lightning\.)?lightning", text)
    for node in nodes_of(path):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            parts = [*(node.module or "").split("."), *(each.name for each in node.names)]
            yield from (f"{where} {part}" for part in parts if is_private(part))
        if isinstance(node, ast.Import):
            yield from (
                f"{where} {each.name}"
                for each in node.names
                if each.name.startswith("lightning.") and any(map(is_private, each.name.split(".")))
            )
        if isinstance(node, ast.Attribute) and not is_of_self(node) and is_of_lightning(node, path):
            yield f"{where} {node.attr}"
        if isinstance(node, ast.ClassDef) and knows_lightning:
            names = inherited(path, node.name)
            inner = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and is_of_self(each)]
            yield from (f"{path}:{each.lineno} {each.attr}" for each in inner if each.attr in names)


def is_of_lightning(node: ast.Attribute, path: Path) -> bool:
    if "lightning" not in path.relative_to(ROOT).parts:
        return node.attr in FORBIDDEN
    return node.attr in MEMBERS or (is_private(node.attr) and (node.attr in FORBIDDEN or node.attr not in defined()))


def inherited(path: Path, name: str) -> set[str]:
    """The private names that a class of this package has from classes of Lightning: methods and attributes."""
    module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    kind = getattr(importlib.import_module(module), name, object)  # a class inside a function has none
    bases = [each for each in kind.__mro__ if each.__module__.startswith("lightning.")]
    return {each for base in bases for each in members(base) - OTHERS if is_private(each)}


@functools.cache
def members(base: type) -> set[str]:
    return {*vars(base), *re.findall(r"self\.(_\w+)", inspect.getsource(base))}


def defined() -> set[str]:
    """The private names that classes of this package define: attributes, methods and fields."""
    if not _DEFINED:
        for path in FILES:
            for node in nodes_of(path):
                if isinstance(node, ast.FunctionDef):
                    _DEFINED.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    _DEFINED.add(node.target.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
                    _DEFINED.add(node.attr)
    return _DEFINED


_DEFINED: set[str] = set()


def test_private_names_are_only_in_one_file() -> None:
    assert [use for path in FILES for use in uses_of_private_names(path)] == []


@pytest.fixture(scope="module")
def found() -> set[str]:
    """The names that an object of their owner has in a fit."""
    names: set[str] = set()

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            pl_module.log("logged", 1.0, on_epoch=True)
            results = _compat.TRAIN_RESULTS.get(trainer)
            logged = next(iter(results.values()))
            objects: list[Any] = [trainer, pl_module, ModelCheckpoint(), ModelSummary(), WandbLogger(), MeanMetric()]
            objects += [results, logged, RichProgressBar(), AsyncCheckpointIO(), LearningRateFinder()]
            own = {"launchers": launchers, "plugin_wrappers": plugin_wrappers, "Closure": Closure}
            own["callback_connector"] = callback_connector
            owners = {kind.__name__: each for each in objects for kind in type(each).__mro__} | own
            names.update(name for name, private in NAMES.items() if has(owners[private.owner], private))

    with RemoteModule("tiny", rank=2, base_url="embedded") as module:
        quiet(max_steps=1, callbacks=[Looks()], strategy="tinker").fit(module, loader())
    return names


def has(owner: Any, private: Private) -> bool:
    try:
        private.get(owner)
    except IncompatibleLightning:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_lightning_has_every_private_name(name: str, found: set[str]) -> None:
    assert (name in found) == (Version(lightning.__version__) >= Version(NAMES[name].since))


def test_uses_of_private_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "probed" / "lightning" / "uses.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from lightning.pytorch.cli import LightningCLI\n"
        "class Own(LightningCLI):\n"
        "    def output(self, results):\n"
        "        self._own = results.dataloader_idx\n"
        "        return self._get(self.config, 'output')\n"
    )
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path / "probed")
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(use.split()[-1] for use in uses_of_private_names(file)) == ["_get", "dataloader_idx"]


class Validated(RemoteModule):
    """Has a step of the user."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)


@pytest.mark.parametrize(("kind", "warned"), [(RemoteModule, 0), (Validated, 1)])
def test_only_a_validation_step_of_the_user_needs_data(
    kind: type[RemoteModule], warned: int, service: ServiceClient
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(max_steps=1).fit(new(service, kind), loader())
    assert sum("but have no `val_dataloader`" in str(each.message) for each in caught) == warned


def test_launchers_are_wrapped_once() -> None:
    wrapped = _compat.LAUNCH_SCRIPT.get(launchers)
    _compat.before_launch(lambda *_: None)
    assert _compat.LAUNCH_SCRIPT.get(launchers) is wrapped


def test_a_name_that_lightning_has_renamed_is_reported() -> None:
    trainer = quiet()
    renamed = Private("Trainer", "fit_loop._renamed")
    with pytest.raises(
        IncompatibleLightning, match=rf"Lightning {lightning.__version__} has no Trainer\.fit_loop\._renamed"
    ):
        renamed.get(trainer)
    with pytest.raises(IncompatibleLightning, match="_renamed"):
        renamed.set(trainer, 1)
    assert not hasattr(trainer.fit_loop, "_renamed")
