"""The facts of one failure, in the form of the table that rules are written against.

What a collector could not read is null. Facts that follow from others (``incident.unused``) are derived here, once,
also for the examples in the rule files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Final, TypeVar

from oomdoctor.model.cards import CARDS, CONTEXT_BYTES
from oomdoctor.model.code import CodeFacts, OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import CellLine, Incident
from oomdoctor.model.memory import DeviceMemory, HostMemory, JittorMemory, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.jittor import told
from oomdoctor.rulebook.context import SITES, SYMBOLS, Fact, Facts
from oomdoctor.rulebook.holders import of_census, of_host

T = TypeVar("T")

_TRAINS: Final = re.compile(r"[.](train|fit|fit_one_cycle|fine_tune|backward)[(]")
_STEPS: Final = re.compile(r"torch[/\\](optim[/\\]|_tensor[.]py:\d+ backward|autograd[/\\].*backward)")
"""Training that no loop of the cells shows: a framework's trainer was called, or the failure stands in a step."""
_OPTIMIZER: Final = re.compile(r"torch[/\\]optim[/\\]")


def facts_of(incident: Incident, evidence: Evidence | None) -> Facts:
    """Return the facts of one failure; without evidence, of its text alone."""
    given: dict[str, dict[str, Fact]] = {"incident": _incident(incident)}
    if evidence is not None:
        given["device"] = _device(evidence)
        given["host"] = _host(evidence.host)
        given["census"] = of_census(evidence.census, evidence.code)
        if evidence.census.device == _HOST:
            given["census"] |= of_host(evidence.beside_tensors, evidence.code)
        given["code"] = _code(evidence.code, incident)
    lazy = told(incident.message) if evidence is None else evidence.jittor
    if lazy is not None:
        given["jittor"] = _jittor(lazy)
    return complete(given)


def _jittor(memory: JittorMemory) -> dict[str, Fact]:
    """Return what Jittor holds, and the name that leads to most of its variables."""
    whole = (memory.pool_used or 0) + (memory.pool_unused or 0)
    facts = {**_plain(memory, "jittor"), "unused_ratio": _share(memory.pool_unused, whole)}
    most = next(iter(memory.holders), None)
    return facts if most is None else {**facts, "largest": most.bytes, "largest_path": most.path}


def complete(facts: Facts) -> Facts:
    """Add what follows from the facts that are given."""
    groups = "incident", "device", "census", "host"
    incident, device, census, host = (dict(facts.get(group, {})) for group in groups)
    incident |= _contradiction(incident)
    if incident.get("device") is not None:
        incident["on_host"] = incident["device"] == _HOST
    unused = _unused(incident)
    incident["unused"] = unused and max(unused, 0)
    incident["elsewhere"] = _elsewhere(incident)
    incident["request_ratio"] = _share(incident.get("requested"), incident.get("total"))
    incident["allocated_ratio"] = _share(incident.get("allocated"), incident.get("total"))
    incident["elsewhere_ratio"] = _share(incident["elsewhere"], incident.get("total"))
    incident |= {"fragmented": _is_fragmented(incident), "occupied": _is_occupied(incident)}
    host |= _of_program(host)
    device["unused"] = _unused(device)
    device["elsewhere"] = _elsewhere(device)
    device["elsewhere_ratio"] = _share(device["elsewhere"], device.get("total"))
    device |= _card(incident, device)
    code = {**facts.get("code", {}), **_other_widths(facts.get("code", {}), census)}
    whole = _number(census.get("allocated")) or _whole(census, device, host)
    census["freed"], asked = (None, 0.0) if incident.get("on_host") else _of_running(incident, census, code)
    whole = whole and whole + (_number(census["freed"]) or 0) + asked
    for role in Role:
        census[f"{role.value}_ratio"] = _share(census.get(role.value), whole)
    names = "saved", "nameless", "freed", "largest", "data_set", "left", "second", "kept_copies"
    census |= {f"{name}_ratio": _share(census.get(name), whole) for name in names}
    if (activation := _number(census.get("activation"))) is not None:
        running = activation + (_number(census["freed"]) or 0) + asked
        census["activation_ratio"] = _share(running, whole)
        requested = _number(incident.get("requested"))
        census["outweighed"] = requested if requested is not None and requested > activation else None
    census["other_ratio"] = max(_number(census[f"{role.value}_ratio"]) or 0.0 for role in Role if role is not _RUNNING)
    return {**facts, "incident": incident, "device": device, "census": census, "host": host, "code": code}


