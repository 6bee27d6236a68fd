"""How a fix proposes and refuses: what is needed, and why none is proposed or written.

A reader of code goes some calls deep before it finds that a change cannot be written. ``Unfit`` never leaves the fixes:
it is raised where that is found, and returned as ``Refused`` to whoever asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from oomdoctor.model import Dose, Effect, Evidence, Incident, Proposal, Refused, Role, Site
from oomdoctor.model.sizes import format_size

PARTS: Final = (2, 4, 8, 16, 32)
"""Into how many a batch is taken apart, mildest first."""
OVERHEAD: Final = 0.02
"""Time lost per part to launching the same kernels again, as a share of a step. A round figure, not measured."""
FORWARD_SHARE: Final = 1 / 3
"""A forward's share of a step: the backward pass costs about two. Source: Korthikanti et al., arXiv:2205.05198, 4.3."""

Found = TypeVar("Found")
Given = ParamSpec("Given")


class Unfit(Exception):
    """The change cannot be made so that it is right; the text says why, for the user."""


def need(found: Found | Refused | None, why: str = "") -> Found:
    """Return what was found; raise ``Unfit`` where it was refused, or is nothing: None, no bytes, none of several."""
    if isinstance(found, Refused):
        raise Unfit(found.reason)
    if not found:
        raise Unfit(why)
    return found


def refused(why: str) -> Callable[..., Refused]:
    """Return a ``patch`` for what the source cannot carry."""
    return lambda cells, evidence, dose: Refused(why)


def check(why: str | None) -> None:
    """Raise ``Unfit`` where there is a reason."""
    if why is not None:
        raise Unfit(why)


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

    @refusing
    @wraps(propose)
    def asked(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...]:
        return tuple(propose(incident, evidence))

    return asked


def fitting(counts: Sequence[int], evidence: Evidence) -> list[int]:
    """Return those of ``counts`` that the largest batch found has samples for, all where no batch was found."""
    rows = [held.shape[0] for held in evidence.census.holdings if held.role is Role.BATCH and held.shape]
    found = [count for count in counts if count <= max(rows, default=count)]
    return need(found, "the batch has one sample: there is nothing to split")


def in_parts_of(
    counts: Iterable[int],
    name: str,
    size: int,
    what: str,
    *,
    effect: Effect = Effect.EQUIVALENT,
    slowdown: float = 1.0,
    each: float = 0.0,
    caveat: str | None = None,
    through: str | None = None,
) -> Iterator[Proposal]:
    """Propose to have ``size`` bytes of ``what`` in so many parts, one at a time; the dose calls them ``name``.

    Args:
        slowdown: time with it over time without it; ``each``: what each part adds to that.
        through: the library through whose settings it is made.
    """
    more = {} if through is None else {"through": through}
    for parts in counts:
        yield Proposal(
            dose=Dose.of(**{name: parts}, **more),
            effect=effect,
            saves=size * (parts - 1) // parts,
            slowdown=slowdown + each * parts,
            basis=f"estimate: 1/{parts} of {format_size(size)} of {what} at a time",
            caveat=caveat,
        )


def sites_of(evidence: Evidence, fix: str, why: str) -> tuple[Site, ...]:
    """Return what was found that a fix mends, at least one; ``why`` is said where there is none."""
    return need(evidence.code.sites.get(fix), why)


def listed(names: Iterable[str], word: str = "and") -> str:
    """Return names in words: `a`, `b` and `c`."""
    *some, last = (f"`{name}`" for name in names)
    return f"{', '.join(some)} {word} {last}" if some else last


def root_of(path: str) -> str:
    """Return the name that an expression begins with, empty where it begins with something else."""
    return re.split(r"\W", path, maxsplit=1)[0]
