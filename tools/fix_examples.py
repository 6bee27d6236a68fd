"""``make examples``: writes ``docs/examples/fixes.json``, the change that each fix makes to a program of the tests.

The programs are the model families of ``tests/models/``: each fails on the virtual accelerator, and the fix with its
mildest dose is written into it. The shortest diff of a fix stands on its page. A fix that changes none of them, because
it needs a graphics card, loader processes or a leak, has no example here.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
EXAMPLES: Final = ROOT / "docs" / "examples" / "fixes.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "fixes")]

from models import FAMILIES  # noqa: E402
from running import fail  # noqa: E402

from oomdoctor import fixes  # noqa: E402
from oomdoctor.model.unavailable import Refused  # noqa: E402


def main() -> int:
    """Write the file."""
    warnings.simplefilter("ignore")
    shortest: dict[str, dict[str, str]] = {}
    for family in FAMILIES.values():
        failure = fail(family)
        for fix in fixes.catalogue().values():
            proposals = fix.propose(failure.incident, failure.evidence)
            if isinstance(proposals, Refused):
                continue
            patch = fix.patch(failure.cells, failure.evidence, proposals[0].dose)
            if isinstance(patch, Refused) or not (diff := patch.diff()):
                continue
            known = shortest.get(fix.id)
            if known is None or len(diff) < len(known["diff"]):
                shortest[fix.id] = {"family": family.name, "dose": str(proposals[0].dose), "diff": diff}
        print(f"{family.name}: {len(shortest)} fixes have an example", flush=True)
    EXAMPLES.parent.mkdir(exist_ok=True)
    EXAMPLES.write_text(json.dumps(dict(sorted(shortest.items())), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {EXAMPLES.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
