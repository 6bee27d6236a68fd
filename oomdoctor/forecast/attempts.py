"""The way in which cells are run that a patch changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Attempt, Cell

__all__ = ["patched"]


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
