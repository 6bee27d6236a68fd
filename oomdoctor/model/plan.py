"""What is worth trying: fixes with their price, best first; what a trial says of one; a cell before it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.model import jsonable
from oomdoctor.model.fix import Dose, Effect, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused

if TYPE_CHECKING:
    from oomdoctor.model.session import Cell


class Verdict(StrEnum):
    """Whether a forecast peak fits into the budget."""

    FITS = "fits"
    BORDERLINE = "borderline"
    TOO_LARGE = "too large"
    UNKNOWN = "unknown"


FROM_PEAK: Final = (0.4, 2.4)
"""Measured peaks over their estimates, 9 in 10, where the peak of the unchanged cell is known by a dry run."""
FROM_FAILURE: Final = (1.7, 24.0)
"""The same where no more is known than what the cell held and asked for when it failed. Source of both:
`benchmarks/estimates.py`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How the memory of a cell goes, as its dry run saw it. Bytes are those of tensors, before any rounding.

    Attributes:
        at_peak: what was alive at the peak, ``(role, bytes)``, largest first; together the peak of tensors.
        lasting: what parameters, gradients and optimizer state took when they took most together, ``(role, bytes)``.
        points: ``(bytes alive, line of the cell)`` in the order of the operations. Where several operations share a
            point, it is the highest of them.
        by_role: what the points are made of, ``(role, bytes at each point)``, largest at the peak first.
        temporaries: what operations needed for their own time at the peak, ``(name, bytes)``: buffers of optimizers,
            workspaces of libraries.
        flops: floating point operations of the part that was followed; ``moved``: bytes that it read and wrote.
    """

    at_peak: tuple[tuple[Role, int], ...] = ()
    lasting: tuple[tuple[Role, int], ...] = ()
    points: tuple[tuple[int, int | None], ...] = ()
    by_role: tuple[tuple[Role, tuple[int, ...]], ...] = ()
    temporaries: tuple[tuple[str, int], ...] = ()
    flops: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a cell would need, in bytes.

    Attributes:
        peak: highest sum of live tensors; ``reserved``: what the caching allocator would hold at most.
        budget: what there is for it.
        slowdown: time with the change over time without it, None where it is not known.
        basis: how it was found out: a dry run, an analytic estimate.
        error_ratio: how far off such forecasts may be, as a share of the peak.
        estimated: of what is told from the census alone, between how many times the estimate 9 in 10 measured peaks
            lie: ``FROM_PEAK`` or ``FROM_FAILURE``. Then it says neither what fits nor what does not.
        at_least: whether more than this may be needed: then it is known what does not fit, and never what does.
        at_most: whether less than this may be needed: then it is known what fits, and never what does not.
        peak_line: line of the failing cell at which the peak stands, None where it was not seen.
        refused: why there is no number, where there is none.
        course: how the memory goes on the way, None where no dry run saw it.
    """

    basis: str
    budget: int | None = None
    peak: int | None = None
    reserved: int | None = None
    slowdown: float | None = None
    error_ratio: float = 0.0
    estimated: tuple[float, float] | None = None
    at_least: bool = False
    at_most: bool = False
    peak_line: int | None = None
    refused: str | None = None
    course: Course | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, by the larger of peak and reserved and the error that such forecasts have."""
        if self.peak is None or self.budget is None or self.estimated is not None:
            return Verdict.UNKNOWN
        need = max(self.peak, self.reserved or 0)
        if need > self.budget:
            return Verdict.BORDERLINE if self.at_most else Verdict.TOO_LARGE
        if self.at_least:
            return Verdict.UNKNOWN
        return Verdict.FITS if need * (1 + self.error_ratio) <= self.budget else Verdict.BORDERLINE

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return {Verdict.FITS: True, Verdict.TOO_LARGE: False}.get(self.verdict)

    @property
    def is_hopeless(self) -> bool:
        """Whether an estimate would not fit if no more were needed than the least share that 9 in 10 of such were."""
        if self.estimated is None or self.peak is None or self.budget is None:
            return False
        return self.peak * self.estimated[0] > self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """High-water marks of a run with a change in place, in bytes, by the means that ``measure`` names.

    Attributes:
        tensors: of live tensors; ``reserved``: of what the caching allocator held, None where there is none.
    """

    tensors: int
    reserved: int | None = None
    measure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One fix in one dose, priced; or several, where no single one fits.

    Attributes:
        fix: the id of the fix; of two, both with `` + `` between them, and ``title`` and ``dose`` tell both.
        patch: the change in the user's source; where it is refused, the live change alone is offered.
        applies_live: whether the fix can change the live objects.
        is_tried: whether a retry runs both programs on a few rows before it makes the change, so that what it promises
            is still to be checked.
        parts: the two that it is made of, each as its id and its dose; empty where it is one.
        stronger: what its fix proposes in stronger doses, mildest first.
        breaks: whether its dry run failed where that of the unchanged cell did not.
        refuted: what a retry found that makes it wrong for this program, None where nothing was found.
        measured: what the cell took when it was healed with it, None where it was not.
        follows: label of the change with which memory ran out before a retry came to this one, a stronger dose or more.
    """

    fix: str
    title: str
    dose: Dose
    effect: Effect
    forecast: Forecast
    patch: Patch | Refused
    applies_live: bool
    is_tried: bool = False
    caveat: str | None = None
    parts: tuple[tuple[str, Dose], ...] = ()
    stronger: tuple[Proposal, ...] = ()
    breaks: bool = False
    refuted: str | None = None
    measured: MeasuredPeak | None = None
    follows: str = ""

    @property
    def made_of(self) -> tuple[tuple[str, Dose], ...]:
        """The fixes that it is made of, each with its dose."""
        return self.parts or ((self.fix, self.dose),)

    @property
    def answers_to(self) -> tuple[str, ...]:
        """The ids of the fixes that it is made of, and its own."""
        return (self.fix, *(fix for fix, _ in self.parts))

    @property
    def label(self) -> str:
        """The id with its dose, ``micro_batch(micro_batch=8)``."""
        return f"{self.fix}({self.dose})" if self.dose.values else self.fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The candidates, best first, what the cell needs unchanged, and what was considered and refused.

    Attributes:
        pending: whether it is still to be priced, and nothing is in it yet.
        named: ids of fixes in the order of the numbers that earlier plans of the case gave them.
    """

    unchanged: Forecast
    candidates: tuple[Candidate, ...] = ()
    refusals: tuple[tuple[str, str], ...] = field(default=())
    pending: bool = False
    named: tuple[str, ...] = ()

    @property
    def numbered(self) -> tuple[str, ...]:
        """The ids of all fixes that have a number, in its order: what is new comes after what had one before."""
        return tuple(dict.fromkeys((*self.named, *(one.fix for one in self.candidates))))

    def number(self, candidate: Candidate) -> int:
        """Return the number that a candidate is called by, the same in every plan of its case."""
        return self.numbered.index(candidate.fix) + 1

    def after(self, earlier: Plan) -> Plan:
        """Return the plan with the numbers that an earlier plan of the same case gave."""
        return replace(self, named=tuple(dict.fromkeys((*earlier.numbered, *self.named))))

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """Return the plan with these fixes refused, each for its reason; what is left keeps its number."""
        whys = [next((reasons[fix] for fix in one.answers_to if fix in reasons), None) for one in self.candidates]
        told = [(one.fix, why) for one, why in zip(self.candidates, whys, strict=True) if why and not one.refuted]
        candidates = (replace(one, refuted=one.refuted or why) for one, why in zip(self.candidates, whys, strict=True))
        return replace(self, candidates=tuple(candidates), refusals=(*self.refusals, *told))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of running the failing cell as it was and as changed, for a step or two on a few rows.

    Attributes:
        same: whether both left the same; None where that could not be found out.
        basis: what was compared, and how close it is: ``2 steps of 13 rows, up to 3e-07 of the largest value``.
        why: what differs first, and by how much; or why it could not be found out.
        beside: names that hold other rows afterwards, as those that a loop over parts leaves.
        draws: whether the changed program has drawn other random numbers.
        chosen: which of the ways to write the change it is about.
    """

    same: bool | None
    basis: str = ""
    why: str = ""
    beside: tuple[str, ...] = ()
    draws: bool = False
    chosen: int = 0


