"""Reads a failure out of an exception: which of a chain ran out of memory, and which line of the user's it was.

Torch is asked nothing where it was not imported already. Exceptions are the user's objects: they are read past their
own ``__getattr__``, and the one piece of their code that runs is ``__str__``, behind a guard. No frame leaves this
module, as it would keep the tensors alive that are to be freed.

What failed in another process is carried as an exception or as text:

    ipyparallel             ``ename``, ``evalue`` and ``traceback`` as strings, a ``CompositeError`` many in ``elist``
    Ray                     ``traceback_str``, and the exception itself in ``cause``, which is not ``__cause__``
    DataLoader              the same class with the worker's traceback in its message, or a RuntimeError with it
    torch.multiprocessing   ``ProcessRaisedException`` with the traceback in its message
    concurrent.futures, multiprocessing, joblib   a ``RemoteTraceback`` as the cause

An error of oneDNN does not say whether memory was wanting: the system is asked, the first time that it is looked at.

Limits: an exception that was raised while another was being handled is taken to be a consequence of it.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import getattr_static
from pathlib import Path, PurePath
from typing import Any, Final

from oomdoctor.errors import HostMemoryPressure
from oomdoctor.incident.clean import clean
from oomdoctor.incident.scan import find, ranked, same
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.objects.frames import steps_of, traceback_of
from oomdoctor.objects.kinds import module_of, qualname_of
from oomdoctor.sandbox.primitives import assemblers_error, is_short_of_memory

_CHAIN: Final = 1_000
"""Exceptions of one chain that are looked at; a retry loop without an end makes long ones."""
_TEXT: Final = 20_000
_BRIEF: Final = 300
_ALTOGETHER: Final = 5 * _TEXT
"""Characters of the messages of a chain that are read whole."""
_NOTES: Final = 20
_FRAMES: Final = 4
"""Innermost frames that are shown to the message table: some wordings mean a thing only below ``pin_memory``."""
_GROUP: Final = BaseExceptionGroup.__dict__["exceptions"]
_OWN_FILES: Final = str(Path(__file__).parents[1] / "allocator")
_LIBRARY: Final = re.compile(r"(?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|\\Lib\\|^<frozen ")
_PACKAGES: Final = re.compile(r"(?:site|dist)-packages[/\\]")
_STOPS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)


def find_oom(exc: BaseException) -> BaseException | None:
    """Return the exception that ran out of memory: ``exc`` or one that led to it, the root; None if there is none.

    Never raises. An interrupt is none, whatever it interrupted.
    """
    found = _root(exc)
    return None if found is None else found[0][0]


def from_exception(exc: BaseException, cells: Mapping[str, int]) -> Incident:
    """Return what ``exc`` was.

    Args:
        cells: execution numbers by the file names that the cells' code objects carry.

    The cell line and the inner line are the outermost and the innermost frame that stand in a cell, in the root failure
    or, where that was caught before it reached the cell, in the nearest of the exceptions that it led to.
    """
    found = _root(exc)
    path, incident = found if found is not None else ([exc], _understood(exc, _text(exc, _TEXT)))
    return _placed(path, incident, cells)


def all_from_exception(exc: BaseException) -> tuple[Incident, ...]:
    """Return what ``exc`` was, the root first, and the other, distinct failures for want of memory that it holds.

    What is a cell is not known here: the lines are those of any file that no library brought.
    """
    found: dict[Incident, Incident] = {}
    for path, incident in () if issubclass(type(exc), _STOPS) else _readings(exc):
        if incident.is_oom and not any(same(one, incident) for one in found):
            found[incident] = _placed(path, incident, None)
    return tuple(found.values()) or (_placed([exc], _understood(exc, _text(exc, _TEXT)), None),)


def _placed(path: list[BaseException], incident: Incident, cells: Mapping[str, int] | None) -> Incident:
    """Return ``incident`` with its class, its message and its place, by the exceptions that it led to."""
    root = path[0]
    name = _class_name(type(root))
    cell, inner = next((lines for one in path if (lines := _cell_lines(one, cells))[0] is not None), (None, None))
    return replace(
        incident,
        exc_type=incident.exc_type if _is_carrier(name) and incident.exc_type else name,
        message=_words(root)[:_TEXT],
        cell=cell or incident.cell,
        inner=inner if cell else incident.inner,
        framework_frame=_innermost(root) or incident.framework_frame,
    )


def _root(exc: BaseException) -> tuple[list[BaseException], Incident] | None:
    """Return the earliest failure for want of memory with those that it led to, up to ``exc``, and what it says."""
    if issubclass(type(exc), _STOPS):
        return None
    return next((reading for reading in _readings(exc) if reading[1].is_oom), None)


def _readings(exc: BaseException) -> Iterator[tuple[list[BaseException], Incident]]:
    """Yield what each exception of the chain says, the earliest first, with those that it led to.

    Of a chain with much to say, the later ones are read by the beginning of their messages alone.
    """
    left = _ALTOGETHER
    for path in _earliest_first(exc):
        text = _text(path[0], _TEXT if left > 0 else _BRIEF)
        left -= len(text)
        yield path, _understood(path[0], text)


def _earliest_first(exc: BaseException) -> Iterator[list[BaseException]]:
    """Yield each exception that ``exc`` comes from, then itself, each with what it led to; no exception twice."""
    seen = {id(exc)}
    stack = [(exc, iter(_origins(exc)))]
    while stack:
        current, origins = stack[-1]
        for origin in origins:
            if id(origin) not in seen and len(seen) < _CHAIN:
                seen.add(id(origin))
                stack.append((origin, iter(_origins(origin))))
                break
        else:
            yield [one for one, _ in reversed(stack)]
            stack.pop()
            del current


def _origins(exc: BaseException) -> tuple[BaseException, ...]:
    """Return the cause, the context, the members of a group and what is carried, read past overridden attributes."""
    chained = [BaseException.__dict__[name].__get__(exc) for name in ("__cause__", "__context__")]
    members = _GROUP.__get__(exc) if issubclass(type(exc), BaseExceptionGroup) else ()
    every = (*chained, *members, _own(exc, "cause"))
    return tuple(one for one in every if issubclass(type(one), BaseException))


def _text(exc: BaseException, most: int) -> str:
    """Return what one exception says of itself, its notes and its remote origin included: ``most`` of each."""
    name = _class_name(type(exc))
    words = _words(exc)[:most]
    said = words if _is_carrier(name) else f"{name}: {words}".rstrip(": ")
    carried = [text[-most:] for text in _carried_texts(exc)]
    notes = _own(exc, "__notes__")
    told = [note[:most] for note in notes if type(note) is str][:_NOTES] if type(notes) is list else []
    frames = [f"in {function} ({PurePath(filename).name})" for filename, _, function in list(_steps(exc))[-_FRAMES:]]
    return "\n".join([*frames, *carried, said, *told])


def _understood(exc: BaseException, text: str) -> Incident:
    if issubclass(type(exc), HostMemoryPressure):  # an exception may raise whatever it is asked for
        return _of_guard(exc)
    lines = clean(text)
    found = ranked(find(lines), lines)
    if found and found[0].is_oom:
        return found[0]
    if is_short_of_memory(exc):
        can_tell = assemblers_error() is not None
        is_stuck = not can_tell and "create a primitive" in text and "primitive descriptor" not in text
        called = "onednn_create" if is_stuck else "onednn"  # no row has it: text does not tell that memory was wanting
        return Incident(is_oom=True, family=Family.HOST, format=called, device="cpu")
    known = _known_class(type(exc))
    if known is not None:
        return Incident(is_oom=True, family=known, device="cpu" if known is Family.HOST else None)
    return found[0] if found else Incident(is_oom=False, family=Family.NOT_OOM)


def _of_guard(exc: BaseException) -> Incident:
    """Return what the host guard has raised, with the figures that it carries."""
    used, limit, requested = (_size(_own(exc, name)) for name in ("used", "limit", "requested"))
    free = None if used is None or limit is None else max(limit - used, 0)
    told = Incident(is_oom=True, family=Family.HOST, format="guard", device="cpu")
    return replace(told, requested=requested, total=limit, free=free)


def _size(value: Any) -> int | None:
    return value if type(value) is int else None


def _known_class(kind: type[BaseException]) -> Family | None:
    """Return the family that the class alone tells of."""
    if issubclass(kind, MemoryError):
        return Family.HOST
    torch: Any = sys.modules.get("torch")
    out_of_memory = getattr_static(torch, "OutOfMemoryError", None) if torch is not None else None
    if isinstance(out_of_memory, type) and issubclass(kind, out_of_memory):
        return Family.CUDA
    return None


def _class_name(kind: type[BaseException]) -> str:
    module = module_of(kind)
    name = qualname_of(kind)
    return name if module in ("builtins", "__main__") or not isinstance(module, str) else f"{module}.{name}"


def _words(exc: BaseException) -> str:
    """Return the message of ``exc``, or nothing where its own code fails to tell it."""
    try:
        words = str(exc)
        # KeyError shows its argument as its repr, and that of torch's loaders is a subclass of str.
        return str.__str__(words)[:_TEXT] if issubclass(type(words), str) else ""
    except BaseException:  # noqa: BLE001  the user's code: whatever it raises must not hide the failure
        return ""


def _steps(exc: BaseException) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of the traceback, outermost first; those of the virtual accelerator are ours."""
    for step in steps_of(traceback_of(exc)):
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(_OWN_FILES):
            # What IPython 7.34 and 8 call the code of a cell itself.
            name = "<module>" if code.co_name.startswith("<cell line:") else code.co_name
            yield code.co_filename, step.tb_lineno, name


