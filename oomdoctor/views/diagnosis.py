"""A failure as a document: what filled the memory, why, what to change and what to type next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from oomdoctor.model.case import Finding, OutcomeKind
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Census, DeviceMemory, Measured, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.views import labels
from oomdoctor.views.device_card import device_bar
from oomdoctor.views.document import (
    Bar,
    Block,
    Cause,
    Causes,
    Document,
    Fold,
    Head,
    Items,
    Line,
    Notice,
    Source,
    Static,
    Timeline,
    apart,
    given,
    prose,
)
from oomdoctor.views.holder_groups import within
from oomdoctor.views.holders import holders, worth_telling
from oomdoctor.views.outcome import CHANGED, FOLLOWED, WHY, Retry, aftermath, next_steps
from oomdoctor.views.prices import offered, prices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oomdoctor.model.case import Case
    from oomdoctor.model.code import ModelFacts
    from oomdoctor.views.displayed import Explained

_TOP: Final = 5
_LONGEST_NOTE: Final = 500
_SIZES: Final = ("requested", "total", "free", "allocated", "reserved", "process_used")
_STEPS: Final = 3
"""Causes of which a message's explanation says where to read on."""
_MEASURE: Final = "`oomdoctor run SCRIPT.py`, or `%load_ext oomdoctor` in a notebook, finds which change fits."
_RECORD: Final = (
    '`torch.cuda.memory._record_memory_history()` before the run and `_dump_snapshot("memory.pickle")` after it, '
    "then `oomdoctor explain memory.pickle`, show the line of each tensor."
)
_UNTOLD: Final = "The text alone does not tell: in a notebook, `%load_ext oomdoctor` looks at the memory itself."

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


def answer(case: Case, retry: Retry | None = None) -> Document:
    """Return what a page shows first: what ran out of memory, how full it is, and what a retry would do about it."""
    if case.outcome.kind is OutcomeKind.HEALED:
        return (aftermath(case),)
    incident, bar = case.incident, _bar(case)
    title = Text.assemble(("Out of memory" if incident.is_oom else "Not a memory failure", "bad"))
    return (
        Line(title.append_text(prose(_in_short(case))), "lead"),
        *given(replace(bar, is_slim=True) if bar is not None else None),
        *_offer(case, retry or Retry.of(case.plan)),
    )


def _in_short(case: Case) -> str:
    """Return what follows ``Out of memory``: where, what was asked for and what was free, and the likeliest cause."""
    incident, evidence = case.incident, case.evidence
    cell, device = incident.cell, _device(incident, evidence)
    where = "" if cell is None else f" at {labels.code(cell.source_line)} ({labels.place(cell)})"
    if not incident.is_oom:
        return f"{where}: {labels.clean(incident.exc_type or 'an error')}."
    total = labels.known(incident.total, device.total)
    free = labels.known(incident.free, device.free)
    fate, kept = _fate(incident), evidence.host.kept_back if device.name == "cpu" else 0
    if fate is None and incident.requested is not None and total is not None and free is not None:
        free = max(free - (kept if isinstance(kept, int) else 0), 0)
        limit = labels.limit_of_cell(device)
        whole = f"{format_size(free)} of {format_size(total)} free on {labels.limited_name(device)}"
        whole = f"{format_size(free)} free under {limit}" if limit else whole
        fate = f"asked for {format_size(incident.requested)} with {whole}"
    fate = fate or _request(incident, device, kept)
    most = _largest(evidence.census, device)
    part = "" if most is None else f" Largest part: {labels.ROLES[most[0]]} ({labels.percent(most[1])})."
    return f"{where}: {fate}.{_likeliest(case.findings) or part}"


def _likeliest(findings: Sequence[Finding]) -> str:
    """Return the cause that comes first among the causes: a headline tells no other."""
    return f" Likely cause: {labels.clean(findings[0].title).removesuffix('.')}." if findings else ""


def _fate(incident: Incident) -> str | None:
    """Return what happened where it was more than a request that was refused."""
    return _FATES_BY_FORMAT.get(incident.format or "") or _FATES.get(incident.family)


def _largest(census: Census, device: DeviceMemory) -> tuple[Role, float] | None:
    """Return the role that most of what was found on ``device`` is of, and its share; None where none was found."""
    if census.device != device.name or not census.found or not census.roles:
        return None
    role, size = max(census.roles, key=lambda item: item[1])
    return role, size / census.found


def _offer(case: Case, retry: Retry) -> Document:
    """Return how it ended, or what a retry would do; the latter only where no button says so."""
    if case.outcome.kind is not OutcomeKind.OFFERED:
        end = aftermath(case)
        return (Notice(end.mark, end.title, tuple(fact for fact in end.facts if fact[0] in (WHY, CHANGED, FOLLOWED))),)
    if not retry.chosen:
        return (Static(tuple(Line(step, "offer") for step in next_steps(case, retry))),)
    return (Static((Line(f"`%oomdoctor retry`: {offered(retry.chosen[0])}", "offer"),)),)


