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
from oomdoctor.views.document import Document, FixRow, Inline, prose
from oomdoctor.views.labels import KINDS, TONES
from oomdoctor.views.pictures import TIMELINE_HEIGHT, TREEMAP_HEIGHT, timeline_drawn, treemap_drawn
from oomdoctor.views.translated import inline, translated

_BELOW: Final = '~.jp-OutputArea-child:has(>[data-mime-type="application/vnd.jupyter.stderr"])'
"""A traceback that stands below something: to these front ends it is of the same kind as the standard error."""
_HATCHES: Final = {
    "up": ("45deg", "8px 8px"),
    "down": ("135deg", "8px 8px"),
    "upright": ("90deg", "6px 6px"),
    "level": ("0deg", "6px 6px"),
}


_CONTROLLED: Final = (
    # What live controls tell as well. Those whose kernel is gone are the ones to hide: the rest is there to read.
    ".jp-OutputArea:has(.oomdoctor-panel:not(.jupyter-widgets-disconnected)) .oomdoctor-static,"
    ":is(.oomdoctor-panel,.oomdoctor-again).jupyter-widgets-disconnected,"
    # What a front end says in the place of controls that were not saved.
    ".jp-OutputArea-child:has(.oomdoctor-answer)+.jp-OutputArea-child>.jp-OutputArea-output:not(:has(*)),"
    # What a failed attempt has put out and its traceback, where a button has healed the cell.
    ".jp-OutputArea-child:has(~.jp-OutputArea-child .oomdoctor-healed),"
    f".jp-OutputArea-child:has(.oomdoctor-healed){_BELOW},"
    ".oomdoctor-healed .oomdoctor-first-run"
    "{display:none}"
    # A long output is put into a box with a bar to scroll by. The answer stands out of it; the traceback has its own.
    ".jp-mod-outputsScrolled .jp-OutputArea:has(.oomdoctor-answer){max-height:none}"
    f".jp-mod-outputsScrolled .jp-OutputArea-child:has(.oomdoctor-answer){_BELOW}{{max-height:24em;overflow:auto}}"
    # In a narrow window a prompt stands above its output, as high as it is wide beside one.
    "@media (max-width:760px){.jp-mod-outputsScrolled .jp-OutputArea:has(.oomdoctor-answer)>.jp-OutputArea-child>"
    ".jp-OutputArea-prompt{flex-basis:auto}}"
)
"""Rules for JupyterLab, Notebook and nbconvert. A page without them, as an untrusted one, shows all there is to read.

Source: ``_comm_live_update`` of @jupyter-widgets/base; ``scroll-output`` of @jupyter-notebook/notebook-extension, which
does so from 1,820 pixels on.
"""

_FIRST_RUN: Final = "A traceback below is of the first run, which failed."


def controlled(document: Document, *, is_healed: bool = False) -> str:
    """Return what stands above controls that may be live."""
    kind = f"oomdoctor-answer{' oomdoctor-healed' if is_healed else ''}"
    # Where the rules are not obeyed, the traceback is there to see.
    below = f'<small class="oomdoctor-first-run">{part("inline", _FIRST_RUN)}</small>' if is_healed else ""
    return f'<style>{_CONTROLLED}</style><div class="{kind}">{render(document)}{below}</div>'


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
    environment.filters.update(spans=_spans, fill=_fill, share=_share, timeline=timeline_drawn, treemap=treemap_drawn)
    environment.globals.update(
        say=say, tones=TONES, kinds=KINDS, heights={"timeline": TIMELINE_HEIGHT, "treemap": TREEMAP_HEIGHT}
    )
    return environment


def part(name: str, content: Inline | FixRow) -> str:
    """Return a sentence (``inline``), a diff (``changed``) or a ``gauge`` as a part of what stands in no document."""
    told = inline(content) if name == "inline" and not isinstance(content, FixRow) else content
    found: str = getattr(_templates().get_template("parts.html.j2").module, name)(told)
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
