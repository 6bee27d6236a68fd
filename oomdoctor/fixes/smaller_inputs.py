"""Smaller inputs: shorter sequences, and smaller images.

Activations grow with the length of the sequences, those of plain attention with its square, and those of convolutions
with the area of images. The batch is made smaller in the loop, before the model is given it: that holds whatever made
the batch, and nothing has to be made anew. What stands beyond a cut is not learnt from. Images only for models that
pool images of whatever size before their last layers: others would not run on another size, or would give results of
another size than their targets.

There is no live form: whether a model may be given less than it asks for is in the code that calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

import libcst as cst

from oomdoctor.fixes._step_lines import step_lines
from oomdoctor.fixes._terms import (
    Unfit,
    check_training,
    layer,
    model_facts,
    need,
    proposing,
    refusing,
    running_loops,
)
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.import_lines import spelled

Line: TypeAlias = Callable[[TrainingLoop, set[str]], str]
"""Makes the line that makes the batch of a loop smaller, from the loop and the names that are bound by then."""

_DIVISORS: Final = (2, 4, 8)
_SHORTEST: Final = 16
_WHOLE: Final = re.compile(r"^(torch\.)?(u?int(8|16|32|64)|long|bool)$")
_SHARES: Final = ((3, 4), (1, 2), (1, 4))
_SMALLEST: Final = 32
_MULTIPLE: Final = 8
"""Sizes are kept to multiples of this, as strides of 2 halve them again and again."""
_CHANNELS: Final = frozenset({1, 3, 4})


def _loops(evidence: Evidence, *, of_images: bool) -> list[TrainingLoop]:
    """Return the training loops of the failing run, whose models can be given less."""
    loops = running_loops(evidence)
    for text, model in ((text, model_facts(evidence.code, loop, text)) for loop in loops for text in loop.models):
        if not of_images and model is not None and model.sequence_first:
            where = layer(model, model.sequence_first[0])
            raise Unfit(f"{where} takes the batch in dimension 1, where the length would be")
        if of_images and model is None:
            raise Unfit(f"`{text}` is not among the notebook's objects, so whether it takes any size is not known")
        if of_images and model is not None and not model.any_size:
            raise Unfit(f"`{text}` does not pool images of any size to one, so it may take its own size alone")
    return loops


def _scales(incident: Incident, evidence: Evidence) -> int:
    """Return the bytes that grow with the inputs."""
    check_training(evidence)
    scales = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    if not scales:
        raise Unfit("no activations were found that smaller inputs could save")
    return scales


@proposing
def _truncate(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose a half, a quarter and an eighth of the longest sequence in the batch."""
    scales = _scales(incident, evidence)
    _loops(evidence, of_images=False)
    length = need(_length(evidence), "the census found no batch of token numbers, samples by length")
    if length // _DIVISORS[0] < _SHORTEST:
        raise Unfit(f"sequences of {length} tokens are short already")
    for one in (one for one in _DIVISORS if length // one >= _SHORTEST):
        yield Proposal(
            dose=Dose.of(length=length // one),
            effect=Effect.CHANGES_RESULT,
            saves=scales - scales // one,
            slowdown=1 / one,
            basis=f"analytic estimate: {format_size(scales)} of activations and request grow with the length: "
            f"1/{one} of it remains",
            caveat=f"what stands beyond {length // one} of {length} tokens is cut off and not learnt from",
        )


def _length(evidence: Evidence) -> int | None:
    """Return the length of the longest tensor of the batch that holds whole numbers, samples by length."""
    batch = [held for held in evidence.census.holdings if held.role is Role.BATCH and _WHOLE.match(held.dtype or "")]
    return max((held.shape[1] for held in batch if held.shape and len(held.shape) == 2), default=None)


@refusing
def _truncated(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with sequences of ``dose["length"]`` tokens at most."""
    loops, length = _loops(evidence, of_images=False), dose.number("length")
    if any(f"[:, :{length}]" in cell.source for cell in cells.history):
        raise Unfit(f"the batch is cut to {length} already")
    return _written(cells, loops, partial(_cut, evidence, length))


def _batch_shapes(evidence: Evidence) -> Iterator[tuple[str, str, Holding]]:
    """Yield the tensors of the batch, each with the name that it is found by and what follows that."""
    for held in evidence.census.holdings:
        root = re.match(r"(?:local `)?(\w+)(\[)?", held.path)
        if held.role is Role.BATCH and held.shape:
            yield (root[1], root[2] or "", held) if root else ("", "", held)


def _cut(evidence: Evidence, length: int, loop: TrainingLoop, names: set[str]) -> str:
    """Return the line that cuts the batch of ``loop``, of which the model is given ``names``."""
    longest, shapes = _length(evidence), dict[str, list[tuple[int, ...]]]()
    for name, _, held in _batch_shapes(evidence):
        shapes.setdefault(name, []).append(held.shape or ())
    # A name that was moved to a device has the batch under the name that it was given then.
    batch = [name for name in dict.fromkeys((*loop.batch, *sorted(names))) if name in shapes]
    if len(loop.batch) == 1 and batch == [loop.batch[0]] and len(shapes[batch[0]]) > 1:
        (name,) = batch
        if any(len(shape) > 2 or (len(shape) == 2 and shape[1] != longest) for shape in shapes[name]):
            raise Unfit(f"`{name}` holds tensors of other lengths, which may belong to the tokens one by one")
        value = f"value[:, :{length}].contiguous()"
        if not all(len(shape) == 2 for shape in shapes[name]):
            value += " if value.dim() > 1 else value"
        return f"{name} = {{key: {value} for key, value in {name}.items()}}"
    missing = [name for name in loop.batch if name not in shapes and name not in {"_", "i", "step", "idx"}]
    if missing or not batch:
        raise Unfit(f"the shape of `{(missing or ['the batch'])[0]}` was not seen, so how to cut it is not known")
    long = [name for name in batch if any(len(shape) == 2 and shape[1] == longest for shape in shapes[name])]
    if not set(long) & names or any(len(s) > 1 for name in batch if name not in long for s in shapes[name]):
        raise Unfit("the tensors of the batch differ in their length, so how to cut them is not known")
    # Contiguous, as the whole batch was: what comes after may call ``view``.
    return f"{', '.join(long)} = {', '.join(f'{name}[:, :{length}].contiguous()' for name in long)}"


@proposing
def _shrink(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose three quarters, a half and a quarter of the side of the images."""
    scales = _scales(incident, evidence)
    _loops(evidence, of_images=True)
    side = _side(evidence)
    sides = dict.fromkeys(side * part // whole // _MULTIPLE * _MULTIPLE for part, whole in _SHARES)
    smaller = [new for new in sides if _SMALLEST <= new < side]
    if not smaller:
        raise Unfit(f"images of {side} x {side} pixels are small already")
    for new in smaller:
        yield Proposal(
            dose=Dose.of(size=new),
            effect=Effect.CHANGES_RESULT,
            saves=int(scales * (1 - (new / side) ** 2)),
            slowdown=(new / side) ** 2,
            basis=f"analytic estimate: {format_size(scales)} of activations and request grow with the area of images",
            caveat=f"the model sees images of {new} x {new} pixels and no longer of {side} x {side}: small things are "
            "lost, and results do not compare with those of the larger size",
        )


def _images(evidence: Evidence) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the images of the batch by the names that hold them."""
    return {
        name: held.shape
        for name, item, held in _batch_shapes(evidence)
        if held.shape and len(held.shape) == 4 and held.shape[1] in _CHANNELS and "float" in (held.dtype or "")
        if not item
    }


def _side(evidence: Evidence) -> int:
    shapes = set(_images(evidence).values())
    if not shapes:
        raise Unfit("the census found no batch of images, samples by channels by height by width")
    sides = {length for shape in shapes for length in shape[2:]}
    if len(sides) != 1:
        raise Unfit("the images are not squares of one size")
    (side,) = sides
    for _, _, held in _batch_shapes(evidence):
        if held.shape not in shapes and (held.shape or ())[-2:] == (side, side):
            raise Unfit("the targets have the size of the images, and would have to be scaled in their own way")
    return side


@refusing
def _shrunk(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with images of ``dose["size"]`` pixels a side."""
    loops, size = _loops(evidence, of_images=True), dose.number("size")
    _side(evidence)  # of squares of one size alone
    if any("interpolate(" in cell.source and f"({size}, {size})" in cell.source for cell in cells.history):
        raise Unfit(f"the images are scaled to {size} x {size} already")

    def scaled(_: TrainingLoop, names: set[str]) -> str:
        function = spelled(cells, "torch.nn.functional.interpolate")
        images = sorted(names & set(_images(evidence)))
        if len(images) != 1:
            raise Unfit("which name of the loop holds the images was not seen")
        call = need(function, "the cells do not import `torch` by its name")
        return f'{images[0]} = {call}({images[0]}, size=({size}, {size}), mode="bilinear", antialias=True)'

    return _written(cells, loops, scaled)


def _written(cells: Cells, loops: Sequence[TrainingLoop], line_of: Line) -> Patch | Refused:
    """Return the cells with a line before the model is run in each loop."""

    def change(parsed: rewriting.ParsedCell, here: list[TrainingLoop]) -> dict[cst.CSTNode, rewriting.New]:
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for facts in here:
            step = step_lines(parsed, facts)
            known = {name for node in step.node.body[: step.first] for name in bound(node)} | set(facts.batch)
            changes[step.loop] = step.preceded_by(line_of(facts, known & reads(step.node.body[step.first])))
        return changes

    return rewriting.at_sites(cells, loops, change)


FIXES: Final = (
    Fix(
        id="truncate_sequence",
        title="Train on shorter sequences",
        effect=Effect.CHANGES_RESULT,
        joins=True,
        cost="what is cut off is not learnt from; faster",
        propose=_truncate,
        patch=_truncated,
    ),
    Fix(
        id="smaller_image",
        title="Train on smaller images",
        effect=Effect.CHANGES_RESULT,
        joins=True,
        cost="small things are lost; faster",
        propose=_shrink,
        patch=_shrunk,
    ),
)
