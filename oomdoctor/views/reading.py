"""What a message alone tells, as facts: there is no memory to look at, so nothing is measured and nothing priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomdoctor.views import words
from oomdoctor.views.story import FindingRow, finding_rows, headline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomdoctor.model.explanation import Explanation
    from oomdoctor.model.incident import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The failure in one sentence, its likely causes, what to try, and what else failed in the same text."""

    headline: str
    findings: tuple[FindingRow, ...]
    unrecognised: str | None
    helps: str | None
    others: tuple[str, ...]


def read(explanation: Explanation, meanings: Mapping[Incident, str] | None = None) -> Reading:
    """Return the facts of ``explanation``; ``meanings`` are sentences that say what its failures are."""
    known = meanings or {}
    findings = explanation.findings
    ids = dict.fromkeys(fix for finding in findings for fix in finding.fixes)
    is_open = explanation.incident.is_oom and not findings
    return Reading(
        headline=headline(explanation.incident, meaning=known.get(explanation.incident, "")),
        findings=finding_rows(findings),
        unrecognised="No rule recognised the cause." if is_open else None,
        helps=f"What helps: {', '.join(words.code(fix) for fix in ids)}." if ids else None,
        others=tuple(headline(incident, meaning=known.get(incident, "")) for incident in explanation.others),
    )
