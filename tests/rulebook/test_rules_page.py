"""The page of all rules: up to date, and with everything that the files have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from oomdoctor.rulebook import load, locate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rules.md"
BOOK = load([locate()], known_fixes=None)


def write(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "rules_page.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_is_what_the_rule_files_say():
    done = write("--check")
    assert (done.returncode, done.stderr) == (0, ""), "run: make docs"


def test_a_page_that_is_out_of_date_is_told(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools" / "rules_page.py").write_text((ROOT / "tools" / "rules_page.py").read_text())
    (tmp_path / "docs" / "rules.md").write_text(PAGE.read_text().replace("The rules", "The rule", 1))
    done = write("--check", root=tmp_path)
    assert (done.returncode, done.stderr) == (1, "docs/rules.md is out of date: make docs\n")
    assert write(root=tmp_path).returncode == 0
    assert (tmp_path / "docs" / "rules.md").read_text() == PAGE.read_text()


def test_every_rule_has_its_section_with_all_that_a_reader_asks_for():
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))
    assert set(sections) == {rule.file.id for rule in BOOK.rules}
    for rule in BOOK.rules:
        text, file = sections[rule.file.id], rule.file
        assert f"**{file.title}.**" in text
        assert f"*confidence* {file.confidence:.0%}" in text
        assert all(f"`{fix}`" in text for fix in file.fixes)
        assert all(address in text for address in file.references)
        for heading in ("*Why.*", "*Fires when*", "*Says*", "*May be wrong.*"):
            assert heading in text


def test_links_within_the_page_and_to_the_sources_lead_somewhere():
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
    }
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert {link[1:] for link in links if link.startswith("#")} <= headings
    sources = [PAGE.parent / link for link in links if link.startswith("../")]
    assert len(sources) > len(BOOK.rules)
    assert all(source.exists() for source in sources)
