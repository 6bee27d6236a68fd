"""Pictures as SVG, in the form that every front end shows.

What JupyterLab 4.6 lets through of an untrusted notebook was tried in a browser. An inline ``<svg>`` is taken out, and
its texts stay behind as text of the page; ``<object>``, ``<embed>``, the names of image maps and outputs of the type
``image/svg+xml`` are taken out as well. An ``<img>`` whose source is SVG as a ``data:`` URL stays, with its ``alt`` and
its style; ``role`` and ``aria-label`` do not. So a picture is such an ``<img>``: ``alt`` describes it to screen
readers, and titles of transparent ``<div>`` above it answer the pointer.

No theme reaches into an ``<img>``, and JupyterLab's themes set no ``color-scheme`` that it could ask for. So a picture
paints the colours of ``labels.KINDS`` alone, which stand out from light and dark pages, with white text on them. The
texts of axes stand beside it, in the page's own colour.

Two are drawn here, coloured by role: what is alive over the operations of a cell, and who holds memory as a treemap,
areas by bytes, each with the name of a module or of a variable. A module is split into those within it as long as they
are large enough to be seen; the tiles of a role lie together. The layout is squarified: tiles are as square as they can
be. Source: Bruls, Huizing and van Wijk, Squarified Treemaps, 2000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple
from urllib.parse import quote
from xml.sax.saxutils import escape

from oomdoctor.language import say
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Timeline, Treemap, point
from oomdoctor.views.holder_groups import by_module
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
    """A picture as a page shows it: the URL of an image, what that shows in words, and what answers the pointer."""

    alt: str
    source: str
    spots: tuple[Spot, ...]


def picture(
    title: str, alt: str, shapes: Iterable[str], *, kinds: Collection[str], spots: Iterable[Spot], size: str = ""
) -> Picture:
    """Return a picture of SVG elements, which use the fills of ``kinds`` of memory.

    Elements are drawn in ``size``, ``width height``, which is stretched; they are given in shares where it is "".
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


TIMELINE_HEIGHT: Final = 160
"""Pixels."""

_COLUMNS: Final = 100
_ONE_COLOUR: Final = Role.UNEXPLAINED.value
_MOST_LIMIT: Final = 2.5
"""A limit that is further above the peak is beyond the picture, which would be empty otherwise."""
_ROOM_ABOVE: Final = 1.05
_LABEL: Final = 15 / TIMELINE_HEIGHT
"""Height of a label, as a share of the picture."""
_PLACE: Final = 0.09
"""Width of the number of a line, likewise."""


class Tick(NamedTuple):
    """A label of the axis of sizes, so far from the top; ``is_strong``: of the peak or the limit."""

    top: float
    text: str
    is_strong: bool = False


class Drawn(NamedTuple):
    """A timeline as a page shows it.

    Attributes:
        kinds: what its colours mean; empty where it has one colour.
        limit: how far from the top the limit is, None where it is beyond the picture or not known.
        peak: the line from the axis to the peak.
        places: what stands below: the lines of the cell.
    """

    picture: Picture
    kinds: tuple[str, ...]
    ticks: tuple[Tick, ...]
    limit: float | None
    peak: Spot
    places: tuple[Spot, ...]


def timeline_drawn(timeline: Timeline) -> Drawn:
    """Return the picture of a timeline, with what stands around it."""
    places = timeline.highest(_COLUMNS)
    points, peak = [timeline.points[at] for at in places], max(size for size, _ in timeline.points)
    limit = timeline.limit_bytes
    is_within = limit is not None and limit <= _MOST_LIMIT * peak
    top = int(max(peak, limit if is_within and limit is not None else 0) * _ROOM_ABOVE) or 1
    roles = [(role.value, [sizes[at] for at in places]) for role, sizes in timeline.by_role]
    # What is there throughout lies below what comes and goes.
    layers = sorted((layer for layer in roles if any(layer[1])), key=lambda layer: (-min(layer[1]), max(layer[1])))
    kinds = tuple(kind for kind, _ in layers)
    layers = layers or [(_ONE_COLOUR, [size for size, _ in points])]
    step, at_peak = 1 / len(points), max(range(len(points)), key=lambda at: points[at][0])
    whole = "" if limit is None else f" The limit is {format_size(limit)}."
    told = [point(*each, timeline.axis) + _made_of(layers if kinds else (), at) for at, each in enumerate(points)]
    spots = (Spot(at * step, 0.0, step, 1.0, told[at]) for at in range(len(points)))
    return Drawn(
        picture=picture(
            "Memory timeline",
            f"{timeline.sentence}{whole} At the peak: {told[at_peak]}.",
            _shapes(layers, top),
            kinds=[kind for kind, _ in layers],
            spots=spots,
            size=f"{WIDTH} {TIMELINE_HEIGHT}",
        ),
        kinds=kinds[::-1],
        ticks=tuple(_ticks(top, peak, limit, is_within=is_within)),
        limit=1 - limit / top if limit is not None and is_within else None,
        peak=Spot(0.0, 1 - peak / top, (at_peak + 1) * step, 0.0),
        places=tuple(_places([line for _, line in points], timeline.axis)),
    )


