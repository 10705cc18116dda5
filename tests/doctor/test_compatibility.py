"""The compatibility matrix of the docs is the one of the saved reports."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.doctor import CHECKS, Report

FOLDER = Path(__file__).parents[2] / "docs" / "compatibility"


def test_the_docs_show_the_saved_reports() -> None:
    script = runpy.run_path(str(FOLDER / "render.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["rendered"](page) == page, "run: python docs/compatibility/render.py"


def test_the_reports_are_those_of_the_present_checks() -> None:
    for path in FOLDER.glob("*.json"):
        report = Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
        expected = [(check.name, check.shows) for check in CHECKS]
        assert [(result.name, result.shows) for result in report.results] == expected, path.name


def test_the_known_dialects_are_those_that_were_measured() -> None:
    for name in ("embedded", "skyrl", "tuft"):
        assert Dialect.load(FOLDER / f"{name}.json") == dialect_named(name)
