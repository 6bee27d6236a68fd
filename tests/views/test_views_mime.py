from __future__ import annotations

import subprocess
import sys

import cases
import pytest

from oomdoctor import views
from oomdoctor.views import html, text
from oomdoctor.views.survey import survey


@pytest.mark.parametrize(
    ("made", "plain", "page"),
    [
        (views.bundle, text.case, html.case),
        (
            lambda case: views.explanation_bundle(cases.explained(case)),
            lambda case: text.explanation(cases.explained(case)),
            lambda case: html.explanation(cases.explained(case)),
        ),
        (
            lambda case: views.plan_bundle(case.plan),
            lambda case: text.plan(case.plan),
            lambda case: html.plan(case.plan),
        ),
        (views.notice_bundle, text.notice, html.notice),
        (
            lambda case: views.report_bundle(survey(case.evidence)),
            lambda c: text.report(survey(c.evidence)),
            lambda c: html.report(survey(c.evidence)),
        ),
    ],
)
def test_a_bundle_has_text_and_html(made, plain, page) -> None:  # type: ignore[no-untyped-def]
    case = cases.healed()
    assert made(case) == {"text/plain": plain(case), "text/html": page(case)}


def test_the_views_load_neither_torch_nor_ipywidgets() -> None:
    program = (
        "import sys, oomdoctor.views, oomdoctor.views.panel\n"
        "print([name for name in ('torch', 'ipywidgets', 'IPython') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
