"""What the trace of a dry run that is over comes to: peak and reserved, how far they may be off, and the course.

What no one has told a role of is judged by how long it lasted, as a census would see it: what a finished statement of
the cell left behind is a tensor of the user's, or its batch if it was fed to what is differentiated; what the running
statement holds, and what graphs hold, are activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace
from oomdoctor.allocator.settings import SMALL_BUFFER
from oomdoctor.forecast.dry_run_result import BASIS, ON_CARD, Reading, Settings
from oomdoctor.forecast.growth import Event, Growth
from oomdoctor.forecast.values import unbounded, uncertain_bytes
from oomdoctor.model.memory import LASTING, Role
from oomdoctor.model.plan import Course, Forecast
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from oomdoctor.allocator.blocks import Block
    from oomdoctor.allocator.settings import AllocatorSettings
    from oomdoctor.forecast.cost import Meter
    from oomdoctor.forecast.live_storages import Layout, Ledger, Note
    from oomdoctor.forecast.loop_model import LoopModel
    from oomdoctor.forecast.tracker import Tracker
    from oomdoctor.sandbox.card import Card


_POINTS: Final = 256
_MANY: Final = 10_000
"""Iterations of a loop of unknown length, in which a list of losses matters no more than the error of a forecast."""

_HIDDEN_PAGES: Final = 3
"""Pages of an expandable segment that forecasts of what is reserved were off by at the most: see the 27 programs with
such segments in ``benchmarks/results/cuda.txt``."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A dry run that is over, or was left.

    Attributes:
        settings: those of the caching allocator; ``others``: further ones that are asked about.
        budget: bytes that there are, None where it is not known.
        cached: whether a caching allocator stands between the tensors and the device.
        card: the device that was emulated and that this machine lacks, None where there is none.
        layout: where what is alive at the start lies in the allocator; None packs it into an empty one.
        statements: lines at which the statements of the cell begin, in order.
        is_left: whether the cell was left before its end; ``left_early``: while more was needed after its training, or
            by a library in it.
        failure: what it failed with because a loop was cut, None where it did not.
    """

    tracker: Tracker
    loops: LoopModel
    settings: AllocatorSettings
    budget: int | None
    cached: bool
    card: Card | None
    layout: Layout | None
    statements: Sequence[int]
    is_left: bool = True
    left_early: bool = False
    failure: str | None = None
    others: Collection[Settings] = ()


def reading_of(run: Run) -> Reading:
    """Return the figures of a run."""
    ledger, meter, loops = run.tracker.ledger, run.tracker.meter, run.loops
    if run.layout is not None and run.layout.ledger is not ledger:
        run.layout = None  # it is that of another memory than the one that is asked about
    growth = Growth(ledger.events, loops.cuts)
    peak, reserved = _with_cache(run, growth, run.settings) if run.cached else (_peak(growth), None)
    endless = growth.endless if growth.endless * _MANY > meter.margin * peak else 0
    missed = run.failure or _missed(run.tracker, loops)
    is_bound = uncertain_bytes(ledger) > meter.margin * ledger.peak
    notes = {
        ON_CARD: run.card is not None,
        "extrapolated over 1 step" if growth.over == 1 else f"extrapolated over {growth.over} steps": growth.over,
        f"grows by {format_size(endless)} per step": endless,
        f"{missed}": missed,
        "what kernels need inside is an estimate": meter.is_estimate,
        **{f"{what} is not known": True for what in sorted(meter.unknown)},
        "what is compiled counts as if it were not": run.tracker.is_uncompiled,
        "on the likelier way where values decide": run.tracker.scalars.has_guessed,
        "at the most that values may decide": is_bound,
        **{f"more where values make {name} larger": True for name in sorted(unbounded)},
        "at the most, as if no deque and no cycle were ever full": loops.is_counted_on,
        "may be larger in steps that were not seen": loops.is_partial,
        "what comes after the training is not seen": run.left_early,
    }
    forecast = Forecast(
        basis=", ".join([BASIS, *(note for note, holds in notes.items() if holds)]),
        budget=run.budget,
        peak=peak,
        reserved=reserved,
        error_ratio=_error(run, peak, reserved),
        peak_line=ledger.peak_line,
        course=course_of(ledger, meter, run.statements),
        at_least=bool(endless) or missed is not None or run.left_early,
        at_most=is_bound or loops.is_counted_on,
    )
    return Reading(
        forecast=forecast,
        cost=meter.cost * loops.share,
        left_early=run.left_early,
        otherwise=dict(_otherwise(run, growth, forecast)),
    )


def _otherwise(run: Run, growth: Growth, forecast: Forecast) -> Iterator[tuple[Settings, Forecast]]:
    """Yield what is needed with other settings of the allocator, where these do not fit and the tensors do."""
    if run.budget is None or not run.cached or forecast.fits or (forecast.peak or 0) > run.budget:
        return
    for changed in run.others:
        settings = replace(run.settings, **dict(changed))
        if settings != run.settings:
            peak, reserved = _with_cache(run, growth, settings)
            error = _error(run, peak, reserved)
            yield changed, replace(forecast, peak=peak, reserved=reserved, error_ratio=error)


def _peak(growth: Growth) -> int:
    sizes: dict[Hashable, int] = {}
    live = peak = 0
    for event in growth.events():
        if event[0] == "alloc":
            sizes[event[1]] = event[2]
            live += event[2]
            peak = max(peak, live)
        else:
            live -= sizes.pop(event[1], 0)
    return peak


def _with_cache(run: Run, growth: Growth, settings: AllocatorSettings) -> tuple[int, int]:
    """Return the peaks of what a caching allocator of these settings has allocated and reserved.

    Where it is short of room, it gives back what is cached.
    """

    def replayed(budget: int | None = None, *, is_emptied: bool = False) -> Replay:
        allocator = CachingAllocator(budget, settings=settings)
        blocks = None if run.layout is None else run.layout.seed(allocator, is_emptied=is_emptied)
        return replay(growth.events(), allocator=allocator, blocks=blocks)

    found, budget = replayed(), run.budget
    if budget is not None and run.layout is not None and found.peak_reserved * (1 + run.tracker.meter.margin) > budget:
        # What the cell finds cached and does not need is the first to be given back.
        found = min(found, replayed(is_emptied=True), key=lambda each: each.peak_reserved)
    if budget is not None and found.peak_reserved > budget:
        squeezed = replayed(budget)
        found = found if squeezed.failed_at is not None else squeezed
    return found.peak_allocated, found.peak_reserved


def _error(run: Run, peak: int, reserved: int | None) -> float:
    """Return how far off the figures may be, as a share of the larger one."""
    return max(run.tracker.meter.margin, round(_slack(run) / max(peak, reserved), 4) if reserved else 0.0)


def _slack(run: Run) -> int:
    """Return the bytes by which what is reserved may be off, however well the tensors are known.

    Where a dry run follows a few steps, the small blocks may lie less well in the others, and ask for a segment more
    than they did. Where an expandable segment begins is not told, and its first pages may have been given back: new
    memory goes there first.
    """
    slack = SMALL_BUFFER if run.loops.cuts or run.is_left else 0
    if run.settings.expandable_segments and run.layout is not None:
        slack = max(slack, _HIDDEN_PAGES * run.settings.large_segment_size)
    return slack


def _missed(tracker: Tracker, loops: LoopModel) -> str | None:
    if loops.missed:
        return "steps go on to change in size"
    if loops.searches:
        return "LBFGS may search further and remember more than was seen"
    if tracker.scalars.missed:
        return "a loop that values end goes on to pile up memory"
    return "what sparse tensors need is not seen" if tracker.has_sparse else None


# The course ----------------------------------------------------------------------------------------------------------


def course_of(ledger: Ledger, meter: Meter, statements: Sequence[int]) -> Course:
    """Return the course of a run that is over; ``statements`` has the lines at which those of the cell begin."""
    temporaries = Counter[str]()
    for number, nbytes in ledger.alive_after(ledger.peak_at).items():
        note = ledger.note(number)
        if note.temporary is not None and note.role is None:
            temporaries[note.temporary] += nbytes
    points = _points(ledger)
    seen = _by_role(ledger, {ledger.peak_at, *(at for at, *_ in points)}, statements)
    at_peak = seen[ledger.peak_at].most_common()
    ranked = dict.fromkeys(role for roles in (dict(at_peak), *seen.values()) for role in roles)
    return Course(
        at_peak=tuple((role, nbytes) for role, nbytes in at_peak if nbytes),
        lasting=_lasting(ledger),
        points=tuple((level, line) for _, level, line in points),
        by_role=tuple((role, tuple(seen[at][role] for at, *_ in points)) for role in ranked),
        temporaries=tuple((name, nbytes) for name, nbytes in temporaries.most_common() if nbytes),
        flops=meter.flops,
        moved=meter.moved,
    )


def _lasting(ledger: Ledger) -> tuple[tuple[Role, int], ...]:
    """Return what lasts, when it took most together."""
    sizes, level, most = dict[int, int](), Counter[Role](), Counter[Role]()
    for event in ledger.events:
        if (role := ledger.note(event[1]).role) not in LASTING:
            continue
        size = sizes[event[1]] = event[2] if event[0] == "alloc" else -sizes[event[1]]
        level[role] += size
        most = level.copy() if level.total() > most.total() else most
    return tuple(most.items())


def _by_role(ledger: Ledger, wanted: Collection[int], statements: Sequence[int]) -> dict[int, Counter[Role]]:
    """Return what was alive after each so many events, by role. What has one trait has one role at any moment."""
    sizes, levels, found = dict[int, int](), Counter[_Trait](), {0: Counter[Role]()}
    last = _Trait()
    for count, event in enumerate(ledger.events, 1):
        trait = _trait(ledger.note(event[1]), statements)
        if event[0] == "alloc":
            last, size = trait, event[2]
            sizes[event[1]] = size
        else:
            size = -sizes.pop(event[1])
        levels[trait] += size
        if not levels[trait]:
            del levels[trait]
        if count in wanted:
            roles = found[count] = Counter()
            for each, nbytes in levels.items():
                roles[_role(each, last)] += nbytes
    return found


class _Trait(NamedTuple):
    """What an allocation is judged by: its role where that is told, else when the cell made it and what for."""

    role: Role | None = None
    turn: int = 0
    statement: int | None = None
    fed: bool = False


def _trait(note: Note, statements: Sequence[int]) -> _Trait:
    is_activation = note.temporary is not None or (note.in_graph and not note.detached)
    statement = None if note.statement is None else bisect_right(statements, note.statement)
    return _Trait(note.role or (Role.ACTIVATION if is_activation else None), note.turn, statement, note.fed)


def _role(trait: _Trait, last: _Trait) -> Role:
    """Return what an allocation was there for when ``last`` was made."""
    if trait.role is not None:
        return trait.role
    if trait.statement is None:
        return Role.USER_TENSOR
    if (trait.turn, trait.statement) == (last.turn, last.statement):
        return Role.ACTIVATION
    return Role.BATCH if trait.fed else Role.USER_TENSOR


def _points(ledger: Ledger) -> list[tuple[int, int, int | None]]:
    """Return what was alive when the cell began, and the highest of each bin: events until then, bytes, the line."""
    begun = len(ledger.events) if ledger.begun is None else ledger.begun
    sizes = ledger.alive_after(begun)
    level, line = sum(sizes.values()), None
    points: list[tuple[int, int, int | None]] = [(begun, level, line)]
    width = -(-(len(ledger.events) - begun) // (_POINTS - 1))
    for index, event in enumerate(ledger.events[begun:]):
        if event[0] == "alloc":
            sizes[event[1]] = event[2]
            level, line = level + event[2], ledger.note(event[1]).line
        else:
            level -= sizes.pop(event[1])
        if index % width == 0:
            points.append((begun + index + 1, level, line))
        elif level > points[-1][1]:
            points[-1] = begun + index + 1, level, line
    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a sequence of allocations comes to.

    Attributes:
        peak_allocated: bytes, the high-water mark with what was allocated before it; likewise ``peak_reserved``.
        failed_at: index of the event that found no room, where the replay ended; None if all of it fits.
    """

    peak_allocated: int
    peak_reserved: int
    failed_at: int | None


def replay(
    events: Iterable[Event], allocator: CachingAllocator, blocks: Mapping[Hashable, Block | None] | None = None
) -> Replay:
    """Run ``events`` through an allocator, to their end or to the first request that does not fit.

    Args:
        events: in order. A free of an unknown id is passed over.
        allocator: may hold what was there before; it is used up.
        blocks: those of ``allocator`` that the events may free, by id; None for what is not to be freed. An allocation
            of one of these ids is passed over: it is there.
    """
    allocator.reset_peak()
    live, failed_at = dict[Any, Any](blocks or {}), None
    there = frozenset(live)
    for index, event in enumerate(events):
        if event[0] == "free":
            allocator.free(live.pop(event[1], None))
        elif event[1] not in there:
            try:
                live[event[1]] = allocator.malloc(event[2])
            except OutOfSpace:
                failed_at = index
                break
    return Replay(peak_allocated=allocator.peak_allocated, peak_reserved=allocator.peak_reserved, failed_at=failed_at)
