"""Smaller inputs: smaller batches, shorter sequences, and smaller images.

``smaller_batch``: each step then averages over fewer samples, so the training goes another way: ``micro_batch`` is to
be preferred where it can be had. The number is changed where it is written, in whichever cell, and loaders that were
made from it are made anew; not where it also sets what cannot be made again, as a schedule over so many steps.

``truncate_sequence``, ``smaller_image``: activations grow with the length of sequences and with the area of images. The
batch is made smaller in the loop, before the model is given it, whatever made it. Images only for models that pool them
before their last layers, whatever their size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

import libcst as cst

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._batch_sizes import fixed_schedule, sizes_of, smaller, takes_fixed_steps
from oomdoctor.fixes._construction_sites import step_lines
from oomdoctor.fixes._preconditions import check_training, layer, model_facts, passing, running_loops
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.earlier_cells import exchange_numbers
from oomdoctor.program.import_lines import spelled
from oomdoctor.program.literals import Book, Number

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


@refusing
def batch_size(cells: Cells, evidence: Evidence) -> int:
    """Return how many samples the cells put into a batch of the training that the last cell runs."""
    return _of_one_size(cells, evidence)[0].value


@refusing
def at_batch(cells: Cells, evidence: Evidence, size: int) -> Patch | Refused:
    """Return the cells with batches of ``size`` samples in every loop that the last cell runs."""
    return exchange_numbers(cells, dict.fromkeys(_of_one_size(cells, evidence), size))


def _of_one_size(cells: Cells, evidence: Evidence) -> tuple[Number, ...]:
    """Return the places where the one batch size is written, at least one of them."""
    book, sizes = Book.read(cells), dict(evidence.code.batch_sizes)
    every = [_taken(sizes_of(book, loop), sizes.get(loop.loader)) for loop in running_loops(evidence)]
    numbers = {id(number.node): number for found in every for number in found}
    *some, last = sorted({number.value for number in numbers.values()})
    if some:
        raise Unfit(f"there is not one batch size: the cells set {', '.join(map(str, some))} and {last}")
    return tuple(numbers.values())


def _taken(numbers: tuple[Number, ...], size: int | None) -> tuple[Number, ...]:
    """Leave out the numbers of branches that were not taken, as the batch there was tells."""
    taken = [number for number in numbers if number.is_choice and number.value == size]
    return tuple(number for number in numbers if not number.is_choice or number in taken or not taken)


@_trainers.first("smaller_batch")
@proposing
def _propose_batch(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    loops = running_loops(evidence)
    check_training(evidence)
    why = "the census found no batch of the loop, so how many samples it has is not known"
    size = need(_samples(evidence, loops), why)
    need(size != 1, "the batch has one sample: it cannot be smaller")
    scales = need(passing(incident, evidence), "no activations were found that a smaller batch could save")
    yield from smaller(size, scales, is_fixed=takes_fixed_steps(loops))


def _samples(evidence: Evidence, loops: list[TrainingLoop]) -> int | None:
    """Return the samples in a batch: of the loop's loader, else what the loaders and the batch found agree on."""
    known = dict(evidence.code.batch_sizes)
    named = [known[loop.loader] for loop in loops if loop.loader in known]
    if named:
        return max(named)
    shapes = [held.shape for held in evidence.census.holdings if held.role is Role.BATCH and held.shape]
    dim = 1 if any(_is_sequence_first(evidence.code, loop) for loop in loops) else 0
    if not known:
        there = [loop.batch_shape for loop in loops if loop.batch_shape is not None]
        return max((shape[dim] for shape in there or shapes if len(shape) > dim), default=None)
    agreed = set(known.values()) & {length for shape in shapes for length in shape}
    return max(agreed, default=max((shape[0] for shape in shapes), default=None))