_SMALL: Final = 2 << 20
_MEDIUM: Final = 20 << 20
"""Segments for requests of up to 1 MiB and of up to 10 MiB, which always leave a rest.

Source: ``kSmallBuffer`` and ``kLargeBuffer`` of ``c10/cuda/CUDACachingAllocator.cpp``.
"""
_CONTEXTS: Final = 3 << 29
"""More than the contexts of a device take; see ``_CONTEXT_LIMIT`` in ``incident/scan.py``."""


def _is_fragmented(incident: Mapping[str, Fact]) -> bool:
    """Whether what the pool holds unused would have served the request, and is no small part of it.

    Where others hold much more, they refused it, and not the pieces.
    """
    names = "requested", "total", "unused", "allocated", "reserved"
    numbers = [number for name in names if (number := _number(incident.get(name))) is not None]
    if len(numbers) < len(names) or incident.get("on_host"):
        return False
    asked, total, unused, held, pool = numbers
    elsewhere = _number(incident["elsewhere"]) or 0
    return (
        asked > _SMALL
        and held < total
        and pool <= _ROUNDING * total
        and unused >= max(asked, 0.05 * pool)
        and (asked > _MEDIUM or unused >= max(0.3 * pool, 2 * _MEDIUM))
        and not (elsewhere >= 0.4 * total and elsewhere > 2 * unused)
    )


def _is_occupied(incident: Mapping[str, Fact]) -> bool:
    """Whether what is held outside of the pool would have served the request, and next to nothing was free.

    What is free is read after the refusal, and a little of it is never to be had.
    """
    names = "requested", "total", "free", "elsewhere"
    numbers = [number for name in names if (number := _number(incident.get(name))) is not None]
    if len(numbers) < len(names):
        return False
    asked, total, free, elsewhere = numbers
    return elsewhere >= max(0.15 * total, _CONTEXTS, asked) and free < max(asked, 0.1 * elsewhere)


_HOST: Final = "cpu"
_RUNNING: Final = Role.ACTIVATION
_LITTLE: Final = 0.05
"""Of what is allocated: what a failed expression lets go of beside it is not told."""


def _of_running(
    incident: Mapping[str, Fact], census: Mapping[str, Fact], code: Mapping[str, Fact]
) -> tuple[float | None, float]:
    """Return what the step of a training has beside the activations found, before its optimizer steps.

    What only the failed expression held is gone when the census is taken: the items of a list, the arguments of a call.
    What is asked for is for an activation, or for its gradient.
    """
    if code.get("differentiated") is not True or _OPTIMIZER.search(str(incident.get("frame"))):
        return None, 0.0
    held, found = _number(incident.get("allocated")), _number(census.get("allocated"))
    freed = held - found if held is not None and found is not None and held - found > _LITTLE * held else None
    return freed, _number(incident.get("requested")) or 0.0


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
    """Return the smallest well-known card that would have held what is allocated and asked for, if this one cannot."""
    asked, total = _number(incident.get("requested")), _number(device.get("total") or incident.get("total"))
    held = _number(device.get("allocated"))
    held = _number(incident.get("allocated")) if held is None else held
    if incident.get("on_host") or asked is None or held is None or total is None or not held <= total < held + asked:
        return {}
    fits = next((card.name for card in CARDS if held + asked <= card.total_bytes - CONTEXT_BYTES), None)
    return {} if fits is None else {"card_that_fits": fits}


def _number(value: Fact) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _unused(facts: Mapping[str, Fact]) -> float | None:
    reserved, allocated = _number(facts.get("reserved")), _number(facts.get("allocated"))
    return None if reserved is None or allocated is None else reserved - allocated


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


def _plain(source: DeviceMemory | HostMemory | JittorMemory | Incident | CodeFacts, group: str) -> dict[str, Fact]:
    """Return the fields of ``source`` that are facts; what a collector could not read is null."""
    values = {one.name: getattr(source, one.name) for one in fields(source) if one.name in SYMBOLS[group]}
    return {name: _known(value) for name, value in values.items()}


