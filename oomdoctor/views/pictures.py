"""Pictures as SVG, in the form that every front end shows.

What JupyterLab 4.6 lets through of an untrusted notebook was tried in a browser. An inline ``<svg>`` is taken out, and
its texts stay behind as text of the page; ``<object>``, ``<embed>``, the names of image maps and outputs of the type
``image/svg+xml`` are taken out as well. An ``<img>`` whose source is SVG as a ``data:`` URL stays, with its ``alt`` and
its style; ``role`` and ``aria-label`` do not. So a picture is such an ``<img>``: ``alt`` describes it to screen
readers, and titles of transparent ``<div>`` above it answer the pointer.

No theme reaches into an ``<img>``, and JupyterLab's themes set no ``color-scheme`` that it could ask for. So a picture
paints the colours of ``labels.KINDS`` alone, which stand out from light and dark pages, with white text on them. The
texts of axes stand beside it, in the page's own colour.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple
from urllib.parse import quote
from xml.sax.saxutils import escape

from oomdoctor.language import say
from oomdoctor.views.labels import KINDS

WIDTH: Final = 780
"""Pixels that a picture takes where there is room: the width of a diagnosis."""

_HATCHES: Final = {
    "up": '<path d="M0 8 8 0M-2 2 2 -2M6 10 10 6"/>',
    "down": '<path d="M0 0 8 8M-2 6 2 10M6 -2 10 2"/>',
    "upright": '<path d="M2 0V8M6 0V8" stroke-width="1.5"/>',
    "level": '<path d="M0 2H8M0 6H8" stroke-width="1.5"/>',
}
_READABLE: Final = " /:;=,.()-"
"""Characters that a ``data:`` URL within an attribute may have beside letters and digits."""


class Spot(NamedTuple):
    """A rectangle of a picture and what it says; places and sizes are shares of the picture."""

    left: float
    top: float
    width: float
    height: float
    title: str = ""


class Picture(NamedTuple):
    """A picture as a page shows it.

    Attributes:
        alt: what it shows, in words.
        source: the URL of an image.
        spots: what answers the pointer.
    """

    alt: str
    source: str
    spots: tuple[Spot, ...]


def picture(
    title: str, alt: str, shapes: Iterable[str], *, kinds: Collection[str], spots: Iterable[Spot], size: str = ""
) -> Picture:
    """Return a picture of SVG elements.

    Args:
        kinds: of memory, whose fills the elements use; see ``fill``.
        size: ``width height`` that the elements are drawn in; it is stretched. They are given in shares where it is "".
    """
    title, alt = say(title), say(alt)
    spots = (spot._replace(title=say(spot.title)) for spot in spots)
    box = f' viewBox="0 0 {size}" preserveAspectRatio="none"' if size else ""
    patterns = "".join(_pattern(kind) for kind in dict.fromkeys(kinds) if KINDS[kind].hatch)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img"{box} font-family="sans-serif" font-size="12">'
        f"<title>{escape(title)}</title><desc>{escape(alt)}</desc><defs>{patterns}</defs>{''.join(shapes)}</svg>"
    )
    return Picture(alt, f"data:image/svg+xml,{quote(svg, safe=_READABLE)}", tuple(spots))


def fill(kind: str) -> str:
    """Return the paint of a kind of memory, as it is in bars: its colour, hatched where they are."""
    return f"url(#{kind})" if KINDS[kind].hatch else KINDS[kind].colour


def _pattern(kind: str) -> str:
    colour, hatch = KINDS[kind].colour, KINDS[kind].hatch
    lines = f'<g stroke="#000" stroke-opacity="0.25" stroke-width="2.5">{_HATCHES[hatch]}</g>'
    ground = f'<rect width="8" height="8" fill="{colour}"/>'
    return f'<pattern id="{kind}" width="8" height="8" patternUnits="userSpaceOnUse">{ground}{lines}</pattern>'
