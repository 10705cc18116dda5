"""The command line: each sub-command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tinker_lightning.errors import TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except TinkerLightningError as error:
        print(f"tinker-lightning: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinker-lightning", description="Trains language models over the Tinker API, remote ones and local ones."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('tinker-lightning')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run a Tinker-API server on this machine",
        description="Runs a Tinker-API server that trains real models on this machine.",
    )
    serve.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME",
        help="tiny, smollm2-135m, a folder with a Hugging Face model, or a hub id; may be given several times",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a key")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send as X-API-Key; the official SDK wants it to begin with tml-",
    )
    serve.add_argument("--data-dir", type=Path, metavar="DIR", help="where checkpoints are kept")
    serve.add_argument(
        "--allow-pickled-losses",
        action="store_true",
        help="run pickled loss functions that clients send, which is any code; needs --api-key",
    )
    serve.set_defaults(run=_serve)
    return parser


def _serve(options: argparse.Namespace) -> None:
    try:
        from tinker_lightning.server.serve import serve
    except ImportError as error:
        raise TinkerLightningError(
            f"the embedded trainer needs {error.name}, which is not installed. Install it with: "
            "python -m pip install 'tinker-lightning[embedded]'"
        ) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(
        options.model,
        host=options.host,
        port=options.port,
        api_key=options.api_key,
        data_dir=options.data_dir,
        allow_pickled_losses=options.allow_pickled_losses,
    )
