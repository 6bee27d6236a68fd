from __future__ import annotations

import re
from dataclasses import replace

import cases
import pytest
from cases import CASES, VIEWS
from covering import few
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from oomdoctor.model.sizes import GIB
from oomdoctor.views import text
from oomdoctor.views.diagnosis import tell
from oomdoctor.views.document import Bar, Segment
from oomdoctor.views.labels import KINDS
from oomdoctor.views.memory_report import cards

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", few([*range(60, 201, 10), 79, 91, 92, 93], [60, 92, 200]))
@pytest.mark.parametrize("name", CASES)
def test_no_line_is_wider_than_asked_for(name: str, width: int) -> None:
    case = CASES[name]()
    shown = "".join(text.render(view(case), width=width) for view in VIEWS.values())
    assert max(map(cell_len, shown.splitlines())) <= width


def test_of_the_less_likely_causes_the_names_are_told() -> None:
    many = tuple(
        replace(cases.FINDINGS[0], title=f"cause {number}", because=(f"sign {number}",)) for number in range(1, 31)
    )
    shown = text.render(tell(cases.offered(findings=many)))
    assert [int(number) for number in re.findall(r" cause (\d+) ", shown)] == list(range(1, 31))
    assert [int(number) for number in re.findall(r"sign (\d+)", shown)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", CASES)
def test_colour_adds_nothing_but_colour(name: str) -> None:
    case = CASES[name]()
    for view in VIEWS.values():
        plain, coloured = text.render(view(case)), text.render(view(case), colour=True)
        assert "\x1b" not in plain
        assert "\x1b" in coloured
        assert [line.rstrip() for line in ANSI.sub("", coloured).splitlines()] == plain.splitlines()


def test_the_parts_come_in_their_order() -> None:
    shown = text.render(tell(cases.offered()))
    parts = [
        "Out of memory, case 3",
        "asked for 2.41 GiB",
        "In[5], line 7 │ loss.backward()",
        "cuda:0    ",
        "█ activations",
        "What holds it",
        "Why",
        "confidence 86 %",
        "What to change",
        "%oomdoctor fix 1",
        "Considered and refused",
        "`%oomdoctor retry`",
    ]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_hostile_names_are_shown_as_they_are_typed() -> None:
    shown = text.render(tell(cases.hostile()), width=400)
    assert cases.HOSTILE in shown
    assert "\\x1b[31mred\\u202edesrever\\nnewline" in shown


def test_no_unprintable_character_reaches_the_terminal() -> None:
    case = cases.hostile()
    shown = "".join(text.render(view(case)) for view in VIEWS.values())
    assert {char for char in shown if not char.isprintable()} == {"\n"}


def test_the_marker_stands_over_the_last_cell_within_the_budget() -> None:
    lines = text.render(tell(cases.offered()), width=100).splitlines()
    mark = next(number for number, line in enumerate(lines) if line.endswith("▼"))
    assert lines[mark + 1].index("╳") == len(lines[mark])  # noqa: RUF001
    assert len(lines[mark + 1]) == 100


def test_a_title_too_long_for_the_marker_gets_a_line_of_its_own() -> None:
    bar = Bar(title="t" * 30, budget="1.00 GiB", budget_ratio=0.5, segments=(_segment(0.5), _segment(0.5, "over")))
    title, marker, line, *_ = (part.plain for part in text.draw(bar, 40))
    assert (title, marker) == ("t" * 30, "1.00 GiB ▼".rjust(20))
    assert len(line) == 40


def _segment(ratio: float, kind: str = "activation") -> Segment:
    return Segment(kind=kind, label="label", size="1.00 GiB", ratio=ratio)


@given(st.lists(st.integers(1, 64 * GIB), min_size=1, max_size=15), st.integers(20, 200))
def test_the_bar_is_as_long_as_asked_for_and_shows_every_segment(sizes: list[int], width: int) -> None:
    cells = text._cells([size / sum(sizes) for size in sizes], width)
    assert sum(cells) == width
    assert min(cells) >= 1


def test_every_kind_of_memory_has_a_fill_of_its_own() -> None:
    fills = [kind.sign for kind in KINDS.values()]
    assert len(set(fills)) == len(fills)


def _drawn(*ratios: tuple[float, str]) -> list[str]:
    bar = Bar(title="", budget=None, budget_ratio=None, segments=tuple(_segment(*one) for one in ratios))
    return [part.plain for part in text.draw(bar, 60)]


def test_what_is_under_half_a_cell_shares_one() -> None:
    tiny = 0.49 / 60
    _, line, *legend = _drawn(
        (0.5, "activation"), (tiny, "batch"), (0.5 - 3 * tiny, "free"), (tiny, "buffer"), (tiny, "cached")
    )
    assert line.count("≡") == 1
    assert set(line) == {"█", "≡", "·"}
    assert any("≡ other: label 1.00 GiB, label 1.00 GiB, label 1.00 GiB" in part for part in legend)


def test_a_single_tiny_segment_and_what_is_free_or_asked_for_keep_their_fills() -> None:
    tiny = 0.49 / 60
    _, line, *_ = _drawn((0.99, "activation"), (tiny, "batch"))
    assert line.endswith("█▚")
    _, line, *_ = _drawn((0.97, "activation"), (tiny, "free"), (tiny, "asked"), (tiny, "over"))
    assert line.endswith("█·╱╳")  # noqa: RUF001


@pytest.mark.parametrize("width", few([20, 30, 40, 50, 59, 60, 70, 80, 100], [20, 59, 100]))
@pytest.mark.parametrize("name", CASES)
def test_a_narrow_terminal_is_kept_to_and_breaks_no_code_that_fits(name: str, width: int) -> None:
    case = CASES[name]()
    shown = text.render(cases.grown(case), width=width).splitlines()
    assert max(map(cell_len, shown)) <= width
    for row in (row for card in cards(case.evidence, top=30) for row in card.holders.rows):
        for code in (row.path, row.frees or ""):
            words = [word for word in code.split(" ") if cell_len(word) <= width]
            assert [word for word in words if not any(word in line for line in shown)] == []


def test_the_environment_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = text.render(tell(cases.offered()))
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("JUPYTER_COLUMNS", "40"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    assert text.render(tell(cases.offered())) == before
