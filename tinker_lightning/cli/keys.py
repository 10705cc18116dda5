"""`tinker-lightning keys`: adds, lists and removes the API keys of a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Adds the sub-commands to the parser."""
    keys = commands.add_parser(
        "keys",
        help="add, list and remove the API keys of a server",
        description="Edits the file of `tinker-lightning serve --api-key-file FILE`. A running server reads it again.",
    )
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("add", _add, "add a key and print it; the file has only its SHA-256"),
        ("list", _list, "list the names of the keys"),
        ("remove", _remove, "remove a key and end its sessions; its checkpoints are kept"),
    ):
        parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name != "list":
            parser.add_argument("name", metavar="NAME", help="the name of the key, which owns what is made with it")
        parser.add_argument("--file", type=Path, required=True, metavar="FILE", help="the file of the keys")
        parser.set_defaults(run=run)


def _add(options: argparse.Namespace) -> int:
    from tinker_lightning.server.keys import add_key

    print(add_key(options.file, options.name))
    print(
        f"The key of {options.name}, which is not shown again. Clients set TINKER_API_KEY to it; the server is started "
        f"with --api-key-file {options.file}",
        file=sys.stderr,
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    from tinker_lightning.server.keys import read_file

    for name in read_file(options.file):
        print(name)
    return 0


def _remove(options: argparse.Namespace) -> int:
    from tinker_lightning.server.keys import remove_key

    remove_key(options.file, options.name)
    return 0
