"""Addresses that show by themselves that this server gave them out, for downloads by programs that have no key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

# What clients take for granted that do not look.
VALID_SECONDS = 900


class Signer:
    """Signs names for a while. The secret lives as long as the server: after a restart clients ask anew."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def expiry(self) -> int:
        """The moment until which what is signed now is valid, in seconds of Unix time."""
        return int(time.time()) + VALID_SECONDS

    def sign(self, name: str, expires: int) -> str:
        """What shows that this server has named a name, and until when."""
        return hmac.new(self._secret, f"{expires} {name}".encode(), hashlib.sha256).hexdigest()

    def is_valid(self, name: str, expires: str, signature: str) -> bool:
        """Whether this server has signed the name, and its time has not come."""
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 20):
            return False
        right = hmac.compare_digest(signature.encode(), self.sign(name, int(expires)).encode())
        return right and time.time() < int(expires)
