"""Text and HTML show the same: every number of one stands in the other, and every fact stands in both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum

import pytest
from cases import CASES, VIEWS
from rich.text import Text
from seen import Seen

from oomdoctor.views import html, text
from oomdoctor.views.document import Document

NUMBER = re.compile(r"\d+(?:\.\d+)?")
WIDE = 2000
SHOWN_AS_SHAPE = {"kind", "look", "of", "mark", "tiles", "axis"}


def _squeeze(shown: str) -> str:
    return " ".join(shown.replace("`", "").split())


def _facts(value: object, name: str = "") -> Iterator[str]:
    """Every string within the facts that stands for itself."""
    if isinstance(value, Enum) or name in SHOWN_AS_SHAPE:
        return
    if isinstance(value, str | Text) and value:
        yield from map(_squeeze, str(value).split("\n"))
    elif is_dataclass(value):
        for field in fields(value):
            yield from _facts(getattr(value, field.name), field.name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _facts(item)


def _both(view: str, name: str) -> tuple[Document, str, str]:
    document = VIEWS[view](CASES[name]())
    return document, _squeeze(text.render(document, width=WIDE)), _squeeze(Seen(html.render(document)).text)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_every_number_stands_in_both(view: str, name: str) -> None:
    _, plain, page = _both(view, name)
    assert set(NUMBER.findall(plain)) == set(NUMBER.findall(page))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_every_fact_stands_in_both(view: str, name: str) -> None:
    document, plain, page = _both(view, name)
    facts = list(_facts(document))
    assert facts
    assert [fact for fact in facts if fact not in plain] == []
    assert [fact for fact in facts if fact not in page] == []


def test_the_number_test_can_fail() -> None:
    _, plain, page = _both("case", "offered")
    assert set(NUMBER.findall(plain)) != set(NUMBER.findall(page.replace("2.41", "2.14")))
