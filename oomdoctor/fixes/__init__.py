"""The fixes: one module each, found by listing this folder.

A module whose name does not begin with an underscore ends in ``FIX: Final = Fix(...)`` and its stem is the fix's id.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from oomdoctor.errors import UsageError
from oomdoctor.model.fix import Detect, Fix

__all__ = ["catalogue", "detectors", "get", "ids"]


def ids() -> tuple[str, ...]:
    """Return the ids of all fixes, sorted, importing none of them."""
    return tuple(sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")))


def get(fix_id: str) -> Fix:
    """Return one fix.

    Raises:
        UsageError: there is no fix of that id.
    """
    try:
        return catalogue()[fix_id]
    except KeyError:
        raise UsageError(f"there is no fix {fix_id!r}: there are {', '.join(ids())}") from None


@cache
def catalogue() -> dict[str, Fix]:
    """Return every fix by its id."""
    return {fix_id: import_module(f"{__name__}.{fix_id}").FIX for fix_id in ids()}


def detectors() -> dict[str, Detect]:
    """Return what finds the practice that a fix mends, by the id of the fix."""
    return {fix_id: fix.detect for fix_id, fix in catalogue().items() if fix.detect is not None}
