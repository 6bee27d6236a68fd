"""Pictures: areas say what the bytes say, nothing is drawn outside, and names from a program stay text."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from urllib.parse import unquote
from xml.etree import ElementTree

import cases
import memplans
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, Holding, Role
from oomdoctor.model.plan import Course
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.views import html, pictures
from oomdoctor.views.document import Timeline, Treemap
from oomdoctor.views.labels import KINDS
from oomdoctor.views.pictures import WIDTH, Box, Picture, fill, picture, squarified

SVG = "{http://www.w3.org/2000/svg}"
ELEMENTS = {"svg", "title", "desc", "defs", "pattern", "g", "path", "rect", "text"}
ONE_MODEL = (ModelFacts(path="model", type_name="Sequential", training=True, parameter_bytes=MIB),)


def svg(drawn: Picture) -> ElementTree.Element:
    """Return the picture as it is parsed."""
    kind, _, content = drawn.source.partition(",")
    assert kind == "data:image/svg+xml"
    return ElementTree.fromstring(unquote(content))


def shape(course: Course, **limits: int) -> pictures.Drawn:
    """Return the picture of a course."""
    found = Timeline.of(course, **limits)
    assert found is not None
    return pictures.timeline_drawn(found)


def census(*held: tuple[Role, str, int]) -> Census:
    """Return a census of ``(role, path, bytes)``."""
    holdings = tuple(Holding(bytes=size, device="cuda:0", role=role, path=path) for role, path, size in held)
    return Census(device="cuda:0", found=sum(size for *_, size in held), allocated=0, holdings=holdings)


def areas(drawn: Picture) -> dict[str, float]:
    """Return the area of each spot as a share of the picture, by the first word of what it says."""
    return {spot.title.partition(": ")[0]: spot.width * spot.height for spot in drawn.spots}


# Treemaps -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=60), st.floats(1, 900), st.floats(1, 900))
def test_rectangles_fill_the_box_by_their_sizes_and_stay_within_it(
    sizes: list[int], width: float, height: float
) -> None:
    sizes.sort(reverse=True)
    boxes = squarified(sizes, Box(5.0, 7.0, width, height))
    assert len(boxes) == len(sizes)
    for size, box in zip(sizes, boxes, strict=True):
        wanted = size / sum(sizes) * width * height
        assert box.width * box.height == pytest.approx(wanted, rel=1e-3, abs=1e-3)
        assert 5 - 1e-3 <= box.left <= box.left + box.width <= 5 + width + 1e-3
        assert 7 - 1e-3 <= box.top <= box.top + box.height <= 7 + height + 1e-3


def test_rectangles_do_not_overlap_and_are_nearly_square() -> None:
    sizes = sorted((random.Random(0).randint(50, 100) for _ in range(40)), reverse=True)
    boxes = squarified(sizes, Box(0.0, 0.0, 780.0, 220.0))
    for at, one in enumerate(boxes):
        for other in boxes[at + 1 :]:
            across = min(one.left + one.width, other.left + other.width) - max(one.left, other.left)
            down = min(one.top + one.height, other.top + other.height) - max(one.top, other.top)
            assert min(across, down) < 1e-6
    assert max(max(box.width / box.height, box.height / box.width) for box in boxes) < 2.5


def test_areas_are_the_shares_of_all_that_was_found() -> None:
    found = pictures.treemap(cases.census(), ())
    assert found is not None
    drawn = pictures.treemap_drawn(found)
    shares = areas(drawn)
    assert shares["loss.grad_fn (encoder.layers)"] == pytest.approx(4.1 / 7.02, rel=1e-2)
    assert sum(shares.values()) == pytest.approx(1)
    tiles = svg(drawn).findall(f"{SVG}svg")
    assert len(tiles) == len(drawn.spots)
    for tile in tiles:
        left, width = (float(tile.attrib[name].removesuffix("%")) for name in ("x", "width"))
        assert 0 <= left <= left + width <= 100.02


def test_a_module_is_split_as_long_as_its_parts_can_be_seen() -> None:
    weights = [(Role.PARAMETER, f"model.blocks[{at}].weight", 10 * MIB) for at in range(3)]
    small = [(Role.PARAMETER, f"model.blocks[3][{at}].weight", 64 << 10) for at in range(4)]
    found = pictures.treemap(census(*weights, *small, (Role.GRADIENT, "model.blocks[0].weight.grad", MIB)), ONE_MODEL)
    assert found is not None
    tiles = {kind: dict(of_kind) for kind, of_kind in found.tiles}
    names = {f"model.blocks[{at}]": 10 * MIB for at in range(3)}
    assert tiles[Role.PARAMETER.value] == {**names, "model.blocks (the rest)": 256 << 10}
    assert tiles[Role.GRADIENT.value] == {"model.blocks[0]": MIB}


def test_what_a_graph_saved_is_of_the_modules_that_it_was_saved_in() -> None:
    saved = (("model.blocks[0]", 6 * MIB), ("model.blocks[1]", 3 * MIB))
    kept = census((Role.ACTIVATION, "loss → graph", 10 * MIB))
    kept = replace(kept, holdings=(replace(kept.holdings[0], saved_in=saved),))
    found = pictures.treemap(kept, ONE_MODEL)
    assert found == Treemap(
        (("activation", (("model.blocks[0]", 6 * MIB), ("model.blocks[1]", 3 * MIB), ("loss → graph", MIB))),)
    )


def test_items_of_a_container_are_tiles_where_they_are_large_and_one_where_they_are_not() -> None:
    large = pictures.treemap(census(*((Role.USER_TENSOR, f"kept[{at}]", MIB) for at in range(3))), ())
    small = pictures.treemap(
        census((Role.BATCH, "x", 500 * MIB), *((Role.USER_TENSOR, f"kept[{at}]", MIB) for at in range(20))), ()
    )
    assert large is not None
    assert small is not None
    assert [name for name, _ in large.tiles[0][1]] == ["kept[0]", "kept[1]", "kept[2]"]
    assert small.tiles[1] == ("user_tensor", (("kept[…]", 20 * MIB),))


@pytest.mark.parametrize("held", [(), ((Role.BATCH, "x", 0),), ((Role.BATCH, "x", MIB),)])
def test_there_is_no_treemap_of_one_holder_or_none(held: tuple[tuple[Role, str, int], ...]) -> None:
    assert pictures.treemap(census(*held), ()) is None


# Timelines ------------------------------------------------------------------------------------------------------------


def edges(path: ElementTree.Element) -> list[float]:
    """Return the heights that a path goes through."""
    return [float(height) for height in re.findall(r"V([\d.]+)", path.attrib["d"])]


def test_the_areas_of_a_point_add_up_to_it_and_stay_within_the_picture() -> None:
    drawn = shape(memplans.COURSE)
    paths = svg(drawn.picture).findall(f"{SVG}path")
    assert len(paths) == len(memplans.COURSE.by_role)
    columns = len(drawn.picture.spots)
    top = (9 * GIB + 64 * MIB) * 1.05
    highest = edges(paths[-1])[:columns]
    assert min(highest) == pytest.approx(pictures.TIMELINE_HEIGHT * (1 - (9 * GIB + 64 * MIB) / top), abs=0.1)
    for path in paths:
        assert all(0 <= height <= pictures.TIMELINE_HEIGHT for height in edges(path))
        assert all(0 <= float(at) <= WIDTH for at in re.findall(r"H([\d.]+)", path.attrib["d"]))
    for lower, upper in pairwise(paths):
        assert edges(lower)[:columns] == edges(upper)[columns:][::-1]
    assert sum(spot.width for spot in drawn.picture.spots) == pytest.approx(1)


def test_the_pointer_is_told_the_size_the_line_and_the_roles() -> None:
    drawn = shape(memplans.COURSE)
    highest = next(spot.title for spot in drawn.picture.spots if spot.title.startswith("9.06 GiB"))
    assert highest == (
        "9.06 GiB at line 3: activations 6.00 GiB, optimizer state 2.00 GiB, parameters 1.00 GiB, the batch 64.0 MiB"
    )
    assert highest in drawn.picture.alt
    assert drawn.kinds[-1] == Role.PARAMETER.value, "what is there throughout lies below"


def test_the_axis_has_the_limit_the_peak_and_few_round_sizes() -> None:
    drawn = shape(memplans.COURSE, limit=8 * GIB)
    assert [tick.text for tick in drawn.ticks] == ["limit 8.00 GiB", "peak 9.06 GiB", "0 B", "4.00 GiB"]
    assert drawn.limit == pytest.approx(1 - 8 / (9.0625 * 1.05), abs=1e-3)
    assert [place.title for place in drawn.places] == ["line 2", "line 3"]
    assert "The limit is 8.00 GiB." in drawn.picture.alt


def test_a_limit_far_above_is_beyond_the_picture() -> None:
    drawn = shape(memplans.COURSE, limit=80 * GIB)
    assert drawn.limit is None
    assert drawn.ticks[0] == pictures.Tick(0.0, "limit 80.0 GiB ↑", is_strong=True)


@pytest.mark.parametrize("limit", [None, 1, 80 * MIB, 100 * MIB, 101 * MIB, 104 * MIB, 250 * MIB, 400 * GIB])
@pytest.mark.parametrize("peak", [0, 1, 100 * MIB])
def test_labels_of_the_axis_do_not_overlap(peak: int, limit: int | None) -> None:
    drawn = shape(Course(points=((0, None), (peak, 1))), **({} if limit is None else {"limit": limit}))
    tops = sorted(tick.top for tick in drawn.ticks)
    assert all(later - earlier >= pictures._LABEL - 1e-9 for earlier, later in pairwise(tops))
    assert tops[0] >= 0
    assert tops[-1] <= 1


def test_a_course_without_roles_has_one_colour_and_no_legend() -> None:
    drawn = shape(cases.COURSE)
    assert drawn.kinds == ()
    assert len(svg(drawn.picture).findall(f"{SVG}path")) == 1


def test_a_course_of_one_point_is_drawn_and_one_of_none_is_not() -> None:
    drawn = shape(Course(points=((MIB, None),)))
    assert len(drawn.picture.spots) == 1
    assert [place.title for place in drawn.places] == ["operations in their order"]
    assert Timeline.of(Course()) is None


def test_the_ends_of_cells_are_told_by_their_numbers() -> None:
    found = Timeline.of_cells([(MIB, 2), (8 * MIB, 3), (4 * MIB, 4)], 64 * MIB)
    assert found is not None
    assert (
        found.sentence
        == "At the ends of cells: 1.00 MiB after In[2], at most 8.00 MiB after In[3], now 4.00 MiB after In[4]."
    )
    assert [spot.title for spot in pictures.timeline_drawn(found).picture.spots][1] == "8.00 MiB after In[3]"
    assert [place.title for place in pictures.timeline_drawn(found).places] == ["In[2]", "In[3]", "In[4]"]
    assert Timeline.of_cells([(MIB, 2)], None) is None


# Both -----------------------------------------------------------------------------------------------------------------


def test_hostile_names_are_text_in_the_picture_and_around_it() -> None:
    hostile = f"{cases.HOSTILE}</svg><script>alert(1)</script>{cases.CONTROL}"
    found = pictures.treemap(census((Role.BATCH, hostile, MIB), (Role.USER_TENSOR, "]]>&amp;", MIB)), ())
    assert found is not None
    drawn = pictures.treemap_drawn(found)
    assert {element.tag.removeprefix(SVG) for element in svg(drawn).iter()} <= ELEMENTS
    assert any(cases.HOSTILE in (element.text or "") for element in svg(drawn).iter(f"{SVG}desc"))
    page = html.render((found,))
    assert "<script" not in page
    assert "<img src=x" not in page
    assert not re.search(r"[\x00-\x08\x1b\u202e]", page)


def test_colours_and_hatches_are_those_of_the_bar() -> None:
    for kind, looks in KINDS.items():
        drawn = picture("", "", [f'<path fill="{fill(kind)}"/>'], kinds=[kind], spots=())
        patterns = {pattern.attrib["id"]: pattern for pattern in svg(drawn).iter(f"{SVG}pattern")}
        assert set(patterns) == ({kind} if looks.hatch else set())
        assert fill(kind) == (f"url(#{kind})" if looks.hatch else looks.colour)
        assert all(rect.attrib["fill"] == looks.colour for rect in svg(drawn).iter(f"{SVG}rect"))


def _luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("role", Role)
def test_white_names_can_be_read_on_every_role(role: Role) -> None:
    assert 1.05 / (_luminance(KINDS[role.value].colour) + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("name", "room", "told"),
    [
        ("model.layers[12]", 16, "model.layers[12]"),
        ("model.transformer.blocks[12]", 12, "model.t…[12]"),
        ("model.encoder.weight", 12, "mode….weight"),
        ("model.blocks[12]", 5, "…[12]"),
        ("model.blocks[12]", 4, ""),
        ("averylongname", 6, ""),
    ],
)
def test_a_long_name_keeps_its_number_or_is_left_out(name: str, room: int, told: str) -> None:
    assert pictures.shortened(name, room) == told


def test_the_peak_of_a_timeline_is_that_of_the_forecast() -> None:
    course = Course(points=((GIB, 1), (3 * GIB, 2), (2 * GIB, 3)))
    shown = Timeline.of(course, 4 * GIB, forecast_bytes=3 * GIB + GIB // 10)
    assert shown is not None
    assert "to the peak of 3.10 GiB at line 2" in shown.sentence
    assert max(shown.points) == (3 * GIB + GIB // 10, 2)
