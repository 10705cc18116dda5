"""The architecture: a folder is a layer, and imports point downward only, those for types included.

Imports at run time have no cycles. Those for types may form cycles within a folder.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import tinker_lightning

if TYPE_CHECKING:
    from collections.abc import Container

ROOT = Path(tinker_lightning.__file__).parent

# From the top down. Folders on one line do not import each other.
LAYERS = (
    ("cli",),
    ("recipes", "data"),
    ("rl",),
    ("callbacks",),
    ("lightning",),
    ("rows",),
    ("metrics",),
    ("remote",),
    ("doctor",),
    ("client",),
    ("server",),
    ("lossgraph",),
    ("losses",),
    ("wire",),
    ("threads",),
    ("types",),
    ("errors",),
)
DEPTH = {folder: depth for depth, folders in enumerate(LAYERS) for folder in folders}
HTTP = {"httpx", "starlette", "uvicorn"}
# The third-party packages and modules that a layer must not know.
FOREIGN = {
    "recipes": HTTP,
    "data": HTTP,
    "rl": HTTP,
    "callbacks": HTTP,
    "lightning": HTTP,
    "rows": {"lightning", *HTTP},
    "metrics": {"lightning", *HTTP},
    "remote": {"lightning", *HTTP},
    "doctor": {"lightning", "starlette", "uvicorn"},
    "client": {"lightning", "torch.nn", "starlette", "uvicorn"},
    "server": {"lightning", "httpx"},
    "lossgraph": {"lightning", *HTTP},
    "losses": {"lightning", *HTTP},
    "wire": {"lightning", "torch", *HTTP},
    "threads": {"lightning", *HTTP},
    "types": {"lightning", *HTTP},
    "errors": {"lightning", "torch", *HTTP},
}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if not path.name.endswith("_pb2.py"))
TESTS = Path(__file__).parent


def layer(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / path).read_text())))


def for_types(path: Path) -> set[ast.AST]:
    """The nodes of a file below `if TYPE_CHECKING`."""
    blocks = [node for node in nodes_of(path) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def imported(path: Path, modules: Container[str] = (), *, at_run_time: bool = False) -> set[str]:
    """The modules that a file imports anywhere in it; `from a import b` is `a.b` where that is one of `modules`."""
    found = set()
    left_out = for_types(path) if at_run_time else set()
    for node in nodes_of(path):
        if node in left_out:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                found.add(full if not modules or full in modules else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def dotted(path: Path) -> set[str]:
    """The attributes of names that a file reaches, such as `torch.nn` in `torch.nn.Module`."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def own(module: str) -> str | None:
    """The layer of a module of this package."""
    package, _, rest = module.partition(".")
    if package != "tinker_lightning":
        return None
    name = rest.partition(".")[0]
    return name if name in DEPTH else None


def test_imports_point_downward() -> None:
    for path in FILES:
        here = layer(path)
        for module in imported(path) if here in DEPTH else ():
            there = own(module)
            if there is None or there == here:
                continue
            assert DEPTH[there] > DEPTH[here], f"{path} imports {module}, which is above or next to it"
            if there == "server" and here != "cli":
                assert path == Path("client/transport/embedded.py"), (
                    f"{path} imports {module}; only client/transport/embedded.py may"
                )


def test_layers_do_not_use_what_they_must_not_know() -> None:
    for path in FILES:
        foreign = FOREIGN.get(layer(path), set())
        # `torch.nn` is also reached as an attribute of torch.
        reached = imported(path) | (dotted(path) if foreign else set())
        used = {name for name in reached if any(f"{name}.".startswith(f"{each}.") for each in foreign)}
        assert used == set(), path


def test_the_trainer_knows_only_the_interface_of_an_engine() -> None:
    engine = "tinker_lightning.server.engine"
    for path in FILES:
        if path.parts[:2] == ("server", "engine"):
            continue
        used = {name for name in imported(path) if f"{name}.".startswith(f"{engine}.")}
        if path == Path("server/trainer/trainer.py"):
            used.discard(f"{engine}.DEFAULT_ENGINE")
        assert not [name for name in used if not name.startswith(f"{engine}.interface.")], path


def test_every_folder_is_a_layer() -> None:
    assert {layer(path) for path in FILES} - DEPTH.keys() == {"__init__", "__main__", "testing"}


def test_nothing_imports_testing() -> None:
    for path in FILES:
        if layer(path) != "testing":
            assert not any(module.startswith("tinker_lightning.testing") for module in imported(path)), path


def test_no_file_name_occurs_three_times() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name: count for name, count in names.items() if count > 2} == {}


def test_tests_share_code_by_helpers_only() -> None:
    for path in TESTS.rglob("*.py"):
        foreign = re.findall(r"^\s*(?:from|import) (tests\.(?!helpers).*)", path.read_text(), re.MULTILINE)
        assert not foreign, f"{path} imports {foreign}; move what it needs to tests/helpers"


def test_there_are_no_cycles() -> None:
    names = {path: ".".join(("tinker_lightning", *path.with_suffix("").parts)) for path in FILES}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    uses = {name: imported(path, modules, at_run_time=True) & modules.keys() for name, path in modules.items()}
    while leaves := {name for name, used in uses.items() if not used & uses.keys()}:
        for name in leaves:
            del uses[name]
    assert {name: sorted(used & uses.keys()) for name, used in uses.items()} == {}
