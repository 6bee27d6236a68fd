"""What the Python functions return: values that show themselves in a notebook and in a terminal.

``memory_report`` and ``diagnosis`` tell a report and an explanation; the forecast of a cell stands here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from rich.text import Text

from oomdoctor.errors import UsageError
from oomdoctor.model import jsonable
from oomdoctor.model.cards import CONTEXT_BYTES
from oomdoctor.model.case import Finding
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Patch
from oomdoctor.model.incident import Incident
from oomdoctor.model.plan import Course, Fit, Forecast, LargestBatch, MemPlan, Plan, Verdict
from oomdoctor.model.session import Cell
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused, Unavailable
from oomdoctor.views import html, labels
from oomdoctor.views.device_card import in_use
from oomdoctor.views.diagnosis import read
from oomdoctor.views.document import (
    Bar,
    Diff,
    Document,
    Fold,
    Head,
    Inline,
    Items,
    Line,
    Source,
    Table,
    Timeline,
    apart,
    given,
    prose,
)
from oomdoctor.views.growth import Growth, compare
from oomdoctor.views.holders import TOP
from oomdoctor.views.host_card import ceiling
from oomdoctor.views.memory_report import GrowthRows, focus, growth_rows, survey
from oomdoctor.views.mime import plain, report_bundle
from oomdoctor.views.prices import Prices, basis, prices

_numbers: Final = count()


def _filled(name: str, whole: tuple[int, int | None] | None) -> str:
    if whole is None:
        return f"{name} unknown"
    used, total = whole
    return f"{name} {format_size(used)}{f' of {format_size(total)}' if total is not None else ''} in use"


class Report:
    """What holds memory at one moment: plain values, which keep nothing of the program alive.

    Attributes:
        whole: the evidence of all devices, of which ``evidence`` has one where that was asked for: ``only``.
        number: of two reports of one ``process``, the later has the larger one.
    """

    def __init__(self, evidence: Evidence, absent: Sequence[tuple[str, Unavailable]] = ()) -> None:
        self.evidence = self.whole = evidence
        self.absent = tuple(absent)
        self.only: str | None = None
        self.number, self.process = next(_numbers), os.getpid()

    def of(self, device: str) -> Report:
        """Return the report of one device, by its name or the beginning of it, and the host. See ``focus``."""
        found = copy(self)
        found.evidence = focus(self.evidence, device)
        found.only = found.evidence.device.name
        return found

    def survey(self, *, top: int = TOP, growth: GrowthRows | None = None, history: Timeline | None = None) -> Document:
        """Return what is shown of it."""
        return survey(self.evidence, top=top, growth=growth, history=history, absent=self.absent)

    def diff(self, other: Report) -> Grown:
        """Return what grew between this report and ``other``, from the earlier to the later.

        Raises:
            UsageError: ``other`` is no report, or one of another process or of another device.
        """
        given: object = other  # callers without a type checker give anything
        if not isinstance(given, Report):
            raise UsageError(f"diff takes an earlier report, and was given {type(given).__name__}")
        if self.process != other.process:
            raise UsageError(f"reports of two processes, {self.process} and {other.process}, cannot be compared")
        if self.only and other.only and self.only != other.only:
            raise UsageError(f"a report of {self.only} cannot be compared with one of {other.only}")
        return Grown(*sorted((other, self), key=lambda report: report.number))

    def to_dict(self) -> dict[str, Any]:
        """Return the ``evidence`` part of the JSON shape."""
        return {"schema": jsonable.SCHEMA, "evidence": jsonable.evidence(self.evidence)}

    def to_html(self, *, top: int = TOP) -> str:
        """Return a whole page that opens offline, with the ``top`` largest holders of each device."""
        return html.page("Memory report", self.survey(top=top))

    def __str__(self) -> str:
        return plain(self.survey())

    def __repr__(self) -> str:
        facts = [(labels.device_name(one), in_use(one)) for one in self.evidence.devices if one.name != "cpu"]
        host = ceiling(self.evidence.host)
        facts.append(("host", None if host is None else (host[0] - host[1], host[0])))
        return f"<Report: {', '.join(_filled(name, whole) for name, whole in facts)}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return report_bundle(self.survey())


class Grown:
    """What grew between two reports, on the one device that either is of."""

    def __init__(self, before: Report, after: Report) -> None:
        self.before, self.after = before, after

    @property
    def growth(self) -> Growth:
        """The growth as values."""
        found, only = compare(self.before.whole, self.after.whole), self._only
        return replace(found, devices=tuple(one for one in found.devices if only in (None, one.device)))

    def to_dict(self) -> dict[str, Any]:
        """Return the growth as plain values: bytes, below zero for what shrank."""
        found: dict[str, Any] = jsonable.plain(self.growth)
        for device in found["devices"]:
            device["roles"] = dict(device["roles"])
        return found

    def __str__(self) -> str:
        return plain(tuple(self._rows().blocks()))

    def __repr__(self) -> str:
        return f"<Grown: {self._rows().sentence}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return report_bundle(tuple(self._rows().blocks()))

    def _rows(self) -> GrowthRows:
        return growth_rows(self.before.whole, self.after.whole, "the earlier report", only=self._only)

    @property
    def _only(self) -> str | None:
        return self.after.only or self.before.only


class Planned:
    """What something needs that was not run: plain values, which keep nothing of the program alive.

    ``names`` is what the cells are called in a program that is no notebook.
    """

    def __init__(self, plan: MemPlan, names: Mapping[int, str] | None = None) -> None:
        self.plan = plan
        self._names = names

    @property
    def forecast(self) -> Forecast:
        """What it needs, in bytes."""
        return self.plan.forecast

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return self.plan.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON shape."""
        return self.plan.to_dict()

    def to_html(self) -> str:
        """Return a whole page that opens offline."""
        return html.page("Memory plan", foresight(self.plan, self._names))

    def __str__(self) -> str:
        return plain(foresight(self.plan, self._names))

    def __repr__(self) -> str:
        peak = "no forecast" if self.forecast.peak is None else labels.about(self.forecast.peak)
        return f"<Planned: {peak}, {self.plan.here.verdict.value}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return report_bundle(foresight(self.plan, self._names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What a failure means by its text or its exception alone.

    Attributes:
        others: further, distinct failures in the same text; ``meanings``: what each failure is, in one sentence.
        titles: what each fix does.
        notes: what the explanation could not take into account, a line each.
    """

    incident: Incident
    findings: tuple[Finding, ...]
    others: tuple[Incident, ...] = ()
    meanings: Mapping[Incident, str] = field(default_factory=dict, hash=False, compare=False, repr=False)
    titles: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the ``incident`` and ``findings`` parts of the JSON shape, the other failures, and notes if any."""
        told = {**jsonable.diagnosis(self.incident, self.findings), "others": jsonable.plain(self.others)}
        return {**told, "notes": list(self.notes)} if self.notes else told

    def __str__(self) -> str:
        return plain(read(self))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return report_bundle(read(self))


