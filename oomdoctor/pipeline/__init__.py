"""The way of the data, from a failure to a healed cell.

    exception ─► incident ─► evidence ─► findings ─► plan ─► retry ─► outcome

Each step takes values of ``model`` and returns one. What is live travels in a ``Session``.
"""

from __future__ import annotations

from oomdoctor.pipeline.failure import accelerator_of, by_message, diagnose, observe, open_session, unpriced
from oomdoctor.pipeline.foresight import foresee
from oomdoctor.pipeline.healing import admitted, beyond_cure, heal
from oomdoctor.pipeline.history import cases, last_case, record
from oomdoctor.pipeline.pricing import plan, planning, recall
from oomdoctor.pipeline.telling import check_snapshot, explain, report, rulebook, snapshot

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
    "report",
    "rulebook",
    "snapshot",
    "unpriced",
]
