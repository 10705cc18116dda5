"""`tinker-lightning checkpoints`: lists and deletes checkpoints of a server, or of the trainer of this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tinker_lightning.cli.sources import add_server_options
from tinker_lightning.errors import InvalidInput, TinkerLightningError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.types.responses import Checkpoint

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


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
    listing.add_argument(
        "--files",
        nargs="+",
        metavar="FOLDER",
        help="only those that checkpoint files in these folders name, or that were saved for files in them",
    )
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    listing.set_defaults(run=run_list)
    deletion = actions.add_parser("delete", help="delete checkpoints", description=description)
    deletion.add_argument("paths", nargs="*", metavar="PATH", help="the tinker:// path of a checkpoint")
    deletion.add_argument("--run", dest="run_id", metavar="RUN", help="all checkpoints of this training run")
    deletion.add_argument("--all", action="store_true", help="all checkpoints of the server")
    deletion.add_argument("--yes", action="store_true", help="required with --run and --all")
    deletion.set_defaults(run=run_delete)
    pruning = actions.add_parser(
        "prune",
        help="delete states that no checkpoint file names anymore",
        description="Deletes the states that runs on this machine saved for checkpoint files in some folders, and that "
        "no file in these folders names anymore. Nothing is deleted if a folder or file cannot be read.",
    )
    pruning.add_argument("--files", nargs="+", metavar="FOLDER", required=True, help="the folders of checkpoint files")
    pruning.add_argument(
        "--older-than", type=_age, default="1d", metavar="AGE", help="the least age, such as 12h; by default 1d"
    )
    pruning.add_argument("--yes", action="store_true", help="delete what is listed")
    pruning.set_defaults(run=run_prune)
    for each in (listing, deletion, pruning):
        add_server_options(each)


def run_list(options: argparse.Namespace) -> int:
    """Prints the checkpoints of a server; returns the exit code."""
    with _connect(options) as service:
        checkpoints = _checkpoints(service, options.run_id)
        location, base_models = _location(service), _base_models(service)
    named: Mapping[str, str] | None = None
    if options.files:
        named, left = _named(options.files), _saved_for(checkpoints, options.files)
        checkpoints = [each for each in checkpoints if each.tinker_path in named or each in left]
    rows = [_row(each, base_models, named) for each in checkpoints]
    if options.json:
        content = [dataclasses.asdict(each) | row for each, row in zip(checkpoints, rows, strict=True)]
        print(json.dumps(content, indent=2, default=datetime.isoformat))
        return 0
    _print(checkpoints, rows)
    print(f"{_total(checkpoints, 'checkpoint')}, in {location}")
    return 0


def run_prune(options: argparse.Namespace) -> int:
    """Deletes the states that no file in the folders names; returns the exit code."""
    from tinker_lightning.lightning.checkpoint.retention import UNREADABLE, NamedStates

    with _connect(options) as service:
        # Before the files are read: what a run saves in the meantime is not deleted.
        checkpoints = _saved_for(_checkpoints(service, None), options.files)
        _named(options.files)  # which raises if a file cannot be read
        oldest = datetime.now(UTC) - options.older_than
        needed = NamedStates().needed(checkpoints, options.files)
        if UNREADABLE in needed:
            raise InvalidInput("--files: a file has changed meanwhile and cannot be read now. Try again.")
        left = [each for each in checkpoints if each.tinker_path not in needed and _time(each) <= oldest]
        base_models = _base_models(service) if left else {}
        _print(left, [_row(each, base_models, None) for each in left])
        location = _location(service)
        if left and not options.yes:
            raise InvalidInput(
                f"this would delete {_total(left, 'state')}, in {location}. No file in the folders names them, but "
                "files that were moved away cannot be used without them. Pass --yes to delete them."
            )
        deleted = []
        try:
            for each in left:
                service.delete_checkpoint(each.tinker_path, missing_ok=True)
                deleted.append(each)
        finally:
            print(f"deleted {_total(deleted, 'state')}, in {location}")
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
                    f"this would delete {_total(checkpoints, 'checkpoint')}, in {_location(service)}. "
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


def _base_models(service: ServiceClient) -> dict[str, str]:
    """Returns the base models of training runs; none on servers that do not list them."""
    rest, runs = service.create_rest_client(), list[Any]()
    while True:
        try:
            page = rest.list_training_runs(limit=100, offset=len(runs)).result()
        except TinkerLightningError:
            return {}
        runs += page.training_runs
        if not page.training_runs or page.cursor is None or len(runs) >= page.cursor.total_count:
            return {each.training_run_id: each.base_model for each in runs}


def _named(folders: Sequence[str]) -> dict[str, str]:
    """Returns the states that the files in folders name, each with its file; raises if a folder or file is unreadable.

    In sub-folders, only files with the name *.ckpt are read.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    from tinker_lightning.lightning.checkpoint.retention import UNREADABLE, NamedStates

    files, named = NamedStates(), dict[str, str]()
    for folder in folders:
        fs, path = url_to_fs(folder)
        if not fs.isdir(path):
            raise InvalidInput(f"--files: there is no folder {folder}")
        for file, states in files.below(folder).items():
            if UNREADABLE in states:
                raise InvalidInput(
                    f"--files: {file} cannot be read, so it may name any state. If it is damaged, move it away."
                )
            named |= dict.fromkeys(states, file)
    return named


