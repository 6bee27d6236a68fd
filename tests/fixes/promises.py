"""What every fix promises, checked on one model family after a real failure of it.

A fix either refuses with a sentence, or its mildest dose is made: as the patched source in a fresh namespace, and on
the live objects. Each of the two has to need less memory than the program as it was, to keep what its effect promises
over the family's five steps, and, live, to leave no trace, however the context is left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import live
import torch
from models import Family
from observed import facts
from running import Run, begun, cells_with, fail, finish, left, plain, run, session_of
from settings import Settings
from torch.utils._python_dispatch import TorchDispatchMode
from traces import Traces, moved, other_form, root_of

from oomdoctor.errors import OomDoctorError
from oomdoctor.forecast.attempts import patched
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.fix import Effect, Fix, Patch, Proposal
from oomdoctor.model.session import Attempt, Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.kinds import Kind, kind_of
from oomdoctor.trial import compare

__all__ = ["Outcome", "check", "check_edits", "offer"]

_FAULTS: Final = ((0.27, torch.OutOfMemoryError), (0.55, KeyboardInterrupt))
"""Where in the last cell an operation fails, as a share of its operations, and with what."""

_STATEFUL: Final = (Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER)
_SENTENCE: Final = re.compile(r"[^\n]{15,300}[^.\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one fix for one family.

    Attributes:
        forms: ``patch`` and ``live``, those that were made and kept their promises.
        refusals: why the others were not made.
    """

    forms: tuple[str, ...]
    refusals: tuple[str, ...]


def check(fix: Fix, family: Family, settings: Settings) -> Outcome:
    """Check all that ``fix`` promises on ``family``.

    Raises:
        AssertionError: it does not keep a promise.
    """
    offered = offer(fix, family)
    if isinstance(offered, Outcome):
        return offered
    first, patch = offered
    refusals = {}
    refusals["patch"] = patch.reason if isinstance(patch, Refused) else _check_ways(fix, family, first, patch, settings)
    refusals["live"] = "it can only be a patch" if fix.apply is None else _check_live(fix, family, first, settings)
    for reason in filter(None, refusals.values()):
        assert _SENTENCE.fullmatch(reason), f"not a sentence: {reason!r}"
    return Outcome(
        forms=tuple(form for form, why in refusals.items() if why is None),
        refusals=tuple(why for why in refusals.values() if why is not None),
    )


def offer(fix: Fix, family: Family) -> Outcome | tuple[Proposal, Patch | Refused]:
    """Return the mildest dose and its patch, checked as far as no program is run; the outcome where that is all.

    Raises:
        AssertionError: it does not keep a promise.
    """
    failure = fail(family)
    proposals = fix.propose(failure.incident, failure.evidence)
    assert proposals == fix.propose(failure.incident, failure.evidence), "it proposes something else when asked again"
    if isinstance(proposals, Refused):
        return _refused(proposals.reason)
    assert proposals, "it proposes nothing, and does not say why"
    first = proposals[0]
    assert first.basis, "the estimate has no basis"
    if fix.allocates and not first.saves:
        return _refused(first.basis)  # until a dry run tells that it is enough
    assert first.saves > 0, "it is proposed although it saves nothing"
    assert first.caveat or first.effect in (Effect.EXACT, Effect.EQUIVALENT), "it does not say what changes"

    patch = fix.patch(failure.cells, failure.evidence, first.dose)
    assert patch == fix.patch(failure.cells, failure.evidence, first.dose), "it patches otherwise when asked again"
    if isinstance(patch, Patch):
        check_edits(patch, failure.cells)
    if first.effect is not Effect.ADVICE:
        return first, patch
    assert fix.apply is None, "advice is never applied"
    return Outcome(forms=(), refusals=() if isinstance(patch, Patch) else (patch.reason,))


def _refused(reason: str) -> Outcome:
    assert _SENTENCE.fullmatch(reason), f"not a sentence: {reason!r}"
    return Outcome(forms=(), refusals=(reason,))


def _check_ways(fix: Fix, family: Family, proposal: Proposal, patch: Patch, settings: Settings) -> str | None:
    """Check the patch, else those of the other ways to write it; return why the first is unfit, None if one is not."""
    failure, why = fail(family), _check_patch(fix, family, proposal, patch, settings)
    for way in fix.ways if why is not None else ():
        other = replace(proposal, dose=proposal.dose | way)
        written = fix.patch(failure.cells, failure.evidence, other.dose)
        if isinstance(written, Patch) and _check_patch(fix, family, other, written, settings) is None:
            return None
    return why


# The patched source ----------------------------------------------------------------------------------------------


