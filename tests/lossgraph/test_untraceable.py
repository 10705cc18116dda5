"""Every program that `docs/server-functions.md` lists as not traceable raises, and what it suggests traces."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.traced_losses import assert_same
from tinker_lightning.errors import LossNotTraceable
from tinker_lightning.lossgraph.trace import trace_datum_loss

PAGE = Path(__file__).parents[2] / "docs" / "server-functions.md"
SECTION = PAGE.read_text().partition("## What does not trace\n")[2]
ENTRIES = re.findall(r"\*\*(.*?)\*\*.*?```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.mark.parametrize(("title", "code"), ENTRIES, ids=[title[:40] for title, _ in ENTRIES])
def test_each_entry_raises_and_its_replacement_traces(title: str, code: str) -> None:  # R3.6
    assert title
    filename = f"/docs/{title[:20]}.py"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(f"import torch\n{code}", filename, "exec"), namespace)  # noqa: S102  # our own page
    rejected = [value for name, value in namespace.items() if name.startswith("rejected")]
    assert rejected
    for loss in rejected:
        with pytest.raises(LossNotTraceable, match=rf"({re.escape(filename)}|<string>):\d+: "):
            trace_datum_loss(loss, {"logprobs": 1, "weights": 1})
    assert_same(namespace["instead"])


def test_the_section_is_found() -> None:
    assert len(ENTRIES) == 8