_CARDS: Final = f"as torch reports their memory, and {format_size(CONTEXT_BYTES)} of it set aside for CUDA itself"


def foresight(plan: MemPlan, names: Mapping[int, str] | None = None) -> Document:
    """Return what a cell needs that was not run, where that fits, and what would help."""
    forecast, course = plan.forecast, plan.forecast.course or Course()
    line = forecast.peak_line
    if "\n" not in plan.cell.source.strip():  # there is but one line to tell
        line, course = None, replace(course, points=tuple((size, None) for size, _ in course.points))
    changes, change = _change(plan)
    title = f"Forecast of In[{plan.cell.number}], made without running it"
    for number, name in (names or {}).items():
        title, change = (text.replace(f"In[{number}]", name) for text in (title, change))
    goes = Timeline.of(course, limit=forecast.budget, forecast_bytes=forecast.peak)
    bar, work = _bar(forecast, course), _work(course)
    temporaries = tuple(f"{format_size(size)} for {labels.clean(name, 120)}" for name, size in course.temporaries)
    return (
        Line(labels.clean(title), "name"),
        Line(_headline(plan.here), "lead"),
        *_least(plan),
        *apart(None if line is None else Source(f"line {line}", _source_line(plan.cell, line), "peak at ")),
        *apart(bar),
        *((Head("Temporaries at the peak"), Items(temporaries)) if temporaries else ()),
        *((Head("Memory over time"), goes) if goes else ()),
        *given(Line(work, "inner") if work else None),
        *(Head("Batch"), Line(_batch(plan.batch), "inner")),
        *((Head("Cards", _CARDS), Table("cards", tuple(map(_card, plan.elsewhere)))) if plan.elsewhere else ()),
        *((Head("What to change"), *_prices(plan.plan).blocks()) if plan.plan is not None else ()),
        *given(Fold("The change", (Diff(change),), changes) if change else None),
        *apart(Line(f"The forecast took {plan.elapsed_s:.1f} s.", "muted")),
    )


