"""Turns what the groups of a format captured into bytes: the one place that knows what each number means.

Messages of PyTorch round to two decimals, so a size here is right to half a hundredth of its unit. ``GB`` in these
messages is binary as ``GiB`` is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_GROUP: Final = 3
"""Digits that a comma keeps apart in a large number; printed fractions have two."""
_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SIZE: Final = re.compile(r"([\d.,]{1,40})\s?([a-z]?)", re.IGNORECASE)
_BITS: Final = re.compile(r"(\d{1,4})$")
_TYPES: Final = {
    "half": 2, "float": 4, "double": 8, "bfloat16": 2, "bool": 1, "bool_": 1, "object": 8, "int": 4, "complex": 8,
    "string": 16, "long": 8,
}  # fmt: skip
_CONTEXT_LIMIT: Final = 1 << 30
"""What a CUDA context with its libraries takes at most beside the pool of the allocator.

Source: differences of 0.3 to 0.9 GiB between the pool and the process' use in the messages of many reports.
"""

_ROUNDING: Final = 1.01
"""What two sizes of two decimals that are equal may differ by as printed."""


def size(text: str) -> int:
    """Return the bytes that a printed size such as ``1.5 GiB``, ``117. GiB`` or ``1900,00 MiB`` names."""
    match = _SIZE.match(text)
    if match is None:
        return 0
    digits, prefix = match.groups()
    number = _plain(digits.rstrip(".,"))
    if number.isdigit():
        return int(number) << 10 * _UNITS.get(prefix.lower(), 0)
    return round(float(number or 0) * float(1 << 10 * _UNITS.get(prefix.lower(), 0)))


def _plain(digits: str) -> str:
    """Return a number with a point before its fraction, whichever sign groups its digits."""
    point = max(".,", key=digits.rfind)
    whole, _, last = digits.rpartition(point)
    if not whole:
        return digits
    grouped = whole.replace(".", "").replace(",", "")
    is_group = point in whole or (point == "," and "." not in whole and whole != "0")
    return grouped + last if is_group and len(last) == _GROUP else f"{grouped}.{last}"


def count(text: str) -> int:
    """Return a printed whole number; commas group its digits."""
    digits = text.replace(",", "").split(".")[0]
    return int(digits) if digits.isdigit() else 0


def array_bytes(shape: str, dtype: str) -> int | None:
    """Return the bytes of an array from its printed shape and type, None where the type is not known."""
    item = _item_bytes(dtype)
    axes = [int(axis) for axis in re.findall(r"\d{1,18}", shape)]
    return math.prod(axes) * item if item and axes else None


def _item_bytes(dtype: str) -> int | None:
    name = dtype.lstrip("<>|=")
    if name.lower() in _TYPES:
        return _TYPES[name.lower()]
    bits = _BITS.search(name)
    if bits is None:
        return None
    if name[0] in "US":  # numpy's text: a number of characters, four bytes each in U
        return int(bits[1]) * (4 if name[0] == "U" else 1)
    return int(bits[1]) if len(name) == 2 else int(bits[1]) // 8 or None


def settle(groups: Mapping[str, str], processes: tuple[int, ...] = ()) -> dict[str, int | None]:
    """Return the fields of an incident from captured groups.

    Args:
        groups: what was captured, by name.
        processes: what the message says that single processes hold. In a container this process may be among them
            under a number that it does not know itself by; it is the one that holds little more than the pool does.
    """
    sizes = {name: size(text) for name, text in groups.items() if name in _SIZES}
    total = sizes.get("total")
    for name, text in groups.items():
        if name.endswith("_as_total"):
            unit = groups.get("total", "").lstrip("0123456789., ")
            sizes[name.removesuffix("_as_total")] = size(f"{text} {unit}")
    requested = _requested(sizes.get("requested"), groups)
    allocated = sizes.get("allocated")
    if "free" not in sizes and total is not None and sizes.get("used", total + 1) <= total:
        sizes["free"] = total - sizes["used"]
    reserved = _reserved(sizes)
    if reserved is not None and allocated is not None and allocated > reserved * _ROUNDING:
        reserved = allocated = None  # one of them was cut, and nothing tells which
    process = sizes.get("process")
    if process is None and reserved:
        own = [held for held in processes if 0 <= held - reserved < _CONTEXT_LIMIT]
        process = own[0] if own else None
    return {
        "requested": requested or None,  # "0GB" was cut off, and nobody asks for nothing
        "total": total,
        "free": sizes.get("free"),
        "allocated": allocated,
        "reserved": reserved,
        "process_used": process,
    }


_SIZES: Final = frozenset(
    {"requested", "total", "free", "allocated", "reserved", "cached", "unallocated", "process", "used"},
)


def _reserved(sizes: Mapping[str, int]) -> int | None:
    """Return the pool, allocated bytes included, out of whichever of the three wordings was used."""
    if "reserved" in sizes:
        return sizes["reserved"]
    unused = sizes.get("cached", sizes.get("unallocated"))
    return None if unused is None or "allocated" not in sizes else sizes["allocated"] + unused


def _requested(printed: int | None, groups: Mapping[str, str]) -> int | None:
    """Return the request; shape and type are exact where a printed size has three digits."""
    exact = array_bytes(groups["shape"], groups["dtype"]) if "shape" in groups and "dtype" in groups else None
    if exact is None or (printed and abs(exact - printed) > 0.02 * printed):
        return printed
    return exact
