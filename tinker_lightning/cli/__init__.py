"""The command line: one module per sub-command, which imports its dependencies when it runs."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from tinker_lightning.cli import chat, checkpoint_commands, doctor, export, keys, serve, stages, wording
from tinker_lightning.errors import TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEBUG = "--debug"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in arguments  # which may stand anywhere
    parser = _parser()
    options, rest = parser.parse_known_args([argument for argument in arguments if argument != _DEBUG])
    if options.takes_rest:
        options.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code: int = options.run(options)
    except (TinkerLightningError, OSError) as error:
        if debug:
            raise
        print(f"tinker-lightning: {wording.reword(str(error), options.advice)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinker-lightning", description="Trains remote and local language models over the Tinker API."
    )
    parser.set_defaults(takes_rest=False, advice={})
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('tinker-lightning')}")
    parser.add_argument(_DEBUG, action="store_true", help="show the stack trace of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (stages, chat, export, checkpoint_commands, serve, keys, doctor):
        module.add_to(commands)
    return parser
