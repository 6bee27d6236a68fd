"""The facts as HTML that stands by itself: saved, exported, sanitised and in either theme.

There is no script, and no ``<style>`` block that it needs, as untrusted notebooks lose both. Text colours are theme
variables that fall back to what surrounds them; bars are drawn with what JupyterLab's sanitiser lets through, each
segment with a pattern and a line in the legend as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from oomdoctor.language import is_chinese, say
from oomdoctor.views import timeline, treemap
from oomdoctor.views.document import Document, Inline, prose
from oomdoctor.views.labels import KINDS, TONES
from oomdoctor.views.translated import inline, translated

_HATCHES: Final = {
    "up": ("45deg", "8px 8px"),
    "down": ("135deg", "8px 8px"),
    "upright": ("90deg", "6px 6px"),
    "level": ("0deg", "6px 6px"),
}


_CONTROLLED: Final = (
    "<style>.jp-OutputArea:has(.oomdoctor-panel) .oomdoctor-static{display:none}"
    ".jp-OutputArea-child:has(.oomdoctor-answer)+.jp-OutputArea-child>.jp-OutputArea-output:not(:has(*)){display:none}"
    "</style>"
)
"""Hides what live controls tell as well, and what a front end says in the place of controls that were not saved.

A page without it, as an untrusted one, shows all there is to read.
"""


def controlled(document: Document) -> str:
    """Return what stands above controls that may be live."""
    return f'{_CONTROLLED}<div class="oomdoctor-answer">{render(document)}</div>'


def static(content: str) -> str:
    """Return a part of a page that live controls hide, as they show the same."""
    return f'<div class="oomdoctor-static">{content}</div>'


def render(document: Document) -> str:
    """Return ``document`` as a part of a page."""
    return _templates().get_template("document.html.j2").render(blocks=translated(document))


def page(title: str, document: Document) -> str:
    """Return a whole page that opens offline and follows the theme of the browser."""
    return (
        _templates()
        .get_template("page.html.j2")
        .render(title=say(title), content=Markup(render(document)), language="zh-CN" if is_chinese() else "en")
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("oomdoctor.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(spans=_spans, fill=_fill, share=_share, timeline=timeline.drawn, treemap=treemap.drawn)
    environment.globals.update(
        say=say, tones=TONES, kinds=KINDS, heights={"timeline": timeline.HEIGHT, "treemap": treemap.HEIGHT}
    )
    return environment


def part(name: str, content: Inline) -> str:
    """Return a sentence (``inline``) or a diff (``changed``) as a part of what stands in no document."""
    found: str = getattr(_templates().get_template("parts.html.j2").module, name)(
        inline(content) if name == "inline" else content
    )
    return str(found)


def _spans(content: Inline) -> Iterator[tuple[str, str]]:
    """Yield the stretches of a line, each with the name of its style."""
    text = prose(content)
    if text.style:
        yield text.plain, str(text.style)
        return
    at = 0
    for span in text.spans:
        stretch = text.plain[span.start : span.end]
        yield text.plain[at : span.start], ""
        yield stretch.strip("`") if span.style == "quoted" else stretch, str(span.style)
        at = span.end
    yield text.plain[at:], ""


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
