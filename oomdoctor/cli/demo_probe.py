"""What the demo reads in the kernel after each cell; this module runs there, not in the command.

It looks and changes nothing: the last case, the losses, and a digest of each name that holds state.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, Final

_SHOWN_FIXES: Final = 4
_WIDTH: Final = 72


def read(namespace: dict[str, Any]) -> str:
    """Return the reading of ``namespace`` as JSON: the fields of ``demo.Reading``."""
    from oomdoctor.objects.leaves import state_digests

    return json.dumps({**_last_case(), "losses": namespace.get("losses", []), "digests": state_digests(namespace)})


def _last_case() -> dict[str, Any]:
    # A kernel in which nothing has failed, or without the extension, has not loaded the pipeline, and need not.
    pipeline = sys.modules.get("oomdoctor.pipeline")
    case = pipeline.last_case() if pipeline is not None else None
    if case is None:
        return {}
    from oomdoctor.model.case import OutcomeKind
    from oomdoctor.views import text
    from oomdoctor.views.diagnosis import causes, headline
    from oomdoctor.views.document import GAP, Fixes, Line
    from oomdoctor.views.outcome import aftermath
    from oomdoctor.views.prices import fix_rows

    told = Line(headline(case.incident, case.evidence)), GAP, causes(case.findings[:1])
    patch = next((one.patch for one in reversed(case.plan.candidates) if one.label in case.outcome.fixes), None)
    return {
        "number": case.number,
        "case": case.to_dict(),
        "diagnosis": text.render((*told, Fixes(fix_rows(case.plan)[:_SHOWN_FIXES])), width=_WIDTH),
        "notice": "" if case.outcome.kind is OutcomeKind.OFFERED else text.render((aftermath(case),), width=_WIDTH),
        "edits": [asdict(edit) for edit in getattr(patch, "edits", ())],
    }
