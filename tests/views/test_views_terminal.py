"""What a failure shows in a terminal: as wide as it is, in colours where it has them, and plain in a log."""

import io
import re
import sys
from collections.abc import Callable

import pytest
from cases import CASES, healed, simulated

from oomdoctor.views import bundle, notice_bundle, text, whole
from oomdoctor.views.diagnosis import tell
from oomdoctor.views.mime import fitted, looks

SHOWN = {"diagnosis": bundle, "notice": notice_bundle}


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_screen(monkeypatch: pytest.MonkeyPatch, columns: int = 60) -> None:
    """Have a terminal on the standard output, and a file on the standard error."""
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text: str) -> str:
    """The text without colours, of which there have to be some."""
    assert "\x1b[" in text
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("what", SHOWN)
def test_it_is_as_wide_as_the_terminal_and_has_its_colours(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    on_a_screen(monkeypatch)
    shown = SHOWN[what](healed())["text/plain"]
    assert 40 < max(map(len, plain(shown).splitlines())) <= 60


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_there_are_no_colours_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    on_a_screen(monkeypatch)
    monkeypatch.setenv(name, value)
    shown = bundle(healed())["text/plain"]
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_an_empty_no_color_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_screen(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "")
    assert looks(sys.stdout)["colour"]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"healed", "hostile"}))  # of which a notice tells
def test_a_terminal_shows_the_answer_in_a_few_lines(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    on_a_screen(monkeypatch, columns=80)
    case = CASES[name]()
    lines = bundle(case, is_brief=True)["text/plain"].rstrip().splitlines()
    assert len(lines) <= 12
    assert "%oomdoctor why" in " ".join(lines)
    assert len(whole(case).splitlines()) > len(lines)


def test_what_a_script_shows_goes_by_its_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_screen(monkeypatch)
    case = healed()
    shown = bundle(case, {case.incident.cell.number: "train.py"})["text/plain"]
    assert "\x1b" not in shown
    assert 60 < max(map(len, shown.splitlines())) <= 100


def test_a_closed_or_missing_stream_is_no_terminal() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None, object()):
        assert looks(stream) == {"width": 100, "colour": False}


def written(text: str, encoding: str) -> str:
    """What a stream of that encoding, which takes nothing else, makes of a text that was fitted to it."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    stream.write(fitted(text, stream))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_without_utf_8_is_told_the_same(encoding: str) -> None:
    whole = text.render(tell(simulated()))
    plain = written(whole, encoding)
    assert len(plain.splitlines()) == len(whole.splitlines())
    assert re.findall(r"[0-9.]+ [KMG]iB", plain) == re.findall(r"[0-9.]+ [KMG]iB", whole)
    assert written(whole, "utf-8") == whole


@pytest.mark.parametrize("encoding", [None, "no such", 3])
def test_what_stands_in_for_a_stream_gets_the_text_as_it_is(encoding: object) -> None:
    class Stand:
        pass

    Stand.encoding = encoding  # type: ignore[attr-defined]
    assert fitted("≈ 3", Stand()) == "≈ 3"  # type: ignore[arg-type]


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_the_name_of_a_script_moves_no_cursor(show: Callable[..., dict[str, str]]) -> None:
    case = healed()
    (shown,) = show(case, {case.incident.cell.number: "train\x1b[31m\n.py"}).values()
    assert "train\\x1b[31m\\n.py" in shown
    assert "\x1b" not in shown