def _check_patch(fix: Fix, family: Family, proposal: Proposal, patch: Patch, settings: Settings) -> str | None:
    """Check the patch; return why it found itself unfit when it ran, None if it did not."""
    failure = fail(family)
    after = check_edits(patch, failure.cells)
    cells = cells_with(failure.cells, after)
    sources = [cell.source for cell in cells.history]

    if (why := _refuted(fix, family, proposal, patch)) is not None:
        return why

    def guarded(namespace: dict[str, Any]) -> AbstractContextManager[None]:
        return fix.guard(session_of(namespace, failure.cells), proposal.dose) if fix.guard else nullcontext()

    def code_of(namespace: dict[str, Any]) -> CodeFacts:
        session = session_of(namespace, cells)
        return facts(cells, namespace, session.modules, session.optimizers, session.loaders)

    try:
        found, code = finish(family, sources, guarded, code_of)
    except OomDoctorError as unfit:
        return str(unfit)
    _check_numbers(fix, family, proposal, found, settings, "patched")
    _check_memory(family, found, settings, lambda budget: finish(family, sources, guarded, budget=budget), "patched")

    if any(edit.cell != failure.cells.failing.number for edit in patch.edits):
        _check_replay(family, patch, found)
    code = replace(code, grad_disabled=failure.evidence.code.grad_disabled)
    again = fix.patch(cells, replace(failure.evidence, code=code), proposal.dose)
    assert isinstance(again, Refused), f"patching the patched cells again changes them again:\n{again.diff()}"
    return None


def _refuted(fix: Fix, family: Family, proposal: Proposal, patch: Patch | None) -> str | None:
    """Try a change as a retry does before it is made; return why it does not keep the results, None if it does.

    Args:
        patch: None for the change of live objects.
    """
    if not fix.is_tried or proposal.effect not in (Effect.EXACT, Effect.EQUIVALENT):
        return None
    failing = fail(family).cells.failing
    parts = max((value for _, value in proposal.dose.values if type(value) is int), default=1)
    with begun(family.cells()) as namespace:
        session = session_of(namespace, fail(family).cells)
        live = () if patch is not None or fix.apply is None else (partial(fix.apply, session, proposal.dose),)
        trial = compare(
            session,
            lambda: None,
            Attempt(source=failing.source),
            [Attempt(source=failing.source, live=live) if patch is None else patched(failing, patch)],
            effect=proposal.effect,
            leaves=fix.leaves,
            parts=parts,
            aim_s=0.0,
        )
    return f"the trial: {trial.why[:250].rstrip('. ')}" if trial.same is False else None


def check_edits(patch: Patch, cells: Cells) -> dict[int, str]:
    """Check that the edits are of these cells and are Python; return their texts."""
    for edit in patch.edits:
        assert edit.before == cells.get(edit.cell).source, "the diff is of another text than the cell's"
        assert edit.before != edit.after, f"cell {edit.cell} is said to change and does not"
        for text in (edit.after, edit.replay):
            try:
                compile(text, f"<cell {edit.cell}>", "exec")
            except SyntaxError as error:
                raise AssertionError(f"what it makes of cell {edit.cell} is not Python: {error}") from None
    return {edit.cell: edit.after for edit in patch.edits}


def _check_replay(family: Family, patch: Patch, fresh: Run) -> None:
    """Check that a retry in the notebook that failed leaves what the patched cells leave in a fresh one."""
    sources = list(family.cells())
    with begun(sources) as namespace:
        for edit in patch.edits:
            if edit.cell != len(sources):
                run(edit.replay, namespace, len(sources) + 1)
            else:
                sources[-1] = edit.after
        run(sources[-1], namespace, len(sources))
        retried = left(family, namespace)
    assert retried.random == fresh.random, "the retry left the random numbers elsewhere than a fresh kernel does"
    assert retried.results == fresh.results, "the retry has other results than a fresh kernel"
    assert live.same(retried.state, fresh.state), "the retry left other parameters than a fresh kernel"


# The live objects ------------------------------------------------------------------------------------------------


def _check_live(fix: Fix, family: Family, proposal: Proposal, settings: Settings) -> str | None:
    """Check the live form; return why it found itself unfit, None if it did not."""
    cells = fail(family).cells
    assert fix.apply is not None
    apply = fix.apply

    def applied(namespace: dict[str, Any]) -> AbstractContextManager[None]:
        return apply(session_of(namespace, cells), proposal.dose)

    try:
        found, _ = finish(family, family.cells(), applied)
    except OomDoctorError as unfit:
        _traces(family, applied, settings, None, unfit=True)
        return str(unfit)
    try:
        _check_numbers(fix, family, proposal, found, settings, "live")
    except AssertionError:
        if (why := _refuted(fix, family, proposal, None)) is None:
            raise
        return why
    if not settings.live_frees_before:
        _check_memory(
            family, found, settings, lambda budget: finish(family, family.cells(), applied, budget=budget), "live"
        )
    forms = _traces(family, applied, settings, None)
    if proposal.effect in (Effect.EXACT, Effect.EQUIVALENT):
        others = other_form(_plain_forms(family), forms)
        assert not _unless(others, settings), f"after the live form is left, not as without it: {others}"
    for fault in _FAULTS:
        _traces(family, applied, settings, fault)
    return None