def _made_of(layers: Sequence[tuple[str, Sequence[int]]], at: int) -> str:
    """Return what a point is made of, the largest first."""
    made = sorted(((sizes[at], kind) for kind, sizes in layers if sizes[at]), reverse=True)
    parts = ", ".join(f"{KINDS[kind].label} {format_size(size)}" for size, kind in made)
    return f": {parts}" if parts else ""


def _shapes(layers: Sequence[tuple[str, Sequence[int]]], top: int) -> Iterator[str]:
    """Yield an area for each layer, which lies on those before it."""
    below = [0] * len(layers[0][1])
    edges = [round(WIDTH * at / len(below), 1) for at in range(len(below) + 1)]
    for kind, sizes in layers:
        above = [under + size for under, size in zip(below, sizes, strict=True)]
        there = "".join(f"V{_y(size, top)}H{edges[at + 1]:g}" for at, size in enumerate(above))
        back = "".join(f"V{_y(below[at], top)}H{edges[at]:g}" for at in reversed(range(len(below))))
        yield f'<path d="M0 {TIMELINE_HEIGHT}{there}{back}Z" fill="{fill(kind)}"/>'
        below = above


def _y(size: int, top: int) -> str:
    return f"{TIMELINE_HEIGHT * (1 - size / top):.4g}"


