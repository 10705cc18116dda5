"""`tinker-lightning serve`: runs a Tinker-API server on this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import TinkerLightningError

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Adds the sub-command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="run a Tinker-API server on this machine",
        description="Runs a Tinker-API server that trains real models on this machine.",
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME",
        help="tiny, smollm2-135m, a folder with a Hugging Face model, or a hub id; may be given several times",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any other than loopback requires a key"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 for any free port")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that clients must send; visible in the list of processes, so rather set TINKER_LIGHTNING_SERVE_KEY",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the keys of several users, written by `tinker-lightning keys`; each has its own sessions and "
        "checkpoints",
    )
    parser.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate (PEM), to serve https")
    parser.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="key of the certificate, if not in its file")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where checkpoints are kept")
    parser.add_argument(
        "--allow-pickled-losses",
        action="store_true",
        help="run pickled loss functions from clients, which can execute any code; requires a key",
    )
    parser.add_argument(
        "--sampling-seed",
        type=int,
        metavar="N",
        help="make sampling requests without a seed reproducible, so that a repeated run draws the same tokens",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="the most memory that the server takes, e.g. 6G; requests beyond it fail (default: 60%% of the memory)",
    )
    parser.add_argument(
        "--disk-limit",
        metavar="SIZE",
        help="the most space that checkpoints and imported adapters take, e.g. 50G; saves beyond it fail",
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help="positions per model call of new runs, instead of the default of each model; changes memory and rounding",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the server until it is interrupted; returns the exit code."""
    try:
        from tinker_lightning.server.serve import serve
        from tinker_lightning.server.trainer.memory import parse_size
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
        api_key_file=options.api_key_file,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        data_dir=options.data_dir,
        allow_pickled_losses=options.allow_pickled_losses,
        sampling_seed=options.sampling_seed,
        memory_limit=None if options.memory_limit is None else parse_size(options.memory_limit),
        token_budget=options.token_budget,
        disk_limit=None if options.disk_limit is None else parse_size(options.disk_limit),
    )
    return 0
