from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import cases
import pytest
from cases import CASES
from jinja2 import UndefinedError
from seen import Seen

from oomdoctor.model.case import Case
from oomdoctor.model.memory import Role
from oomdoctor.views import html
from oomdoctor.views.diagnosis import tell
from oomdoctor.views.labels import KINDS
from oomdoctor.views.memory_report import growth_rows

VIEWS: dict[str, Callable[[Case], str]] = {
    **{name: lambda case, view=view: html.render(view(case)) for name, view in cases.VIEWS.items()},  # type: ignore[misc]
    "growth": lambda case: html.render(
        tuple(growth_rows(cases.weights().evidence, case.evidence, cases.HOSTILE).blocks())
    ),
}
EVERY = pytest.mark.parametrize(("view", "name"), [(view, name) for view in VIEWS for name in CASES])

# What JupyterLab's sanitiser lets through in an untrusted notebook, as far as it is used here. The words for screen
# readers it drops, without which the page says the same, only more of it.
TAGS = {
    *("br", "code", "details", "div", "em", "h3", "h4", "img", "li", "ol", "p", "pre", "section", "small", "span"),
    *("strong", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}
ATTRIBUTES = {"style", "title", "scope", "aria-hidden", "role", "dir", "alt", "src"}
PROPERTIES = {
    *("background", "background-color", "background-image", "background-size", "border", "border-bottom"),
    *("border-collapse", "border-left", "border-radius", "border-right", "box-sizing", "color", "cursor", "display"),
    *("flex", "flex-wrap", "gap", "overflow-wrap"),
    *("float", "font-family", "font-size", "font-weight", "height", "left", "line-height", "margin", "margin-bottom"),
    *("margin-right", "margin-top", "max-width", "min-width", "opacity", "overflow", "overflow-x", "padding"),
    *(
        "padding-left",
        "position",
        "table-layout",
        "text-align",
        "text-overflow",
        "top",
        "vertical-align",
        "white-space",
        "width",
    ),
    *("word-break", "border-top", "margin-left"),
}
THEMED = re.compile(
    r"var\(--jp-[\w-]+, var\(--vscode-[\w-]+, (inherit|monospace|14px)\)\)"
    r"|color-mix\(in srgb, var\(--jp-[\w-]+, var\(--vscode-[\w-]+, currentcolor\)\) 70%, currentcolor\)"
)
LITERAL_TEXT_COLOUR = {"inherit", "#ffffff"}


def _case(case: Case) -> str:
    return html.render(tell(case))


@EVERY
def test_only_what_an_untrusted_notebook_keeps_is_used(view: str, name: str) -> None:
    seen = Seen(VIEWS[view](CASES[name]()))
    assert set(seen.tags) <= TAGS
    assert {attribute for _, attribute, _ in seen.attributes} <= ATTRIBUTES
    assert {prop for _, prop, _ in seen.styles} <= PROPERTIES


@EVERY
def test_text_takes_its_colours_from_the_theme(view: str, name: str) -> None:
    for _, prop, value in Seen(VIEWS[view](CASES[name]())).styles:
        if prop == "color":
            assert THEMED.fullmatch(value) or value in LITERAL_TEXT_COLOUR
        elif "var(" in value:
            assert THEMED.fullmatch(value)


@EVERY
def test_there_is_no_style_block_and_no_script(view: str, name: str) -> None:
    page = VIEWS[view](CASES[name]()).lower()
    assert "<style" not in page
    assert "<script" not in page
    assert "javascript:" not in page


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_names_stay_text(view: str) -> None:
    page = VIEWS[view](cases.hostile())
    seen = Seen(page)
    assert not [name for _, name, _ in seen.attributes if name.startswith("on")]
    assert {value[:19] for _, name, value in seen.attributes if name == "src"} <= {"data:image/svg+xml,"}
    assert "<img src=x" not in page
    assert cases.HOSTILE in seen.text
    assert "\x1b" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize("view", VIEWS)
def test_code_keeps_its_order_beside_names_from_right_to_left(view: str) -> None:
    page = VIEWS[view](cases.weights())
    assert page.count("<code ") == page.count('<code dir="ltr" ')


def test_the_escaping_test_can_fail() -> None:
    environment = html._templates()
    unsafe = environment.from_string("{{ name | safe }}").render(name=cases.HOSTILE)
    assert "img" in Seen(unsafe).tags


def test_a_fact_that_a_template_misspells_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        html._templates().from_string("{{ blocks.hedline }}").render(blocks={})


def _widths(page: str) -> list[float]:
    return [float(width) for width in re.findall(r"float:left;height:26px;width:([\d.]+)%", page)]


@pytest.mark.parametrize("name", sorted(set(CASES) - {"unavailable"}))
def test_the_segments_fill_the_bar_and_never_more(name: str) -> None:
    widths = _widths(_case(CASES[name]()))
    assert len(widths) >= 2
    assert 99 < sum(widths) <= 100


def test_every_segment_has_a_line_in_the_legend_and_a_tooltip() -> None:
    page = _case(cases.offered())
    seen = Seen(page)
    tips = [value for tag, name, value in seen.attributes if name == "title" and tag == "div"]
    for tip in tips[: len(_widths(page))]:
        assert tip in seen.text


def test_every_kind_of_memory_looks_different() -> None:
    fills = [html._fill(kind) for kind in KINDS]
    assert len(set(fills)) == len(fills)
    colours = [KINDS[kind].colour for kind in ("process", *(role.value for role in Role))]
    assert colours.count(colours[0]) == 1, "both stand in the bar of this process"


def test_refusals_are_folded() -> None:
    page = _case(cases.offered())
    assert re.search(r"<details[^>]*>\s*<summary[^>]*>Considered and refused: \d+ fix(es)?</summary>", page)
    assert page.index("chunked_forward") > page.index("<details")


@pytest.mark.parametrize("title", ["What holds it", "Memory over time", "Considered and refused"])
def test_details_are_folded(title: str) -> None:
    page = _case(cases.nothing_fits())
    assert re.search(rf"<details[^>]*>\s*<summary[^>]*>{title}(: [^<]+)?</summary>", page)
    assert page.index("What to change") > page.index("What holds it")


def test_the_less_likely_causes_are_folded_and_go_on_counting() -> None:
    many = tuple(replace(cases.FINDINGS[0], title=f"cause {number}") for number in range(1, 31))
    page = _case(cases.offered(findings=many))
    told, _, rest = page.partition("25 less likely</summary>")
    assert told.rindex("<details") > told.index("cause 5<")
    assert "cause 6<" not in told
    folded = rest[: rest.index("</details>")]
    assert folded.index('<ol start="6"') < folded.index("cause 6<") < folded.index("cause 30<")
    assert "less likely" not in _case(cases.offered(findings=many[:5]))


def test_the_timeline_has_a_line_for_the_budget_and_says_it_in_words() -> None:
    page = _case(cases.nothing_fits())
    assert re.search(r"top:19\.0\d%;border-top:2px solid", page), "8 of 9.41 GiB and some room, from above"
    assert ">limit 8.00 GiB<" in page
    assert ">peak 9.41 GiB<" in page
    assert "Memory ran out at line 7. With enough of it, the cell goes from" in Seen(page).text
