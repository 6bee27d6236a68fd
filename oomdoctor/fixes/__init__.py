"""The fixes, found by listing this folder: one module each, or one for several settings of the same object.

A module whose name does not begin with an underscore ends in ``FIX: Final = Fix(...)``, or in ``FIXES`` with several.
Ids and titles are read from the text of the modules: to import them takes longer than all that needs those alone.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

from oomdoctor.errors import UsageError
from oomdoctor.model.fix import Detect, Fix

__all__ = ["catalogue", "detectors", "get", "home", "ids", "title"]

_MADE: Final = re.compile(r'\bFix\(\s*id="(\w+)",\s*title="([^"]+)"')


@cache
def _listed() -> dict[str, tuple[str, str]]:
    """Return the module and the title of each fix, by its id."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in Path(__path__[0]).glob("[!_]*.py")}
    found = {fix_id: (stem, title) for stem, text in texts.items() for fix_id, title in _MADE.findall(text)}
    return dict(sorted(found.items()))


def ids() -> tuple[str, ...]:
    """Return the ids of all fixes, sorted, importing none of them."""
    return tuple(_listed())


def title(fix_id: str) -> str:
    """Return the title of a fix without importing it, the id where there is no such fix."""
    return _listed().get(fix_id, ("", fix_id))[1]


def home(fix_id: str) -> str:
    """Return the qualified name of the module that a fix stands in."""
    return f"{__name__}.{_listed()[fix_id][0]}"


@cache
def _of_module(name: str) -> dict[str, Fix]:
    module = import_module(name)
    return {fix.id: fix for fix in getattr(module, "FIXES", None) or (module.FIX,)}


def get(fix_id: str) -> Fix:
    """Return one fix.

    Raises:
        UsageError: there is no fix of that id.
    """
    if fix_id not in _listed():
        raise UsageError(f"unknown fix {fix_id!r}. Available: {', '.join(ids())}")
    return _of_module(home(fix_id))[fix_id]


@cache
def catalogue() -> dict[str, Fix]:
    """Return every fix by its id."""
    return {fix_id: get(fix_id) for fix_id in ids()}


def detectors() -> dict[str, Detect]:
    """Return what finds the practice that a fix mends, by the id of the fix."""
    return {fix_id: fix.detect for fix_id, fix in catalogue().items() if fix.detect is not None}