def more(case: Case) -> Document:
    """Return how to see more than the answer where only a command can show it."""
    shows = "`%oomdoctor diff` shows the change. " if any(row.diff for row in prices(case.plan).fixes) else ""
    return (Line(f"{shows}`%oomdoctor why` shows the causes, what holds the memory, and all fixes.", "offer"),)


def details(case: Case, retry: Retry | None = None) -> Document:
    """Return what a page folds away below its ``answer`` and the controls."""
    likeliest = case.findings[0].title if case.findings else ""
    why = (*_lines(case.incident), *_held(case), causes(case.findings))
    number = labels.count(len(case.plan.candidates), "fix", "fixes")
    return (
        Fold("Why", why, aside=labels.clean(likeliest)),
        Static((Fold("All fixes", _changes(case, retry), aside=number),)),
    )


def tell(case: Case, retry: Retry | None = None, names: Mapping[int, str] | None = None) -> Document:
    """Return the diagnosis of ``case``, from the headline to what to type next. For the arguments see ``bundle``."""
    incident, evidence = case.incident, case.evidence
    frame = incident.framework_frame if incident.cell is None else None
    return (
        Line(f"{_heading(case)}, case {case.number}", "title"),
        Line(headline(incident, evidence, cause=_likeliest(case.findings)), "lead"),
        *apart(*_lines(incident)),
        *apart(Line(f"raised in {labels.clean(frame)}", "inner") if frame else None),
        *apart(_bar(case)),
        *_held(case),
        *(Head("Why"), causes(case.findings)),
        *(Head("What to change"), *_changes(case, retry, names)),
    )


def _heading(case: Case) -> str:
    if case.outcome.kind is OutcomeKind.HEALED:
        return "Healed, after it ran out of memory"
    return "Out of memory" if case.incident.is_oom else "Not a memory failure"


def _lines(incident: Incident) -> Document:
    """Return the lines of the program that the failure went through."""
    lines = (line for line in (incident.cell, incident.inner) if line is not None)
    return tuple(Source(labels.place(line), labels.clean(line.source_line, 200)) for line in lines)


def _bar(case: Case) -> Bar | None:
    device = _device(case.incident, case.evidence)
    return device_bar(device, _census(case), total=case.incident.total, asked=case.incident.requested)


def _census(case: Case) -> Census | None:
    """Return who holds what, None where another device was searched."""
    census, device = case.evidence.census, _device(case.incident, case.evidence)
    return census if census.device == device.name else None


def _held(case: Case) -> Document:
    """Return who holds the memory, and how it goes in the cell."""
    evidence, unchanged = case.evidence, case.plan.unchanged
    device = _device(case.incident, evidence)
    beside = worth_telling(evidence.host, evidence.beside_tensors) if device.name == "cpu" else []
    held = holders(_census(case), evidence.code.models, top=_TOP, beside=beside)
    cell = case.incident.cell
    failed_at = cell.line if cell is not None and cell.file is None else None
    course = Timeline.of(unchanged.course, unchanged.budget, forecast_bytes=unchanged.peak, failed_at=failed_at)
    blocks = held.blocks("What holds it", folded=True)
    return (*blocks, *given(Fold("Memory over time", (course,)) if course else None))


def _changes(case: Case, retry: Retry | None, names: Mapping[int, str] | None = None) -> Document:
    """Return the fixes with their prices, what is not known of the device, and what to type next."""
    priced, steps = prices(case.plan, case.incident), next_steps(case, retry or Retry.of(case.plan))
    if names is not None:
        needs = priced.unchanged.replace("this cell", labels.clean(names[max(names)]), 1)
        priced, steps = replace(priced.without_commands(), unchanged=needs), ()
    return (
        *priced.blocks(),
        *apart(*(Line(sentence, "muted") for sentence in missing(_device(case.incident, case.evidence)))),
        *apart(*(Line(sentence, "next") for sentence in steps)),
    )


def read(explained: Explained) -> Document:
    """Return what a message alone tells: there is no memory to look at, so nothing is measured and nothing priced."""
    failure, findings, meanings = explained.incident, explained.findings, explained.meanings
    first, *others = (
        headline(incident, meaning=meanings.get(incident, "")) for incident in (failure, *explained.others)
    )
    told = meanings.get(failure, "") if failure.is_oom else failure.message.partition("\n")[0]
    sizes = ((name.replace("_", " "), getattr(failure, name)) for name in _SIZES)
    numbers = ", ".join(f"{name} {format_size(size)}" for name, size in sizes if size is not None)
    why = causes(findings) if findings else Line(_UNTOLD, "inner")
    fixes = dict.fromkeys(fix for finding in findings for fix in finding.fixes)
    helps = tuple(f"{labels.clean(explained.titles.get(fix, fix))} ({labels.code(fix)})" for fix in fixes)
    return (
        Line(first, "lead"),
        *(Line(labels.clean(line, 200), "inner") for line in (told, numbers) if line),
        *(Line(labels.clean(note, _LONGEST_NOTE), "muted") for note in explained.notes),
        *((Head("Why"), why) if findings or failure.is_oom else ()),
        *((Head("What helps"), Items(helps)) if helps else ()),
        *((Head("Next steps"), Items(_reading(failure, findings, measured=bool(helps)))) if findings else ()),
        *((Head("Also in this text"), Items(tuple(others))) if others else ()),
    )


