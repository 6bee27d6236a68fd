"""The traceback of an earlier failure let go of, with the tensors in its frames.

IPython and the interpreter keep the last failure for ``%debug`` and ``%tb``: in ``sys.last_value`` and its siblings, in
the traceback printer, and in the result of the last cell. Its frames keep every local variable that they had.

The failure at hand is left alone, as it is still to be shown and is released by the retry. An exception that a name
of the user's holds keeps its traceback too: that name is the user's to delete. What was let go of stays gone when the
context is left: holding it to put it back would hold the memory. ``%debug`` for that failure is what is lost.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.frames import chained, set_traceback, traceback_of

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

_LAST: Final = ("last_exc", "last_type", "last_value", "last_traceback")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose to let go where the census found tensors in the frames of an earlier failure."""
    held = evidence.census.bytes_of(Role.TRACEBACK)
    if not held:
        return Refused("no earlier traceback keeps tensors alive")
    basis = f"measured: the census found {format_size(held)} in the frames of an earlier failure"
    return (Proposal(dose=Dose(), effect=Effect.EXACT, saves=held, slowdown=1.0, basis=basis),)


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Let go of earlier tracebacks; nothing else changes, so there is nothing to undo."""
    release(session)
    yield


def release(session: Session) -> None:
    """Cut every holder of an earlier failure's traceback, then collect the cycles that frames form."""
    shown = getattr(sys, "last_value", None)
    if shown is not None and not _is_at_hand(session, shown):
        _forget(session, shown)
        for name in _LAST:
            if hasattr(sys, name):
                delattr(sys, name)
    result = getattr(session.shell, "last_execution_result", None)
    for name in ("error_in_exec", "error_before_exec"):
        failed = getattr(result, name, None)
        if isinstance(failed, BaseException) and not _is_at_hand(session, failed):
            _forget(session, failed)
    printer: Any = getattr(session.shell, "InteractiveTB", None)
    printed = getattr(printer, "tb", None)
    if isinstance(printed, TracebackType) and not _goes_through_failing_cell(session, printed):
        printer.tb = None
    del shown, result, printed
    gc.collect()


def _forget(session: Session, exc: BaseException) -> None:
    """Take the tracebacks off ``exc`` and what it is chained to, leaving types and messages as they are."""
    users = {id(value) for value in list(session.namespace.values()) if isinstance(value, BaseException)}
    for link in chained(exc):
        if id(link) not in users:
            set_traceback(link, None)


def _is_at_hand(session: Session, exc: BaseException) -> bool:
    """Tell whether ``exc`` is the failure that is being looked at: handled now, or raised by the failing cell."""
    handled = sys.exc_info()[1]
    if handled is not None and any(exc is link for link in chained(handled)):
        return True
    return any(_goes_through_failing_cell(session, traceback_of(link)) for link in chained(exc))


def _goes_through_failing_cell(session: Session, tb: TracebackType | None) -> bool:
    numbers: dict[str, Any] = getattr(getattr(session.shell, "compile", None), "_filename_map", None) or {}
    while tb is not None:
        if numbers.get(tb.tb_frame.f_code.co_filename) == session.cells.failing.number:
            return True
        tb = tb.tb_next
    return False


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Refuse: no line of the user's keeps the traceback."""
    return Refused("nothing in the code to change: IPython and the interpreter keep the traceback of the last failure")


FIX: Final = Fix(
    id="release_traceback",
    title="Let go of the traceback of an earlier failure",
    effect=Effect.EXACT,
    cost="%debug and %tb no longer reach that failure",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
