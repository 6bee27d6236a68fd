"""``oomdoctor.report()``: in a notebook it calls the cells by their numbers, as ``%memreport`` does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oomdoctor.shell.cells import cells_until
from oomdoctor.shell.cells import filenames as filenames_of

if TYPE_CHECKING:
    from oomdoctor.model.session import Cells
    from oomdoctor.views.displayed import Report


def report(
    namespace: dict[str, Any] | None = None, cells: Cells | None = None, filenames: Mapping[str, int] | None = None
) -> Report:
    """Tell what holds memory now, by role and by name: the device first, where one is in use.

    Args:
        namespace: where to look for names; what the caller sees by default, its locals and its globals.
        cells: that were run; those of the notebook by default, where the caller is a cell of it.
        filenames: number of the cell by the file name of its code; as the notebook has it by default.
    """
    from oomdoctor import pipeline
    from oomdoctor.objects.frames import locals_of

    shell = _notebook()
    if namespace is None:
        caller = sys._getframe(1)
        if cells is None and shell is not None and caller.f_globals is shell.user_ns:
            cells = cells_until(shell, shell.execution_count, "")
        namespace = {**caller.f_globals, **locals_of(caller)}
        del caller
    if filenames is None and shell is not None:
        filenames = filenames_of(shell, shell.execution_count)
    return pipeline.report(namespace, cells, filenames)


def _notebook() -> Any:
    """Return the shell that this process runs, None where it is no notebook and no IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
