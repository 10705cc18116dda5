"""The command line: one module per sub-command, which imports its dependencies when it runs."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from tinker_lightning.cli import doctor, serve
from tinker_lightning.errors import TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except TinkerLightningError as error:
        print(f"tinker-lightning: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinker-lightning", description="Trains remote and local language models over the Tinker API."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('tinker-lightning')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve.add_to(commands)
    doctor.add_to(commands)
    return parser
