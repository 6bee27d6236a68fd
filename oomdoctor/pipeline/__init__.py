"""The way of the data, from a failure to a healed cell.

    exception ─► incident ─► evidence ─► findings ─► plan ─► retry ─► outcome

Each step takes values of ``model`` and returns one. What is live travels in a ``Session``.
"""

from __future__ import annotations

from oomdoctor.pipeline.failure import (
    accelerator_of,
    by_message,
    cases,
    diagnose,
    last_case,
    observe,
    open_session,
    plan,
    planning,
    recall,
    record,
    refused,
    simulated,
    unpriced,
)
from oomdoctor.pipeline.healing import admitted, beyond_cure, heal
from oomdoctor.pipeline.telling import check_snapshot, explain, foresee, report, rulebook, snapshot

__all__ = [
    "accelerator_of",
    "admitted",
    "beyond_cure",
    "by_message",
    "cases",
    "check_snapshot",
    "diagnose",
    "explain",
    "foresee",
    "heal",
    "last_case",
    "observe",
    "open_session",
    "plan",
    "planning",
    "recall",
    "record",
    "refused",
    "report",
    "rulebook",
    "simulated",
    "snapshot",
    "unpriced",
]
