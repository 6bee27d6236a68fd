"""What ``oomdoctor.explain`` returns: an explanation that shows itself in a notebook and in a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomdoctor.model.explanation import Explanation
from oomdoctor.views.displayed import width
from oomdoctor.views.mime import explanation_bundle
from oomdoctor.views.text import explanation

__all__ = ["Explained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Explanation):
    """An explanation with its text and its HTML."""

    def __str__(self) -> str:
        return explanation(self, width=width())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return explanation_bundle(self)
