"""Text and HTML together, for ``IPython.display.display(bundle, raw=True)``.

The panel is not in it: with a widget in the same bundle, a saved notebook that is opened without its widget state
shows nothing at all.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from oomdoctor.views import html, text
from oomdoctor.views.aftermath import aftermath
from oomdoctor.views.story import tell
from oomdoctor.views.terminal import fitted, looks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomdoctor.model.case import Case
    from oomdoctor.views.document import Document
    from oomdoctor.views.story import Retry


def bundle(case: Case, names: Mapping[int, str] | None = None, retry: Retry | None = None) -> dict[str, str]:
    """Return the diagnosis of ``case`` by MIME type.

    Args:
        names: what the cells are called in a program that is no notebook, which has text alone, on its standard error.
        retry: what a retry would do; by the plan alone where nothing else is known.
    """
    return _bundle(tell(case, retry, names), names)


def notice_bundle(case: Case, names: Mapping[int, str] | None = None) -> dict[str, str]:
    """Return how ``case`` ended by MIME type. For ``names`` see ``bundle``."""
    return _bundle((aftermath(case, in_notebook=names is None),), names)


def _bundle(document: Document, names: Mapping[int, str] | None) -> dict[str, str]:
    stream = sys.stdout if names is None else sys.stderr
    shown = {"text/plain": fitted(text.render(document, names=names, **looks(stream)), stream)}
    return shown if names is not None else {**shown, "text/html": html.render(document)}


def report_bundle(document: Document) -> dict[str, str]:
    """Return ``document`` by MIME type."""
    return {"text/plain": plain(document), "text/html": html.render(document)}


def plain(document: Document) -> str:
    """Return ``document`` as text for the standard output."""
    return fitted(text.render(document, width=looks(sys.stdout)["width"]), sys.stdout)
