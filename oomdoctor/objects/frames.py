"""Exceptions, and frames that hold tensors in their locals: those of a failure, and those that are running."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from threading import get_ident
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

from oomdoctor.model.session import Standing
from oomdoctor.objects.alive import alive
from oomdoctor.objects.kinds import Kind, kind_of, members_of, module_of, mro_of, plain_dict, spelled, submodules
from oomdoctor.objects.named import is_installed, is_users_file

_TOP_LEVEL: Final = ("<module>", "<cell line: ")
"""What the code of a cell is called: the latter by IPython 7.33 and later ones of 7."""
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


def steps_of(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield a traceback and what follows it, outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def is_of_signal(exc: BaseException) -> bool:
    """Whether the handler of a signal raised the exception, in whatever ran: as torch's does when a worker was killed.

    Such an exception is the program's, wherever it arrives.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    return any(step.tb_frame.f_code in codes for step in steps_of(traceback_of(exc)))


def set_traceback(exc: BaseException, traceback: TracebackType | None) -> None:
    """Give an exception another traceback, past what its class makes of that."""
    _traceback.__set__(exc, traceback)


_REFERENCES_OF_OURS: Final = 3
"""To the dict of locals: the frame's, the variable that holds it here, and the argument of ``getrefcount``."""

_DEBUGGERS: Final = frozenset({"bdb", "pdb", "IPython.core.debugger", "pydevd"})
_LEADS_NOWHERE: Final = frozenset(
    {"IPython", "ipykernel", "traitlets", "tornado", "zmq", "jupyter_client", "oomdoctor"}
)
"""Packages whose objects hold nothing of the user's but lead to a great deal."""
_MACHINERY: Final = frozenset(
    {
        *("IPython", "ipykernel", "traitlets", "tornado", "asyncio", "zmq", "jupyter_client", "nbclient", "debugpy"),
        *("threading", "concurrent", "queue", "selectors", "socketserver", "multiprocessing", "subprocess", "runpy"),
        *("pytest", "_pytest", "pluggy", "xdist", "execnet", "__channelexec__", "oomdoctor"),
    }
)
"""Packages whose frames hold nothing of the user's but lead to a great deal."""


class Frame(NamedTuple):
    """A frame's locals. Short-lived: it holds them.

    Attributes:
        place: ``forward at In[5] line 3``; of a library the line of the program that called it, ``forward, called at
            In[5] line 3``.
        code_names: names that a frame at the top level of a program uses; empty for a function's.
        is_program: whether its code is of the program that was asked about, and not of a library.
        ends: whether it is still running, and lets go of its locals by itself.
    """

    values: dict[str, Any]
    place: str
    code_names: frozenset[str]
    is_program: bool
    ends: bool = False


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the locals of ``frame``, leaving nothing behind on it.

    Before Python 3.13, reading ``f_locals`` leaves a dict on the frame that keeps all of them alive until it ends.
    It is emptied again, unless the program has it as well (it called ``locals()``), or a trace function is set: after
    that ran, the interpreter writes the dict back into the frame, and what is not in it is deleted.
    """
    snapshot = frame.f_locals
    values = dict(snapshot)
    is_snapshot = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(snapshot) is dict
    if is_snapshot and sys.getrefcount(snapshot) == _REFERENCES_OF_OURS and not _is_traced(frame):
        snapshot.clear()
    return values


def _is_traced(frame: FrameType) -> bool:
    if sys.gettrace() is not None or frame.f_trace is not None:
        return True
    running = (inner for inner, _ in walk_stack(sys._getframe()))
    return any(inner.f_trace is not None or inner.f_globals.get("__name__") in _DEBUGGERS for inner in running)


def frames_of(exc: BaseException | None, cells: Mapping[str, int], namespace: Mapping[str, Any]) -> Iterator[Frame]:
    """Yield the frames that ``exc`` and what it is chained to went through, outermost first, each once.

    ``cells`` are the numbers of cells by the file names of their code, ``namespace`` the globals or a copy of them.
    """
    seen: set[int] = set()
    for link in chained(exc):
        caller = ""
        for step in steps_of(traceback_of(link)):
            frame, line = step.tb_frame, step.tb_lineno
            own = _line_of_program(frame, line, cells, namespace)
            caller = own or caller
            if id(frame) not in seen and not _is_of(home_of(frame), _MACHINERY):
                seen.add(id(frame))
                yield _read(frame, line, namespace, own, caller)


def lines_of(exc: BaseException | None, cells: Mapping[str, int], through: tuple[int, int]) -> list[tuple[int, int]]:
    """Return ``(cell, line)`` of the code of cells that an exception went through, outermost first.

    It is told by one of those places, ``through``, from others that it is chained to.
    """
    return [place for place, _ in _places(exc, cells, through)]


def _places(
    exc: BaseException | None, cells: Mapping[str, int], through: tuple[int, int]
) -> list[tuple[tuple[int, int], FrameType]]:
    """Return those of ``lines_of``, each with its frame."""
    for link in chained(exc):
        steps = [(cells.get(step.tb_frame.f_code.co_filename), step) for step in steps_of(traceback_of(link))]
        found = [((number, step.tb_lineno), step.tb_frame) for number, step in steps if number is not None]
        if through in (place for place, _ in found):
            return found
    return []


def standing_in(
    exc: BaseException | None, cells: Mapping[str, int], through: tuple[int, int]
) -> dict[tuple[int, int], Standing]:
    """Return where each function of ``lines_of`` stood."""
    found: dict[tuple[int, int], Standing] = {}
    for place, frame in _places(exc, cells, through):
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED:
            own = locals_of(frame)
            unbound = frozenset((*code.co_varnames, *code.co_cellvars)).difference(own)
            unbound &= found[place].unbound if place in found else unbound
            parts = plain_dict(own.get("self")) or {}
            held = {**own, **{f"self.{name}": value for name, value in parts.items()}, **_modules_of(parts)}
            found[place] = Standing(unbound, {name: own_names(value) for name, value in held.items()})
    return found


def own_names(value: Any) -> frozenset[str]:
    """Return the attributes of an object that are its own, or that a class of the user's defines."""
    classes = (one for one in mro_of(type(value)) if not is_installed(module_of(one)))
    names = chain(plain_dict(value) or (), *map(members_of, classes))
    return frozenset(name for name in names if type(name) is str)


