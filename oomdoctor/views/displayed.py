"""What the Python functions return: values that show themselves in a notebook and in a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model import jsonable
from oomdoctor.model.finding import Finding
from oomdoctor.model.growth import compare
from oomdoctor.model.incident import Incident
from oomdoctor.model.sizes import format_size
from oomdoctor.views import html, text, words
from oomdoctor.views.bar import ceiling
from oomdoctor.views.device_card import in_use
from oomdoctor.views.growth import GrowthRows, growth_rows
from oomdoctor.views.holders import TOP
from oomdoctor.views.memplan import foresight
from oomdoctor.views.mime import plain, report_bundle
from oomdoctor.views.story import read
from oomdoctor.views.survey import focus, survey

if TYPE_CHECKING:
    from oomdoctor.model.absence import Unavailable
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.growth import Growth, Mark
    from oomdoctor.model.memplan import MemPlan
    from oomdoctor.model.plan import Forecast
    from oomdoctor.views.document import Document

_LOG: Final = 100
_numbers: Final = count()


def _filled(name: str, whole: tuple[int, int | None] | None) -> str:
    if whole is None:
        return f"{name} unknown"
    used, total = whole
    return f"{name} {format_size(used)}{f' of {format_size(total)}' if total is not None else ''} in use"


class Report:
    """What holds memory at one moment: plain values, which keep nothing of the program alive.

    Args:
        absent: what this machine lacks, by name.

    Attributes:
        whole: the evidence of all devices, of which ``evidence`` has one where that was asked for: ``only``.
        number: of two reports of one process, the later has the larger one.
        process: the id of the process that it is of.
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

    def survey(
        self, *, top: int = TOP, growth: GrowthRows | None = None, marks: tuple[Mark, Mark] | None = None
    ) -> Document:
        """Return what is shown of it."""
        return survey(self.evidence, top=top, growth=growth, marks=marks, absent=self.absent)

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

    def to_text(self, *, top: int = TOP, width: int = _LOG, colour: bool = False) -> str:
        """Return text for a terminal or a log, with the ``top`` largest holders of each device."""
        return text.render(self.survey(top=top), width=width, colour=colour)

    def __str__(self) -> str:
        return plain(self.survey())

    def __repr__(self) -> str:
        facts = [(words.device_name(one), in_use(one)) for one in self.evidence.devices if one.name != "cpu"]
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

    Args:
        names: what the cells are called in a program that is no notebook.
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

    def to_text(self, *, width: int = _LOG, colour: bool = False) -> str:
        """Return text for a terminal or a log."""
        return text.render(foresight(self.plan, self._names), width=width, colour=colour)

    def __str__(self) -> str:
        return plain(foresight(self.plan, self._names))

    def __repr__(self) -> str:
        peak = "no forecast" if self.forecast.peak is None else words.about(self.forecast.peak)
        return f"<Planned: {peak}, {self.plan.here.verdict.value}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return report_bundle(foresight(self.plan, self._names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What a failure means by its text or its exception alone.

    Attributes:
        others: further, distinct failures in the same text.
        meanings: what each failure is, in one sentence; ``titles``: what each fix does.
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
