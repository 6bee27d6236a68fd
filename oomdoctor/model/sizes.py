"""Memory sizes: read from what people type, printed in binary units."""

from __future__ import annotations

import re
from math import isfinite
from typing import Final

from oomdoctor.errors import SizeError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_EXPONENT: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_LONGEST: Final = 80
_SIZE: Final = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kmgtp]?)(?P<unit>i?b?)", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Return the number of bytes that ``text`` names.

    Accepts a number with an optional unit: ``512MiB``, ``1.5 GiB``, ``16GB``, ``2g``, ``1048576``. As in the
    messages of PyTorch and in everyday speech about memory, ``GB`` and ``GiB`` both mean 2**30 bytes. A text without a
    unit means bytes, and there have to be a MiB of them: who types ``16`` means another unit.

    Raises:
        SizeError: ``text`` is not a size, or not above zero.
    """
    match = _SIZE.fullmatch(str(text).strip())
    count = float(match["number"]) * 1024 ** _EXPONENT[match["prefix"].lower()] if match else 0.0
    size = int(count) if isfinite(count) else 0
    if size <= 0 or isinstance(text, bool):
        told = repr(text) if len(str(text)) <= _LONGEST else f"{str(text)[:_LONGEST]!r}..."
        raise SizeError(f"{told} is not a memory size: write a number above zero with a unit, such as 512MiB or 1.5GiB")
    if isinstance(text, str) and match and not match["prefix"] and not match["unit"] and size < MIB:
        raise SizeError(f"{text.strip()!r} has no unit, and would be {size} bytes: write 16GiB or 512MiB")
    return size


def format_size(size_bytes: int) -> str:
    """Return ``size_bytes`` in the largest binary unit that leaves a number of at least one."""
    sign, size = ("-" if size_bytes < 0 else ""), float(abs(size_bytes))
    if size < KIB:
        return f"{sign}{int(size)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            break
    decimals = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{decimals}f} {unit}"
