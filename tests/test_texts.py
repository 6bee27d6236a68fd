"""The pages of all texts that a user can see: up to date, and with what the modules say and nothing else of theirs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "texts_page.py"
MODULE = '''\
"""A docstring is for readers of the source."""
import re

def told(path, names, count):
    """So is this one."""
    pattern = re.compile("a pattern that matches")
    code = "loss = criterion(model(x), y) + penalty"
    yield f"`{path.name}` is held by {', '.join(names)}, {count:,} of them{f' at line {count}' if count else ''}"
    yield "no holder was found"
    yield "word"
'''


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


def test_the_pages_are_what_the_modules_say(tool: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert (tool["main"](["--check"]), capsys.readouterr().err) == (0, ""), "run: make docs"


def test_a_text_is_told_with_the_names_of_what_is_filled_in(tool: dict[str, Any]) -> None:
    assert list(tool["texts"](MODULE)) == [
        "`{name}` is held by {names}, {count} of them{…}",
        " at line {count}",
        "no holder was found",
    ]


def test_pages_that_are_out_of_date_are_told_and_written_anew(
    tool: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = tool["main"]
    main.__globals__.update(ROOT=tmp_path, PAGES=tmp_path / "texts")
    for room, text in {"views": MODULE, "silent": "NAME = 1\n"}.items():
        (tmp_path / "oomdoctor" / room).mkdir(parents=True)
        (tmp_path / "oomdoctor" / room / "module.py").write_text(text)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "gone.md").write_text("of a room that is no more")
    assert main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/texts is out of date: make docs\n"
    assert main([]) == 0
    assert [page.name for page in (tmp_path / "texts").iterdir()] == ["views.md"]
    assert main(["--check"]) == 0
