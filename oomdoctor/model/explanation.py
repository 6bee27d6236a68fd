"""What a failure means by its text alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomdoctor.model import jsonable
from oomdoctor.model.finding import Finding
from oomdoctor.model.incident import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One failure explained from its text or its exception.

    Attributes:
        others: further, distinct failures in the same text.
    """

    incident: Incident
    findings: tuple[Finding, ...]
    others: tuple[Incident, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the ``incident`` and ``findings`` parts of the JSON shape, and the other failures."""
        return {**jsonable.diagnosis(self.incident, self.findings), "others": jsonable.plain(self.others)}