def _cell_lines(exc: BaseException, cells: Mapping[str, int] | None) -> tuple[CellLine | None, CellLine | None]:
    """Return the outermost line in a cell and, where it is another one, the innermost; of any script without cells."""
    inside = [place for place in _steps(exc) if (place[0] in cells if cells is not None else _is_script(place))]
    if not inside:
        return None, None
    inner = _cell_line(inside[-1], cells) if inside[-1] != inside[0] else None
    return _cell_line(inside[0], cells), inner


def _is_script(place: tuple[str, int, str]) -> bool:
    """Whether the line is there to be read, in a file that neither a library nor Python brought."""
    filename, line, _ = place
    return _LIBRARY.search(filename) is None and bool(linecache.getline(filename, line).strip())


def _cell_line(place: tuple[str, int, str], cells: Mapping[str, int] | None) -> CellLine:
    filename, line, function = place
    source = linecache.getline(filename, line).strip()
    number = cells[filename] if cells is not None else None
    return CellLine(number=number, line=line, source_line=source, function=function)


def _innermost(exc: BaseException) -> str | None:
    """Return the innermost frame, ``file:line function``; a library's file from its package on."""
    for filename, line, function in list(_steps(exc))[-1:]:
        return f"{_PACKAGES.split(filename)[-1]}:{line} {function}"
    return None


