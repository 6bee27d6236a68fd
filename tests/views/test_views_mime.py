from __future__ import annotations

import subprocess
import sys

import cases
import pytest

from oomdoctor import views
from oomdoctor.views import html, text
from oomdoctor.views.memory_report import survey


@pytest.mark.parametrize(
    ("made", "view"),
    [
        (views.bundle, "case"),
        (views.notice_bundle, "notice"),
        (lambda case: views.report_bundle(survey(case.evidence)), "report"),
    ],
)
def test_a_bundle_has_text_and_html(made, view) -> None:  # type: ignore[no-untyped-def]
    case = cases.healed()
    document = cases.VIEWS[view](case)
    assert made(case) == {"text/plain": text.render(document), "text/html": html.render(document)}


def test_the_views_load_neither_torch_nor_ipywidgets() -> None:
    program = (
        "import sys, oomdoctor.views, oomdoctor.views.panel\n"
        "print([name for name in ('torch', 'ipywidgets', 'IPython') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