def _modules_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modules that an object which is a module itself has, by their dotted names."""
    modules = parts.get("_modules")
    return {f"self.{name}": value for name, value in modules.items()} if type(modules) is dict else {}


def local_objects(
    exc: BaseException | None, cells: Mapping[str, int], kind: Kind, known: Iterable[tuple[str, Any]]
) -> list[tuple[str, Any, tuple[int, int]]]:
    """Return the modules or the optimizers of torch that only locals of functions lead to, outermost function first.

    ``known`` are those that names of the notebook lead to.

    Returns:
        ``(path, object, (cell, line))``: ``self.net`` for an attribute of an object; where the function begins.
    """
    seen = {id(part) for path, value in known for part in _with_parts(path, value)}
    found = []
    for step in (step for link in chained(exc) for step in steps_of(traceback_of(link))):
        code = step.tb_frame.f_code
        if (number := cells.get(code.co_filename)) is None or code.co_name == "<module>":
            continue
        own = locals_of(step.tb_frame)
        held = {f"self.{name}": value for name, value in (plain_dict(own.get("self")) or {}).items()}
        for path, value in [*own.items(), *held.items()]:
            if kind_of(type(value)) is kind and id(value) not in seen and path.replace(".", "").isidentifier():
                seen.update(map(id, _with_parts(path, value)))
                found.append((path, value, (number, code.co_firstlineno)))
    return found


def _with_parts(path: str, value: Any) -> list[Any]:
    """Return an object, and of a module all that are below it."""
    is_module = kind_of(type(value)) is Kind.MODULE
    return [part for _, part in submodules(value, path)] if is_module else [value]


def running_frames(cells: Mapping[str, int], namespace: Mapping[str, Any]) -> Iterator[Frame]:
    """Yield the frames of this thread that are running now, from where this package was called, outermost first.

    Those of other threads are left alone: they run on while they are read.
    """
    stack = [frame for frame, _ in walk_stack(sys._getframe(1))]
    # A frame of ours among those kept here would hold them all, and be held by them.
    stack = [frame for frame in reversed(stack) if not _is_of(home_of(frame), _MACHINERY)]
    # What started the program (a test runner, a launcher) holds nothing of it, and leads to a great deal.
    first = next((at for at, frame in enumerate(stack) if _is_program(frame, namespace)), 0)
    del stack[:first]
    caller = ""
    for frame in stack:
        own = _line_of_program(frame, frame.f_lineno, cells, namespace)
        caller = own or caller
        yield _read(frame, frame.f_lineno, namespace, own, caller)._replace(ends=True)


def line_of_cell(thread: int | None, globals_: Mapping[str, Any]) -> int | None:
    """Return the line that the cell on a thread stands at, the outermost of its own; None where it awaits."""
    innermost, found = sys._current_frames().get(thread or 0), None
    for frame, line in walk_stack(innermost) if innermost is not None else ():
        if frame.f_globals is globals_ and frame.f_code.co_name.startswith(_TOP_LEVEL):
            found = line
    return found


def in_backward_elsewhere() -> bool:
    """Return whether another thread is in a backward, which frees what graphs saved without holding the GIL."""
    running = sys._current_frames()
    del running[get_ident()]  # this frame itself, which would hold itself
    frames = (frame for innermost in running.values() for frame, _ in walk_stack(innermost))
    return any(frame.f_code.co_name == "_engine_run_backward" for frame in frames)


def holds_the_users(frame: FrameType) -> bool:
    """Return whether the locals of a frame are its own, and may hold what is the user's."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and not _is_of(home_of(frame), _MACHINERY)