_ERRORS: Final = 100
"""Errors of a composite that are read; a cluster has one for each engine."""
_CARRIERS: Final = frozenset(
    {"RemoteError", "CompositeError", "RayTaskError", "RayActorError", "ActorDiedError", "ProcessRaisedException"}
    | {"RemoteTraceback", "_RemoteTraceback", "ChildFailedError", "CellExecutionError"}
)
"""Classes that stand for a failure elsewhere; the failure's own class is in what they carry."""


def _own(exc: BaseException, name: str) -> Any:
    """Return an attribute from the instance's dictionary or its classes, without running any of their code."""
    attributes = BaseException.__dict__["__dict__"].__get__(exc)
    return attributes[name] if name in attributes else getattr_static(type(exc), name, None)


def _is_carrier(name: str) -> bool:
    """Whether a class of this name only reports what another process raised."""
    return name.rpartition(".")[2].partition("(")[0] in _CARRIERS or "RayTaskError(" in name


def _carried_texts(exc: BaseException) -> list[str]:
    """Return what ``exc`` carries as strings: each traceback, and below it the class and the message."""
    texts = _error(_own(exc, "ename"), _own(exc, "evalue"), _own(exc, "traceback"))
    members = _own(exc, "elist")
    for member in members[:_ERRORS] if type(members) in (list, tuple) else ():
        if type(member) in (list, tuple) and len(member) >= 2:
            texts += _error(member[0], member[1], member[2] if len(member) > 2 else None)
    written = _own(exc, "traceback_str")
    if type(written) is str:
        texts.append(written[-_TEXT:])
    return texts


def _error(name: Any, value: Any, traceback: Any) -> list[str]:
    if type(name) is not str or type(value) is not str:
        return []
    above = [traceback[-_TEXT:]] if type(traceback) is str else []
    return [*above, f"{name}: {value}"[:_TEXT]]
