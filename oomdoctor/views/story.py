"""A failure as the facts to show, in the order in which they are shown; the renderers add nothing to them.

All sentences and figures are made here, so that text and HTML cannot differ. Code within a sentence stands between
backticks. What comes from the user's program has gone through ``words.clean``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from oomdoctor.model.case import OutcomeKind
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.finding import Finding
from oomdoctor.model.fix import Effect
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.memory import Census, DeviceMemory, Measured
from oomdoctor.model.plan import Candidate, Plan, Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words
from oomdoctor.views.aftermath import CHANGED, WHY, aftermath
from oomdoctor.views.bar import Bar, device_bar
from oomdoctor.views.grouping import within
from oomdoctor.views.holders import Holders, holders, worth_telling
from oomdoctor.views.prices import Prices, prices
from oomdoctor.views.timeline import Timeline, timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomdoctor.model.case import Case
    from oomdoctor.model.code import ModelFacts

_TOP: Final = 5

TOLD: Final = 5
"""Causes that are told with what speaks for them, the likeliest; of the others only the names are seen at first."""

_FATES: Final = {
    Family.WORKER_KILLED: "lost a worker process, which was killed",
    Family.RANK_KILLED: "failed when a process was killed",
    Family.KERNEL_KILLED: "ended when the kernel was killed",
    Family.SHM: "ran out of shared memory (/dev/shm)",
    Family.FORK: "could not start a process for lack of memory",
    Family.TRITON_RESOURCE: "asked for more on-chip memory than one kernel may have",
    Family.VLLM_KV: "left too little memory for the KV cache",
}
_FATES_BY_FORMAT: Final = {
    "dl_killed": "lost a DataLoader worker, which was killed",
    "dl_exited": "lost a DataLoader worker, which exited unexpectedly",
    "torchrun_killed": "lost a rank, which was killed",
}
"""Where the wording tells more than the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What `%oomdoctor retry` would do.

    Attributes:
        chosen: the candidates that it would try, in their order.
        why: why it would try none, where that is not for their forecasts.
    """

    chosen: tuple[Candidate, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Retry:
        """Return what it would do by the plan alone: try what keeps the result and is not known to be too large."""
        offered = (one for one in plan.candidates if one.refuted is None)
        keeping = (one for one in offered if one.effect in (Effect.EXACT, Effect.EQUIVALENT))
        return cls(chosen=tuple(one for one in keeping if one.forecast.fits is not False))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingLine:
    """The line of the user's own code that was running."""

    place: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """One cause with the sentences that speak for it."""

    title: str
    confidence: str
    because: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The diagnosis of one case, from the headline to what to type next.

    Attributes:
        timeline: how the memory of the unchanged cell goes; None where no shadow run saw it.
    """

    title: str
    headline: str
    lines: tuple[FailingLine, ...]
    raised_in: str | None
    bar: Bar | None
    holders: Holders
    findings: tuple[FindingRow, ...]
    timeline: Timeline | None
    prices: Prices
    missing: tuple[str, ...]
    next: tuple[str, ...]


def tell(case: Case, retry: Retry | None = None) -> Story:
    """Return the facts of ``case``.

    Args:
        retry: what a retry would do; by the plan alone where nothing else is known.
    """
    incident, evidence = case.incident, case.evidence
    device = _device(incident, evidence)
    census = evidence.census if evidence.census.device == device.name else None
    is_host = device.name == "cpu"
    beside = worth_telling(evidence.host, evidence.beside_tensors) if is_host else []
    return Story(
        title=f"{'Out of memory' if incident.is_oom else 'Not a memory failure'}, case {case.number}",
        headline=headline(incident, evidence),
        lines=tuple(_failing_line(line) for line in (incident.cell, incident.inner) if line is not None),
        raised_in=_raised_in(incident),
        bar=device_bar(device, census, total=incident.total, asked=incident.requested),
        holders=holders(census, evidence.code.models, top=_TOP, beside=beside),
        findings=finding_rows(case.findings),
        timeline=timeline(case.plan.unchanged.course, case.plan.unchanged.budget),
        prices=prices(case.plan, incident),
        missing=words.missing(
            [(name, getattr(device, name)) for name in ("total", "free", "allocated", "reserved")],
        ),
        next=_next(case, retry or Retry.of(case.plan)),
    )


def of_script(story: Story, name: str) -> Story:
    """Return the story for readers of a script's output, who cannot type what it says.

    Args:
        name: what stands in the place of the cell.
    """
    rows = tuple(replace(row, apply=None, diff=None) for row in story.prices.fixes)
    needs = story.prices.unchanged.replace("this cell", name, 1)
    return replace(story, prices=replace(story.prices, fixes=rows, unchanged=needs), next=())


def headline(incident: Incident, evidence: Evidence | None = None, *, meaning: str = "") -> str:
    """Return the whole failure in one sentence with its numbers.

    Args:
        meaning: what the failure is, a sentence that is added where it is none of memory.
    """
    cell = incident.cell
    subject = "The program" if cell is None else f"{words.code(cell.source_line)} ({words.place(cell)})"
    if not incident.is_oom:
        told = f"{subject} failed with {words.clean(incident.exc_type or 'an error')}, not for lack of memory."
        return f"{told} {words.clean(meaning, 600)}" if meaning else told
    device = None if evidence is None else _device(incident, evidence)
    kept = None if evidence is None or device is None or device.name != "cpu" else evidence.host.kept_back
    share = "" if evidence is None or device is None else _share(evidence.census, device, evidence.code.models)
    return f"{subject} {_fate(incident) or _request(incident, device, kept)}{share}."


def _fate(incident: Incident) -> str | None:
    return _FATES_BY_FORMAT.get(incident.format or "") or _FATES.get(incident.family)


def _request(incident: Incident, device: DeviceMemory | None, kept: Measured | None) -> str:
    where = words.limited_name(device) if device else _bare_name(incident)
    total = words.known(incident.total, device.total if device else None)
    free = words.known(incident.free, device.free if device else None)
    if incident.requested is None:
        return f"ran out of memory on {where}" if total is None else f"ran out of the {format_size(total)} of {where}"
    asked = f"asked for {format_size(incident.requested)}"
    if total is None:
        return f"{asked} of {where}, which could not be had"
    whole = f"the {format_size(total)} of {where}"
    if free is None:
        return f"{asked} of {whole}, which could not be had"
    if incident.requested > free:
        return f"{asked}, {format_size(incident.requested - free)} more than was free of {whole}"
    back = kept if isinstance(kept, int) else 0
    if incident.requested > free - back:
        lack = f"{format_size(incident.requested - max(free - back, 0))} more than was free of {whole}"
        return f"{asked}, {lack}; {format_size(back)} was kept back for this diagnosis; run again, it gets that too"
    if device is not None and device.name == "cpu":
        left = f"{format_size(free - back)} of {whole} was free after the call had ended"
        return f"{asked}, which could not be had; {left}"
    return f"{asked}, which could not be had although {format_size(free)} of {whole} was free"


def _bare_name(incident: Incident) -> str:
    if incident.device in (None, "cpu"):
        return "host memory" if incident.device else "the device"
    return words.clean(incident.device or "", 40)


def _share(census: Census, device: DeviceMemory, models: Sequence[ModelFacts]) -> str:
    if census.device != device.name or not census.found or not census.roles:
        return ""
    role, size = max(census.roles, key=lambda item: item[1])
    module = within(census, role, models)
    place = f" of {words.code(module)}" if module is not None else ""
    return f"; {words.percent(size / census.found)} of what is held is {words.ROLES[role]}{place}"


def _device(incident: Incident, evidence: Evidence) -> DeviceMemory:
    return next((device for device in evidence.devices if device.name == incident.device), evidence.device)


def _raised_in(incident: Incident) -> str | None:
    """Return the innermost frame, which is worth a line only where no line of the user's is known."""
    return words.clean(incident.framework_frame) if incident.framework_frame and incident.cell is None else None


