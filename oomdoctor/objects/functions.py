"""What a function is beside its attributes and its closure: its code and the defaults of its parameters."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any, NamedTuple

from oomdoctor.objects.recipes import GONE, living, revive

__all__ = ["Written", "is_bare", "restore_function"]


class Written(NamedTuple):
    """A function as it was written.

    Attributes:
        held: the function. defaults, by_name: its ``__defaults__`` and ``__kwdefaults__``, held.
    """

    held: Any
    code: CodeType
    defaults: Any
    by_name: Any


def is_bare(function: FunctionType, namespace: dict[str, Any]) -> bool:
    """Return whether a function is of the namespace and holds nothing else."""
    has_defaults = function.__defaults__ is not None or function.__kwdefaults__ is not None
    is_empty = function.__closure__ is None and not has_defaults and not function.__dict__
    return is_empty and function.__globals__ is namespace


def restore_function(written: Written, memo: dict[int, Any]) -> None:
    """Give a function its code and its defaults again."""
    function = living(written.held)
    if function is GONE:
        return
    if function.__code__ is not written.code:
        function.__code__ = written.code
    for name, held in (("__defaults__", written.defaults), ("__kwdefaults__", written.by_name)):
        now = getattr(function, name)
        before = revive(held, now, memo)
        if before is not now and before is not GONE:
            setattr(function, name, before)
