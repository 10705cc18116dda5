"""Checks that the Hugging Face Hub can be reached, which its library retries for a minute."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

from huggingface_hub import constants, snapshot_download

_SECONDS = 5.0


def reachable_or_cached(name: str) -> str:
    """Returns what transformers loads a hub id from: the id, or without a network the folder of the hub's cache.

    Raises:
        OSError: If the hub cannot be reached and the model is not in its cache.
    """
    host = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return name
    try:
        socket.create_connection((host.hostname or "", host.port or 443), _SECONDS).close()
    except OSError as error:
        try:
            return snapshot_download(name, local_files_only=True)
        except OSError:
            raise OSError(f"{constants.ENDPOINT} cannot be reached ({error}), and it is not in the cache") from error
    return name
