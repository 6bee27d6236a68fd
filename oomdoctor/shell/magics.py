"""The magics ``%oomdoctor``, ``%memreport``, ``%%memplan`` and ``%%mempeak`` with the verbs of the first."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oomdoctor import fixes, pipeline
from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.language import say
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Candidate, Plan
from oomdoctor.model.sizes import format_size, parse_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.shell import host_guard
from oomdoctor.shell import mempeak as measuring
from oomdoctor.shell import memplan as planning
from oomdoctor.shell.cells import cells_until
from oomdoctor.shell.doctor import Request, plan
from oomdoctor.shell.job import circle_lines
from oomdoctor.shell.memreport import USAGE
from oomdoctor.shell.open_case import STOPPED, chosen_by, failed_case, insert, retryable
from oomdoctor.shell.open_case import undo as take_back
from oomdoctor.shell.outputs import shown
from oomdoctor.shell.showing import Shown, retry_of

if TYPE_CHECKING:
    from oomdoctor.shell.extension import Extension


Verb: TypeAlias = "Callable[[Extension, list[str]], None]"

_COMMENT: Final = re.compile(r"(?:^|\s)#")
_RELEASES: Final = {"release_traceback": Role.TRACEBACK, "clear_output_cache": Role.OUTPUT_CACHE}
"""Fixes that only let go of memory, each with the role that the census gives to what they free."""


def status(extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor status`: what is switched on, what is kept, what went wrong."""
    from oomdoctor.allocator import virtual

    simulated = virtual.active()
    opened = extension.open or extension.healed
    kept = format_size(opened.transaction.kept_bytes) if opened is not None else "nothing"
    total = None if simulated is None else simulated.read().total
    print(say(f"auto retry: {extension.config.auto}"))
    print(say(f"simulated device: {'off' if not isinstance(total, int) else format_size(total)}"))
    last = ", the last can be retried" if extension.open is not None else ""
    print(say(f"cases: {len(pipeline.cases())}{last}"))
    print(say(f"changes in place: {_in_place(extension)}"))
    print(say(f"copies of weights kept: {kept}"))
    print(say(host_guard.status(extension.guard)[0]))
    for fault in extension.borders.faults:
        print(say(f"fault: {fault}"))


def _in_place(extension: Extension) -> str:
    """Return the changes that cells of this session were healed with, and whether the last can be taken back."""
    healed = [one for one in pipeline.cases() if one.outcome.kind is OutcomeKind.HEALED]
    told = [f"{', '.join(one.outcome.fixes)}{_of_cell(one)}" for one in healed]
    if not told:
        return "none"
    return f"{'; '.join(told)}{'; the last can be undone' if extension.healed is not None else ''}"


def _of_cell(case: Case) -> str:
    cell = case.incident.cell
    return "" if cell is None or cell.number is None else f" in In[{cell.number}]"


