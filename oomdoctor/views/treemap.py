"""Who holds memory as a treemap: areas by bytes, coloured by role, each with the name of a module or of a variable.

A module is split into those within it as long as they are large enough to be seen; what is smaller stays with the
module around it. The tiles of a role lie together. The layout is squarified: tiles are as square as they can be.
Source: Bruls, Huizing and van Wijk, Squarified Treemaps, 2000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from oomdoctor.language import say
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census
from oomdoctor.model.sizes import format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Treemap
from oomdoctor.views.holder_groups import by_module
from oomdoctor.views.pictures import WIDTH, Picture, Spot, fill, picture

HEIGHT: Final = 220
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


def drawn(tree: Treemap) -> Picture:
    """Return the picture of a treemap."""
    totals = [_bytes(tiles) for _, tiles in tree.tiles]
    shapes, spots, whole = list[str](), list[Spot](), sum(totals)
    for (kind, tiles), of_kind in zip(tree.tiles, squarified(totals, Box(0, 0, WIDTH, HEIGHT)), strict=True):
        for (path, size), box in zip(tiles, squarified([size for _, size in tiles], of_kind), strict=True):
            name = say(path) if " " in path else path  # of more than one word, it is told in ours
            shapes.append(_shape(kind, name, size, box))
            told = f"{name}: {format_size(size)}, {labels.percent(size / whole)}, {labels.KINDS[kind].label}"
            share = (box.left / WIDTH, box.top / HEIGHT, box.width / WIDTH, box.height / HEIGHT)
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
    places = zip(("x", "y", "width", "height"), box, (WIDTH, HEIGHT) * 2, strict=True)
    place = " ".join(f'{side}="{length / whole:.2%}"' for side, length, whole in places)
    edges = f'fill="{fill(kind)}" stroke="#fff" stroke-opacity="0.6"'
    return f'<svg {place} fill="#fff"><rect width="100%" height="100%" {edges}/>{texts}</svg>'
