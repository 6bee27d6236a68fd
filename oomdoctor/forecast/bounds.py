"""Which memory is as large as values decide, and was taken for the most that they may.

``nonzero`` finds all and a mask selects everything, and what is made of the result is as large as that: the tokens of
an expert, what its layers make of them, their gradients. So each such size is remembered, and a storage is of this kind
where it was made of one of this kind and has such a size again. Limits: a size that something else has as well; then
more is taken for uncertain than is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oomdoctor.forecast.ledger import Ledger, Note

_aten = torch.ops.aten
_MARK: Final = "_oomdoctor_bound"
_sizes: set[int] = set()


def bounded(made: torch.Tensor, size: int) -> torch.Tensor:
    """Note that a result has a dimension of this size, which nobody knows and that was taken for the most."""
    if size > 1:
        _sizes.add(size)
        setattr(made, _MARK, True)
    return made


def follow_bounds(func: Any, given: Iterable[Note | None], made: Iterable[tuple[torch.Tensor, Note | None]]) -> None:
    """Mark what an operation has made of memory whose size nobody knows.

    Args:
        func: the operation.
        given: notes of the storages that it was given.
        made: its results with the notes of theirs.
    """
    if not _sizes:
        return
    is_bound = any(note is not None and note.is_bound for note in given)
    for tensor, note in made:
        if note is None:
            continue
        if is_bound and tensor.dim() and (note.is_bound or func is _aten.cat.default):
            _sizes.add(max(tensor.shape))  # another view of it, or several put together
        note.is_bound = note.is_bound or hasattr(tensor, _MARK) or (is_bound and not _sizes.isdisjoint(tensor.shape))


def uncertain_bytes(ledger: Ledger) -> int:
    """Return how much of what is alive at the peak is of a size that nobody knows."""
    if not _sizes:
        return 0
    alive: dict[int, int] = {}
    for event in ledger.events[: ledger.peak_at]:
        if event[0] == "free":
            alive.pop(event[1], None)
        elif ledger.note(event[1]).is_bound:
            alive[event[1]] = event[2]
    return sum(alive.values())
