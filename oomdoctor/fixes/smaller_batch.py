"""Smaller batches, where the batch size is written down in the cells.

What a person does first when memory runs out. Each step then averages over fewer samples and an epoch has more of
them, so the training goes another way: ``micro_batch`` keeps the effective batch and is to be preferred where it can be
had. The number is changed where it is written, in whichever cell, and loaders that were made from it are made anew. A
number that also sets what cannot be made again, as a schedule over so many steps, is left alone.

There is no live form: code that reads the batch size from a name would disagree with a loader that was changed alone.
"""

from __future__ import annotations

from typing import Final

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._activations import why_not_training
from oomdoctor.fixes._batch_sizes import Steps, fixed_schedule, hard_coded, sizes_of, smaller, steps_of
from oomdoctor.fixes._chunks import layer, model_facts
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.program.book import Book, Number
from oomdoctor.program.replay import exchange_numbers


def batch_size(cells: Cells, evidence: Evidence) -> int | Refused:
    """Return how many samples the cells put into a batch of the training that the last cell runs."""
    numbers = _of_one_size(cells, evidence)
    return numbers if isinstance(numbers, Refused) else numbers[0].value


def at_batch(cells: Cells, evidence: Evidence, size: int) -> Patch | Refused:
    """Return the cells with batches of ``size`` samples in every loop that the last cell runs."""
    numbers = _of_one_size(cells, evidence)
    return numbers if isinstance(numbers, Refused) else exchange_numbers(cells, dict.fromkeys(numbers, size))


def _of_one_size(cells: Cells, evidence: Evidence) -> tuple[Number, ...] | Refused:
    """Return the places where the one batch size is written, at least one of them."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if not loops:
        return Refused("no training loop was found in what the cell runs")
    book = Book.read(cells)
    numbers: dict[int, Number] = {}
    for loop in loops:
        found = _of_loop(book, evidence, loop)
        if isinstance(found, Refused):
            return found
        numbers |= {id(number.node): number for number in found}
    values = sorted({number.value for number in numbers.values()})
    if len(values) > 1:
        *some, last = values
        return Refused(f"there is not one batch size: the cells set {', '.join(map(str, some))} and {last}")
    return tuple(numbers.values())


def _written(book: Book, loop: TrainingLoop) -> tuple[Number, ...] | Refused:
    """Return the numbers that set the batch size of a loop, which nothing else in it repeats."""
    found = sizes_of(book, loop)
    if not isinstance(found, Refused) and (call := hard_coded(book, loop, found)) is not None:
        return Refused(f"`{call}` has the size of the batch written into it as well")
    return found


def _of_loop(book: Book, evidence: Evidence, loop: TrainingLoop) -> tuple[Number, ...] | Refused:
    found = _written(book, loop)
    if isinstance(found, Refused):
        return found
    # Of the branches of a condition, the one that was taken, as the loader there tells.
    size = dict(evidence.code.batch_sizes).get(loop.loader)
    taken = tuple(number for number in found if not number.is_choice or number.value == size)
    return taken or found


_NO_LOOP: Final = "no training loop was found in what the failing cell runs"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose batches of a half of the samples down to a 32nd of them."""
    if (through := _trainer_terms.proposed("smaller_batch", incident, evidence)) is not None:
        return through
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if not loops:
        return Refused(_NO_LOOP)
    if (why := why_not_training(evidence)) is not None:
        return Refused(why)
    size = _size(evidence, loops)
    if size is None:
        return Refused("the census found no batch of the loop, so how many samples it has is not known")
    if size == 1:
        return Refused("the batch has one sample: it cannot be smaller")
    scales = evidence.census.bytes_of(Role.ACTIVATION) + evidence.census.bytes_of(Role.BATCH)
    scales += incident.requested or 0
    if not scales:
        return Refused("no activations were found that a smaller batch could save")
    return smaller(size, scales, steps=steps_of(evidence.code, loops))


def _size(evidence: Evidence, loops: list[TrainingLoop]) -> int | None:
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


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with batches of ``dose["batch_size"]`` samples at most in every loop of the failing run."""
    code, size = evidence.code, dose.number("batch_size")
    if (through := _trainer_source.patched("smaller_batch", cells, evidence, dose)) is not None:
        return through
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops:
        return Refused(_NO_LOOP)
    if size == 1 and (name := _normalised(code, loops)) is not None:
        return Refused(f"{name} normalises over the batch, and cannot over one sample")
    book = Book.read(cells)
    numbers: dict[int, Number] = {}
    largest = 0
    for loop in loops:
        if not dict(code.batch_sizes) and loop.loader.startswith("range(") and _is_sequence_first(code, loop):
            return Refused("the loop goes along its sequences: how many there are was decided where they were made")
        found = _written(book, loop)
        if isinstance(found, Refused):
            return found
        numbers |= {
            id(number.node): number for number in _chosen(found, _size(evidence, [loop])) if number.value > size
        }
        largest = max([largest, *(number.value for number in found)])
    if steps_of(code, loops) is not Steps.FIXED and (call := fixed_schedule(book)) is not None:
        return Refused(f"`{call}` is a schedule over so many steps and raises beyond it: there would be more")
    if not numbers:
        return Refused(f"the cells set batches of {largest} samples, which are not larger than {size}")
    odd = next((number.value for number in numbers.values() if number.value % size), None)
    if odd is not None:
        return Refused(f"a batch of {odd} does not divide into batches of {size}: shapes may be made of its size")
    return exchange_numbers(cells, dict.fromkeys(numbers.values(), size))


def _is_sequence_first(code: CodeFacts, loop: TrainingLoop) -> bool:
    models = (model_facts(code, loop, text) for text in loop.models)
    return any(model is not None and model.sequence_first for model in models)


def _chosen(numbers: tuple[Number, ...], size: int | None) -> tuple[Number, ...]:
    """Leave out the numbers of branches that were not taken, as the batch there was tells."""
    taken = [number for number in numbers if number.is_choice and number.value == size]
    return tuple(number for number in numbers if not number.is_choice or number in taken or not taken)


def _normalised(code: CodeFacts, loops: list[TrainingLoop]) -> str | None:
    models = [(loop, model_facts(code, loop, text)) for loop in loops for text in loop.models]
    return next((layer(model, model.batch_norm[0]) for _, model in models if model and model.batch_norm), None)


FIX: Final = Fix(
    id="smaller_batch",
    title="Train with smaller batches",
    effect=Effect.CHANGES_RESULT,
    cost="another course of the training; more steps for the same samples",
    propose=propose,
    apply=None,
    patch=patch,
)
