"""What can be changed: fixes, their doses and patches, and what they cost."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from oomdoctor.model.session import shown_path

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.memory import Role
    from oomdoctor.model.session import Cells, Session
    from oomdoctor.model.site import Site
    from oomdoctor.model.unavailable import Refused

Value: TypeAlias = int | float | str | bool
Detect: TypeAlias = "Callable[[Any, Any], tuple[Site, ...]]"
"""Finds the sites of one practice in ``program.definitions.Program`` and ``objects.known.Objects``. Pure."""


class Effect(StrEnum):
    """What a fix does to the results; a promise that a test proves for each fix."""

    EXACT = "exact"
    """Bit-identical results."""
    EQUIVALENT = "equivalent"
    """Equal up to rounding; the fix states the tolerance."""
    CHANGES_RESULT = "changes_result"
    """Other results, applied only when the user asks for it."""
    ADVICE = "advice"
    """Shown, never applied."""

    @property
    def keeps_results(self) -> bool:
        """Whether the results stay what they were, up to rounding."""
        return self in (Effect.EXACT, Effect.EQUIVALENT)


@dataclass(frozen=True, slots=True)
class Dose:
    """How strong: ``Dose.of(chunks=4)``."""

    values: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, **values: Value) -> Dose:
        """Make a dose of named values."""
        return cls(tuple(values.items()))

    def __or__(self, other: Dose) -> Dose:
        """Return the dose with what ``other`` adds."""
        return Dose((*self.values, *other.values))

    def __getitem__(self, name: str) -> Value:
        return dict(self.values)[name]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values)

    @property
    def short(self) -> str:
        """The dose with lists counted: ``modules=6 parts``."""
        counts = ((name, len(str(value).split(", ")), value) for name, value in self.values)
        return ", ".join(f"{name}={value if count == 1 else f'{count} parts'}" for name, count, value in counts)

    def number(self, name: str) -> int:
        """Return the whole number called ``name``."""
        return int(self[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A dose worth pricing.

    Attributes:
        effect: what this dose does to these models' results; a fix may promise less for some models than for others.
        saves: estimate of the bytes that it takes off the peak, from the census; ``basis`` says how.
        slowdown: estimate of time with it over time without it.
        crosses: tensors go to the host and back, of whose way no forecast knows: it takes ``slowdown`` at least.
        caveat: what the user should know before taking it.
    """

    effect: Effect
    saves: int
    basis: str
    dose: Dose = Dose()
    slowdown: float = 1.0
    crosses: bool = False
    caveat: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one cell, or of a module of the user's own.

    Attributes:
        replay: what to run so that the live namespace becomes as if the changed cell had run: the whole text for
            the failing cell, the redefined function for an earlier one. Of a module, whose functions take the place of
            those that are loaded, what to do to objects besides, mostly nothing.
        file: the path that the module was loaded from, None for a cell.
        anew: names of the objects that the replay of an earlier cell makes anew.
    """

    cell: int
    before: str
    after: str
    replay: str
    file: str | None = None
    anew: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, told: Mapping[str, Any]) -> Edit:
        """Return the edit whose fields came as JSON."""
        return cls(**{**told, "anew": tuple(told.get("anew", ()))})

    @property
    def is_whole(self) -> bool:
        """Whether all of the changed text runs, so that another change can be written into it."""
        return not self.replay if self.file is not None else self.replay == self.after

    @property
    def name(self) -> str:
        """What it is a change of: ``In[3]``, ``train.py``."""
        return f"In[{self.cell}]" if self.file is None else shown_path(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A change of the user's source, over one or more cells; the failing cell's edit, if any, comes last."""

    edits: tuple[Edit, ...]

    def diff(self, name: str | None = None) -> str:
        """Return the change as one unified diff, a file per cell; of a script, ``name`` is the file."""
        return "".join(line for edit in self.edits for line in _unified(edit, name))


def _unified(edit: Edit, name: str | None) -> list[str]:
    name = edit.name if name is None or edit.file is not None else name
    before, after = (text.removesuffix("\n").splitlines() for text in (edit.before, edit.after))
    return [line + "\n" for line in difflib.unified_diff(before, after, name, f"{name} fixed", lineterm="")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One way to need less memory. Each lives in a module of its own, whose stem is the ``id``.

    Attributes:
        effect: the strongest promise; a proposal may weaken it for a model at hand.
        tolerance: for proposals that are EQUIVALENT, the largest difference of losses and gradients of a step, as a
            share of the largest of them, that its test allows.
        cost: what it costs, in a few words.
        propose: the doses worth pricing, mildest first, or why there is none. Pure.
        apply: changes the live objects for as long as the context lasts, and undoes it on exit.
        patch: the same change in the user's source, or why it cannot be written there. Pure.
        guard: watches the live objects while the patched source runs; raises ``OomDoctorError`` where they show that
            the change would not keep its promise.
        asks: whether it is made only where the user asks for it by its name or number, never by an automatic retry.
        detect: finds where the practice that it mends stands; what it found is ``code.sites[id]`` of the evidence.
        is_tried: whether running the cell as it was and as changed on a few rows shows anything: not where the change
            only moves or frees memory, or sets how a loader's processes work.
        is_measured: whether its doses are made anew from what a dry run of the unchanged cell tells of its modules.
        joins: whether it may be made beside another that joins: none counts steps, or looks at what others change.
        draws: where it is proposed as one that changes results, it is so by random numbers that fall otherwise, and by
            nothing else.
        ways: what is added to a dose for further ways to write the change, which are tried where the first one does
            not keep the results.
        frees: what it takes less of among what lasts: parameters, gradients and optimizer state.
        leaves: endings of the paths of what it leaves otherwise by its nature, as its title says: ``.grad``.
        allocates: settings of the caching allocator that it makes, ``(name, value)``. The dry runs of other changes
            tell what they are worth beside each, so that it needs none of its own; alone it needs to save nothing.
    """

    id: str
    title: str
    effect: Effect
    cost: str
    propose: Callable[[Incident, Evidence], tuple[Proposal, ...] | Refused]
    patch: Callable[[Cells, Evidence, Dose], Patch | Refused]
    apply: Callable[[Session, Dose], AbstractContextManager[None]] | None = None
    guard: Callable[[Session, Dose], AbstractContextManager[None]] | None = None
    asks: bool = False
    detect: Detect | None = None
    is_tried: bool = True
    is_measured: bool = False
    joins: bool = False
    draws: bool = False
    frees: tuple[Role, ...] = ()
    leaves: tuple[str, ...] = ()
    ways: tuple[Dose, ...] = ()
    allocates: tuple[tuple[str, Value], ...] = ()
    tolerance: float | None = None

    def without_way(self, dose: Dose) -> Dose:
        """Return a dose as it was proposed, whichever way it is written in."""
        added = {name for way in self.ways for name, _ in way.values}
        return Dose(tuple(value for value in dose.values if value[0] not in added))
