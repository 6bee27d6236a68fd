"""What somebody who mends a fault has to know of a case: the environment and the figures, as JSON to be copied.

Without the user's leave there is nothing of their program in it: no line, name, path or message.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.model import jsonable

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.plan import Forecast

_PACKAGES: Final = ("oomdoctor", "torch", "ipython", "ipykernel", "ipywidgets", "jupyterlab", "notebook", "numpy")
_OF_INCIDENT: Final = (
    *("family", "format", "device", "requested", "total", "free", "allocated", "reserved", "process_used"),
)
_OF_FORECAST: Final = ("peak", "reserved", "budget", "slowdown", "error_ratio", "at_least", "at_most")


def issue_report(case: Case, *, with_code: bool = False) -> str:
    """Return the environment and ``case`` as JSON; with lines, names and messages of the program if ``with_code``."""
    told = jsonable.case(case) if with_code else _figures(case)
    return json.dumps({"environment": environment(), "case": told}, indent=1, ensure_ascii=False)


def environment() -> dict[str, str]:
    """Return the versions that matter. Nothing is imported for it."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _figures(case: Case) -> dict[str, Any]:
    incident, outcome, census = case.incident, case.outcome, case.evidence.census
    return {
        "incident": {name: jsonable.plain(getattr(incident, name)) for name in _OF_INCIDENT},
        "roles": {role.value: size for role, size in census.roles},
        "findings": [{"rule": one.rule, "confidence": one.confidence} for one in case.findings],
        "unchanged": _forecast(case.plan.unchanged),
        "fixes": [
            {"fix": one.fix, "forecast": _forecast(one.forecast), "is_refuted": one.refuted is not None}
            for one in case.plan.candidates
        ],
        "refused": [fix for fix, _ in case.plan.refusals],
        "outcome": {name: jsonable.plain(getattr(outcome, name)) for name in ("kind", "attempts", "state", "peak")},
    }


def _forecast(forecast: Forecast) -> dict[str, Any]:
    figures = {name: getattr(forecast, name) for name in _OF_FORECAST}
    return {**figures, "verdict": forecast.verdict.value}
