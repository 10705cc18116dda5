"""How often hypothesis tries what it makes at random: a thousand times, and many more in `tox -e soak`."""

from __future__ import annotations

import os

from hypothesis import settings

MANY = settings(max_examples=20_000 if os.environ.get("FUZZ_LONG") else 1000, deadline=None)
