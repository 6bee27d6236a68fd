"""Text and HTML together, for ``IPython.display.display(bundle, raw=True)``, and how text looks where it goes.

On a terminal text is as wide as that, in its colours and its characters, and plain elsewhere.

The panel is not in it: with a widget in the same bundle, a saved notebook that is opened without its widget state
shows nothing at all.

Beside that, what somebody who mends a fault has to know of a case, as JSON to be copied: the environment and the
figures. Without the user's leave there is nothing of their program in it: no line, name, path or message.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, TextIO, TypedDict

from oomdoctor.model import jsonable
from oomdoctor.model.case import OutcomeKind
from oomdoctor.views import html, text
from oomdoctor.views.diagnosis import answer, details, more, tell
from oomdoctor.views.document import Bar, Line, prose
from oomdoctor.views.outcome import aftermath
from oomdoctor.views.translated import translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from oomdoctor.model.case import Case
    from oomdoctor.model.plan import Forecast
    from oomdoctor.views.document import Document
    from oomdoctor.views.outcome import Retry


def bundle(
    case: Case, names: Mapping[int, str] | None = None, retry: Retry | None = None, *, is_brief: bool = False
) -> dict[str, str]:
    """Return the diagnosis of ``case`` by MIME type.

    Args:
        names: what the cells are called in a program that is no notebook, which has text alone, on its standard error.
        retry: what a retry would do; by the plan alone where nothing else is known.
        is_brief: whether its answer alone is shown, as where a command prints the rest.
    """
    return _bundle((*answer(case, retry), *more(case)) if is_brief else tell(case, retry, names), names)


def in_brief(case: Case, retry: Retry | None = None) -> str:
    """Return what a terminal shows of ``case`` as text. For ``retry`` see ``bundle``."""
    return _text((*answer(case, retry), *more(case)))


def whole(case: Case, retry: Retry | None = None) -> str:
    """Return the whole diagnosis of ``case`` as text. For ``retry`` see ``bundle``."""
    return _text(tell(case, retry))


def answer_bundles(case: Case, retry: Retry | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a notebook shows above and below the controls of ``case``. For ``retry`` see ``bundle``."""
    above = answer(case, retry)
    page = html.controlled(above, is_healed=case.outcome.kind is OutcomeKind.HEALED)
    return {**report_bundle(above), "text/html": page}, report_bundle(details(case, retry))