# A cell that was not run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A memory that the cell is to fit into.

    Attributes:
        name: as it is called in sentences: ``cuda:0``, ``A100 80 GB``.
        total: capacity in bytes, None where it is not known.
        budget: bytes that tensors may take of it, None where that is not known.
        source: where the capacity was read, in words.
    """

    name: str
    total: int | None
    budget: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether the cell fits one place.

    Attributes:
        forecast: of the cell in that place, with the place's budget.
        least: what the cell needs at the least, where there is no forecast.
    """

    place: Place
    forecast: Forecast
    least: Forecast | None = None

    @property
    def verdict(self) -> Verdict:
        """Of the forecast; without one, too large where even the least is."""
        if self.forecast.peak is None and self.least is not None and self.place.budget is not None:
            return Verdict.TOO_LARGE if (self.least.peak or 0) > self.place.budget else Verdict.UNKNOWN
        return self.forecast.verdict

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return {Verdict.FITS: True, Verdict.TOO_LARGE: False}.get(self.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """How large a batch may be.

    Attributes:
        now: samples in a batch as the cells stand.
        size: the largest that was forecast to fit, 0 where none was.
        forecast: of that batch; of the smallest that was forecast where ``size`` is 0.
        above: the smallest larger batch that was forecast not to fit for certain, None where none was.
        end: why nothing larger was forecast, None where the next larger batch does not fit.
        tried: how many batches were forecast.
    """

    now: int
    size: int
    forecast: Forecast
    above: int | None = None
    end: str | None = None
    tried: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemPlan:
    """A cell before it is run.

    Attributes:
        cell: its number and text.
        here: whether it fits the memory that it is planned for.
        least: the least that the cell needs, by an analytic estimate, where it could not be forecast.
        elsewhere: whether it fits well-known cards that nobody else uses, smallest first; empty without a forecast.
        batch: how large a batch may be there, or why that cannot be told.
        plan: the fixes with their prices, None where none is needed or none could be priced.
        elapsed_s: how long all of it took.
    """

    cell: Cell
    here: Fit
    elsewhere: tuple[Fit, ...]
    batch: LargestBatch | Refused
    plan: Plan | None = None
    least: Forecast | None = None
    elapsed_s: float = 0.0

    @property
    def forecast(self) -> Forecast:
        """What the cell needs where it is planned for."""
        return self.here.forecast

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return self.here.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON shape of schema 1: bytes as ints, absent values null with their ``_why``."""
        return jsonable.memplan(self)
