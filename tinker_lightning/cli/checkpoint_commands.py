"""`tinker-lightning checkpoints`: lists and deletes checkpoints of a server, or of the trainer of this machine."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tinker_lightning.cli.sources import add_server_options
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.types.responses import Checkpoint


def add_to(commands: Any) -> None:
    """Adds the sub-command to the parser."""
    description = (
        "Lists and deletes the checkpoints of a server. Without a server, these are the checkpoints that trainers in "
        "other processes have left in the user's data folder, which the list names."
    )
    parser = commands.add_parser("checkpoints", help="list and delete checkpoints", description=description)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list checkpoints, the newest first", description=description)
    listing.add_argument("--run", dest="run_id", metavar="RUN", help="only checkpoints of this training run")
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    listing.set_defaults(run=run_list)
    deletion = actions.add_parser("delete", help="delete checkpoints", description=description)
    deletion.add_argument("paths", nargs="*", metavar="PATH", help="the tinker:// path of a checkpoint")
    deletion.add_argument("--run", dest="run_id", metavar="RUN", help="all checkpoints of this training run")
    deletion.add_argument("--all", action="store_true", help="all checkpoints of the server")
    deletion.add_argument("--yes", action="store_true", help="required with --run and --all")
    deletion.set_defaults(run=run_delete)
    for each in (listing, deletion):
        add_server_options(each)


def run_list(options: argparse.Namespace) -> int:
    """Prints the checkpoints of a server; returns the exit code."""
    with _connect(options) as service:
        checkpoints = _checkpoints(service, options.run_id)
        location = _location(service)
    if options.json:
        print(
            json.dumps(
                [dataclasses.asdict(checkpoint) for checkpoint in checkpoints], indent=2, default=datetime.isoformat
            )
        )
        return 0
    for each in checkpoints:
        print(f"{each.tinker_path}  {each.checkpoint_type}  {_size([each])}  {each.time:%Y-%m-%d %H:%M}")
    print(f"{len(checkpoints)} checkpoints, {_size(checkpoints)}, in {location}")
    return 0


def run_delete(options: argparse.Namespace) -> int:
    """Deletes checkpoints of a server; returns the exit code."""
    if bool(options.paths) + (options.run_id is not None) + options.all != 1:
        raise InvalidInput("pass the paths of checkpoints, or --run RUN, or --all")
    with _connect(options) as service:
        paths = options.paths
        if not paths:
            checkpoints = _checkpoints(service, options.run_id)
            if not options.yes:
                raise InvalidInput(
                    f"this would delete {len(checkpoints)} checkpoints, {_size(checkpoints)}, in {_location(service)}. "
                    "Runs cannot resume from files that name them. Pass --yes to delete them."
                )
            paths = [checkpoint.tinker_path for checkpoint in checkpoints]
        for path in paths:
            service.delete_checkpoint(path)
            print(f"deleted {path}")
    return 0


def _connect(options: argparse.Namespace) -> ServiceClient:
    from tinker_lightning.client import connect

    return connect(options.base_url, api_key=options.api_key)


def _checkpoints(service: ServiceClient, run_id: str | None) -> list[Checkpoint]:
    rest, checkpoints = service.create_rest_client(), list[Any]()
    if run_id is not None:
        page = rest.list_checkpoints(run_id).result()
        if page.cursor is None or len(page.checkpoints) >= page.cursor.total_count:
            return page.checkpoints
    while True:  # page by page
        page = rest.list_user_checkpoints(offset=len(checkpoints)).result()
        checkpoints += page.checkpoints
        if not page.checkpoints or page.cursor is None or len(checkpoints) >= page.cursor.total_count:
            prefix = "" if run_id is None else f"tinker://{run_id}/"
            return [each for each in checkpoints if each.tinker_path.startswith(prefix)]


def _location(service: ServiceClient) -> str:
    """Returns the location of the checkpoints: a server, or the folder of the trainer in this process."""
    if service.url != "http://embedded":
        return service.url
    from tinker_lightning.server.trainer.trainer import default_data_dir

    return str(default_data_dir() / "checkpoints")


def _size(checkpoints: Iterable[Checkpoint]) -> str:
    return f"{sum(each.size_bytes or 0 for each in checkpoints) / 1e6:.1f} MB"
