"""The JSON shape that every ``--json`` and ``Case.to_dict`` share (schema 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.model.fix import Dose
from oomdoctor.model.unavailable import Refused, Unavailable

if TYPE_CHECKING:
    from oomdoctor.model.case import Case, Finding
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.memory import Census
    from oomdoctor.model.plan import Candidate, Fit, Forecast, LargestBatch, MemPlan, Plan

SCHEMA: Final = 1


def plain(value: Any) -> Any:
    """Return ``value`` made of dicts, lists and scalars; an ``Unavailable`` field becomes null and ``<name>_why``."""
    if isinstance(value, Dose):
        return dict(value.values)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if isinstance(value, (Unavailable, Refused)):
            out[name], out[f"{name}_why"] = None, value.reason
        else:
            out[name] = plain(value)
    return out


def evidence(found: Evidence) -> dict[str, Any]:
    """Return the ``evidence`` part."""
    return {
        "devices": plain(found.devices),
        "host": plain(found.host),
        "beside_tensors": plain(found.beside_tensors),
        "jittor": plain(found.jittor),
        "census": _census(found.census),
        "other_censuses": [_census(census) for census in found.censuses[1:]],
        "code": plain(found.code),
    }


def _census(census: Census) -> dict[str, Any]:
    ratio = census.accounted_ratio
    return {
        "device": census.device,
        "accounted_ratio": None if ratio is None else round(ratio, 4),
        "roles": {role.value: size for role, size in census.roles},
        "holdings": plain(census.holdings),
        "notes": list(census.notes),
    }


def diagnosis(incident: Incident, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Return the part that text alone can give: ``schema``, ``incident`` and ``findings``."""
    return {"schema": SCHEMA, "incident": plain(incident), "findings": plain(findings)}


def case(whole: Case) -> dict[str, Any]:
    """Return all of a case."""
    return {
        **diagnosis(whole.incident, whole.findings),
        "evidence": evidence(whole.evidence),
        "unchanged": _forecast(whole.plan.unchanged),
        "fixes": [_candidate(whole.plan, candidate) for candidate in whole.plan.candidates],
        "refusals": dict(whole.plan.refusals),
        "outcome": plain(whole.outcome),
    }


def memplan(whole: MemPlan) -> dict[str, Any]:
    """Return a cell's plan: the forecast, the places, the largest batch and the fixes."""
    batch = whole.batch
    return {
        "schema": SCHEMA,
        "cell": plain(whole.cell),
        "device": plain(whole.here.place),
        "forecast": _forecast(whole.forecast),
        "fits": whole.fits,
        "verdict": whole.here.verdict.value,
        "least": None if whole.least is None else {"peak": whole.least.peak, "basis": whole.least.basis},
        "cards": [_fit(fit) for fit in whole.elsewhere],
        **_fields([("largest_batch", batch if isinstance(batch, Refused) else _batch(batch))]),
        "fixes": [_candidate(whole.plan, one) for one in whole.plan.candidates] if whole.plan is not None else [],
        "refusals": dict(whole.plan.refusals) if whole.plan is not None else {},
        "elapsed_s": round(whole.elapsed_s, 3),
    }


def _fit(fit: Fit) -> dict[str, Any]:
    forecast = fit.forecast
    numbers = {"peak": forecast.peak, "reserved": forecast.reserved, "error_ratio": forecast.error_ratio}
    return {**plain(fit.place), **numbers, "fits": fit.fits, "verdict": fit.verdict.value}


def _batch(batch: LargestBatch) -> dict[str, Any]:
    return {**plain(batch), "forecast": _forecast(batch.forecast)}


def _candidate(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    patch = candidate.patch
    return {
        "number": plan.number(candidate),
        "id": candidate.fix,
        "title": candidate.title,
        "dose": plain(candidate.dose),
        "effect": candidate.effect.value,
        "forecast": _forecast(candidate.forecast),
        "caveat": candidate.caveat,
        **_fields([("patch", patch if isinstance(patch, Refused) else patch.diff())]),
    }


def _forecast(forecast: Forecast) -> dict[str, Any]:
    return {**plain(forecast), "fits": forecast.fits, "verdict": forecast.verdict.value}
