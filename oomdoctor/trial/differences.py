"""What two ends of a run differ in, beyond what rounding explains.

How far rounding alone carries is not assumed but measured: a *control*, the unchanged program begun with parameters
that are off in their last digit, shows how much of such a difference is left at the end. Where an optimizer divides a
gradient that is nothing but noise by its own size, that is as much as a whole step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.objects.leaves import RANDOM, Leaf

_TIMES_NOISE: Final = 30.0
"""How many times as large as that of the control a difference may be: a part's sums round in another order."""
_LEAST: Final = 5e-6
"""Relative difference that is rounding in any program: some forty of float32's last digits, as sums over rows have."""
_DIGITS: Final = 1.01
"""How many of the last digit that it is printed with a number may be off by rounding."""
_BLURRED: Final = 0.02
"""Relative noise from which on a leaf tells nothing."""
_MOST_BLURRED: Final = 0.25
"""Share of leaves with numbers that may tell nothing in an end that is said to be the same."""
_NAMED: Final = 4
_TOLD: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf that differs.

    Attributes:
        size: of the difference, as a share of the largest entry; None where it is not one of numbers.
        is_rows: it is the same kind of tensor, smaller in one dimension, as of a part of a batch.
    """

    path: str
    why: str
    size: float | None = None
    is_rows: bool = False


def differences(
    before: Mapping[str, Leaf], after: Mapping[str, Leaf], controls: Sequence[Mapping[str, Leaf]] | None
) -> Iterator[Difference]:
    """Yield what the changed program leaves otherwise than the unchanged one; what it leaves besides is its own.

    Args:
        before: the end of the unchanged program; ``after``: of the changed one.
        controls: the ends of controls; None asks for the same bit for bit.
    """
    for path, leaf in before.items():
        other = after.get(path)
        if other is None:
            yield Difference(path=path, why="is not there")
        elif leaf.frame != other.frame:
            yield _of_frames(path, leaf, other)
        elif leaf.exact != other.exact:
            size = _size(leaf, other)
            if leaf.pixels and _are_rounded(leaf, other, [control.get(path) for control in controls or ()]):
                continue
            if controls is None or size is None or size > _allowed(leaf, path, controls):
                yield Difference(path=path, why=_told(leaf, other, size), size=size)


def is_unsteady(path: str, before: Mapping[str, Leaf], after: Mapping[str, Leaf], again: Mapping[str, Leaf]) -> bool:
    """Tell whether a leaf differs by no more than what another run of the unchanged program leaves: a clock, an id.

    Args:
        again: the end of that other run.
    """
    leaf, other, control = before[path], after.get(path), again.get(path)
    if control is None or control.frame != leaf.frame:
        return True
    if control.exact == leaf.exact or other is None or other.frame != leaf.frame:
        return False
    if leaf.digits:  # a text: the numbers that are the same each time have to be so in the changed program
        steady = [at for at, (one, two) in enumerate(zip(leaf.numbers, control.numbers, strict=True)) if one == two]
        kept, others = _only(leaf, steady), _only(other, steady)
        return not (_size(kept, others) or 0.0) > _LEAST
    size = _size(leaf, other)
    return size is None or size <= _TIMES_NOISE * _noise(leaf, control)


def _only(leaf: Leaf, places: Sequence[int]) -> Leaf:
    numbers, digits = (tuple(values[at] for at in places) for values in (leaf.numbers, leaf.digits))
    return replace(leaf, numbers=numbers, digits=digits, scale=max(map(abs, numbers), default=0.0))


def rounding(before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> tuple[float, str]:
    """Return the largest difference of numbers between two ends, as a share of its largest entry, and its path."""
    pairs = [(path, leaf, after[path]) for path, leaf in before.items() if path in after]
    sizes = [(_size(leaf, other) or 0.0, path) for path, leaf, other in pairs if leaf.frame == other.frame]
    return max(sizes, default=(0.0, ""))


def is_blurred(before: Mapping[str, Leaf], control: Mapping[str, Leaf]) -> bool:
    """Tell whether rounding alone changes so much of the end that nothing can be told from it."""
    noisy = [_noise(leaf, control.get(path)) > _BLURRED for path, leaf in before.items() if leaf.numbers]
    return sum(noisy) > _MOST_BLURRED * len(noisy)


def _of_frames(path: str, leaf: Leaf, other: Leaf) -> Difference:
    if leaf.shape and other.shape and len(leaf.shape) == len(other.shape):
        unlike = [(one, two) for one, two in zip(leaf.shape, other.shape, strict=True) if one != two]
        if len(unlike) == 1 and leaf.frame.split()[0] == other.frame.split()[0]:
            were, are = unlike[0]
            return Difference(path=path, why=f"has {are} rows in place of {were}", is_rows=are < were)
    became, was = (re.sub(r", \w{16}$", "", one.frame) for one in (other, leaf))  # the words of a text are a hash
    other_words = "is another text" if leaf.shape is None else "has its entries in other places"
    return Difference(path=path, why=f"is {became} in place of {was}" if became != was else other_words)


def _told(leaf: Leaf, other: Leaf, size: float | None) -> str:
    if leaf.frame == RANDOM:
        return "has drawn other numbers"
    if size is not None:
        return f"differs by {size:.2g} of its largest value" if size < math.inf else "is not finite in one of the two"
    return f"is {other.exact} in place of {leaf.exact}" if len(leaf.exact + other.exact) < 80 else "differs"


def _size(leaf: Leaf, other: Leaf) -> float | None:
    """Return the largest difference of the numbers, as a share of their scale; None where they have none."""
    if not leaf.numbers or len(leaf.numbers) != len(other.numbers):
        return None
    scale, largest = max(leaf.scale, other.scale), 0.0
    digits = leaf.digits or (0.0,) * len(leaf.numbers)
    for one, another, digit in zip(leaf.numbers, other.numbers, digits, strict=True):
        if one != another and not (math.isnan(one) and math.isnan(another)):
            apart = max(abs(one - another) - _DIGITS * digit, 0.0)
            if leaf.digits:  # of numbers in a text, each for itself: steps and losses stand side by side
                apart *= scale / max(abs(one), abs(another)) if math.isfinite(apart) and apart else 1.0
            largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return largest / scale if scale and largest < math.inf else largest and math.inf


def _are_rounded(leaf: Leaf, other: Leaf, controls: Sequence[Leaf | None]) -> bool:
    """Tell whether a few pixels are one brighter or darker, as rounding alone makes some of them in a control."""
    noise = max((_moved(leaf, one) for one in controls if one is not None and one.frame == leaf.frame), default=0.0)
    return _moved(leaf, other) <= min(_TIMES_NOISE * noise, _BLURRED)


def _moved(leaf: Leaf, other: Leaf) -> float:
    """Return the share of pixels that are one brighter or darker; all of them where one is off by more."""
    apart = [abs(one - two) for one, two in zip(leaf.pixels, other.pixels, strict=True) if one != two]
    return 1.0 if max(apart, default=0) > 1 else len(apart) / len(leaf.pixels)


def _noise(leaf: Leaf, control: Leaf | None) -> float:
    if control is None or leaf.frame != control.frame:
        return 0.0
    return _size(leaf, control) or 0.0


def _allowed(leaf: Leaf, path: str, controls: Sequence[Mapping[str, Leaf]]) -> float:
    noise = max((_noise(leaf, control.get(path)) for control in controls), default=0.0)
    return max(_LEAST, _TIMES_NOISE * noise)


def is_setting(path: str, leaf: Leaf, before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> bool:
    """Tell whether a plain attribute of a library's object is how it is set up, whose effect shows in the results.

    The unchanged program has not changed it while it trained, and the changed one has set it before.
    """
    was, became = before.get(path), after.get(path)
    is_constant = leaf.is_of_library and was is not None and was.exact == leaf.exact
    return is_constant and became is not None and became.exact != leaf.exact


def root_of(path: str) -> str:
    """Return the name that a path begins with."""
    return re.split(r"[.\[, ]", path, maxsplit=1)[0]


def shown(path: str) -> str:
    """Return a path as one would write it: a module's parts by their names alone."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)


def why_of(found: list[Difference]) -> str:
    """Return the differences in words, those of numbers last: what is not there at all is told first."""
    found = sorted(found, key=lambda one: (one.size is not None, -(one.size or 0.0)))
    told = "; ".join(f"`{shown(one.path)}` {one.why}" for one in found[:_NAMED])
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{told[:_TOLD]}{more}"
