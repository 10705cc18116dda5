"""Signatures for download URLs that work without an API key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

# The validity that clients assume if they do not check the expiry.
VALID_SECONDS = 900


class Signer:
    """Signs names for a limited time. A restart of the server invalidates all signatures."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def expiry(self) -> int:
        """Returns the expiry of a signature that is created now, as a Unix timestamp."""
        return int(time.time()) + VALID_SECONDS

    def sign(self, name: str, expires: int) -> str:
        """Returns the signature of a name and its expiry."""
        return hmac.new(self._secret, f"{expires} {name}".encode(), hashlib.sha256).hexdigest()

    def is_valid(self, name: str, expires: str, signature: str) -> bool:
        """Returns whether the signature is correct and has not expired."""
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 20):
            return False
        right = hmac.compare_digest(signature.encode(), self.sign(name, int(expires)).encode())
        return right and time.time() < int(expires)
