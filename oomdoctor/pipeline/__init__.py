"""The way of the data, from a failure to a healed cell.

    exception ─► incident ─► evidence ─► findings ─► plan ─► retry ─► outcome

Each step takes values of ``model`` and returns one. What is live travels in a ``Session``.
"""

from __future__ import annotations

from oomdoctor.pipeline.failure import INTERRUPTED as INTERRUPTED
from oomdoctor.pipeline.failure import accelerator_of as accelerator_of
from oomdoctor.pipeline.failure import admitted as admitted
from oomdoctor.pipeline.failure import beyond_cure as beyond_cure
from oomdoctor.pipeline.failure import budget_of as budget_of
from oomdoctor.pipeline.failure import by_message as by_message
from oomdoctor.pipeline.failure import cases as cases
from oomdoctor.pipeline.failure import diagnose as diagnose
from oomdoctor.pipeline.failure import interrupted as interrupted
from oomdoctor.pipeline.failure import last_case as last_case
from oomdoctor.pipeline.failure import memories as memories
from oomdoctor.pipeline.failure import observe as observe
from oomdoctor.pipeline.failure import open_session as open_session
from oomdoctor.pipeline.failure import plan as plan
from oomdoctor.pipeline.failure import planning as planning
from oomdoctor.pipeline.failure import record as record
from oomdoctor.pipeline.failure import refused as refused
from oomdoctor.pipeline.failure import simulated as simulated
from oomdoctor.pipeline.failure import unpriced as unpriced
from oomdoctor.pipeline.healing import heal as heal
from oomdoctor.pipeline.reports import check_snapshot as check_snapshot
from oomdoctor.pipeline.reports import explain as explain
from oomdoctor.pipeline.reports import foresee as foresee
from oomdoctor.pipeline.reports import report as report
from oomdoctor.pipeline.reports import rulebook as rulebook
from oomdoctor.pipeline.reports import snapshot as snapshot
