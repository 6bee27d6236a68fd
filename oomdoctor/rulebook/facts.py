"""The facts of one failure, in the form of the table that rules are written against.

What a collector could not read is null. Facts that follow from others (``incident.unused``) are derived here, once,
also for the examples in the rule files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Final, TypeAlias

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import DeviceMemory, HostMemory, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.rulebook.cards import smallest_for
from oomdoctor.rulebook.context import SITES, SYMBOLS, Fact, Facts
from oomdoctor.rulebook.holders import told_by

_Source: TypeAlias = DeviceMemory | HostMemory | Incident | CodeFacts

_TRAINS: Final = re.compile(r"[.](train|fit|fit_one_cycle|fine_tune|backward)[(]")
_STEPS: Final = re.compile(r"torch[/\\](optim[/\\]|_tensor[.]py:\d+ backward|autograd[/\\].*backward)")
"""Training that no loop of the cells shows: a framework's trainer was called, or the failure stands in a step."""


def facts_of(incident: Incident, evidence: Evidence | None) -> Facts:
    """Return the facts of one failure; without evidence, of its text alone."""
    given: dict[str, dict[str, Fact]] = {"incident": _incident(incident)}
    if evidence is not None:
        given["device"] = _device(evidence)
        given["host"] = _host(evidence.host)
        given["census"] = told_by(evidence.census, evidence.code)
        if evidence.census.device == _HOST:
            given["census"]["beside"] = sum(one.bytes for one in evidence.beside_tensors)
        given["code"] = _code(evidence.code, incident)
    return complete(given)


def complete(facts: Facts) -> Facts:
    """Add what follows from the facts that are given."""
    groups = "incident", "device", "census", "host"
    incident, device, census, host = (dict(facts.get(group, {})) for group in groups)
    incident |= _contradiction(incident)
    if incident.get("device") is not None:
        incident["on_host"] = incident["device"] == _HOST
    incident["unused"] = _at_least_none(_minus(incident, "reserved", "allocated"))
    incident["elsewhere"] = _elsewhere(incident)
    incident["request_ratio"] = _share(incident.get("requested"), incident.get("total"))
    incident["allocated_ratio"] = _share(incident.get("allocated"), incident.get("total"))
    incident["elsewhere_ratio"] = _share(incident["elsewhere"], incident.get("total"))
    host |= _of_program(host)
    device["unused"] = _minus(device, "reserved", "allocated")
    device["elsewhere"] = _elsewhere(device)
    device["elsewhere_ratio"] = _share(device["elsewhere"], device.get("total"))
    device |= _card(incident, device)
    whole = census.get("allocated") or _whole(census, device, host)
    for role in Role:
        census[f"{role.value}_ratio"] = _share(census.get(role.value), whole)
    census |= {f"{name}_ratio": _share(census.get(name), whole) for name in ("saved", "nameless")}
    code = {**facts.get("code", {}), **_other_widths(facts.get("code", {}), census)}
    return {**facts, "incident": incident, "device": device, "census": census, "host": host, "code": code}


_HOST: Final = "cpu"
_TOLD_SHARE: Final = 0.1
"""Of a limit on the host: what holds less of it is not what filled it."""
_ROUNDING: Final = 1.01
"""How much larger than its whole a part may be printed: both are rounded to some three digits."""


