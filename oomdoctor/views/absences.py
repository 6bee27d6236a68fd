"""What this machine cannot tell, each thing once in the whole report, however many figures want for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import DeviceMemory, HostMemory
from oomdoctor.views import words

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


def absences(evidence: Evidence, absent: Sequence[tuple[str, Unavailable]] = ()) -> tuple[str, ...]:
    """Return a line for what the machine lacks and one for what cannot be told, each thing with its reason.

    Args:
        absent: what is known to be missing, by name. A figure that wants for the same reason is not named again.
    """
    told = {missing.reason for _, missing in absent}
    figures: dict[str, list[str]] = {}
    named: set[str] = set()
    for thing, where, reason in _wanting(evidence):
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


def _wanting(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yield each figure that is not there, whose it is, and the reason."""
    for device in evidence.devices:
        if device.name != "cpu":
            yield from ((thing, words.device_name(device), reason) for thing, reason in _of(device))
    yield from ((thing, "the host", reason) for thing, reason in _of(evidence.host))


def _of(memory: DeviceMemory | HostMemory) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(memory):
        value: Any = getattr(memory, field.name)
        # The default stands for a figure that nobody asked for, and says nothing of the machine.
        if isinstance(value, Unavailable) and value != field.default and field.name not in _LIMITS:
            family = _FAMILIES.get(field.name.partition("_")[0])
            yield family or _THINGS.get(field.name, field.name.replace("_", " ")), value.reason
