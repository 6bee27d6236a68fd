"""What is offered to the ranks, how each votes on it, and the decision: a pure function of all votes.

The rank that ran out of memory first leads: it offers one change in its doses, mildest first, as texts. Every rank
forecasts them for itself and votes for the mildest that fits. The strongest of these is taken, so that it fits all;
where one rank refuses, none makes the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from oomdoctor.model.fix import Dose, Edit, Effect, Patch
from oomdoctor.model.unavailable import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedDose:
    """One dose of the change that is offered, and the source with it."""

    label: str
    dose: Dose
    patch: Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One change, in its doses that are likely to fit the rank that leads, mildest first.

    Attributes:
        fix: its id, of two both; ``made_of``: the ids of those that it is made of, each with its dose by its place.
        checked: what a trial of it has shown.
        why: where nothing is offered any more, why not.
    """

    fix: str = ""
    title: str = ""
    effect: Effect = Effect.EXACT
    made_of: tuple[str, ...] = ()
    doses: tuple[OfferedDose, ...] = ()
    checked: str = ""
    why: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return it as what JSON knows."""
        return asdict(self)

    @classmethod
    def from_plain(cls, told: dict[str, Any]) -> Offer:
        """Return the offer that another rank has made."""
        doses = tuple(
            OfferedDose(
                label=one["label"],
                dose=Dose(tuple((name, value) for name, value in one["dose"]["values"])),
                patch=Patch(edits=tuple(map(Edit.from_plain, one["patch"]["edits"]))),
            )
            for one in told["doses"]
        )
        known = {"effect": Effect(told["effect"]), "made_of": tuple(told["made_of"]), "doses": doses}
        return cls(**{**told, **known})


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one rank says of an offer.

    Attributes:
        least: place of the mildest dose that fits by its forecast; None where none does.
        why: why none does, or why it has no forecast.
    """

    rank: int
    least: int | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """In what condition a rank is before anything is changed.

    Attributes:
        program: digest of its program: a change is one of the same text on all ranks.
        losses: what it did that cannot be taken back, a sentence each.
        unfit: ids of the fixes that found themselves unfit for its program.
        stuck: why it cannot go on, so that only a restart helps; empty where it can.
    """

    rank: int
    program: str
    stuck: str = ""
    losses: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


def digest(texts: Sequence[str]) -> str:
    """Return what tells one program from another."""
    return sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


def objection(conditions: Sequence[Condition]) -> str | None:
    """Return why no change is made on any rank, None where nothing stands against it."""
    for one in conditions:
        if one.stuck:
            return f"rank {one.rank}: {one.stuck}; only a restart helps"
    for one in conditions:
        if one.losses:
            return f"rank {one.rank}: {'; '.join(one.losses)}"
    for one in conditions:
        if one.program != conditions[0].program:
            return f"rank {one.rank} runs another program than rank {conditions[0].rank}"
    return None


def decide(votes: Sequence[Vote]) -> int | Refused:
    """Return the place of the dose that all ranks make, or why none does: the same from the same votes."""
    against = [one for one in votes if one.least is None]
    if against:
        return Refused("; ".join(f"rank {one.rank}: {one.why}" for one in against))
    return max(one.least for one in votes if one.least is not None)
