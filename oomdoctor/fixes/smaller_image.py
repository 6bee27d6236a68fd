"""Smaller images: activations of convolutions grow with their area.

The size is changed where transforms are told it, if everything that was made with them can be made anew; else the
batch is scaled down in the loop, before the model is given it. Only for models that pool images of whatever size before
their last layers: others would not run on another size, or would give results of another size than their targets.

There is no live form: whether a model may be given smaller images is in the code that calls it.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes._activations import why_not_training
from oomdoctor.fixes._batch_step import before_model
from oomdoctor.fixes._chunks import model_facts
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program.book import Book, Number, calls
from oomdoctor.program.import_lines import spelled
from oomdoctor.program.names import call_name
from oomdoctor.program.replay import exchange_numbers

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_SHARES: Final = ((3, 4), (1, 2), (1, 4))
_SMALLEST: Final = 32
_MULTIPLE: Final = 8
"""Sizes are kept to multiples of this, as strides of 2 halve them again and again."""
_CHANNELS: Final = frozenset({1, 3, 4})
_SIZES: Final = frozenset({"Resize", "CenterCrop", "RandomCrop", "RandomResizedCrop"})


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose three quarters, a half and a quarter of the side of the images."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if (why := why_not_training(evidence) or _why_not(evidence, loops)) is not None:
        return Refused(why)
    side = _side(evidence)
    if isinstance(side, Refused):
        return side
    scales = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    if not scales:
        return Refused("no activations were found that smaller images could save")
    sides = dict.fromkeys(side * part // whole // _MULTIPLE * _MULTIPLE for part, whole in _SHARES)
    return tuple(
        Proposal(
            dose=Dose.of(size=new),
            effect=Effect.CHANGES_RESULT,
            saves=int(scales * (1 - (new / side) ** 2)),
            slowdown=(new / side) ** 2,
            basis=f"analytic estimate: {format_size(scales)} of activations and request grow with the area of images",
            caveat=f"the model sees images of {new} x {new} pixels and no longer of {side} x {side}: small things are "
            "lost, and results do not compare with those of the larger size",
        )
        for new in sides
        if _SMALLEST <= new < side
    ) or Refused(f"images of {side} x {side} pixels are small already")


def _why_not(evidence: Evidence, loops: list[TrainingLoop]) -> str | None:
    if not loops:
        return "no training loop was found in what the failing cell runs"
    for loop in loops:
        for text in loop.models:
            model = model_facts(evidence.code, loop, text)
            if model is None:
                return (
                    f"`{text}` is not among the notebook's objects, so whether it takes images of any size is not known"
                )
            if not model.any_size:
                return f"`{text}` does not pool images of any size to one, so it may take its own size alone"
    return None


def _images(evidence: Evidence) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the images of the batch by the names that hold them."""
    found: dict[str, tuple[int, ...]] = {}
    for held in evidence.census.holdings:
        shape, root = held.shape or (), re.match(r"(?:local `)?(\w+)(?P<item>\[)?", held.path)
        is_image = len(shape) == 4 and shape[1] in _CHANNELS and "float" in (held.dtype or "")
        if held.role is Role.BATCH and is_image and root and not root["item"]:
            found[root[1]] = shape
    return found


def _side(evidence: Evidence) -> int | Refused:
    shapes = set(_images(evidence).values())
    if not shapes:
        return Refused("the census found no batch of images, samples by channels by height by width")
    sides = {length for shape in shapes for length in shape[2:]}
    if len(sides) != 1:
        return Refused("the images are not squares of one size")
    (side,) = sides
    for held in evidence.census.holdings:
        shape = held.shape or ()
        if held.role is Role.BATCH and shape not in shapes and shape[-2:] == (side, side):
            return Refused("the targets have the size of the images, and would have to be scaled in their own way")
    return side


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with images of ``dose["size"]`` pixels a side."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if (why := _why_not(evidence, loops)) is not None:
        return Refused(why)
    side, size = _side(evidence), dose.number("size")
    if isinstance(side, Refused):
        return side
    if any("interpolate(" in cell.source and f"({size}, {size})" in cell.source for cell in cells.history):
        return Refused(f"the images are scaled to {size} x {size} already")
    told = _told(Book.read(cells))
    values = {number.value for number in told}
    if side not in values and (size in values or max(values, default=side) < size):
        return Refused(f"the transforms make images of {size} or less already")
    if side in values:
        # What is resized before it is cropped keeps its margin.
        sizes = {number: max(number.value * size // side, 1) for number in told if number.value >= side}
        made = exchange_numbers(cells, sizes)
        if isinstance(made, Patch):
            return made
    function = _interpolate(cells)
    if isinstance(function, Refused):
        return function
    return before_model(cells, loops, lambda _, names: _scaled(evidence, names, function, size))


def _told(book: Book) -> list[Number]:
    """Return the numbers that transforms are given as the size to make."""
    found: dict[int, Number] = {}
    for page in book.pages:
        for call in calls(page.tree):
            if call_name(call).rpartition(".")[2] not in _SIZES:
                continue
            given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "size")]
            parts = [part for one in given for part in (one.elts if isinstance(one, ast.Tuple | ast.List) else [one])]
            for part in parts:
                found |= {id(one.node): one for one in book.numbers(part, book.place(page, call))}
    return list(found.values())


def _interpolate(cells: Cells) -> str | Refused:
    """Return what ``interpolate`` is called by in the cells."""
    if (called := spelled(cells, "torch.nn.functional.interpolate")) is not None:
        return called
    return Refused("the cells do not import `torch` by its name")


def _scaled(evidence: Evidence, names: set[str], function: str, size: int) -> str | Refused:
    images = sorted(names & set(_images(evidence)))
    if len(images) != 1:
        return Refused("which name of the loop holds the images was not seen")
    return f'{images[0]} = {function}({images[0]}, size=({size}, {size}), mode="bilinear", antialias=True)'


FIX: Final = Fix(
    id="smaller_image",
    title="Train on smaller images",
    effect=Effect.CHANGES_RESULT,
    cost="small things are lost; faster",
    propose=propose,
    apply=None,
    patch=patch,
)
