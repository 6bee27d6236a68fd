"""What the census met under the names that the cells use: tensors, and containers of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.memory import Holding

_PATH: Final = re.compile(r"(local `)?(?P<path>(?P<name>[^\W\d]\w*)[^`→]*)(` of [^→]*)?")
"""A path of the census that leads to a tensor itself, and not to what its graph holds."""


def root(held: Holding) -> str | None:
    """Return the name that a holding is found from, None where it is found from none."""
    found = _PATH.match(held.path)
    return None if found is None else found["name"]


def containers(evidence: Evidence) -> frozenset[str]:
    """Return the names that were met as containers of tensors, ``xs`` where ``xs[0:4]`` was, and as no tensor."""
    met = list(_met(evidence))
    return frozenset({name for name, path in met if path.startswith(f"{name}[")} - {path for _, path in met})


def _met(evidence: Evidence) -> list[tuple[str, str]]:
    """Return name and expression of each tensor."""
    every = [held for census in evidence.censuses for held in census.holdings if held.dtype]
    found = [_PATH.fullmatch(held.path) for held in every]
    return [(one["name"], one["path"].replace('"', "'").strip()) for one in found if one is not None]
