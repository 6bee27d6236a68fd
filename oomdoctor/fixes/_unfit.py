"""What stops the writing of a change: raised where it is found, and returned as ``Refused`` to whoever asked for it.

A reader of code goes some calls deep before it finds that a change cannot be written. ``Unfit`` never leaves the fixes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from oomdoctor.model.absence import Refused

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
