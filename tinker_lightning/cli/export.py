"""`tinker-lightning export`: downloads trained weights as a PEFT folder."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from tinker_lightning.cli import wording
from tinker_lightning.cli.sources import Source, add_server_options
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Adds the sub-command to the parser."""
    parser = commands.add_parser(
        "export",
        help="download trained weights as a PEFT folder",
        description="Downloads an adapter, with tokenizer and model card, as a folder for peft, transformers and vLLM.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a checkpoint file of Lightning, the folder of a run, or a tinker:// path"
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
    parser.add_argument(
        "--base-model",
        metavar="ID",
        help="the hub id of the base model, for the adapter to name it",
    )
    parser.add_argument("--merged", metavar="FOLDER", help="also save a model with the adapter merged into its weights")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--no-check", action="store_true", help="do not check that transformers and peft load it")
    add_server_options(parser)
    parser.set_defaults(run=run, advice=wording.EXPORT)


def run(options: argparse.Namespace) -> int:
    """Exports an adapter and prints its folder; returns the exit code."""
    source = Source.parse(options.source)
    if source.path is None:
        raise InvalidInput(
            f"{options.source} is neither a checkpoint file nor a tinker:// path. `tinker-lightning checkpoints list` "
            "lists the paths."
        )
    from tinker_lightning.callbacks.export_adapter import ExportAdapter, file_sections
    from tinker_lightning.client import connect
    from tinker_lightning.lightning.module import RemoteModule

    export = ExportAdapter(
        options.folder,
        base_model=options.base_model,
        merged=options.merged,
        check=not options.no_check,
        overwrite=options.overwrite,
    )
    with connect(options.base_url or source.base_url, api_key=options.api_key) as service:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            about = None if source.checkpoint is None else file_sections(*source.checkpoint)
            folder = export.export(RemoteModule(source.training_client(service)), about)
        for each in warned:
            print(f"tinker-lightning: {wording.reword(str(each.message), wording.EXPORT)}", file=sys.stderr)
        print(folder)
    return 0
