"""Text and HTML together, for ``IPython.display.display(bundle, raw=True)``.

The panel is not in it: with a widget in the same bundle, a saved notebook that is opened without its widget state
shows nothing at all.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from oomdoctor.views import html, text
from oomdoctor.views.terminal import fitted, looks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomdoctor.model.case import Case
    from oomdoctor.model.explanation import Explanation
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.plan import Plan
    from oomdoctor.views.story import Retry
    from oomdoctor.views.survey import Survey


def bundle(case: Case, names: Mapping[int, str] | None = None, retry: Retry | None = None) -> dict[str, str]:
    """Return the diagnosis of ``case`` by MIME type.

    Args:
        names: what the cells are called in a program that is no notebook, which has text alone, on its standard error.
        retry: what a retry would do; by the plan alone where nothing else is known.
    """
    stream = _stream(names)
    shown = {"text/plain": fitted(text.case(case, names=names, retry=retry, **looks(stream)), stream)}
    return shown if names is not None else {**shown, "text/html": html.case(case, retry)}


def report_bundle(survey: Survey, *, width: int = 100) -> dict[str, str]:
    """Return what holds memory now by MIME type."""
    return {"text/plain": fitted(text.report(survey, width=width), sys.stdout), "text/html": html.report(survey)}


def explanation_bundle(explanation: Explanation, meanings: Mapping[Incident, str] | None = None) -> dict[str, str]:
    """Return what a message alone tells by MIME type."""
    shown = fitted(text.explanation(explanation, meanings), sys.stdout)
    return {"text/plain": shown, "text/html": html.explanation(explanation, meanings)}


def plan_bundle(plan: Plan) -> dict[str, str]:
    """Return what a cell was forecast to need by MIME type."""
    return {"text/plain": fitted(text.plan(plan), sys.stdout), "text/html": html.plan(plan)}


def notice_bundle(case: Case, names: Mapping[int, str] | None = None) -> dict[str, str]:
    """Return how ``case`` ended by MIME type. For ``names`` see ``bundle``."""
    stream = _stream(names)
    shown = {"text/plain": fitted(text.notice(case, names=names, **looks(stream)), stream)}
    return shown if names is not None else {**shown, "text/html": html.notice(case)}


def _stream(names: Mapping[int, str] | None) -> TextIO | None:
    return sys.stdout if names is None else sys.stderr
