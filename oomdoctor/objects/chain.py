"""The exceptions that one exception comes from, and whether the handler of a signal raised it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

__all__ = ["chained", "is_of_signal", "set_traceback", "traceback_of"]

_cause: Final = vars(BaseException)["__cause__"].__get__
_context: Final = vars(BaseException)["__context__"].__get__
_traceback: Final = vars(BaseException)["__traceback__"]
_members: Final = vars(BaseExceptionGroup)["exceptions"].__get__


def chained(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield ``exc``, its causes, its contexts and the members of its groups, each once.

    What the interpreter noted is read, past whatever a class of the user's says instead: none of its code is run.
    """
    seen: set[int] = set()
    todo: list[Any] = [exc]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        members = _members(found) if issubclass(type(found), BaseExceptionGroup) else ()
        todo += [_cause(found), _context(found), *members]


def traceback_of(exc: BaseException) -> TracebackType | None:
    """Return the traceback of an exception as the interpreter noted it."""
    found: TracebackType | None = _traceback.__get__(exc)
    return found


def is_of_signal(exc: BaseException) -> bool:
    """Whether the handler of a signal raised the exception, in whatever ran: as torch's does when a worker was killed.

    Such an exception is the program's, wherever it arrives.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    trace = traceback_of(exc)
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def set_traceback(exc: BaseException, traceback: TracebackType | None) -> None:
    """Give an exception another traceback, past what its class makes of that."""
    _traceback.__set__(exc, traceback)
