"""What ``oomdoctor.explain`` returns: an explanation that shows itself in a notebook and in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oomdoctor.model.explanation import Explanation
from oomdoctor.model.incident import Incident
from oomdoctor.views.displayed import width
from oomdoctor.views.mime import explanation_bundle
from oomdoctor.views.text import explanation

__all__ = ["Explained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Explanation):
    """An explanation with its text and its HTML.

    Attributes:
        meanings: what each failure is, in one sentence.
    """

    meanings: Mapping[Incident, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __str__(self) -> str:
        return explanation(self, self.meanings, width=width())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return explanation_bundle(self, self.meanings)