def leads_nowhere(cls: type) -> bool:
    """Return whether objects of a class hold nothing of the user's but lead to a great deal."""
    return _is_of(module_of(cls), _LEADS_NOWHERE)


def _is_of(name: Any, packages: frozenset[str]) -> bool:
    return type(name) is str and name.partition(".")[0] in packages


def _read(frame: FrameType, line: int, namespace: Mapping[str, Any], own: str, caller: str) -> Frame:
    code = frame.f_code
    file = f"{code.co_filename.rsplit('/', 1)[-1]} line {line}"
    at_top = not code.co_flags & inspect.CO_OPTIMIZED
    return Frame(
        values={} if at_top else locals_of(frame),
        place=f"{code.co_name}, called at {caller}" if caller and not own else f"{code.co_name} at {own or file}",
        code_names=frozenset(code.co_names) if at_top else frozenset(),
        is_program=_is_program(frame, namespace),
    )


def _line_of_program(frame: FrameType, line: int, cells: Mapping[str, int], namespace: Mapping[str, Any]) -> str:
    """Return where code of the program or of a file of the user's stands, ``In[5] line 3``; empty for a library's."""
    file = frame.f_code.co_filename
    number = cells.get(file)
    if number is not None and number >= 0:
        return f"In[{number}] line {line}"
    is_file = is_users_file(file) and not file.startswith("<")
    is_own = number is not None or is_file or _is_program(frame, namespace)
    return f"{file.rsplit('/', 1)[-1]} line {line}" if is_own else ""


def _is_program(frame: FrameType, namespace: Mapping[str, Any]) -> bool:
    home = namespace.get("__name__")
    return frame.f_globals is namespace or (type(home) is str and home_of(frame) == home)


def home_of(frame: FrameType) -> str:
    """Return the name of the module that the code of a frame is of, nothing where it has none."""
    name = spelled(frame.f_globals).get("__name__")
    return name if type(name) is str else ""


def earlier_errors(exc: BaseException | None, filenames: Container[str]) -> tuple[BaseException, ...]:
    """Return the errors of before that went through a cell and are alive, that last shown first.

    The interpreter keeps the last one that was shown. When the next is shown, the old one is let go of and yet not
    freed: the frame of IPython that ran the cell holds the result of the run, and that the error, so that only the
    garbage collector finds it. Errors that the program kept (``except Exception as e: saved = e``) are alive as well,
    and no name leads from them to their frames. So at a failure, ``exc``, all that the collector knows are looked
    through; without one, only what was last shown is looked at.
    """
    own = {id(link) for link in chained(exc)}
    found: dict[int, BaseException] = {}
    last: Any = getattr(sys, "last_value", None)
    if issubclass(type(last), BaseException) and id(last) not in own:
        found[id(last)] = last
    for error in alive(BaseException) if exc is not None else ():
        if id(error) not in own and any(
            step.tb_frame.f_code.co_filename in filenames for step in steps_of(traceback_of(error))
        ):
            found.setdefault(id(error), error)
    return tuple(found.values())
