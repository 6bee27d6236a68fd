"""What the user sees: the same facts as text, as HTML and as a panel of controls.

``diagnosis``, ``memory_report``, ``prices`` and ``displayed`` turn values of the model into a document; ``text`` and
``html`` render it and add nothing.
"""

from __future__ import annotations

import random

# rich numbers its styles with the user's random number generator, from the moment that it is imported.
_state = random.getstate()
from oomdoctor.views.mime import answer_bundles, bundle, in_brief, kept, notice_bundle, report_bundle, whole  # noqa: E402

random.setstate(_state)
del _state

__all__ = ["answer_bundles", "bundle", "in_brief", "kept", "notice_bundle", "report_bundle", "whole"]
