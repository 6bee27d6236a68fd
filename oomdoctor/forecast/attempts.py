"""How the failing cell is run with one fix, or with several: as its text after a patch, or with live objects changed.

Several fixes are composed by patching the patched program. Each reads the text that it changes and shows on it that the
change is right, so a later one's reasons hold for what the first has written. What was found out about lines of the
unchanged text is said of the same lines where they stand afterwards; of lines that were changed nothing is said any
more. Two changes of live objects are never made together: they may be of the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Final, TypeAlias

from oomdoctor.model.code import TrainerFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Fix, Patch
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.site import Site
from oomdoctor.model.unavailable import Refused
from oomdoctor.program.dataflow import loop_at
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import bound_names

_SAME_PLACE: Final = Refused("both change the same place of the source")

_Lines: TypeAlias = Mapping[int, Mapping[int, int]]
"""Of each changed cell, where the lines stand now that are as they were."""


def attempt_with(
    fix: Fix, dose: Dose, session: Session, evidence: Evidence
) -> tuple[Patch | Refused, Attempt | Refused]:
    """Return how to run the failing cell with one fix: by its patch where there is one, else on the live objects."""
    patch = _on_base(session, fix.patch(session.cells, evidence, dose))
    if isinstance(patch, Patch):
        numbers = {module.number for module in session.cells.modules}
        if any(edit.file is None and edit.cell in numbers for edit in patch.edits):
            return (why := Refused("it would change a module in a way that its loaded form does not follow")), why
        guards = (partial(fix.guard, session, dose),) if fix.guard is not None else ()
        return patch, patched(session.cells.failing, patch, guards)
    # What is told to the loop of a library by its settings is not done to its objects behind its back.
    if fix.apply is None or "through" in dict(dose.values):
        return patch, Refused(patch.reason)
    return patch, replace(unfixed(session), live=(partial(fix.apply, session, dose),))


def unfixed(session: Session) -> Attempt:
    """Return how to run the failing cell as the session's cells have it."""
    failing = session.cells.failing
    return Attempt(source=failing.source) if session.base is None else patched(failing, session.base)


def _on_base(session: Session, patch: Patch | Refused) -> Patch | Refused:
    """Return a patch of the session's cells as one of the text that runs live."""
    if isinstance(patch, Refused) or session.base is None:
        return patch
    return _both(session.base, patch)


def attempt_with_all(
    parts: Sequence[tuple[Fix, Dose]], session: Session, evidence: Evidence
) -> tuple[Patch | Refused, Attempt | Refused]:
    """Return how to run the failing cell with one fix or with several."""
    made = [attempt_with(fix, dose, session, evidence) for fix, dose in parts]
    if len(made) == 1:
        return made[0]
    if (refused := next(((patch, run) for patch, run in made if isinstance(run, Refused)), None)) is not None:
        return refused
    live = tuple(make for _, run in made if isinstance(run, Attempt) for make in run.live)
    patches = [patch for patch, _ in made if isinstance(patch, Patch)]
    if not patches:
        why = Refused("both change the live objects")
        return why, why
    both = patches[0] if len(patches) == 1 else _on_base(session, composed(parts, session.cells, evidence))
    if isinstance(both, Refused):
        return both, both
    # Where one of them cannot be written in the source, the two cannot be either.
    reason = next((patch for patch, _ in made if isinstance(patch, Refused)), None)
    return reason or both, patched(session.cells.failing, both, live)


def patched(failing: Cell, patch: Patch, live: tuple[Callable[[], AbstractContextManager[None]], ...] = ()) -> Attempt:
    """Return how to run the failing cell with a patch; ``live`` changes live objects besides."""
    own = [edit.after for edit in patch.edits if edit.cell == failing.number]
    earlier = [edit for edit in patch.edits if edit.cell != failing.number and edit.file is None]
    modules = tuple(edit for edit in patch.edits if edit.file is not None)
    return Attempt(
        source=own[-1] if own else failing.source,
        replays=tuple(edit.replay for edit in (*earlier, *modules) if edit.file is None or edit.replay),
        cells=tuple(Cell(number=edit.cell, source=edit.after) for edit in earlier),
        modules=modules,
        live=live,
    )


