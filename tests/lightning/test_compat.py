"""Private names of Lightning: all in one file, and all there in the installed release."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import SingleDeviceStrategy, launchers
from packaging.version import Version
from torchmetrics import MeanMetric

import tinker_lightning
from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import IncompatibleLightning
from tinker_lightning.lightning import _compat
from tinker_lightning.lightning._compat import Private

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = SMALL

ROOT = Path(tinker_lightning.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name not in ("_compat.py", "tinker_pb2.py"))
NAMES = {name: value for name, value in vars(_compat).items() if isinstance(value, Private)}
INHERITED = {name for kind in (pl.LightningModule, SingleDeviceStrategy, pl.Callback) for name in dir(kind())}
FORBIDDEN = {name for name in (private.path.split(".")[-1] for private in NAMES.values()) if name.startswith("_")}
# What torch.nn.Module defines, too.
OTHERS = {"_modules", "_apply"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def uses_of_private_names(path: Path) -> Iterator[str]:
    """Private attributes that this package does not define, and private names imported from Lightning."""
    for node in ast.walk(ast.parse(path.read_text())):
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
        if isinstance(node, ast.Attribute) and is_private(node.attr) and is_of_lightning(node, path):
            yield f"{where} {node.attr}"


def is_of_lightning(node: ast.Attribute, path: Path) -> bool:
    if "lightning" not in path.relative_to(ROOT).parts:
        return node.attr in FORBIDDEN and not is_of_self(node)
    return node.attr in INHERITED - OTHERS if is_of_self(node) else node.attr in FORBIDDEN or node.attr not in defined()


def defined() -> set[str]:
    """The private names that classes of this package define: attributes, methods and fields."""
    if not _DEFINED:
        for path in FILES:
            for node in ast.walk(ast.parse(path.read_text())):
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
            logged = next(iter(_compat.TRAIN_RESULTS.get(trainer).values()))
            objects = (trainer, pl_module, ModelCheckpoint(), ModelSummary(), WandbLogger(), logged, MeanMetric())
            own = {"launchers": launchers, "Closure": Closure}
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
