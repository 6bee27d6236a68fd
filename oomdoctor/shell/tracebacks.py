"""The user's traceback: always theirs. Seen as it passes, held back only while an automatic retry may still heal it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from oomdoctor.sandbox import reserve
from oomdoctor.shell.wrapping import Wrapped


class TracebackWatch:
    """Wraps ``shell.showtraceback``.

    Not ``set_custom_exc``: that has one slot, which the next extension takes over in silence.

    Args:
        seen: called with every exception that is shown, before it is shown. It must not raise.
        shown: called with it after it was shown, unless its display is held back. It must not raise.
        holds: asked with the exception whether its display is to be held back for now.
    """

    def __init__(
        self,
        shell: Any,
        seen: Callable[[BaseException], None],
        shown: Callable[[BaseException], None],
        holds: Callable[[BaseException], bool],
    ) -> None:
        self._shell, self._seen, self._shown, self._holds = shell, seen, shown, holds
        self._held: list[tuple[BaseException, Callable[..., Any], tuple[Any, ...]]] = []
        self._wrapped = Wrapped(shell, "showtraceback", self._showtraceback)

    def remove(self) -> None:
        """Put the method back."""
        self._wrapped.remove()

    def _showtraceback(self, *args: Any, **kwargs: Any) -> Any:
        reserve.let_go(keep=reserve.FOR_MESSAGES)  # first of all: whatever follows takes memory
        given = args[0] if args else kwargs.get("exc_tuple")
        exc = (given or sys.exc_info())[1]
        given = None
        if isinstance(exc, BaseException):
            self._seen(exc)
            # Code of a cell alone: what %run and widgets show goes on at once, because their cell goes on. The
            # callers are run_code and the wrapper.
            if sys._getframe(2).f_code.co_name == "run_code" and self._holds(exc):
                return self._render_only(exc, *args, **kwargs)
        result = self._rendered(exc, *args, **kwargs)
        if isinstance(exc, BaseException):
            self._shown(exc)
        return result

    def _rendered(self, exc: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the shell show the traceback; where it has no memory to, show it as Python itself prints it."""
        try:
            return self._wrapped.original(*args, **kwargs)
        except (MemoryError, SystemError):
            if not isinstance(exc, BaseException):
                raise
        try:
            lines = traceback.format_exception(exc)
        except (MemoryError, SystemError):
            lines = traceback.format_exception_only(exc)
        return self._shell._showtraceback(type(exc), exc, [line.rstrip("\n") for line in lines])

    def _render_only(self, exc: BaseException, *args: Any, **kwargs: Any) -> Any:
        """Let the shell render the traceback as always, and keep the rendering instead of sending it."""
        sender = Wrapped(
            self._shell, "_showtraceback", lambda *rendered: self._held.append((exc, sender.original, rendered))
        )
        try:
            return self._rendered(exc, *args, **kwargs)
        finally:
            sender.remove()

    def send_held(self, exc: BaseException | None = None) -> None:
        """Show what was held back of ``exc`` as it would have been shown; without one, what was held back first.

        An ``exc`` of which nothing was held back was shown already.
        """
        held, self._held = self._held, []
        for holder, send, rendered in [one for one in held if one[0] is exc] if exc is not None else held[:1]:
            del holder
            send(*rendered)

    def drop_held(self) -> None:
        """Forget what was held back: it was healed."""
        self._held = []
