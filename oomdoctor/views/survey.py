"""The memory as it stands now, as ``%memreport`` shows it: each device, the host, and what cannot be told, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.growth import Mark
from oomdoctor.model.memory import DeviceMemory, HostMemory
from oomdoctor.views import words
from oomdoctor.views.device_card import Card, device_card
from oomdoctor.views.document import Document, Line, Section, apart, given, prose
from oomdoctor.views.growth import GrowthRows, since_cell
from oomdoctor.views.holders import TOP
from oomdoctor.views.host_card import host_card

_HOST: Final = "cpu"
_UNUSED: Final = "this process has not used"
_BUILT_WITHOUT: Final = " is built without"

# That there is no limit is no want.
_LIMITS: Final = frozenset({"cap", "cgroup_limit", "files_limit", "maps_limit", "process_limit", "process_limit_name"})
_THINGS: Final = {
    "rss": "RSS",
    "uss": "USS",
    "pss": "PSS",
    "card": "name of the card",
    "context": "CUDA context",
    "elsewhere": "use by other processes",
    "processes": "processes on the device",
    "children": "processes that this one started",
    "pressure": "memory pressure",
    "tmpfs": "shared memory",
    "process_used": "address space",
    "committed": "committed memory",
    "commit_limit": "committed memory",
    "overcommit": "overcommit mode",
}
_FAMILIES: Final = {
    "cgroup": "memory cgroup",
    "shm": "/dev/shm",
    "swap": "swap",
    "files": "open files",
    "maps": "memory mappings",
}


def survey(
    evidence: Evidence,
    *,
    top: int = TOP,
    growth: GrowthRows | None = None,
    marks: tuple[Mark, Mark] | None = None,
    absent: Sequence[tuple[str, Unavailable]] = (),
) -> Document:
    """Return one sentence for each memory of ``evidence``, then the devices one by one, then the host.

    Args:
        top: holders to list for each device. Above ``holders.TOP`` weights are listed one by one, and all limits.
        growth: what grew since an earlier report, where that was asked for.
        marks: the counters at the start of the last cell, and now.
        absent: what is known to be missing on this machine, by name.
    """
    found = cards(evidence, top=top)
    return (
        *(_headline(card.headline) for card in found),
        *given(None if marks is None else Line(since_cell(*marks, evidence.devices))),
        *apart(*(growth.blocks() if growth is not None else [])),
        *(Section(card.blocks()) for card in found),
        *apart(*(Line(line, "muted") for line in absences(evidence, absent))),
    )


def cards(evidence: Evidence, *, top: int = TOP) -> tuple[Card, ...]:
    """Return the card of each memory; the host comes last."""
    models = evidence.code.models
    devices = [device for device in evidence.devices if device.name != _HOST]
    host = host_card(
        evidence.host,
        next((device for device in evidence.devices if device.name == _HOST), None),
        evidence.census_of(_HOST),
        models,
        top=top,
        is_alone=not devices,
        simulated=sum(words.known(device.allocated) or 0 for device in devices if device.simulated),
        held=evidence.beside_tensors,
    )
    return (*(device_card(device, evidence.census_of(device.name), models, top=top) for device in devices), host)


def _headline(sentence: str) -> Line:
    text = prose(sentence)
    text.stylize_before("strong", 0, sentence.index(": "))
    return Line(text, "lead")


def focus(evidence: Evidence, device: str) -> Evidence:
    """Return ``evidence`` of one device alone, and of the host as a whole.

    Args:
        device: its name, or the beginning of it: the first such device is taken.

    Raises:
        UsageError: no device in use is called so.
    """
    names = [found.name for found in evidence.devices]
    chosen = next((name for name in names if name == device), None)
    chosen = chosen or next((name for name in names if device and name.startswith(device)), None)
    if chosen is None:
        raise UsageError(f"no device {device!r} is in use: there is {' and '.join(names)}")
    return replace(
        evidence,
        devices=tuple(found for found in evidence.devices if found.name == chosen),
        censuses=tuple(census for census in evidence.censuses if census.device == chosen),
    )


def absences(evidence: Evidence, absent: Sequence[tuple[str, Unavailable]] = ()) -> tuple[str, ...]:
    """Return a line for what the machine lacks and one for what cannot be told, each thing with its reason.

    Args:
        absent: what is known to be missing, by name. A figure that wants for the same reason is not named again.
    """
    told = {missing.reason for _, missing in absent}
    figures: dict[str, list[str]] = {}
    named: set[str] = set()
    devices = [(device, words.device_name(device)) for device in evidence.devices if device.name != _HOST]
    whose: list[tuple[DeviceMemory | HostMemory, str]] = [*devices, (evidence.host, "the host")]
    for thing, where, reason in ((thing, where, reason) for memory, where in whose for thing, reason in _of(memory)):
        names = figures.setdefault(_reason(reason), [])
        if reason in told or thing in names:
            continue
        names.append(f"{thing} of {where}" if thing in named else thing)
        named.add(thing)
    lacking: dict[str, list[str]] = {}
    for name, missing in absent:
        is_idle = missing.reason.startswith(_UNUSED)
        (figures if is_idle else lacking).setdefault(_reason(missing.reason), []).append(words.clean(name, 120))
    lines = (("Not on this machine", lacking), ("Not known", figures))
    return tuple(f"{title}: {text}." for title, things in lines if (text := _listed(things)))


def _listed(things: dict[str, list[str]]) -> str:
    """Return ``CUDA, XPU (torch is built without them); NVML (no NVIDIA driver)``."""
    parts = []
    for reason, names in things.items():
        shown = reason + (" them" if len(names) > 1 else " it") if reason.endswith(_BUILT_WITHOUT) else reason
        parts += [f"{', '.join(dict.fromkeys(names))} ({shown})"] if names else []
    return "; ".join(parts)


def _reason(reason: str) -> str:
    """Return ``reason`` without what the name of the missing thing says already, so that equal reasons are one."""
    who, without, _ = reason.partition(_BUILT_WITHOUT)
    short = f"{who}{without}" if without else reason.removeprefix("this machine has ")
    return words.clean(short).removesuffix(".")


def _of(memory: DeviceMemory | HostMemory) -> Iterator[tuple[str, str]]:
    """Yield each figure that is not there, and the reason."""
    for field in fields(memory):
        value: Any = getattr(memory, field.name)
        # The default stands for a figure that nobody asked for, and says nothing of the machine.
        if isinstance(value, Unavailable) and value != field.default and field.name not in _LIMITS:
            family = _FAMILIES.get(field.name.partition("_")[0])
            yield family or _THINGS.get(field.name, field.name.replace("_", " ")), value.reason
