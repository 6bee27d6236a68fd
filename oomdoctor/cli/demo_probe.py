"""What the demo reads in the kernel after each cell; this module runs there, not in the command.

It looks and changes nothing: the last case, the losses, and a digest of each name that holds state.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def read(namespace: dict[str, Any]) -> str:
    """Return the reading of ``namespace`` as JSON: ``number``, ``case``, ``edits``, ``losses`` and ``digests``."""
    return json.dumps({**_last_case(), "losses": namespace.get("losses", []), "digests": _digests(namespace)})


def _last_case() -> dict[str, Any]:
    # A kernel in which nothing has failed, or without the extension, has not loaded the pipeline, and need not.
    pipeline = sys.modules.get("oomdoctor.pipeline")
    case = pipeline.last_case() if pipeline is not None else None
    if case is None:
        return {"number": 0, "case": None, "edits": []}
    edits: list[tuple[int, str, str]] = []
    for candidate in case.plan.candidates:
        if candidate.label in case.outcome.fixes:
            edits = [(edit.cell, edit.after, edit.replay) for edit in getattr(candidate.patch, "edits", ())]
    return {"number": case.number, "case": case.to_dict(), "edits": edits}


def _digests(namespace: dict[str, Any]) -> dict[str, str]:
    from oomdoctor.objects.leaves import state_digests

    return state_digests(namespace)
