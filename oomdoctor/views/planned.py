"""What ``oomdoctor.plan`` returns and ``%%memplan`` shows: a plan that shows itself in a notebook and in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.views import html, text, words
from oomdoctor.views.terminal import fitted, width

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomdoctor.model.memplan import MemPlan
    from oomdoctor.model.plan import Forecast

_LOG: Final = 100


class Planned:
    """What something needs that was not run: plain values, which keep nothing of the program alive.

    Args:
        names: what the cells are called in a program that is no notebook.

    Attributes:
        plan: all of it.
    """

    def __init__(self, plan: MemPlan, names: Mapping[int, str] | None = None) -> None:
        self.plan = plan
        self._names = names

    @property
    def forecast(self) -> Forecast:
        """What it needs, in bytes."""
        return self.plan.forecast

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return self.plan.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON shape."""
        return self.plan.to_dict()

    def to_html(self) -> str:
        """Return a whole page that opens offline."""
        return html.page("Memory plan", html.memplan(self.plan, self._names))

    def to_text(self, *, width: int = _LOG, colour: bool = False) -> str:
        """Return text for a terminal or a log."""
        return text.memplan(self.plan, width=width, colour=colour, names=self._names)

    def __str__(self) -> str:
        return fitted(self.to_text(width=width()), sys.stdout)

    def __repr__(self) -> str:
        peak = "no forecast" if self.forecast.peak is None else words.about(self.forecast.peak)
        return f"<Planned: {peak}, {self.plan.here.verdict.value}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": html.memplan(self.plan, self._names)}