def composed(parts: Sequence[tuple[Fix, Dose]], cells: Cells, evidence: Evidence) -> Patch | Refused:
    """Return the patch of several fixes, each written into the others' text; a refusal where that goes in no order."""
    for at, (fix, dose) in enumerate(parts):
        patch, others = fix.patch(cells, evidence, dose), [*parts[:at], *parts[at + 1 :]]
        if not others:
            return patch
        known = _moved(evidence, patch) if isinstance(patch, Patch) else None
        if isinstance(patch, Refused) or known is None:
            continue
        after = {edit.cell: edit.after for edit in patch.edits}
        written = composed(others, cells.changed(after), known)
        if isinstance(written, Patch):
            return _both(patch, written)
    return _SAME_PLACE


def _both(first: Patch, second: Patch) -> Patch:
    """Return two patches as one, the second of which is of what the first has left."""
    edits = {edit.cell: edit for edit in first.edits}
    for edit in second.edits:
        before = edits.get(edit.cell)
        if before is not None:
            is_all = edit.is_whole or bound_names(before.replay) <= bound_names(edit.replay)
            replay = edit.replay if is_all else f"{before.replay.rstrip()}\n\n\n{edit.replay}"
            anew = tuple(dict.fromkeys((*before.anew, *edit.anew)))
            edit = replace(edit, before=before.before, replay=replay, anew=anew)
        edits[edit.cell] = edit
    return Patch(edits=tuple(edits[cell] for cell in sorted(edits)))


def _moved(evidence: Evidence, patch: Patch) -> Evidence | None:
    """Return what is known of the text after ``patch``; None where it changed the first line of a loop or a trainer."""
    lines = {edit.cell: unchanged_lines(edit) for edit in patch.edits}
    texts = {edit.cell: edit.after for edit in patch.edits}
    code = evidence.code
    loops = [_loop(loop, lines, texts) for loop in code.loops]
    trainers = [_trainer(trainer, lines) for trainer in code.trainers]
    if None in loops or None in trainers:
        return None
    moved = replace(
        code,
        loops=tuple(loop for loop in loops if loop is not None),
        trainers=tuple(trainer for trainer in trainers if trainer is not None),
        sites={fix: _sites(found, lines) for fix, found in code.sites.items()},
    )
    return replace(evidence, code=moved)


def unchanged_lines(edit: Edit) -> dict[int, int]:
    """Return where each line stands after an edit that it leaves as it is."""
    matcher = SequenceMatcher(None, edit.before.splitlines(), edit.after.splitlines(), autojunk=False)
    blocks = matcher.get_matching_blocks()
    return {block.a + at + 1: block.b + at + 1 for block in blocks for at in range(block.size)}


def _now(cell: int | None, line: int | None, lines: _Lines) -> int | None:
    """Return where a line stands now, None where it was changed."""
    return line if cell is None or line is None or cell not in lines else lines[cell].get(line)


def _loop(loop: TrainingLoop, lines: _Lines, texts: Mapping[int, str]) -> TrainingLoop | None:
    line, tree = _now(loop.cell, loop.line, lines), parsed(texts.get(loop.cell, ""))
    if line is None or tree is None or loop.cell not in lines:
        return loop if loop.cell not in lines else None
    found = loop_at(tree, line)
    return None if found is None else replace(loop, line=line, end_line=found.end_lineno)


def _trainer(trainer: TrainerFacts, lines: _Lines) -> TrainerFacts | None:
    line = _now(trainer.cell, trainer.line, lines)
    return None if line is None and trainer.line is not None else replace(trainer, line=line)


def _sites(sites: tuple[Site, ...], lines: _Lines) -> tuple[Site, ...]:
    """Return the sites where they stand now; none where one of them was changed, as no part is the whole."""
    now = [_now(site.cell, site.line, lines) for site in sites]
    if None in now:
        return ()
    moved = [(site, line - site.line) for site, line in zip(sites, now, strict=True) if line is not None]
    return tuple(replace(site, line=site.line + by, end_line=site.end_line + by) for site, by in moved)
