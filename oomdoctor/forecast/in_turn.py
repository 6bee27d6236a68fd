"""Two fixes in one cell that write in the same place: the second is written into the text that the first has left.

Each fix reads the text that it changes and proves on it that the change is right, so the second one's proof holds for
what the first has written. What was found out about lines of the unchanged text is said of the same lines where they
stand afterwards; of lines that were changed nothing is said any more.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TypeAlias

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Fix, Patch
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.program.magics import mask

__all__ = ["patched_in_turn"]

_Lines: TypeAlias = Mapping[int, Mapping[int, int]]
"""Of each changed cell, where the lines stand now that are as they were."""


def patched_in_turn(parts: Sequence[tuple[Fix, Dose]], cells: Cells, evidence: Evidence) -> Patch | None:
    """Return the patch of two fixes, one written into the other's text; None where that goes in neither order."""
    for (first, dose), (second, other) in (parts, parts[::-1]):
        patch = first.patch(cells, evidence, dose)
        if isinstance(patch, Refused) or not all(edit.is_whole for edit in patch.edits):
            continue
        known = _moved(evidence, patch)
        written = second.patch(_with(cells, patch), known, other) if known is not None else None
        if isinstance(written, Patch) and all(edit.is_whole for edit in written.edits):
            return _both(patch, written)
    return None


def _with(cells: Cells, patch: Patch) -> Cells:
    """Return the cells as a patch leaves them."""
    after = {edit.cell: edit.after for edit in patch.edits}
    return Cells(history=tuple(replace(one, source=after.get(one.number, one.source)) for one in cells.history))


def _both(first: Patch, second: Patch) -> Patch:
    edits = {edit.cell: edit for edit in first.edits}
    for edit in second.edits:
        before = edits[edit.cell].before if edit.cell in edits else edit.before
        edits[edit.cell] = replace(edit, before=before)
    return Patch(edits=tuple(edits[cell] for cell in sorted(edits)))


def _moved(evidence: Evidence, patch: Patch) -> Evidence | None:
    """Return what is known of the text after ``patch``; None where a loop begins on a line that it changed."""
    lines = {edit.cell: _unchanged(edit) for edit in patch.edits}
    trees = {edit.cell: ast.parse(mask(edit.after).text) for edit in patch.edits}
    code = evidence.code
    loops = [_loop(loop, lines, trees) for loop in code.loops]
    found = [loop for loop in loops if loop is not None]
    if len(found) < len(loops) or any(trainer.cell in lines for trainer in code.trainers):
        return None
    moved = replace(
        code,
        loops=tuple(found),
        sites={fix: _sites(found, lines) for fix, found in code.sites.items()},
    )
    return replace(evidence, code=moved)


def _unchanged(edit: Edit) -> dict[int, int]:
    """Return where each line stands after an edit that it leaves as it is."""
    matcher = SequenceMatcher(None, edit.before.splitlines(), edit.after.splitlines(), autojunk=False)
    blocks = matcher.get_matching_blocks()
    return {one.a + at + 1: one.b + at + 1 for one in blocks for at in range(one.size)}


def _loop(loop: TrainingLoop, lines: _Lines, trees: Mapping[int, ast.Module]) -> TrainingLoop | None:
    if loop.cell not in lines:
        return loop
    line = lines[loop.cell].get(loop.line)
    nodes = (node for node in ast.walk(trees[loop.cell]) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)))
    node = next((node for node in nodes if node.lineno == line), None)
    return None if node is None else replace(loop, line=node.lineno, end_line=node.end_lineno)


def _sites(sites: tuple[Site, ...], lines: _Lines) -> tuple[Site, ...]:
    """Return the sites where they stand now; none where one of them was changed, as no part is the whole."""
    starts = [lines[site.cell].get(site.line) if site.cell in lines else site.line for site in sites]
    if None in starts:
        return ()
    moved = [(site, line - site.line) for site, line in zip(sites, starts, strict=True) if line is not None]
    return tuple(replace(site, line=site.line + by, end_line=site.end_line + by) for site, by in moved)
