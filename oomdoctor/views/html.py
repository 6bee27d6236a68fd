"""The facts as HTML that stands by itself: saved, exported, sanitised and in either theme.

There is no ``<style>`` block and no script, as untrusted notebooks lose both. Text colours are theme variables that
fall back to what surrounds them. The bar is drawn with literal colours and with properties that JupyterLab's
sanitiser lets through, so that it is still there in an untrusted notebook; every segment has a pattern and a line
in the legend as well.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from oomdoctor.views.document import Document, Inline, prose
from oomdoctor.views.words import KINDS, TONES

_HATCHES: Final = {
    "up": ("45deg", "8px 8px"),
    "down": ("135deg", "8px 8px"),
    "upright": ("90deg", "6px 6px"),
    "level": ("0deg", "6px 6px"),
}


def render(document: Document) -> str:
    """Return ``document`` as a part of a page."""
    return _templates().get_template("document.html.j2").render(blocks=document)


def page(title: str, document: Document) -> str:
    """Return a whole page that opens offline and follows the theme of the browser."""
    return _templates().get_template("page.html.j2").render(title=title, content=Markup(render(document)))


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("oomdoctor.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(inline=inline, fill=_fill, share=_share)
    environment.globals.update(css=_CSS, lines=_LINES, tones=TONES)
    return environment


def inline(content: Inline) -> Markup:
    """Return a line with what is set apart in it, all of it escaped."""
    text = prose(content)
    pieces, at = [], 0
    for span in text.spans:
        pieces += [escape(text.plain[at : span.start]), _tagged(text.plain[span.start : span.end], str(span.style))]
        at = span.end
    told = Markup("").join([*pieces, escape(text.plain[at:])]).replace("\n", Markup("<br>"))
    return _TAGS[str(text.style)].format(told)


def _tagged(text: str, style: str) -> Markup:
    return _TAGS[style].format(text.strip("`") if style == "quoted" else text)


def _fill(kind: str) -> str:
    colour, hatch = KINDS[kind].colour, KINDS[kind].hatch
    if not hatch:
        return f"background:{colour}"
    angle, size = _HATCHES[hatch]
    # Dark on the colour, as the text on it is white.
    clear, dark = "rgba(0,0,0,0)", "rgba(0,0,0,0.25)"
    slanted = f"{dark} 50%, {dark} 75%, {clear} 75%, " if hatch in ("up", "down") else ""
    hatching = f"linear-gradient({angle}, {dark} 0%, {dark} 25%, {clear} 25%, {clear} 50%, {slanted}{clear} 100%)"
    return f"background-color:{colour};background-image:{hatching};background-size:{size}"


def _share(ratio: float) -> str:
    """Return a width, rounded down so that the segments never add up to more than the bar."""
    return f"{int(ratio * 10_000) / 100:g}%"


def _themed(lab: str, vscode: str, fallback: str = "inherit") -> str:
    return f"var(--jp-{lab}, var(--vscode-{vscode}, {fallback}))"


def _signal(lab: str, vscode: str) -> str:
    """Return a colour of the theme, nearer to that of the text: by itself, green on white is too faint to read."""
    return f"color:color-mix(in srgb, {_themed(lab, vscode, 'currentcolor')} 70%, currentcolor)"


BAD: Final = _signal("error-color1", "errorForeground")
GOOD: Final = _signal("success-color1", "testing-iconPassed")
_MONO: Final = f"font-family:{_themed('code-font-family', 'editor-font-family', 'monospace')}"
_RULE: Final = "border-bottom:1px solid rgba(128,128,128,0.3)"

_CSS: Final = {
    "root": f"max-width:62em;line-height:1.45;color:{_themed('ui-font-color1', 'foreground')};"
    f"font-family:{_themed('ui-font-family', 'font-family')};font-size:{_themed('ui-font-size1', 'font-size', '14px')}",
    "bad": BAD,
    "good": GOOD,
    "warn": _signal("warn-color1", "editorWarning-foreground"),
    "muted": "opacity:0.75",
    "code": f"{_MONO};font-size:0.95em;background:none;color:inherit;padding:0;word-break:break-word",
    "command": f"{_MONO};font-size:0.95em;display:inline-block;white-space:nowrap;color:inherit;border-radius:3px;"
    "background:rgba(128,128,128,0.15);padding:0 0.5em;margin:0.3em 0.8em 0 0",
    "head": "font-weight:bold;font-size:1em;margin:1.2em 0 0.4em 0",
    "summary": "cursor:pointer;font-weight:bold",
    "scroll": "overflow-x:auto",
    # Colour is inherited by name: in a page without a doctype tables would be black on any theme.
    "table": "border-collapse:collapse;border:none;table-layout:auto;margin:0;text-align:left;font-size:1em;"
    "line-height:1.45;color:inherit",
    "th": f"text-align:left;padding:0.25em 1em 0.25em 0;font-weight:normal;opacity:0.75;white-space:nowrap;{_RULE}",
    "td": f"text-align:left;vertical-align:top;padding:0.35em 1em 0.35em 0;{_RULE}",
    "row": f"display:flex;flex-wrap:wrap;gap:0.3em 0.8em;padding:0.35em 0;{_RULE}",
    "title": "text-align:left;font-weight:normal;opacity:0.75;white-space:nowrap;padding:0;border:none",
    "cell": "text-align:left;vertical-align:top;padding:0;border:none;overflow-wrap:anywhere",
    "num": f"text-align:right;vertical-align:top;padding:0.35em 1em 0.35em 0;white-space:nowrap;{_RULE}",
    "pre": f"{_MONO};font-size:0.95em;margin:0.6em 0;padding:0.5em 0.8em;overflow-x:auto;color:inherit;"
    "background:rgba(128,128,128,0.12);border-left:3px solid #c62828",
}
_TONES: Final = ("good", "warn", "bad")
_CODE: Final = Markup('<code dir="ltr" style="{}">{{}}</code>').format(_CSS["code"])
_TAGS: Final = {
    "": Markup("{}"),
    **dict.fromkeys(("quoted", "path", "freeing"), _CODE),
    **dict.fromkeys(("strong", "figure", "grew", "shrank"), Markup("<strong>{}</strong>")),
    **dict.fromkeys(("detail", "muted"), Markup('<small style="{}">{{}}</small>').format(_CSS["muted"])),
    **{tone: Markup('<strong style="white-space:nowrap;{}">{{}}</strong>').format(_CSS[tone]) for tone in _TONES},
}
"""How a style of a document's text is written."""

_LINES: Final = {
    "title": f"{BAD};font-size:1.15em;font-weight:bold;margin:0.4em 0",
    "name": _CSS["head"],
    "lead": "margin:0.3em 0;font-size:1.08em",
    **dict.fromkeys(("plain", "inner"), "margin:0.3em 0"),
    "muted": f"{_CSS['muted']};margin:0.6em 0 0 0",
    "more": f"{_CSS['muted']};margin:0.3em 0",
    "next": "margin:0.8em 0 0.2em 0",
}
