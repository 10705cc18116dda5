"""`tinker-lightning doctor`: checks the behavior of a server."""

from __future__ import annotations

import ipaddress
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import argparse

# A server that fails is not waited for as long as in training, where work could be lost.
_RETRY_SECONDS = 20.0
_LOCAL_NAMES = (".local", ".internal", ".lan", ".localhost")


def add_to(commands: Any) -> None:
    """Adds the sub-command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check the behavior of a server",
        description="Checks the behavior of a server on scratch models, and removes them. Exits with 0 if no check "
        "fails, with 1 if one does, and with 2 if the server cannot be checked.",
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="the server; by default, a trainer in this process")
    parser.add_argument(
        "--model", metavar="NAME", help="base model to use; by default, tiny or the first one announced"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key; by default, TINKER_API_KEY")
    parser.add_argument(
        "--dialect", default="auto", metavar="NAME", help="dialect to start from instead of detecting it"
    )
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="run only this check; may be given several times"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the report to FILE, for connect(dialect=FILE)")
    parser.add_argument("--yes", action="store_true", help="check a hosted service, where it may cost money")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Checks a server and prints the report; returns the exit code."""
    from tinker_lightning.client.service import ServiceClient
    from tinker_lightning.client.transport.discovery import EMBEDDED
    from tinker_lightning.client.transport.retries import RetryPolicy
    from tinker_lightning.client.transport.target import without_password
    from tinker_lightning.doctor import CHECKS, TOKENS, examine
    from tinker_lightning.errors import InvalidInput

    checks = [check for check in CHECKS if options.check is None or check.name in options.check]
    if unknown := set(options.check or ()) - {check.name for check in checks}:
        raise InvalidInput(
            f"--check: there is no check {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CHECKS)}"
        )
    url = options.url or EMBEDDED
    if url != EMBEDDED and not options.yes and not _is_local(url):
        raise InvalidInput(
            f"{without_password(url)} may be a hosted service, where this costs money: the checks create about 15 "
            f"models and pass up to {TOKENS:,} tokens. Pass --yes to run them."
        )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tinker_lightning.doctor").setLevel(logging.INFO)  # a slow server takes minutes
    policy = RetryPolicy(_RETRY_SECONDS)
    with ServiceClient(base_url=url, api_key=options.api_key, dialect=options.dialect, retry_policy=policy) as service:
        report = examine(service, options.model, checks)
    if options.save is not None:
        report.save(options.save)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.table())
    return 0 if report.is_healthy else 1


def _is_local(url: str) -> bool:
    """Returns whether a server is on this machine or in a private network."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # not a URL, which the client reports
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(_LOCAL_NAMES)
    return address.is_loopback or address.is_private
