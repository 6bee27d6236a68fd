from __future__ import annotations

import subprocess
import sys

import cases
import pytest

from oomdoctor import views
from oomdoctor.views import html, text
from oomdoctor.views.memory_report import survey
from oomdoctor.views.mime import kept


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


def test_what_a_cell_has_put_out_is_kept_as_one_output() -> None:
    outputs = [
        {"output_type": "stream", "text": "10%\r50%\r100%\n\x1b[31mdone\x1b[0m\n"},
        {"output_type": "display_data", "data": {"image/png": 'QUJD">\n', "text/plain": "<Figure>"}},
        {"output_type": "display_data", "data": {"text/html": "<b>table</b>", "text/plain": "table"}},
        {"output_type": "display_data", "data": {"text/html": "<script>run()</script>", "text/plain": "<plot>"}},
        {"output_type": "error", "traceback": ["a", "b"]},
    ]
    told = kept(outputs)
    assert told["text/plain"] == "100%\ndone\n<Figure>table<plot>a\nb"
    assert "<pre>100%\ndone\n</pre>" in told["text/html"]
    assert 'src="data:image/png;base64,QUJD&quot;&gt;"' in told["text/html"]
    assert "<b>table</b>" in told["text/html"]
    assert "<pre>&lt;plot&gt;</pre>" in told["text/html"], "what has run once does not run again"
