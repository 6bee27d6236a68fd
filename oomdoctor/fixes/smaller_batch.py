"""Smaller batches, where the batch size is written down in the cells.

What a person does first when memory runs out. Each step then averages over fewer samples and an epoch has more of
them, so the training goes another way: ``micro_batch`` keeps the effective batch and is to be preferred where it can be
had. The number is changed where it is written, in whichever cell, and loaders that were made from it are made anew. A
number that also sets what cannot be made again, as a schedule over so many steps, is left alone.

There is no live form: code that reads the batch size from a name would disagree with a loader that was changed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._batch_sizes import fixed_schedule, sizes_of, smaller, takes_fixed_steps
from oomdoctor.fixes._terms import (
    Unfit,
    check_training,
    layer,
    model_facts,
    proposing,
    refusing,
    running_loops,
)
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.program.book import Book, Number
from oomdoctor.program.replay import exchange_numbers


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
    values = sorted({number.value for number in numbers.values()})
    if len(values) > 1:
        *some, last = values
        raise Unfit(f"there is not one batch size: the cells set {', '.join(map(str, some))} and {last}")
    return tuple(numbers.values())


def _taken(numbers: tuple[Number, ...], size: int | None) -> tuple[Number, ...]:
    """Leave out the numbers of branches that were not taken, as the batch there was tells."""
    taken = [number for number in numbers if number.is_choice and number.value == size]
    return tuple(number for number in numbers if not number.is_choice or number in taken or not taken)


@_trainers.first("smaller_batch")
@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose batches of a half of the samples down to a 32nd of them."""
    loops = running_loops(evidence)
    check_training(evidence)
    size = _samples(evidence, loops)
    if size is None:
        raise Unfit("the census found no batch of the loop, so how many samples it has is not known")
    if size == 1:
        raise Unfit("the batch has one sample: it cannot be smaller")
    scales = evidence.census.bytes_of(Role.ACTIVATION) + evidence.census.bytes_of(Role.BATCH)
    scales += incident.requested or 0
    if not scales:
        raise Unfit("no activations were found that a smaller batch could save")
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
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with batches of ``dose["batch_size"]`` samples at most in every loop of the failing run."""
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
    if not numbers:
        raise Unfit(f"the cells set batches of {largest} samples, which are not larger than {size}")
    odd = next((number.value for number in numbers.values() if number.value % size), None)
    if odd is not None:
        raise Unfit(f"a batch of {odd} does not divide into batches of {size}: shapes may be made of its size")
    return exchange_numbers(cells, dict.fromkeys(numbers.values(), size))


def _is_sequence_first(code: CodeFacts, loop: TrainingLoop) -> bool:
    models = (model_facts(code, loop, text) for text in loop.models)
    return any(model is not None and model.sequence_first for model in models)


FIX: Final = Fix(
    id="smaller_batch",
    title="Train with smaller batches",
    effect=Effect.CHANGES_RESULT,
    joins=True,
    cost="another course of the training; more steps for the same samples",
    propose=propose,
    patch=patch,
)
