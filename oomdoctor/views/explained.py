"""What ``oomdoctor.explain`` returns: an explanation that shows itself in a notebook and in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from oomdoctor.model.explanation import Explanation
from oomdoctor.model.incident import Incident
from oomdoctor.views.mime import explanation_bundle
from oomdoctor.views.terminal import fitted, width
from oomdoctor.views.text import explanation
from oomdoctor.views.words import clean

_LONGEST: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Explanation):
    """An explanation with its text and its HTML.

    Attributes:
        meanings: what each failure is, in one sentence.
        notes: what the explanation could not take into account, a line each.
    """

    meanings: Mapping[Incident, str] = field(default_factory=dict, hash=False, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return fitted(explanation(self, self.meanings, width=width()) + self._noted(), sys.stdout)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON shape, with ``notes`` where there are some."""
        return Explanation.to_dict(self) | ({"notes": list(self.notes)} if self.notes else {})

    def _noted(self) -> str:
        return "".join(f"\n{clean(note, _LONGEST)}\n" for note in self.notes)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        shown = explanation_bundle(self, self.meanings)
        notes = "".join(f"<p>{escape(clean(note, _LONGEST))}</p>" for note in self.notes)
        return {"text/plain": shown["text/plain"] + self._noted(), "text/html": shown["text/html"] + notes}
