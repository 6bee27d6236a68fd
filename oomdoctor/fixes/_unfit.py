"""What stops the writing of a change: raised where it is found, and returned as ``Refused`` to whoever asked for it.

A reader of code goes some calls deep before it finds that a change cannot be written. ``Unfit`` never leaves the fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Proposal
from oomdoctor.model.incident import Incident

Found = TypeVar("Found")
Given = ParamSpec("Given")


class Unfit(Exception):
    """The change cannot be made so that it is right; the text says why, for the user."""


def need(found: Found | Refused | None, why: str = "") -> Found:
    """Return what was found.

    Raises:
        Unfit: it was refused, or is not there, which ``why`` tells.
    """
    if isinstance(found, Refused):
        raise Unfit(found.reason)
    if found is None:
        raise Unfit(why)
    return found


def refusing(write: Callable[Given, Found]) -> Callable[Given, Found | Refused]:
    """Return ``write``, which returns a refusal where it raises ``Unfit``."""

    @wraps(write)
    def asked(*args: Given.args, **kwargs: Given.kwargs) -> Found | Refused:
        try:
            return write(*args, **kwargs)
        except Unfit as why:
            return Refused(str(why))

    return asked


def proposing(
    propose: Callable[[Incident, Evidence], Iterable[Proposal]],
) -> Callable[[Incident, Evidence], tuple[Proposal, ...] | Refused]:
    """Return what gives the proposals that ``propose`` yields, or a refusal where it raises ``Unfit``."""

    @wraps(propose)
    def asked(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
        try:
            return tuple(propose(incident, evidence))
        except Unfit as why:
            return Refused(str(why))

    return asked
