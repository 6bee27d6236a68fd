"""What a shadow run reports to the process that asked for it.

It stands alone, without torch, because the asking process must be able to read an answer that it could never make
itself: one that runs under a memory limit does not even load the modules of the shadow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oomdoctor.model.memory import ModuleMemory
from oomdoctor.model.plan import Course

OUT_OF_TIME: Final = "out of time"
"""Why there is no figure of a shadow that was cut before it saw enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The outcome of one shadow run: its numbers, or why there are none.

    Attributes:
        peak: highest sum of live tensors in bytes; on the virtual accelerator of the blocks that hold them.
        reserved: what the caching allocator would hold at most, None where there is no caching allocator.
        peak_line: line of the cell at which the peak stood.
        cost: time of the run in bytes moved (see ``cost``), comparable between shadow runs of one cell only.
        error_ratio: calibrated margin for the operations that were seen.
        reserved_slack: bytes by which what is reserved may be off, for reasons other than those of ``error_ratio``.
        over: iterations that were not followed and are reckoned with, because each of them keeps something.
        endless: bytes that each iteration of a loop of unknown length keeps, so that more than this may be needed.
        missed: what was not seen, so that more than this may be needed.
        is_estimate: whether what kernels need inside is known only about.
        unknown: what is not known of operations that there were, in words.
        is_bound: whether sizes that values decide were taken for the largest that they may be.
        is_guessed: whether values that nobody knows decided which way the cell went: the likelier one was taken.
        is_partial: whether a loop was cut in which a counter decides what a step does, so that others may need more.
        is_counted_on: whether what piles up only so far was taken to go on.
        left_early: whether a library was left in its training, so that what comes after it was not seen.
        is_uncompiled: whether code ran as it is that is compiled in a real run.
        course: how the memory went on the way.
        modules: what the forward of each module keeps; of the unchanged cell alone.
        why: why there are no numbers.
        is_unfit: whether that is because the change found itself unfit for the cell.
        lacks: type of the device that the cell asked for in vain, where that is why.
        card: type of the device that was emulated.
    """

    peak: int = 0
    reserved: int | None = None
    peak_line: int | None = None
    cost: float = 0.0
    error_ratio: float = 0.0
    reserved_slack: int = 0
    over: int = 0
    endless: int = 0
    missed: str | None = None
    is_estimate: bool = False
    unknown: tuple[str, ...] = ()
    is_bound: bool = False
    is_guessed: bool = False
    is_partial: bool = False
    is_counted_on: bool = False
    left_early: bool = False
    is_uncompiled: bool = False
    course: Course | None = None
    modules: tuple[ModuleMemory, ...] = ()
    why: str | None = None
    is_unfit: bool = False
    lacks: str | None = None
    card: str | None = None
