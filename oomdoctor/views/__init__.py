"""What the user sees: the same facts as text, as HTML and as a panel of controls.

``story``, ``survey`` and ``aftermath`` turn values of the model into facts; ``text``, ``html`` and ``panel`` render
them and add none.
"""

from __future__ import annotations

import random

# rich numbers its styles with the user's random number generator, from the moment that it is imported.
_state = random.getstate()
from oomdoctor.views.mime import bundle, explanation_bundle, notice_bundle, plan_bundle, report_bundle  # noqa: E402

random.setstate(_state)
del _state

__all__ = ["bundle", "explanation_bundle", "notice_bundle", "plan_bundle", "report_bundle"]