def _failing_line(cell: CellLine) -> FailingLine:
    return FailingLine(place=words.place(cell), source=words.clean(cell.source_line, 200))


def finding_rows(findings: tuple[Finding, ...]) -> tuple[FindingRow, ...]:
    """Return the causes as they were ranked."""
    return tuple(
        FindingRow(
            title=words.clean(finding.title),
            confidence=f"confidence {words.percent(finding.confidence)}",
            because=tuple(words.clean(sentence, 600) for sentence in finding.because),
        )
        for finding in findings
    )


def _next(case: Case, retry: Retry) -> tuple[str, ...]:
    """Return what happened, or what to type next: what is said to be run is what would be."""
    if case.outcome.kind is not OutcomeKind.OFFERED:
        end = aftermath(case)
        return (f"{end.mark} {end.title}", *(f"{name}: {text}." for name, text in end.facts if name in (WHY, CHANGED)))
    if case.plan.pending:
        return ("`%oomdoctor retry` waits for the forecasts, then runs the cell again with the best fix that fits.",)
    rows = [row for row in prices(case.plan).fixes if row.apply]
    if not rows:
        return ()
    if retry.why:
        return (f"`%oomdoctor retry` runs nothing: {words.clean(retry.why, 600)}.",)
    verdict = retry.chosen[0].forecast.verdict if retry.chosen else None
    if verdict is Verdict.FITS:
        return ("`%oomdoctor retry` runs the cell again with the best fix that fits; state is restored first.",)
    if verdict is not None:
        number = case.plan.candidates.index(retry.chosen[0]) + 1
        least = "no change that keeps the result is certain to fit"
        return (f"`%oomdoctor retry` tries fix {number} first, though {least}; state is restored first.",)
    fitting = next((row for row in rows if row.verdict is Verdict.FITS), None)
    if fitting is not None:
        nothing = "`%oomdoctor retry` runs nothing: what fits is done only if you ask for it"
        return (f"{nothing}, by `{fitting.apply}`; state is restored first.",)
    nothing = "`%oomdoctor retry` runs nothing: no change was forecast to fit"
    return (f"{nothing}. `{rows[0].apply}` tries one all the same; state is restored first.",)