@refusing
def _patch_batch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    code, size = evidence.code, dose.number("batch_size")
    if (through := _trainers.patched("smaller_batch", cells, evidence, dose)) is not None:
        return through
    loops = running_loops(evidence)
    models = [model_facts(code, loop, text) for loop in loops for text in loop.models]
    for model in (one for one in models if size == 1 and one is not None and one.batch_norm):
        raise Unfit(f"{layer(model, model.batch_norm[0])} normalises over the batch, and cannot over one sample")
    book, numbers, largest = Book.read(cells), dict[int, Number](), 0
    for loop in loops:
        if not dict(code.batch_sizes) and loop.loader.startswith("range(") and _is_sequence_first(code, loop):
            raise Unfit("the loop goes along its sequences: how many there are was decided where they were made")
        found = sizes_of(book, loop)
        taken = _taken(found, _samples(evidence, [loop]))
        numbers |= {id(number.node): number for number in taken if number.value > size}
        largest = max([largest, *(number.value for number in found)])
    if not takes_fixed_steps(loops) and (call := fixed_schedule(book)) is not None:
        raise Unfit(f"`{call}` is a schedule over so many steps and raises beyond it: there would be more")
    need(numbers, f"the cells set batches of {largest} samples, which are not larger than {size}")
    odd = next((number.value for number in numbers.values() if number.value % size), None)
    need(odd is None, f"a batch of {odd} does not divide into batches of {size}: shapes may be made of its size")
    return exchange_numbers(cells, dict.fromkeys(numbers.values(), size))


def _is_sequence_first(code: CodeFacts, loop: TrainingLoop) -> bool:
    models = (model_facts(code, loop, text) for text in loop.models)
    return any(model is not None and model.sequence_first for model in models)


def _loops(evidence: Evidence, *, of_images: bool) -> list[TrainingLoop]:
    """Return the training loops of the failing run, whose models can be given less."""
    loops = running_loops(evidence)
    for text, model in ((text, model_facts(evidence.code, loop, text)) for loop in loops for text in loop.models):
        if not of_images and model is not None and model.sequence_first:
            where = layer(model, model.sequence_first[0])
            raise Unfit(f"{where} takes the batch in dimension 1, where the length would be")
        if of_images:
            why = f"`{text}` is not among the notebook's objects, so whether it takes any size is not known"
            any_size = need(model, why).any_size
            need(any_size, f"`{text}` does not pool images of any size to one, so it may take its own size alone")
    return loops


def _scales(incident: Incident, evidence: Evidence) -> int:
    check_training(evidence)
    return need(passing(incident, evidence, batch=False), "no activations were found that smaller inputs could save")


@proposing
def _truncate(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    scales = _scales(incident, evidence)
    _loops(evidence, of_images=False)
    length = need(_length(evidence), "the census found no batch of token numbers, samples by length")
    divisors = [one for one in _DIVISORS if length // one >= _SHORTEST]
    for one in need(divisors, f"sequences of {length} tokens are short already"):
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
    loops, length = _loops(evidence, of_images=False), dose.number("length")
    need(not any(f"[:, :{length}]" in cell.source for cell in cells.history), f"the batch is cut to {length} already")
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
    scales = _scales(incident, evidence)
    _loops(evidence, of_images=True)
    side = _side(evidence)
    sides = dict.fromkeys(side * part // whole // _MULTIPLE * _MULTIPLE for part, whole in _SHARES)
    smaller = [new for new in sides if _SMALLEST <= new < side]
    for new in need(smaller, f"images of {side} x {side} pixels are small already"):
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
    need(shapes, "the census found no batch of images, samples by channels by height by width")
    sides = {length for shape in shapes for length in shape[2:]}
    side, *others = sides
    need(not others, "the images are not squares of one size")
    for _, _, held in _batch_shapes(evidence):
        if held.shape not in shapes and (held.shape or ())[-2:] == (side, side):
            raise Unfit("the targets have the size of the images, and would have to be scaled in their own way")
    return side


@refusing
def _shrunk(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    loops, size = _loops(evidence, of_images=True), dose.number("size")
    _side(evidence)  # of squares of one size alone
    if any("interpolate(" in cell.source and f"({size}, {size})" in cell.source for cell in cells.history):
        raise Unfit(f"the images are scaled to {size} x {size} already")

    def scaled(_: TrainingLoop, names: set[str]) -> str:
        images = sorted(names & set(_images(evidence)))
        need(len(images) == 1, "which name of the loop holds the images was not seen")
        spelling = spelled(cells, "torch.nn.functional.interpolate")
        call = need(spelling, "the cells do not import `torch` by its name")
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
        id="smaller_batch",
        title="Train with smaller batches",
        effect=Effect.CHANGES_RESULT,
        joins=True,
        cost="another course of the training; more steps for the same samples",
        propose=_propose_batch,
        patch=_patch_batch,
    ),
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