def _contradiction(incident: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return what contradicts itself in a message, in words, and its numbers as not known: either may be the wrong one.

    More may be allocated than a device has, where the driver moves memory to the host; more cannot be free.
    """
    free, total = _number(incident.get("free")), _number(incident.get("total"))
    if free is None or total is None or free <= _ROUNDING * total:
        return {}
    said = f"{format_size(int(free))} free of {format_size(int(total))} in total"
    return {"free": None, "total": None, "contradiction": said}


def _of_program(host: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return of a limit on this process what it leaves to the program, and what that has of it."""
    used, limit = _number(host.get("process_used")), _number(host.get("process_limit"))
    if used is None or limit is None:
        return {}
    bare = _number(host.get("bare")) or 0
    own, left = max(used - bare - (_number(host.get("malloc_free")) or 0), 0), max(limit - bare, 0)
    filled = used + (_number(host.get("kept_back")) or 0)
    return {"process_filled": filled, "program_used": own, "program_limit": left, "program_ratio": _share(own, left)}


def _whole(census: Mapping[str, Fact], device: Mapping[str, Fact], host: Mapping[str, Fact]) -> float | None:
    """Return what the tensors found are a part of: on the host of all that the program holds.

    The host's allocator keeps no count, so a few tensors would be all there is, whatever fills the memory.
    """
    found, total = _number(census.get("found")), _number(device.get("total"))
    if found is None or census.get("device") != _HOST or total is None:
        return found
    left = total - (_number(host.get("bare")) or 0)
    return max(found + (_number(census.get("beside")) or 0), _TOLD_SHARE * left)


def _other_widths(code: Mapping[str, Fact], census: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return what the parameters would take in other widths.

    Source: 16 bytes a parameter for Adam in fp32 are weight, gradient and two moments of 4 each; arXiv:1910.02054.
    """
    count = _share(code.get("parameter_bytes"), census.get("parameter_bytes_each"))
    if count is None:
        return {}
    return {"half_bytes": 2 * count, "int4_bytes": 0.5 * count, "adam_bytes": 16 * count}


def _card(incident: Mapping[str, Fact], device: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the smallest card that would have held what is allocated and what was asked for, if this one cannot."""
    asked, total = _number(incident.get("requested")), _number(device.get("total") or incident.get("total"))
    held = _number(device.get("allocated"))
    held = _number(incident.get("allocated")) if held is None else held
    if incident.get("on_host") or asked is None or held is None or total is None or not held <= total < held + asked:
        return {}
    card = smallest_for(held + asked)
    return {"card_that_fits": card.name, "card_that_fits_memory": card.memory} if card is not None else {}


def _number(value: Fact) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _minus(facts: Mapping[str, Fact], name: str, other: str) -> float | None:
    left, right = _number(facts.get(name)), _number(facts.get(other))
    return None if left is None or right is None else left - right


def _at_least_none(number: float | None) -> float | None:
    return None if number is None else max(number, 0)


def _share(part: Fact, whole: Fact) -> float | None:
    top, bottom = _number(part), _number(whole)
    return None if top is None or not bottom else top / bottom


def _elsewhere(facts: Mapping[str, Fact]) -> float | None:
    """Return what the device holds for others than this process, or for this process outside of PyTorch.

    None where allocated exceeds the total: under WDDM the driver moves memory to the host, and the sum says nothing.
    """
    if facts.get("name") == _HOST:  # this process takes most of it, which is no pool
        return None
    total, free = _number(facts.get("total")), _number(facts.get("free"))
    own = max(_number(facts.get("reserved")) or 0, _number(facts.get("process_used")) or 0)
    if total is None or free is None or facts.get("reserved") is None or own > total:
        return None
    return max(0.0, total - free - own)


def _plain(source: _Source, group: str) -> dict[str, Fact]:
    """Return the fields of ``source`` that are facts; what a collector could not read is null."""
    values = {one.name: getattr(source, one.name) for one in fields(source) if one.name in SYMBOLS[group]}
    return {name: None if isinstance(value, Unavailable) else value for name, value in values.items()}


def _device(evidence: Evidence) -> dict[str, Fact]:
    device = evidence.device
    others = device.elsewhere
    return {
        **_plain(device, "device"),
        "devices": sum(one.name != "cpu" for one in evidence.devices),
        "others": None if isinstance(others, Unavailable) else others,
        "private_pools": sum(pool.reserved for pool in device.private_pools),
        "private_pools_unused": sum(pool.reserved - pool.allocated for pool in device.private_pools),
        **_neighbours(device),
    }


def _neighbours(device: DeviceMemory) -> dict[str, Fact]:
    """Return how many other processes use the device, and the largest of them."""
    if isinstance(device.processes, Unavailable):
        return {}
    others = [one for one in device.processes if not one.is_own]
    if not others:
        return {"processes": 0}
    largest = max(others, key=lambda one: -1 if isinstance(one.bytes, Unavailable) else one.bytes)
    return {
        "processes": len(others),
        "other_name": largest.name,
        "other_pid": str(largest.pid),
        "other_bytes": None if isinstance(largest.bytes, Unavailable) else largest.bytes,
    }


def _host(host: HostMemory) -> dict[str, Fact]:
    facts = _plain(host, "host")
    if not isinstance(host.pressure, Unavailable):
        facts |= {"pressure_some_ratio": host.pressure.some, "pressure_full_ratio": host.pressure.full}
    if not isinstance(host.children, Unavailable):
        alone = [child.uss for child in host.children if not isinstance(child.uss, Unavailable)]
        facts |= {"children": len(host.children), "children_uss": sum(alone)}
    return facts


def _incident(incident: Incident) -> dict[str, Fact]:
    return {
        **_plain(incident, "incident"),
        "family": incident.family.value,
        "source_line": _running_line(incident),
        "frame": incident.framework_frame,
    }


def _running_line(incident: Incident) -> str | None:
    """Return the innermost line of the user's that was running."""
    line = incident.inner or incident.cell
    return line.source_line if line is not None else None


def _code(code: CodeFacts, incident: Incident) -> dict[str, Fact]:
    running = [loop for loop in code.loops if loop.in_failing_run]
    return {
        **_plain(code, "code"),
        **{name: str(site) if (site := code.first(fix)) else None for name, fix in SITES.items()},
        "training": bool(running) or _trains(incident),
        "evaluating": bool(code.models) and not any(model.training for model in code.models),
        "accumulates": any(loop.accumulates for loop in running),
        "models": len(code.models),
        "parameter_bytes": sum(model.parameter_bytes for model in code.models),
        "optimizers": len(code.optimizers),
        "optimizer": code.optimizers[0][1] if code.optimizers else None,
        "history_appends": len(code.sites.get("detach_history", ())),
        "stepped_bytes": sum(one.parameter_bytes for one in code.steppers) if code.steppers else None,
        "foreach": any(one.foreach for one in code.steppers) if code.steppers else None,
        "most_classes": max(code.classes, default=None),
        "stale": ", ".join(one.names[0] for one in code.sites.get("free_stale", ())) or None,
        "batch_norm": any(model.batch_norm for model in code.models),
    }


def _trains(incident: Incident) -> bool:
    lines = [line.source_line for line in (incident.cell, incident.inner) if line is not None]
    return any(map(_TRAINS.search, lines)) or bool(_STEPS.search(incident.framework_frame or ""))
