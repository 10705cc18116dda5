"""Writes the reports of this folder into `docs/doctor.md`: the matrix, and what `tinker-lightning doctor` printed.

Run it after `tinker-lightning doctor URL --save docs/compatibility/NAME.json`:

    python docs/compatibility/render.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tinker_lightning.doctor import Report

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "doctor.md"
TITLES = {
    "embedded": "embedded trainer",
    "skyrl": "SkyRL 0.3.0 (JAX)",
    "tuft": "TuFT 0.2.2 (transformers)",
}
SIGNS = {"ok": "yes", "failed": "**no**", "not offered": "not offered", "crashed": "crashed"}
WIDTH = 110


def rendered(page: str) -> str:
    """Returns the page with the parts between its markers replaced."""
    reports = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in TITLES}
    page = _replaced(page, "matrix", _matrix(reports))
    for name, report in reports.items():
        page = _replaced(page, name, f"```text\n{Report.from_dict(report).table(WIDTH)}\n```")
    return page


def _matrix(reports: dict[str, dict[str, Any]]) -> str:
    lines = ["| check | what it shows | " + " | ".join(TITLES.values()) + " |", "|---" * (len(TITLES) + 2) + "|"]
    found = {name: {check["name"]: check["status"] for check in report["checks"]} for name, report in reports.items()}
    for check in reports["embedded"]["checks"]:
        signs = [SIGNS[found[name][check["name"]]] for name in TITLES]
        lines.append(f"| {check['name']} | {check['shows']} | " + " | ".join(signs) + " |")
    return "\n".join(lines)


def _replaced(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(rf"{begin}.*?{end}", lambda _: f"{begin}\n\n{text}\n\n{end}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