def _traces(
    family: Family,
    applied: Callable[[dict[str, Any]], AbstractContextManager[None]],
    settings: Settings,
    fault: tuple[float, type[BaseException]] | None,
    *,
    unfit: bool = False,
) -> dict[str, Any]:
    """Leave the live form normally or by a fault; return the forms of what it may not have touched."""
    with begun(family.cells()) as namespace:
        before = Traces(namespace)
        how = _left(family, namespace, applied, fault)
        assert how is (OomDoctorError if unfit else fault and fault[1]), f"the live form was left by {how}"
        after, stateful = Traces(namespace), _stateful(namespace)
    changed = _unless(_beyond(_plain_moves(family), moved(before, after), stateful), settings)
    assert not changed, f"left behind by the live form ({how.__name__ if how else 'left normally'}): {changed}"
    return after.forms(stateful)


def _left(
    family: Family,
    namespace: dict[str, Any],
    applied: Callable[[dict[str, Any]], AbstractContextManager[None]],
    fault: tuple[float, type[BaseException]] | None,
) -> type[BaseException] | None:
    """Run the last cell within the context; return the type of what it was left by."""
    sources = family.cells()
    injected = _Fault(int(plain(family).operations * fault[0]), fault[1]) if fault else nullcontext()
    try:
        with applied(namespace), injected:
            run(sources[-1], namespace, len(sources))
    except OomDoctorError:
        return OomDoctorError
    except (torch.OutOfMemoryError, KeyboardInterrupt) as exc:
        return type(exc)
    return None


class _Fault(TorchDispatchMode):
    """Raises at one operation."""

    def __init__(self, operation: int, kind: type[BaseException]) -> None:
        super().__init__()
        self._left, self._kind = operation, kind

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._kind("in the middle of a step")
        return func(*args, **(kwargs or {}))


@cache
def _plain_moves(family: Family) -> frozenset[str]:
    """Return the paths that the program itself changes, run through or interrupted."""
    found: set[str] = set()
    for fault in (None, *_FAULTS):
        with begun(family.cells()) as namespace:
            before = Traces(namespace)
            _left(family, namespace, _nothing, fault)
            found |= moved(before, Traces(namespace)).keys()
    return frozenset(found)


@cache
def _plain_forms(family: Family) -> dict[str, Any]:
    with begun(family.cells()) as namespace:
        _left(family, namespace, _nothing, None)
        return Traces(namespace).forms(_stateful(namespace))


@contextmanager
def _nothing(namespace: dict[str, Any]) -> Iterator[None]:
    yield


def _stateful(namespace: dict[str, Any]) -> set[str]:
    return {name for name, value in namespace.items() if kind_of(type(value)) in _STATEFUL}


def _beyond(plain_moves: frozenset[str], found: dict[str, str], stateful: set[str]) -> dict[str, str]:
    """Return what moved that the program alone does not move.

    Below the names of models, optimizers, schedulers and loaders each path counts for itself; other names that the
    program changes (its lists, its last batch) are its own affair.
    """
    own = {root_of(path) for path in plain_moves} - stateful - {""}
    return {path: how for path, how in found.items() if path not in plain_moves and root_of(path) not in own}


def _unless(found: dict[str, str], settings: Settings) -> dict[str, str]:
    """Return ``found`` without what the settings say stays changed on purpose."""
    return {path: how for path, how in found.items() if not any(re.search(one, path) for one in settings.stays)}


# What both have to keep ------------------------------------------------------------------------------------------


def _check_numbers(fix: Fix, family: Family, proposal: Proposal, found: Run, settings: Settings, form: str) -> None:
    expected = plain(family)
    assert found.results, f"{form}: the program left no results"
    assert all(map(math.isfinite, found.results)), f"{form}: the results are not finite"
    if proposal.effect is Effect.EXACT:
        assert live.same(found.state, expected.state), f"{form}: the parameters are not bit for bit the same"
        assert found.results == expected.results, f"{form}: the results are not bit for bit the same"
        assert found.random == expected.random, f"{form}: the random numbers stand elsewhere"
    elif proposal.effect is Effect.EQUIVALENT:
        tolerance = settings.tolerance.get(family.name, fix.tolerance)
        assert tolerance is not None, "EQUIVALENT needs a tolerance"
        assert found.state.keys() == expected.state.keys()
        off = live.furthest(found.state, expected.state)
        assert off <= tolerance, f"{form}: the parameters are {off:.1e} off, more than {tolerance:.0e}"
        assert len(found.results) == len(expected.results), (
            f"{form}: {len(found.results)} results, not {len(expected.results)}"
        )
        off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found.results, expected.results, strict=True))
        assert off <= tolerance, f"{form}: the results are {off:.1e} off, more than {tolerance:.0e}"


def _check_memory(family: Family, found: Run, settings: Settings, again: Callable[[int], Any], form: str) -> None:
    """Check that it needs less than the program as it was, or that it runs within what that did not fit into."""
    if found.peak < plain(family).peak:
        return
    budget = fail(family).budget
    try:
        again(budget)
    except torch.OutOfMemoryError:
        raise AssertionError(
            f"{form}: its peak is {found.peak} bytes, {plain(family).peak} without it, and {budget} are not enough"
        ) from None
