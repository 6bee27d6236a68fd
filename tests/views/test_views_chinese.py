"""The views in Chinese: every block of a document, the same figures, and lines that are no wider than they may be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import cases
import memplans
import pytest
from latin import shown
from rich.cells import cell_len
from rich.text import Text

from oomdoctor import language
from oomdoctor.views import html, text
from oomdoctor.views.displayed import Planned, foresight
from oomdoctor.views.document import Bar, Diff, Document, Line, Source, Table
from oomdoctor.views.mime import live_bundle
from oomdoctor.views.translated import inline, translated

DOCUMENTS = {
    **{f"{name}, {view}": (name, view) for name in cases.CASES for view in cases.VIEWS if name != "hostile"},
    **{f"plan {name}": (name, "") for name in memplans.MEMPLANS},
}


def document(name: str, view: str) -> Document:
    return cases.VIEWS[view](cases.CASES[name]()) if view else foresight(memplans.MEMPLANS[name]())


@pytest.fixture
def chinese() -> Iterator[None]:
    language.choose("zh")
    yield
    language.choose("auto")


def test_english_documents_are_the_same_objects() -> None:
    told = document("offered", "case")
    assert translated(told) is told
    assert inline(line := Text("Out of memory")) is line


def figures(rendered: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:\.\d+)? (?:[KMGT]iB|%)", " ".join(rendered.split())))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_figures_are_those_of_the_english_text(name: str, chinese: None) -> None:
    told = document(*DOCUMENTS[name])
    said = text.render(told, width=1000)
    language.choose("en")
    assert figures(said) == figures(text.render(told, width=1000))
    assert "{" not in re.sub(r"`[^`]*`", "", said)


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", ["offered, case", "offered, report", "healed, notice", "plan too_large"])
def test_no_line_is_wider_than_in_english(name: str, width: int, chinese: None) -> None:
    lines = text.render(document(*DOCUMENTS[name]), width=width).splitlines()
    assert [line for line in lines if cell_len(line) > width and not line.startswith("  ")] == []


def test_columns_stand_below_one_another(chinese: None) -> None:
    """A Chinese character is as wide as two others, and columns count in those."""
    rows = (("1 MiB", "50 %", "激活值", Text("a")), ("2 MiB", "50 %", "optimizer state", Text("b")))
    first, second = text.render((Table("holders", rows),), width=80).splitlines()
    assert cell_len(first.partition("a")[0]) == cell_len(second.partition("b")[0])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pages_are_whole(name: str, chinese: None) -> None:
    page = html.page("Memory report", document(*DOCUMENTS[name]))
    assert '<html lang="zh-CN">' in page
    assert "<title>内存报告</title>" in page


def test_code_and_diffs_are_left_alone(chinese: None) -> None:
    blocks = (Diff("- free\n+ Out of memory\n"), Source("In[2], line 3", "free = request", before="peak at "))
    diff, source = translated(blocks)
    assert diff is blocks[0]
    assert source == Source("In[2]，第 3 行", "free = request", before="峰值在 ")
    styled = Text.assemble(("free", "path"), " ", ("free", "detail"))
    said = inline(styled)
    assert isinstance(said, Text)
    assert (said.plain, [str(span.style) for span in said.spans]) == ("free 空闲", ["path", "detail"])


def test_a_name_before_its_sentence_stays_set_apart(chinese: None) -> None:
    sentence = Text("host memory: 1 GiB of 2 GiB in use.")
    sentence.stylize("strong", 0, len("host memory"))
    said = inline(sentence)
    assert isinstance(said, Text)
    assert said.plain == "主机内存：已用 1 GiB，共 2 GiB。"
    assert [said.plain[span.start : span.end] for span in said.spans] == ["主机内存"]


def test_what_is_refreshed_is_said_in_chinese(chinese: None) -> None:
    bar = Bar.of("host", 4 << 30, [("process", "resident in this process", 1 << 30), ("free", "free", 3 << 30)])
    assert bar is not None
    bundle = live_bundle((Line("host: 1.00 GiB resident in this process"), bar))
    assert bundle["text/plain"].startswith("主机：本进程常驻 1.00 GiB\n")
    assert "空闲" in bundle["text/html"]


def test_json_is_english_in_any_language(chinese: None) -> None:
    said = [json.dumps(make().to_dict()) for make in cases.CASES.values()]
    said += [json.dumps(Planned(make()).to_dict()) for make in memplans.MEMPLANS.values()]
    language.choose("en")
    told = [json.dumps(make().to_dict()) for make in cases.CASES.values()]
    told += [json.dumps(Planned(make()).to_dict()) for make in memplans.MEMPLANS.values()]
    assert said == told


def test_little_english_is_left_of_pages(chinese: None) -> None:
    """In what these hand-made cases say, sentences of their own are left; words of the views are not."""
    page = html.render(document("crowded", "report"))
    left = shown(page)
    assert not re.search(r"\b(in use|reserved|allocated|free|The limit|Top holders|Size|Share|Role|Held by)\b", left)