def _ticks(top: int, peak: int, limit: int | None, *, is_within: bool) -> Iterator[Tick]:
    """Yield the limit, the peak, and the round sizes that are clear of both."""
    at_peak = 1 - peak / top
    taken = [at_peak]
    if limit is not None:
        at_limit = 1 - limit / top if is_within else 0.0
        if abs(at_limit - at_peak) < _LABEL:  # the lower of the two gives way
            lower = min(at_limit, at_peak) + _LABEL
            at_limit, at_peak = (at_limit, lower) if at_limit <= at_peak else (lower, at_peak)
        taken = [at_peak, at_limit]
        yield Tick(at_limit, f"limit {format_size(limit)}{'' if is_within else ' ↑'}", is_strong=True)
    yield Tick(at_peak, f"peak {format_size(peak)}", is_strong=True)
    step = 1 << max((top // 2).bit_length() - 1, 0)  # between two and four of them
    for size in range(0, top, step):
        at = 1 - size / top
        if all(abs(at - other) >= _LABEL for other in taken):
            yield Tick(at, format_size(size))


def _places(lines: Sequence[int | None], axis: str) -> Iterator[Spot]:
    """Yield the lines that the stretches of a timeline belong to, where there is room for them."""
    if not any(lines):
        yield Spot(0.0, 1.0, 1.0, 0.0, "operations in their order")
        return
    at = 0
    for line, stretch in groupby(lines):
        count = len(list(stretch))
        if line is not None and count / len(lines) >= _PLACE:
            yield Spot(
                at / len(lines), 1.0, count / len(lines), 0.0, f"In[{line}]" if axis == "cells" else f"line {line}"
            )
        at += count


TREEMAP_HEIGHT: Final = 220
"""Pixels."""

_WORTH_A_TILE: Final = 0.01
_TOLD: Final = 8
"""Tiles that the description names, the largest."""

_LINE_PX, _LETTER_PX, _MARGIN_PX = 15, 6.6, 6
_FEW_LETTERS: Final = 5
_REST: Final = " (the rest)"


def treemap(census: Census, models: Sequence[ModelFacts]) -> Treemap | None:
    """Return the treemap of a census, None where it would be a single tile or none."""
    sizes = {role: of_role for role, of_role in by_module(census, models).items() if of_role[()] > 0}
    least = _WORTH_A_TILE * sum(of_role[()] for of_role in sizes.values())
    tiles = [(role.value, _largest_first(_tiles(of_role, (), least))) for role, of_role in sizes.items()]
    if sum(len(of_role) for _, of_role in tiles) < 2:
        return None
    return Treemap(tuple(sorted(tiles, key=lambda of_kind: -_bytes(of_kind[1]))))


def _largest_first(tiles: Iterator[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(tiles, key=lambda tile: -tile[1]))


def _bytes(tiles: Sequence[tuple[str, int]]) -> int:
    return sum(size for _, size in tiles)


def _tiles(sizes: Counter[tuple[str, ...]], way: tuple[str, ...], least: float) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of what stands at the end of ``way``: of its parts that are large enough, or whole."""
    parts = [part for part, size in sizes.items() if part[:-1] == way and part and size >= least]
    for part in parts:
        yield from _tiles(sizes, part, least)
    rest = sizes[way] - sum(sizes[part] for part in parts)
    if rest > 0:
        name = labels.clean(way[-1], 120) if way else ""
        yield (f"{name}{_REST}" if name and parts else name or "smaller holders"), rest


# Its picture ----------------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A rectangle, in pixels."""

    left: float
    top: float
    width: float
    height: float


def squarified(sizes: Sequence[int], box: Box) -> list[Box]:
    """Return a rectangle for each of ``sizes``, which are above zero, the largest first; together they fill ``box``."""
    left, top, width, height = box
    areas = [size * width * height / sum(sizes) for size in sizes]
    found = list[Box]()
    while len(found) < len(areas):
        rest, side = areas[len(found) :], min(width, height)
        count = 1
        while count < len(rest) and _longest(rest[: count + 1], side) <= _longest(rest[:count], side):
            count += 1
        row, at = sum(rest[:count]), 0.0
        depth = min(row / side, max(width, height)) if side else 0.0
        for area in rest[:count]:
            along = side * area / row if row else 0.0
            found.append(Box(left, top + at, depth, along) if width >= height else Box(left + at, top, along, depth))
            at += along
        if width >= height:
            left, width = left + depth, max(width - depth, 0.0)
        else:
            top, height = top + depth, max(height - depth, 0.0)
    return found


def _longest(row: Sequence[float], side: float) -> float:
    """Return how long the longest of a row of rectangles along ``side`` is for its breadth."""
    depth = sum(row) / side if side else 0.0
    return max((max(depth * depth / area, area / (depth * depth)) if area and depth else 1.0) for area in row)


def treemap_drawn(tree: Treemap) -> Picture:
    """Return the picture of a treemap."""
    totals = [_bytes(tiles) for _, tiles in tree.tiles]
    shapes, spots, whole = list[str](), list[Spot](), sum(totals)
    for (kind, tiles), of_kind in zip(tree.tiles, squarified(totals, Box(0, 0, WIDTH, TREEMAP_HEIGHT)), strict=True):
        for (path, size), box in zip(tiles, squarified([size for _, size in tiles], of_kind), strict=True):
            name = say(path) if " " in path else path  # of more than one word, it is told in ours
            shapes.append(_shape(kind, name, size, box))
            told = f"{name}: {format_size(size)}, {labels.percent(size / whole)}, {labels.KINDS[kind].label}"
            share = (box.left / WIDTH, box.top / TREEMAP_HEIGHT, box.width / WIDTH, box.height / TREEMAP_HEIGHT)
            spots.append(Spot(*share, told))
    kinds = ", ".join(
        f"{labels.KINDS[kind].label} {format_size(size)}" for (kind, _), size in zip(tree.tiles, totals, strict=True)
    )
    largest = _largest_first(tile for _, tiles in tree.tiles for tile in tiles)
    names = ", ".join(f"{name} {format_size(size)}" for name, size in largest[:_TOLD])
    alt = f"{format_size(whole)} by role: {kinds}. The largest holders: {names}."
    return picture("Treemap of holders", alt, shapes, kinds=[kind for kind, _ in tree.tiles], spots=spots)


def shortened(name: str, room: int) -> str:
    """Return a name in at most ``room`` letters, with its last part whole; nothing where that has no room."""
    if len(name) <= room:
        return name
    last = max(name.rfind("."), name.rfind("["), 0)
    head = room - len(name[last:]) - 1
    return f"{name[:head]}…{name[last:]}" if head >= 0 and last else ""


def _shape(kind: str, name: str, size: int, box: Box) -> str:
    """Return a tile, with its name and its bytes where there is room. Of a long name the middle is left out.

    A module's own number or name is at the end, and is there whole or not at all.
    """
    texts, room = "", int((box.width - 2 * _MARGIN_PX) / _LETTER_PX)
    if room >= _FEW_LETTERS:
        module = name.removesuffix(_REST)
        lines = [line for line in (shortened(module, room), format_size(size)) if line and len(line) <= room]
        lines = lines[: int((box.height - 4) / _LINE_PX)]
        texts = "".join(
            f'<text x="{_MARGIN_PX}" y="{_LINE_PX * at}">{escape(line)}</text>' for at, line in enumerate(lines, 1)
        )
    places = zip(("x", "y", "width", "height"), box, (WIDTH, TREEMAP_HEIGHT) * 2, strict=True)
    place = " ".join(f'{side}="{length / whole:.2%}"' for side, length, whole in places)
    edges = f'fill="{fill(kind)}" stroke="#fff" stroke-opacity="0.6"'
    return f'<svg {place} fill="#fff"><rect width="100%" height="100%" {edges}/>{texts}</svg>'