def _headline(fit: Fit) -> Text:
    """Return in one sentence what the cell needs and whether that fits."""
    forecast, place = fit.forecast, fit.place
    where = f" on {labels.clean(place.name, 60)}"
    if forecast.peak is None:
        reason = labels.clean(forecast.refused or forecast.basis).removesuffix(".")
        return prose(f"It has no forecast{where}: {reason}.")
    of = "" if forecast.budget is None else f" of {format_size(forecast.budget)}"
    reserved = "" if forecast.reserved is None else f" ({labels.about(forecast.reserved)} reserved)"
    need = Text(f"It needs {labels.about(forecast.peak)}{reserved}{of}{where}")
    if forecast.budget is not None:
        need.append(": ").append_text(_verdict(fit.verdict))
    return need.append_text(prose(f" ({basis(forecast)})."))


def _verdict(verdict: Verdict) -> Text:
    return Text(labels.verdict(verdict), labels.TONES[verdict])


def _least(plan: MemPlan) -> Iterator[Line]:
    """Yield the least that it needs, where it could not be forecast."""
    if plan.least is not None and plan.least.peak is not None:
        budget, verdict = plan.here.place.budget, plan.here.verdict
        is_too_large = budget is not None and verdict is Verdict.TOO_LARGE
        told = f" of {format_size(budget or 0)}: {_verdict(verdict)}" if is_too_large else ""
        yield Line(f"It needs at least {labels.about(plan.least.peak)}{told} ({labels.clean(plan.least.basis)}).")


def _source_line(cell: Cell, line: int) -> str:
    lines = cell.source.split("\n")
    return labels.clean(lines[line - 1].strip(), 120) if line <= len(lines) else ""


def _bar(forecast: Forecast, course: Course) -> Bar | None:
    """Return what is alive at the peak, and how much of the budget is left; None where that was not seen."""
    parts = [(role.value, labels.ROLES[role], size) for role, size in course.at_peak if size > 0]
    used = sum(size for *_, size in parts)
    if not used:
        return None
    return Bar.of("At the peak", forecast.budget, [*parts, ("free", "free", (forecast.budget or 0) - used)])


def _work(course: Course) -> str:
    if not course.flops and not course.moved:
        return ""
    thousands = next((power for power in range(4) if course.flops < 999.5 * 1000**power), 4)
    flops = f"{course.flops / 1000**thousands:.3g} {('', 'k', 'M', 'G', 'T')[thousands]}FLOPs"
    return f"The part that was followed takes {flops} and moves {format_size(int(course.moved))}."


def _batch(batch: LargestBatch | Refused) -> str:
    """Return how large a batch may be in one sentence."""
    if isinstance(batch, Refused):
        return f"Largest batch not computed: {labels.clean(batch.reason).removesuffix('.')}."
    found = f"{basis(batch.forecast)}, {labels.count(batch.tried, 'forecast')}"
    ended = f"; {labels.clean(batch.end).removesuffix('.')}" if batch.end else ""
    if batch.size == 0:
        least = labels.count(batch.above or batch.now, "sample")
        return f"No batch was forecast to fit, down to {least} ({found}){ended}."
    need = labels.about(max(batch.forecast.peak or 0, batch.forecast.reserved or 0))
    fits = f"A batch of {batch.size} samples fits with {need}"
    above = "" if batch.above is None else f", one of {batch.above} may not"
    return f"{fits}{above}; now it has {batch.now} ({found}){ended}."


def _card(fit: Fit) -> tuple[Inline, ...]:
    """Return a card, whether the cell fits there, what it needs, and what there is, with the part for tensors."""
    forecast, place = fit.forecast, fit.place
    shown = fit.least if forecast.peak is None and fit.least is not None else forecast
    need = None if shown.peak is None else max(shown.peak, shown.reserved or 0)
    share = "" if place.budget is None else f"{format_size(place.budget)} for tensors"
    return (
        Text(labels.clean(place.name, 60), "strong"),
        _verdict(fit.verdict),
        "" if need is None else f"{'at least ' if shown is not forecast else ''}{labels.about(need)}",
        ", ".join(filter(None, ["" if place.total is None else format_size(place.total), share])),
    )


def _prices(plan: Plan) -> Prices:
    """Return the fixes as rows without commands: there is no failed cell that they could be applied to.

    What the cell needs unchanged stands above them already, and that most changes have nothing to do here is left to
    the JSON.
    """
    found, refused = prices(plan).without_commands(), len(plan.refusals)
    priced = labels.count(len(found.fixes), "change")
    told = f"{priced} priced, {refused} refused; the reasons are in the JSON form."
    return replace(found, unchanged=told, refusals=())


def _change(plan: MemPlan) -> tuple[str, str]:
    """Return the name and the diff of the first fix that fits and that can be written into the cells."""
    priced = plan.plan or Plan(unchanged=plan.forecast)
    for candidate in priced.candidates:
        if candidate.forecast.verdict is Verdict.FITS and isinstance(candidate.patch, Patch):
            return f"{priced.number(candidate)}. {candidate.title}", candidate.patch.diff()
    return "", ""