def kept(outputs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return what a cell put out below a button as one output that is saved with the notebook.

    A page shows it where the button's own output is not live.
    """
    texts, parts = [], []
    for one in outputs:
        data = one.get("data", {})
        plain = one.get("text") or data.get("text/plain") or "\n".join(one.get("traceback", ()))
        texts.append(_OVERWRITTEN.sub("", _ESCAPES.sub("", "".join(plain))))
        page = "".join(data.get("text/html", ""))
        if (picture := next((kind for kind in _PICTURES if kind in data), None)) is not None:
            parts.append(f'<img src="data:{picture};base64,{escape("".join(data[picture]).strip())}">')
        else:  # a script has run where the output was shown first
            parts.append(page if page and "<script" not in page.lower() else f"<pre>{escape(texts[-1])}</pre>")
    return {"text/plain": "".join(texts), "text/html": html.static("".join(parts))}


def notice_bundle(case: Case, names: Mapping[int, str] | None = None) -> dict[str, str]:
    """Return how ``case`` ended by MIME type. For ``names`` see ``bundle``."""
    return _bundle((aftermath(case, in_notebook=names is None),), names)


def _bundle(document: Document, names: Mapping[int, str] | None) -> dict[str, str]:
    if names is None:
        return report_bundle(document)
    return {"text/plain": _text(document, names)}


def _text(document: Document, names: Mapping[int, str] | None = None) -> str:
    stream = sys.stdout if names is None else sys.stderr
    return fitted(text.render(document, names=names, **looks(stream)), stream)


def report_bundle(document: Document) -> dict[str, str]:
    """Return ``document`` by MIME type."""
    return {"text/plain": _text(document), "text/html": html.render(document)}


def live_bundle(document: Sequence[Line | Bar]) -> dict[str, str]:
    """Return lines and bars by MIME type, for a thread beside the program.

    Its text is not made by rich's console, which draws random numbers of the user's.
    """
    said = [one for one in translated(tuple(document)) if isinstance(one, Line | Bar)]
    drawn = (text.draw(block, _BAR)[1] if isinstance(block, Bar) else prose(block.text) for block in said)
    return {"text/plain": "\n".join(line.plain for line in drawn), "text/html": html.render(tuple(document))}


def plain(document: Document) -> str:
    """Return ``document`` as text as wide as the standard output, without colours."""
    return fitted(text.render(document, width=looks(sys.stdout)["width"]), sys.stdout)


_PICTURES: Final = ("image/png", "image/jpeg")
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OVERWRITTEN: Final = re.compile(r"[^\n]*\r(?=[^\n])")
_NARROWEST, _WIDEST, _LOG, _BAR = 20, 120, 100, 60
_COLOURLESS: Final = ("", "dumb", "unknown")


class Looks(TypedDict):
    """What the text views are told of the place that they are shown in."""

    width: int
    colour: bool


def looks(stream: TextIO | None) -> Looks:
    """Return the width and whether there are colours: on a terminal that has them, unless NO_COLOR is set.

    A kernel's standard output is no terminal. Source: https://no-color.org
    """
    coloured = _is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in _COLOURLESS
    return Looks(width=_width(stream), colour=coloured)


def fitted(text: str, stream: TextIO | None) -> str:
    """Return ``text`` in the characters that ``stream`` can take, ``?`` for others."""
    encoding = getattr(stream, "encoding", None)
    try:
        return text.encode(encoding, "replace").decode(encoding) if isinstance(encoding, str) else text
    except (LookupError, UnicodeError):  # what stands in for a stream may name no real encoding
        return text


def _width(stream: TextIO | None) -> int:
    """Return the width of the terminal; a fixed one for logs and files."""
    if not _is_terminal(stream):
        return _LOG
    return min(max(shutil.get_terminal_size((_LOG, 24)).columns, _NARROWEST), _WIDEST)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # what stands in for a stream may lack it, and a closed one raises
        return False


_PACKAGES: Final = ("oomdoctor", "torch", "ipython", "ipykernel", "ipywidgets", "jupyterlab", "notebook", "numpy")
_OF_INCIDENT: Final = (
    *("family", "format", "device", "requested", "total", "free", "allocated", "reserved", "process_used"),
)
_OF_FORECAST: Final = ("peak", "reserved", "budget", "slowdown", "error_ratio", "at_least", "at_most")


def issue_report(case: Case, *, with_code: bool = False) -> str:
    """Return the environment and ``case`` as JSON; with lines, names and messages of the program if ``with_code``."""
    told = jsonable.case(case) if with_code else _figures(case)
    return json.dumps({"environment": environment(), "case": told}, indent=1, ensure_ascii=False)


def environment() -> dict[str, str]:
    """Return the versions that matter. Nothing is imported for it."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _figures(case: Case) -> dict[str, Any]:
    incident, outcome, census = case.incident, case.outcome, case.evidence.census
    return {
        "incident": {name: jsonable.plain(getattr(incident, name)) for name in _OF_INCIDENT},
        "roles": {role.value: size for role, size in census.roles},
        "findings": [{"rule": one.rule, "confidence": one.confidence} for one in case.findings],
        "unchanged": _forecast(case.plan.unchanged),
        "fixes": [
            {"fix": one.fix, "forecast": _forecast(one.forecast), "is_refuted": one.refuted is not None}
            for one in case.plan.candidates
        ],
        "refused": [fix for fix, _ in case.plan.refusals],
        "outcome": {name: jsonable.plain(getattr(outcome, name)) for name in ("kind", "attempts", "state", "peak")},
    }


def _forecast(forecast: Forecast) -> dict[str, Any]:
    figures = {name: getattr(forecast, name) for name in _OF_FORECAST}
    return {**figures, "verdict": forecast.verdict.value}
