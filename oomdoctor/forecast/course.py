"""How the memory of a shadow run went, from the events of the ledger and its notes.

What no one has told a role of is judged by how long it lasted, as a census would see it: what a finished statement of
the cell left behind is a tensor of the user's, or its batch if it was fed to what is differentiated; what the running
statement holds, and what graphs hold, are activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Course

if TYPE_CHECKING:
    from oomdoctor.forecast.cost import Meter
    from oomdoctor.forecast.ledger import Ledger, Note

_POINTS: Final = 256


def course_of(ledger: Ledger, meter: Meter, statements: Sequence[int]) -> Course:
    """Return the course of a run that is over.

    Args:
        ledger: with the notes on what was made.
        meter: what the operations cost.
        statements: lines at which the statements of the cell begin, in order.
    """
    sizes = alive_after(ledger, ledger.peak_at)
    last = ledger.note(ledger.events[ledger.peak_at - 1][1]) if ledger.peak_at else None
    roles, temporaries = Counter[Role](), Counter[str]()
    for number, nbytes in sizes.items():
        note = ledger.note(number)
        roles[_role(note, last, statements)] += nbytes
        if note.temporary is not None and note.role is None:
            temporaries[note.temporary] += nbytes
    return Course(
        at_peak=tuple((role, nbytes) for role, nbytes in roles.most_common() if nbytes),
        points=tuple(_points(ledger)),
        temporaries=tuple((name, nbytes) for name, nbytes in temporaries.most_common() if nbytes),
        flops=meter.flops,
        moved=meter.moved,
    )


def alive_after(ledger: Ledger, count: int) -> dict[int, int]:
    """Return the sizes of what was alive after so many events, by number."""
    alive: dict[int, int] = {}
    for event in ledger.events[:count]:
        if event[0] == "alloc":
            alive[event[1]] = event[2]
        else:
            del alive[event[1]]
    return alive


def _role(note: Note, last: Note | None, statements: Sequence[int]) -> Role:
    """Return what an allocation was there for when ``last``, which made the peak, was made."""
    if note.role is not None:
        return note.role
    if note.temporary is not None or (note.in_graph and not note.detached):
        return Role.ACTIVATION
    if last is None or note.statement is None:
        return Role.USER_TENSOR
    if note.turn == last.turn and _statement(note, statements) == _statement(last, statements):
        return Role.ACTIVATION
    return Role.BATCH if note.fed else Role.USER_TENSOR


def _statement(note: Note, statements: Sequence[int]) -> int:
    return bisect_right(statements, note.statement or 0)


def _points(ledger: Ledger) -> list[tuple[int, int | None]]:
    """Return what was alive when the cell began, and then the highest of each bin of events."""
    begun = len(ledger.events) if ledger.begun is None else ledger.begun
    sizes = alive_after(ledger, begun)
    level, line = sum(sizes.values()), None
    points: list[tuple[int, int | None]] = [(level, line)]
    width = -(-(len(ledger.events) - begun) // (_POINTS - 1))
    for index, event in enumerate(ledger.events[begun:]):
        if event[0] == "alloc":
            sizes[event[1]] = event[2]
            level, line = level + event[2], ledger.note(event[1]).line
        else:
            level -= sizes.pop(event[1])
        if index % width == 0:
            points.append((level, line))
        elif level > points[-1][0]:
            points[-1] = level, line
    return points