def _known(value: T | Unavailable) -> T | None:
    return None if isinstance(value, Unavailable) else value


def _device(evidence: Evidence) -> dict[str, Fact]:
    device = evidence.device
    return {
        **_plain(device, "device"),
        "devices": sum(one.name != "cpu" for one in evidence.devices),
        "others": _known(device.elsewhere),
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
        "other_bytes": _known(largest.bytes),
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
    line = incident.inner or incident.cell
    return {
        **_plain(incident, "incident"),
        "family": incident.family.value,
        "source_line": line.source_line if line is not None else None,
        "frame": incident.framework_frame,
    }


def _code(code: CodeFacts, incident: Incident) -> dict[str, Fact]:
    running = [loop for loop in code.loops if loop.in_failing_run]
    line = (incident.inner or incident.cell or _NOWHERE).source_line
    ran = code.local_models or code.models  # those of a function that was running are what it ran
    steppers = (*code.steppers, *_beside_names(code))
    return {
        **_plain(code, "code"),
        **{name: next((str(one) for one in code.sites.get(fix, ()) if one.holds), None) for name, fix in SITES.items()},
        "training": bool(running) or _trains(incident),
        "differentiated": not code.grad_disabled and (any(one.was_running for one in running) or _trains(incident)),
        "evaluating": bool(ran) and not any(model.training for model in ran),
        "accumulates": any(loop.accumulates for loop in running),
        "models": len(code.models),
        "parameter_bytes": sum(model.parameter_bytes for model in code.models),
        **_smaller(code),
        "optimizers": len(code.optimizers) + len(_beside_names(code)),
        **_stepping(code, line),
        "history_appends": len(code.sites.get("detach_history", ())),
        "stepped_bytes": sum(one.parameter_bytes for one in steppers) if steppers else None,
        "foreach": any(one.foreach for one in steppers) if steppers else None,
        "most_classes": max(code.classes, default=None),
        "stale": ", ".join(one.names[0] for one in code.sites.get("free_stale", ())) or None,
        "batch_norm": any(model.batch_norm for model in code.models),
    }


def _smaller(code: CodeFacts) -> dict[str, Fact]:
    """Return what lighter architectures of the same shapes would take, for the model that has most of each kind."""
    facts: dict[str, Fact] = {}
    wide = max(code.models, key=lambda model: model.convolution_bytes, default=None)
    deep = max(code.models, key=lambda model: model.repeated_bytes, default=None)
    if wide is not None and wide.convolution_bytes:
        facts = {"convolution_bytes": wide.convolution_bytes, "separable_bytes": wide.separable_bytes}
    if deep is not None and deep.repeats > 1:
        facts |= {"repeats": deep.repeats, "repeated_bytes": deep.repeated_bytes}
        facts |= {"halved_bytes": deep.repeated_bytes // 2, "shared_bytes": deep.repeated_bytes // deep.repeats}
        facts["repeated_path"] = deep.path
    return facts


_NOWHERE: Final = CellLine(number=None, line=None, source_line="")


def _beside_names(code: CodeFacts) -> tuple[OptimizerFacts, ...]:
    """Return the optimizers that no name of the namespace leads to: those of functions, and of a library's trainer."""
    of_trainers = (one.optimizer for one in code.trainers if not one.given_optimizer)
    return (*code.local_steppers, *(one for one in of_trainers if one is not None))


def _stepping(code: CodeFacts, line: str) -> dict[str, Fact]:
    """Return the optimizer that the failing line names, else the first, and the name of its class."""
    known = (*code.optimizers, *((one.path, one.type_name) for one in _beside_names(code)))
    named = [one for one in known if re.search(rf"(?<![\w.]){re.escape(one[0])}\b", line)]
    path, kind = next(iter((*named, *known)), (None, None))
    return {"optimizer": kind, "optimizer_path": path}


def _trains(incident: Incident) -> bool:
    lines = [line.source_line for line in (incident.cell, incident.inner) if line is not None]
    return any(map(_TRAINS.search, lines)) or bool(_STEPS.search(incident.framework_frame or ""))
