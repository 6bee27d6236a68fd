"""What healed which failure in this session: the fix in its dose, to be tried first when the same failure comes again.

A failure is the same where the cell's text is, and what it ran out of: the family of the error, the device and its
size, the models with their sizes, and how many samples the loaders put into a batch. The line is not asked for, because
a healed run leaves an optimizer's state behind, with which the next one may fail elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.fix import Dose
from oomdoctor.model.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A fix that healed a cell.

    Attributes:
        cell: number of the cell, None where it has none.
        peak: what was measured then, in bytes, None where nothing could be measured.
    """

    fix: str
    dose: Dose
    label: str
    cell: int | None
    peak: int | None

    def __str__(self) -> str:
        where = "a cell" if self.cell is None else f"In[{self.cell}]"
        return f"{self.label} for {where}" + (f", measured {format_size(self.peak)}" if self.peak is not None else "")


class Remedies:
    """The remedies of a session, the one for a failure that healed it last."""

    def __init__(self) -> None:
        self._by_failure: dict[Hashable, Remedy] = {}

    def __iter__(self) -> Iterator[Remedy]:
        return iter(self._by_failure.values())

    def of(self, case: Case, source: str) -> Remedy | None:
        """Return what healed this failure of the cell ``source`` before, None if nothing did."""
        return self._by_failure.get(_failure(case, source))

    def note(self, case: Case, source: str, tried_first: str) -> None:
        """Keep what healed the case; drop what was kept for it where that was ``tried_first`` and did not heal.

        Two fixes together are not kept: whether they still go together is for a new plan to say.
        """
        outcome, known = case.outcome, self.of(case, source)
        healers = [one for one in case.plan.candidates if one.label in outcome.fixes and len(one.made_of) == 1]
        if outcome.kind is OutcomeKind.HEALED and healers:
            made, cell = healers[0], case.incident.cell
            self._by_failure[_failure(case, source)] = Remedy(
                fix=made.fix,
                dose=made.dose,
                label=made.label,
                cell=None if cell is None else cell.number,
                peak=outcome.peak,
            )
        elif outcome.attempts and known is not None and known.label == tried_first:
            self.drop(case, source)

    def drop(self, case: Case, source: str) -> None:
        """Forget what healed this failure."""
        self._by_failure.pop(_failure(case, source), None)


def _failure(case: Case, source: str) -> Hashable:
    code, device = case.evidence.code, case.evidence.device
    # Of a device: that of the host is the strictest limit in force, and moves with what else the machine does.
    size = None if device.name == "cpu" else device.total
    models = tuple((model.path, model.type_name, model.parameter_bytes) for model in code.models)
    return source.strip(), case.incident.family, device.name, size, models, tuple(code.batch_sizes)
