"""Text and HTML show the same: every number of one stands in the other, and every fact stands in both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum

import pytest
from cases import CASES, explained, grown
from seen import Seen

from oomdoctor.model.case import Case
from oomdoctor.views import html, text
from oomdoctor.views.aftermath import aftermath
from oomdoctor.views.prices import prices
from oomdoctor.views.reading import read
from oomdoctor.views.story import tell
from oomdoctor.views.survey import survey

NUMBER = re.compile(r"\d+(?:\.\d+)?")
WIDE = 2000
SHOWN_AS_SHAPE = {"kind", "mark", "ratio", "peak_ratio", "budget_ratio"}

VIEWS = {
    "case": (lambda c: text.case(c, width=WIDE), html.case, tell),
    "report": (
        lambda c: text.report(survey(c.evidence), width=WIDE),
        lambda c: html.report(survey(c.evidence)),
        lambda c: survey(c.evidence),
    ),
    "grown report": (
        lambda c: text.report(grown(c), width=WIDE),
        lambda c: html.report(grown(c)),
        lambda c: grown(c),
    ),
    "growth": (
        lambda c: text.growth(grown(c).growth, width=WIDE),
        lambda c: html.growth(grown(c).growth),
        lambda c: grown(c).growth,
    ),
    "explanation": (
        lambda c: text.explanation(explained(c), width=WIDE),
        lambda c: html.explanation(explained(c)),
        lambda c: read(explained(c)),
    ),
    "plan": (lambda c: text.plan(c.plan, width=WIDE), lambda c: html.plan(c.plan), lambda c: prices(c.plan)),
    "notice": (lambda c: text.notice(c, width=WIDE), html.notice, aftermath),
}


def _squeeze(shown: str) -> str:
    return " ".join(shown.replace("`", "").split())


def _facts(value: object, name: str = "") -> Iterator[str]:
    """Every string within the facts that stands for itself."""
    if isinstance(value, Enum) or name in SHOWN_AS_SHAPE:
        return
    if isinstance(value, str) and value:
        yield _squeeze(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _facts(getattr(value, field.name), field.name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _facts(item)


def _both(view: str, name: str) -> tuple[Case, str, str]:
    case = CASES[name]()
    as_text, as_html, _ = VIEWS[view]
    return case, _squeeze(as_text(case)), _squeeze(Seen(as_html(case)).text)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_every_number_stands_in_both(view: str, name: str) -> None:
    _, plain, page = _both(view, name)
    assert set(NUMBER.findall(plain)) == set(NUMBER.findall(page))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_every_fact_stands_in_both(view: str, name: str) -> None:
    case, plain, page = _both(view, name)
    facts = list(_facts(VIEWS[view][2](case)))
    assert facts
    assert [fact for fact in facts if fact not in plain] == []
    assert [fact for fact in facts if fact not in page] == []


def test_the_number_test_can_fail() -> None:
    _, plain, page = _both("case", "offered")
    assert set(NUMBER.findall(plain)) != set(NUMBER.findall(page.replace("2.41", "2.14")))
