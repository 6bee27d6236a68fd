"""What an exception carries of a failure that happened in another process.

    ipyparallel             ``ename``, ``evalue`` and ``traceback`` as strings, a ``CompositeError`` many in ``elist``
    Ray                     ``traceback_str``, and the exception itself in ``cause``, which is not ``__cause__``
    DataLoader              the same class with the worker's traceback in its message, or a RuntimeError with it
    torch.multiprocessing   ``ProcessRaisedException`` with the traceback in its message
    concurrent.futures, multiprocessing, joblib   a ``RemoteTraceback`` as the cause

Attributes are read past the code of their classes: those of Ray look up what they lack in the carried exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import getattr_static
from typing import Any, Final

_MOST: Final = 20_000
_ERRORS: Final = 100
"""Errors of a composite that are read; a cluster has one for each engine."""
_CARRIERS: Final = frozenset(
    {
        "RemoteError",
        "CompositeError",
        "RayTaskError",
        "RayActorError",
        "ActorDiedError",
        "ProcessRaisedException",
        "RemoteTraceback",
        "_RemoteTraceback",
        "ChildFailedError",
        "CellExecutionError",
    }
)
"""Classes that stand for a failure elsewhere; the failure's own class is in what they carry."""


def own(exc: BaseException, name: str) -> Any:
    """Return an attribute from the instance's dictionary or its classes, without running any of their code."""
    attributes = BaseException.__dict__["__dict__"].__get__(exc)
    return attributes[name] if name in attributes else getattr_static(type(exc), name, None)


def is_carrier(name: str) -> bool:
    """Whether a class of this name only reports what another process raised."""
    return name.rpartition(".")[2].partition("(")[0] in _CARRIERS or "RayTaskError(" in name


def carried_texts(exc: BaseException) -> list[str]:
    """Return what ``exc`` carries as strings: each traceback, and below it the class and the message."""
    texts = _error(own(exc, "ename"), own(exc, "evalue"), own(exc, "traceback"))
    members = own(exc, "elist")
    for member in members[:_ERRORS] if type(members) in (list, tuple) else ():
        if type(member) in (list, tuple) and len(member) >= 2:
            texts += _error(*_three(member))
    written = own(exc, "traceback_str")
    if type(written) is str:
        texts.append(written[-_MOST:])
    return texts


def carried_exception(exc: BaseException) -> BaseException | None:
    """Return the exception that ``exc`` has as its ``cause``, as Ray's errors do."""
    cause = own(exc, "cause")
    return cause if issubclass(type(cause), BaseException) else None


def _three(member: Sequence[Any]) -> tuple[Any, Any, Any]:
    return member[0], member[1], member[2] if len(member) > 2 else None


def _error(name: Any, value: Any, traceback: Any) -> list[str]:
    if type(name) is not str or type(value) is not str:
        return []
    above = [traceback[-_MOST:]] if type(traceback) is str else []
    return [*above, f"{name}: {value}"[:_MOST]]
