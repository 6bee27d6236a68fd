"""The cells with another batch size, smaller or larger, where it is one number that is written down in them."""

from __future__ import annotations

from oomdoctor.fixes._batch_sizes import hard_coded, sizes_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cells
from oomdoctor.program.book import Book, Number
from oomdoctor.program.replay import exchange_numbers


def batch_size(cells: Cells, evidence: Evidence) -> int | Refused:
    """Return how many samples the cells put into a batch of the training that the last cell runs."""
    numbers = _numbers(cells, evidence)
    return numbers if isinstance(numbers, Refused) else numbers[0].value


def at_batch(cells: Cells, evidence: Evidence, size: int) -> Patch | Refused:
    """Return the cells with batches of ``size`` samples in every loop that the last cell runs."""
    numbers = _numbers(cells, evidence)
    return numbers if isinstance(numbers, Refused) else exchange_numbers(cells, dict.fromkeys(numbers, size))


def _numbers(cells: Cells, evidence: Evidence) -> tuple[Number, ...] | Refused:
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


def _of_loop(book: Book, evidence: Evidence, loop: TrainingLoop) -> tuple[Number, ...] | Refused:
    found = sizes_of(book, loop)
    if isinstance(found, Refused):
        return found
    if (call := hard_coded(book, loop, found)) is not None:
        return Refused(f"`{call}` has the size of the batch written into it as well")
    # Of the branches of a condition, the one that was taken, as the loader there tells.
    size = dict(evidence.code.batch_sizes).get(loop.loader)
    taken = tuple(number for number in found if not number.is_choice or number.value == size)
    return taken or found
