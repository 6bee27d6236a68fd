"""The views as they look, kept as files.

After a wanted change, write them anew and read the difference before it is committed:

    OOMDOCTOR_REGENERATE=1 pytest tests/views/test_views_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import CASES, VIEWS

from oomdoctor.views import html, text

GOLDEN = Path(__file__).parent / "golden"


def _text(name: str, width: int) -> str:
    case = CASES[name]()
    return f"{'=' * width}\n".join(text.render(view(case), width=width) for view in VIEWS.values())


def _html(name: str) -> str:
    case = CASES[name]()
    return "<hr>\n".join(html.render(view(case)) for view in VIEWS.values())


def _check(path: Path, shown: str) -> None:
    if os.environ.get("OOMDOCTOR_REGENERATE"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", CASES)
def test_text_looks_as_it_did(name: str, width: int) -> None:
    _check(GOLDEN / f"{name}.{width}.txt", _text(name, width))


@pytest.mark.parametrize("name", CASES)
def test_html_looks_as_it_did(name: str) -> None:
    _check(GOLDEN / f"{name}.html", _html(name))


def test_no_golden_file_is_left_over() -> None:
    wanted = {f"{name}.{ending}" for name in CASES for ending in ("80.txt", "100.txt", "html")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted
