"""What the code shows, by all detectors that the fixes bring."""

from __future__ import annotations

from typing import Any

from oomdoctor import fixes
from oomdoctor.evidence import code
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.site import Site


def facts(*given: Any, **terms: Any) -> CodeFacts:
    return code.facts(*given, **{"detectors": fixes.detectors(), **terms})


def site(text: str, kind: str = "", *names: str) -> Site:
    """Return the site that ``text`` says: ``In[2] line 4: torch.load(path)``."""
    where, _, source = text.partition(": ")
    cell, _, line = where.rpartition("line ")
    number = int(cell.strip().removeprefix("In[").removesuffix("]") or 0)
    return Site(kind=kind, cell=number, line=int(line), end_line=int(line), text=source, names=names)
