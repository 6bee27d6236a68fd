"""The words and numbers that every view shares: labels of the model's enums, and how figures are written.

The one place where text that comes from a user's program is made safe to print: ``clean`` spells out control
characters, so that no terminal escape and no bidirectional override reaches a screen. Escaping for HTML is left to
the HTML views.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from oomdoctor.model.case import State
from oomdoctor.model.fix import Effect
from oomdoctor.model.incident import CellLine
from oomdoctor.model.memory import DeviceMemory, Measured, Role
from oomdoctor.model.plan import Verdict
from oomdoctor.model.sizes import format_size


class Kind(NamedTuple):
    """How a kind of memory is called, and how it looks as a stretch of a bar: no two look alike without colour."""

    label: str
    sign: str
    style: str
    colour: str
    hatch: str = ""


# The colours of pages are dark enough to carry white text, and light enough to stand out from a dark page.
KINDS: Final = {
    Role.ACTIVATION.value: Kind("activations", "█", "red", "#b8481a"),
    Role.PARAMETER.value: Kind("parameters", "▓", "blue", "#2368a8"),
    Role.GRADIENT.value: Kind("gradients", "▒", "cyan", "#2f7f9e", "up"),
    Role.OPTIMIZER_STATE.value: Kind("optimizer state", "░", "green", "#2b7d5b", "level"),
    Role.BATCH.value: Kind("the batch", "▚", "yellow", "#96690f", "upright"),
    Role.BUFFER.value: Kind("buffers", "▪", "blue", "#5b6fa8", "down"),
    Role.GRAPH_KEPT_ALIVE.value: Kind("graphs kept alive", "▞", "magenta", "#a8447f", "down"),
    Role.TRACEBACK.value: Kind("held by a traceback", "◆", "magenta", "#8a3fa0", "upright"),
    Role.OUTPUT_CACHE.value: Kind("output history", "▤", "magenta", "#a03f5c", "level"),
    Role.KV_CACHE.value: Kind("KV cache", "▥", "cyan", "#3b7a76", "upright"),
    Role.PINNED_HOST.value: Kind("pinned host memory", "▦", "yellow", "#7b6f1e", "down"),
    Role.USER_TENSOR.value: Kind("your tensors", "▨", "yellow", "#6a5acd"),
    Role.WORKSPACE.value: Kind("workspaces of cuBLAS", "▢", "bright_black", "#5d6d7e", "level"),
    Role.UNEXPLAINED.value: Kind("no holder found", "?", "bright_black", "#767676"),
    "process": Kind("this process", "▣", "bright_blue", "#7a5c48"),
    "simulated": Kind("tensors of the simulated device", "◇", "yellow", "#8a6d1c", "level"),
    "children": Kind("processes that it started", "▬", "cyan", "#2f7f9e", "upright"),
    "cached": Kind("reserved, not in use", "┄", "bright_black", "#757575", "level"),
    "context": Kind("CUDA context and libraries", "■", "bright_black", "#5c5c5c"),
    "elsewhere": Kind("other processes", "▩", "bright_black", "#6e6e6e", "upright"),
    "outside": Kind("in use otherwise", "▧", "bright_black", "#6e6e6e", "down"),
    "free": Kind("free", "·", "bright_black", "rgba(128,128,128,0.15)"),
    "asked": Kind("request", "╱", "red", "#a85858", "up"),  # noqa: RUF001 - a hatching, not a slash
    "over": Kind("over the limit", "╳", "bold red", "#c62828", "up"),  # noqa: RUF001
    "other": Kind("other", "≡", "bright_black", "#4a4a4a"),
}
ROLES: Final = {role: KINDS[role.value].label for role in Role if role.value in KINDS}

EFFECTS: Final = {
    Effect.EXACT: ("exact", "identical results"),
    Effect.EQUIVALENT: ("equivalent", "same results up to rounding"),
    Effect.CHANGES_RESULT: ("changes results", "never applied automatically"),
    Effect.ADVICE: ("advice", "never applied for you"),
}

TONES: Final = {Verdict.FITS: "good", Verdict.BORDERLINE: "warn", Verdict.TOO_LARGE: "bad", Verdict.UNKNOWN: ""}
"""Names of styles."""
MARKS: Final = {Verdict.FITS: "✓", Verdict.BORDERLINE: "~", Verdict.TOO_LARGE: "✗", Verdict.UNKNOWN: "?"}

OF_CELL: Final = "%%"
"""How the name of a limit begins that a magic above a cell sets."""

STATES: Final = {
    State.CLEAN: "clean, as if the changed cell had run first",
    State.RESTORED: "restored, as it was before the cell",
    State.UNVERIFIED: "unverified, something may differ from before the cell",
}


def clean(text: str, limit: int = 300) -> str:
    """Return ``text`` on one line, with every unprintable character spelled out and its middle cut at ``limit``."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    if len(shown) <= limit:
        return shown
    head = (limit - 1) * 2 // 3
    return f"{shown[:head]}…{shown[len(shown) - (limit - 1 - head) :]}"


def code(text: str, limit: int = 60) -> str:
    """Return ``text`` as code within a sentence; a backtick of its own would end it there."""
    shown = clean(text, limit).replace("`", "'")
    return f"`{shown}`"


def verdict(verdict: Verdict) -> str:
    """Return ``✓ fits``: a sign says it without colour."""
    return f"{MARKS[verdict]} {verdict.value}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 tensor``, ``3 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def about(size_bytes: int) -> str:
    """Return an estimated size, marked as one."""
    return f"≈ {format_size(size_bytes)}"


def percent(ratio: float, decimals: int = 0) -> str:
    """Return ``71 %``."""
    return f"{ratio * 100:.{decimals}f} %"


def times(ratio: float) -> str:
    """Return a ratio as a multiple."""
    return f"×{ratio:.3g}"  # noqa: RUF001 - the multiplication sign is meant


def place(cell: CellLine) -> str:
    """Return where a line of the user's stands: ``In[5], line 7``."""
    home = f"In[{cell.number}]" if cell.file is None else clean(cell.file)
    parts = [] if cell.number is None else [home]
    parts.append("line unknown" if cell.line is None else f"line {cell.line}")
    if cell.function != "<module>":
        parts.append(f"in {code(cell.function)}")
    return ", ".join(parts)


def device_name(device: DeviceMemory) -> str:
    """Return the device as it is called in sentences; a virtual accelerator never passes for a real one."""
    name = "host memory" if device.name == "cpu" else clean(device.name, 40)
    return f"{name} (simulated)" if device.simulated else name


def limited_name(device: DeviceMemory) -> str:
    """Return the device as it is called beside its capacity: of the host's memory, which limit that is."""
    is_limit = device.name == "cpu" and device.basis not in ("", "the machine's memory")
    return f"{device_name(device)} ({clean(device.basis)})" if is_limit else device_name(device)


def limit_of_cell(device: DeviceMemory) -> str:
    """Return the limit above the cell that binds, as code; nothing where none does. It counts from the cell on."""
    return code(device.basis) if device.name == "cpu" and device.basis.startswith(OF_CELL) else ""


def known(*values: Measured | None) -> int | None:
    """Return the first value that could be had."""
    return next((value for value in values if isinstance(value, int)), None)