def auto(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor auto off|exact|any`: retry by itself never, with fixes that keep the result, or with any fix."""
    accepted = ("off", "exact", "any")
    if len(words) != 1 or words[0] not in accepted:
        raise UsageError(f"auto takes one of {', '.join(accepted)}, not {shown(*words)}")
    extension.config.auto = words[0]


def fix(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor fix [N|ID] [DOSE] [--anyway]`: run the failed cell again with this fix, or with the first.

    `%oomdoctor fix micro_batch parts=8` takes another dose than the plan's.
    `%oomdoctor fix [N|ID] --insert` runs nothing: it puts the changed cell into the next one, for you to keep.
    `release_traceback` and `clear_output_cache` free what they can at once where no failed cell waits for them.
    """
    anyway = "--anyway" in words
    named = [word for word in words if word not in ("--anyway", "--insert")]
    if "--insert" in words:
        if anyway:
            raise UsageError("--insert runs nothing, so there is nothing to do --anyway: give one of the two")
        insert(extension, *_written(extension, named))
        return
    waiting = [one.fix for one in failed_case().plan.candidates] if extension.open is not None else []
    if len(named) == 1 and named[0] in _RELEASES and named[0] not in waiting:
        _release(extension, named[0])
        return
    case, candidate = chosen_by(extension, named)
    if candidate.effect is Effect.ADVICE:
        raise UsageError(f"{candidate.label} is advice and not applied: `%oomdoctor diff {candidate.fix}` shows it")
    retryable(extension)
    extension.request = Request(case=case, chosen=(candidate,), anyway=anyway, anew=True)


def fit(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor fit SIZE`: plan the failed cell again, for no more memory than that, such as 11GiB."""
    if len(words) != 1:
        raise UsageError("fit takes the memory that the cell may need, such as 11GiB")
    size, case = parse_size(words[0]), failed_case()
    retryable(extension)
    most = pipeline.budget_of(case.evidence, 0)
    if most is None:
        raise UsageError("how much memory there is for tensors could not be told, so that less of it cannot be taken")
    if size > most:
        raise UsageError(f"tensors may take {format_size(most)} here: fit takes no more than that, not {shown(*words)}")
    last, begun_s = extension.shown, time.monotonic()

    def tell(priced: Plan) -> None:
        if last is not None:
            extension.borders.guarded("display", lambda: last.show_progress(priced, time.monotonic() - begun_s))

    try:
        planned = plan(extension, case, at_most=size, tell=tell)
    except KeyboardInterrupt:
        planned = failed_case()
        print(f"{STOPPED} The fixes are as far as they are known.")
    if last is not None and hasattr(extension.shell, "kernel"):
        last.update(planned)
    else:
        Shown(extension).show(planned)


def retry(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor retry [--anyway]`: run the failed cell again with the fixes that keep the result, best first."""
    if others := [word for word in words if word != "--anyway"]:
        raise UsageError(f"retry does not take {shown(*others)}")
    case = failed_case()
    retryable(extension)
    chosen = pipeline.admitted(case, "exact")
    if not chosen:
        from oomdoctor.views.outcome import why_nothing

        why = pipeline.beyond_cure(case) or why_nothing(case.plan).removesuffix(".")
        raise UsageError(f"{why}: `%oomdoctor fix N` tries one all the same")
    extension.request = Request(case=case, chosen=chosen, anyway="--anyway" in words)


def diff(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor diff [N|ID] [DOSE]`: the fix as a unified diff of your cells, or the one in place."""
    case, candidate, patch = _written(extension, words)
    if candidate.label in case.outcome.fixes and case.outcome.kind is not OutcomeKind.HEALED:
        print(say(f"not in place: {candidate.label} was tried, and did not heal the cell"))
    print(patch.diff(), end="")


def undo(extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor undo`: take back the fix of the healed cell, and go back to the state before that cell."""
    print(say(take_back(extension)))


def why(_extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor why`: the whole diagnosis of the last failure: its causes, what holds the memory, and all fixes."""
    from oomdoctor.views import whole

    case = failed_case()
    print(whole(case, retry_of(case)), end="")


def cases(_extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor cases`: the failures of this session and how each ended."""
    for case in pipeline.cases():
        cell = case.incident.cell
        where = f"In[{cell.number}] line {cell.line}" if cell is not None else "outside of a cell"
        outcome = case.outcome
        with_fix = f" with {', '.join(outcome.fixes)}" if outcome.fixes else ""
        what = f"{case.incident.family.value} on {case.incident.device}"
        is_empty = outcome.kind is OutcomeKind.OFFERED and not case.plan.candidates and not case.plan.pending
        ended = "nothing to offer" if is_empty else outcome.kind.value
        print(f"{case.number}. {say(where)}: {say(what)}: {say(ended)}{say(with_fix)}")


def simulate(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor simulate SIZE|off`: behave as a machine with a GPU of that much memory."""
    from oomdoctor.allocator import virtual

    if len(words) != 1:
        raise UsageError("simulate takes a size, such as 512MiB, or off")
    if words[0] == "off":
        virtual.switch_off()
    else:
        virtual.switch_on(words[0])
    if extension.shown is not None:
        extension.borders.guarded("display", extension.shown.refresh)


def guard(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor guard on|off|auto|status`: raise a MemoryError before the kernel is killed, or tell whether it would.

    `auto` is on where a limit on host memory is set, or less than 15 % of the machine's memory is available.
    """
    host_guard.switch(extension, words)


def rules(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor rules [ID]`: the rules that are loaded, your own included; of one, what it means and what helps."""
    book = pipeline.rulebook(tuple(map(Path, extension.config.rule_paths)))
    if words:
        rule = next((of.file for of in book.rules if [of.id] == words), None)
        if rule is None:
            raise UsageError(f"unknown rule {shown(*words)}: `%oomdoctor rules` lists them all")
        helps = ", ".join(rule.fixes) or "nothing that this package can change"
        print(f"{say(rule.title)}\n\n{say(rule.what)}\n")
        print(say(f"Why: {say(rule.why)}"), end="\n\n")
        print(say(f"When it is wrong: {say(rule.false_positives)}"), end="\n\n")
        print(say(f"What helps: {helps}"))
        return
    for one in book.rules:
        print(f"{one.id}: {say(one.title)}")
    for fault in book.faults:
        print(say(f"left out: {fault}"))


def report(_extension: Extension, words: list[str]) -> None:
    """`%oomdoctor report [--code]`: the environment and the last failure as JSON for an issue, with your code if asked.

    Without `--code` there is no line, name or message of your program in it.
    """
    from oomdoctor.views.mime import issue_report

    if others := [word for word in words if word != "--code"]:
        raise UsageError(f"report does not take {shown(*others)}")
    print(issue_report(failed_case(), with_code="--code" in words))


def ranks(extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor ranks`: which rank of a job this process is, and whether the others answer."""
    if extension.job is None:
        print(say("this process has no part in a job of several ranks that are healed together"))
        return
    for line in circle_lines(extension.job):
        print(say(line))


def config(extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor config`: the settings and their values; `%config OomDoctor.auto = "exact"` changes one."""
    for name, trait in sorted(extension.config.traits(config=True).items()):
        print(f"OomDoctor.{name} = {getattr(extension.config, name)!r}  # {say(trait.help)}")


def help_(_extension: Extension, _words: list[str]) -> None:
    """`%oomdoctor help`: this text."""
    for verb in VERBS.values():
        print(say(getdoc(verb) or ""))
    for usage in (USAGE, planning.USAGE, measuring.USAGE, host_guard.USAGE):
        what, _, how, *_ = usage.splitlines()
        told = f"{what[:1].lower()}{what[1:].rstrip('.')}; `--help` says what each option does"
        print(say(f"`{how.strip()}`: {told}"))


def _release(extension: Extension, fix_id: str) -> None:
    shell, role = extension.shell, _RELEASES[fix_id]
    cells = cells_until(shell, shell.execution_count, "")

    def held() -> int:
        report = pipeline.report(shell.user_ns, cells)
        return sum(census.bytes_of(role) for census in report.evidence.censuses)

    before, chosen = held(), fixes.get(fix_id)
    session = pipeline.open_session(shell.user_ns, cells, pipeline.accelerator_of(None), shell)
    if chosen.apply is not None:
        with chosen.apply(session, Dose()):
            pass
    freed = before - held()
    told = f"{format_size(freed)} of tensors freed; {chosen.cost}" if freed > 0 else "there was no tensor to free"
    print(say(told))


def _written(extension: Extension, words: list[str]) -> tuple[Case, Candidate, Patch]:
    """Return the candidate that is named, the one in place where none is, and its change of the source."""
    case = failed_case()
    if not words and case.outcome.fixes:
        words = [one.label for one in case.plan.candidates if one.label in case.outcome.fixes][:1]
    _, candidate = chosen_by(extension, words)
    if isinstance(candidate.patch, Refused):
        raise UsageError(f"{candidate.label} cannot be written as a change of your cells: {candidate.patch.reason}")
    return case, candidate, candidate.patch


VERBS: Final[dict[str, Verb]] = {
    verb.__name__.rstrip("_"): verb
    for verb in (
        *(status, auto, fix, fit, retry, diff, undo, why, cases),
        *(simulate, guard, ranks, rules, report, config, help_),
    )
}
_KINDS: Final = {
    "oomdoctor": "line",
    "memreport": "line",
    "memplan": "line_cell",
    "mempeak": "line_cell",
    "memlimit": "cell",
}


def register(extension: Extension) -> None:
    """Add the magics to the shell of ``extension``."""

    def oomdoctor(line: str) -> None:
        """Diagnose and heal cells that run out of memory: `%oomdoctor help`."""
        _answered(lambda: _oomdoctor(extension, line))

    def memreport(line: str) -> None:
        _answered(lambda: extension.memreport.answer(_split(line)))

    def memplan(line: str, cell: str | None = None) -> None:
        number, time_s = extension.memreport.number, extension.config.forecast_time_s
        answer = partial(planning.answer, extension.shell, cell=cell, number=number, time_s=time_s)
        extension.to_run = _answered(lambda: answer(_split(line))) or ""

    def mempeak(line: str, cell: str | None = None) -> None:
        if (source := _answered(lambda: measuring.source_of(line, cell))) is not None:
            measuring.run(extension.shell, source, extension.memreport.number)

    def memlimit(line: str, cell: str | None = None) -> None:
        _answered(lambda: host_guard.run_limited(extension, line, cell))

    memreport.__doc__, memplan.__doc__, mempeak.__doc__ = USAGE, planning.USAGE, measuring.USAGE
    memlimit.__doc__ = host_guard.USAGE
    known = extension.shell.magics_manager.magics
    for magic in (oomdoctor, memreport, memplan, mempeak, memlimit):
        name = magic.__name__
        extension.magics_before[name] = {kind: magics[name] for kind, magics in known.items() if name in magics}
        extension.shell.register_magic_function(magic, magic_kind=_KINDS[name], magic_name=name)


def unregister(extension: Extension) -> None:
    """Take the magics away again, and put those back that had their names before."""
    for kind, magics in extension.shell.magics_manager.magics.items():
        for name in _KINDS:
            magics.pop(name, None)
            if (before := extension.magics_before.get(name, {}).get(kind)) is not None:
                magics[name] = before


def _answered(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except OomDoctorError as exc:
        print(f"oomdoctor: {say(str(exc))}", file=sys.stderr)
        return None


def _split(line: str) -> list[str]:
    """Return the words of a line without its comment, which IPython leaves in."""
    head = _COMMENT.split(line, maxsplit=1)[0]
    line = line if "'" in head or '"' in head else head
    try:
        return shlex.split(line)
    except ValueError as exc:
        raise UsageError(f"{shown(line)} cannot be read: {exc}") from None


def _oomdoctor(extension: Extension, line: str) -> None:
    verb, *rest = _split(line) or ["status"]
    verb = "help" if verb in ("--help", "-h") else verb
    if verb not in VERBS:
        raise UsageError(f"there is no verb {shown(verb)}: there are {', '.join(VERBS)}")
    if VERBS[verb] in (status, undo, why, cases, ranks, config, help_) and rest:
        raise UsageError(f"{verb} does not take {shown(*rest)}")
    VERBS[verb](extension, rest)