def _saved_for(checkpoints: Sequence[Checkpoint], folders: Sequence[str]) -> list[Checkpoint]:
    """Returns the states that were saved for files in these folders."""
    from tinker_lightning.client.files.checkpoints import written_into
    from tinker_lightning.lightning.checkpoint.files import folder_id

    ids = {folder_id(folder) for folder in folders}
    return [each for each in checkpoints if written_into(each) in ids]


def _row(each: Checkpoint, base_models: Mapping[str, str], named: Mapping[str, str] | None) -> dict[str, str | None]:
    """Returns what a listing shows about a checkpoint in addition to its own fields."""
    from tinker_lightning.client.files.checkpoints import run_of, saved_by

    row = {"base_model": base_models.get(run_of(each.tinker_path) or ""), "run": saved_by(each)}
    return row if named is None else {**row, "file": named.get(each.tinker_path)}


def _print(checkpoints: Sequence[Checkpoint], rows: Sequence[Mapping[str, str | None]]) -> None:
    """Prints a table with one line per checkpoint."""
    now = datetime.now(UTC)
    names = [name.upper().replace("_", " ") for name in next(iter(rows), ())]
    table = [["PATH", "KIND", "SIZE", "AGE", "EXPIRES", *names]]
    for each, row in zip(checkpoints, rows, strict=True):
        expires = "never" if each.expires_at is None else f"in {_duration(each.expires_at - now)}"
        own = [each.tinker_path, each.checkpoint_type, _size([each]), _duration(now - _time(each)), expires]
        table.append([*own, *(value or "-" for value in row.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table if checkpoints else ():
        print(printable("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()))


def _time(checkpoint: Checkpoint) -> datetime:
    time = checkpoint.time
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _duration(time: timedelta) -> str:
    """Returns a duration in its largest unit."""
    seconds = max(0, int(time.total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _age(text: str) -> timedelta:
    """Parses an age, a whole number with a unit: 90s, 30m, 12h or 1d."""
    match = re.fullmatch(rf"(\d{{1,6}})([{''.join(_UNITS)}])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with a unit: 90s, 30m, 12h or 1d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _location(service: ServiceClient) -> str:
    """Returns the location of the checkpoints: a server, or the folder of the trainer in this process."""
    if service.url != "http://embedded":
        return service.url
    from tinker_lightning.server.trainer.trainer import default_data_dir

    return str(default_data_dir() / "checkpoints")


def _total(checkpoints: Sequence[Checkpoint], noun: str) -> str:
    return f"{len(checkpoints)} {noun}{'' if len(checkpoints) == 1 else 's'}, {_size(checkpoints)}"


def _size(checkpoints: Iterable[Checkpoint]) -> str:
    return f"{sum(each.size_bytes or 0 for each in checkpoints) / 1e6:.1f} MB"
