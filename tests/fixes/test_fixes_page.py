"""The page of all fixes: up to date, and with everything that the modules and the measurements have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from oomdoctor import fixes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fixes.md"
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "fixes.json").read_text())


def test_the_page_is_what_the_modules_say() -> None:
    command = [sys.executable, str(ROOT / "tools" / "fixes_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "run: make docs"


def test_every_fix_has_its_section_and_every_figure_its_row() -> None:
    text = PAGE.read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert set(sections) == set(fixes.ids())
    assert {row["fix"] for row in MEASURED["rows"]} <= set(fixes.ids())
    rows = [line for line in text.splitlines() if line.startswith("| [`") and " MiB | " in line]
    assert len(rows) == len(MEASURED["rows"])


def test_what_is_measured_buys_something() -> None:
    assert [row for row in MEASURED["rows"] if row["after"] > row["before"]] == []