def _reading(incident: Incident, findings: Sequence[Finding], *, measured: bool) -> tuple[str, ...]:
    """Return where to read on about the likeliest causes, by the ids of their rules, and what would tell more.

    ``measured``: whether changes are named that a run would price.
    """
    pages = (
        f"{labels.clean(finding.title)}: `oomdoctor rules show {finding.rule}` (docs/rules.md#{finding.rule})"
        for finding in findings[:_STEPS]
    )
    is_pool = incident.family in (Family.CUDA, Family.HIP) and incident.allocated is not None
    return (*pages, *((_MEASURE,) if measured else ()), *((_RECORD,) if is_pool else ()))


def missing(device: DeviceMemory) -> tuple[str, ...]:
    """Return one sentence for each reason why some of the figures of ``device`` are not there."""
    by_reason: dict[str, list[str]] = {}
    for name in ("total", "free", "allocated", "reserved"):
        if isinstance(value := getattr(device, name), Unavailable):
            by_reason.setdefault(value.reason, []).append(name)
    return tuple(f"{', '.join(names)} not available: {labels.clean(reason)}" for reason, names in by_reason.items())


def headline(incident: Incident, evidence: Evidence | None = None, *, meaning: str = "", cause: str = "") -> str:
    """Return the whole failure in one sentence with its numbers; with its ``meaning`` where it is none of memory.

    ``cause`` is a sentence with the likeliest; without one, who holds most is told.
    """
    cell = incident.cell
    subject = "The program" if cell is None else f"{labels.code(cell.source_line)} ({labels.place(cell)})"
    if not incident.is_oom:
        told = f"{subject} failed with {labels.clean(incident.exc_type or 'an error')}, not for lack of memory."
        return f"{told} {labels.clean(meaning, 600)}" if meaning else told
    device = None if evidence is None else _device(incident, evidence)
    kept = None if evidence is None or device is None or device.name != "cpu" else evidence.host.kept_back
    share = "" if evidence is None or device is None else _share(evidence.census, device, evidence.code.models)
    return f"{subject} {_fate(incident) or _request(incident, device, kept)}{'' if cause else share}.{cause}"


def _request(incident: Incident, device: DeviceMemory | None, kept: Measured | None) -> str:
    bare = "host memory" if incident.device == "cpu" else labels.clean(incident.device or "the device", 40)
    where = labels.limited_name(device) if device else bare
    total = labels.known(incident.total, device.total if device else None)
    free = labels.known(incident.free, device.free if device else None)
    limit = labels.limit_of_cell(device) if device else ""
    if incident.requested is None:
        if limit:
            return f"ran out of host memory under {limit}"
        return f"ran out of memory on {where}" if total is None else f"ran out of the {format_size(total)} of {where}"
    asked = f"asked for {format_size(incident.requested)}"
    if total is None:
        return f"{asked} of {where} and was refused"
    whole = f"host memory under {limit}" if limit else f"the {format_size(total)} of {where}"
    if free is None:
        return f"{asked} of {whole} and was refused"
    if incident.requested > free:
        return f"{asked}, {format_size(incident.requested - free)} more than was free of {whole}"
    back = kept if isinstance(kept, int) else 0
    if incident.requested > free - back:
        lack = f"{format_size(incident.requested - max(free - back, 0))} more than was free of {whole}"
        return f"{asked}, {lack}; {format_size(back)} was kept back for this diagnosis; a run again gets that too"
    if device is not None and device.name == "cpu":
        left = f"{format_size(free - back)} of {whole} was free after the call had ended"
        return f"{asked} and was refused; {left}"
    return f"{asked} and was refused although {format_size(free)} of {whole} was free"


def _share(census: Census, device: DeviceMemory, models: Sequence[ModelFacts]) -> str:
    most = _largest(census, device)
    if most is None:
        return ""
    role, share = most
    module = within(census, role, models)
    place = f" of {labels.code(module)}" if module is not None else ""
    return f"; {labels.percent(share)} of what is held is {labels.ROLES[role]}{place}"


def _device(incident: Incident, evidence: Evidence) -> DeviceMemory:
    return next((device for device in evidence.devices if device.name == incident.device), evidence.device)


def causes(findings: tuple[Finding, ...]) -> Block:
    """Return the causes as they were ranked."""
    if not findings:
        return Line("No rule recognised the cause.", "inner")
    return Causes(
        tuple(
            Cause(
                title=labels.clean(finding.title),
                confidence=f"confidence {labels.percent(finding.confidence)}",
                because=tuple(labels.clean(sentence, 600) for sentence in finding.because),
                rule=labels.clean(finding.rule),
                page=labels.clean(finding.page) if finding.page.startswith(("https://", "http://")) else "",
            )
            for finding in findings
        )
    )
