"""The book of the census: which storages have an owner by now, in which role, by which path.

The first to claim a storage owns it, so that each is counted once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch

from oomdoctor.model.memory import Census, DeviceMemory, Holding, Role
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.alive import alive, without_apart
from oomdoctor.objects.paths import Holder, Path, Root, Ways
from oomdoctor.objects.storages import Bare, is_plain, plain_storages, storages_of, unobserved

Place: TypeAlias = tuple[DeviceMemory, Callable[[torch.Tensor], bool]]
"""A device, and what tells whether the memory of a plain tensor is there."""

_MANY: Final = 64
_device: Final = attrgetter("device")
_dtype: Final = vars(torch._C.TensorBase)["dtype"].__get__
_MOST_HOLDINGS: Final = 10_000
_MOST_MODULES: Final = 100
"""Of one holder that are told what a graph saved in them."""
_FEW: Final = 3
"""Up to so many tensors of one container are named one by one."""
_MOST_WORKSPACES: Final = 4
"""Of cuBLAS and cuBLASLt, for the program's thread and the one of autograd; more may as well be memory of C++."""
_WORKSPACES: Final = Path(Root(""), None, "(PyTorch keeps one for each thread)")
_CLEARS: Final = "torch._C._cuda_clearCublasWorkspaces()"
"""Source: PyTorch's documentation, "cuBLAS workspaces"."""


@dataclass(slots=True)
class _Sum:
    bytes: int = 0
    count: int = 0
    most: int = 0
    largest: Any = None

    def add(self, nbytes: int, tensor: Any) -> None:
        self.bytes += nbytes
        self.count += 1
        if nbytes > self.most:
            self.most, self.largest = nbytes, tensor


@dataclass(slots=True)
class Entry:
    """Storages that were claimed together.

    Attributes:
        items: which of the sequence at ``path``, None for ``path`` itself.
        frees: the statement that lets go of them whatever leads to ``path``; None where ``path`` must be cut.
        others: what holds one of them beside ``path``.
        saved_in: modules, each once, and the bytes that a graph saved in it.
    """

    total: _Sum
    role: Role
    path: Path
    items: tuple[int, int] | None
    sliceable: bool
    suffix: str
    frees: str | None
    others: dict[tuple[int, bool], Holder] = field(default_factory=dict)
    saved_in: Sequence[tuple[Path, int]] = ()

    @property
    def holder(self) -> Holder:
        """What holds them first of all."""
        return Holder(self.path, bool(self.suffix))


class Ledger:
    """Storages with their owners on some devices, while the census is taken. Short-lived: it holds tensors."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._owned: dict[int, Entry] = {}
        self._claimed: set[int] = set()
        self._entries: list[list[Entry]] = [[] for _ in places]
        self._by_device: dict[torch.device, list[tuple[int, bool]]] = {}
        self._workspaces = [list(memory.workspaces) for memory, _ in places]
        """Blocks that may be one: those as large as a storage that was claimed are taken out again."""

    def claim(
        self,
        tensors: Sequence[torch.Tensor],
        role: Role,
        path: Path,
        *,
        items: tuple[int, int] | None = None,
        sliceable: bool = True,
        suffix: str = "",
        frees: str | None = None,
    ) -> None:
        """Give the storages of ``tensors`` that have no owner yet to ``path``.

        Args:
            items: first and last index, exclusive, of their holders in the sequence at ``path``, if it is of several.
            suffix: written behind the path: that the graph of what stands there holds them.
            frees: the statement that lets go of them, where not the path is to be cut.
        """
        self._claimed.update(map(id, tensors))
        if len(tensors) > _MANY and self._take_together(tensors, role, path, items, sliceable, suffix, frees):
            return
        taken: dict[int, Entry] = {}
        here = Holder(path, bool(suffix))
        for key, nbytes, device, tensor in storages_of(tensors):
            owner = self._owned.get(key)
            if owner is not None:
                # One gradient is met by all ways to its parameter, and a part of a sparse one with the whole.
                if owner.role is not Role.GRADIENT or (role is not Role.GRADIENT and path is not owner.path):
                    owner.others[here.key] = here
            elif nbytes and (at := self._at(device, tensor)) is not None:
                if at not in taken:
                    taken[at] = self._enter(at, Entry(_Sum(), role, path, items, sliceable, suffix, frees))
                self._owned[key] = taken[at]
                taken[at].total.add(nbytes, tensor)
                self._is_storage(at, nbytes)

    def _enter(self, at: int, entry: Entry) -> Entry:
        self._entries[at].append(entry)
        return entry

    def _take_together(self, tensors: Sequence[torch.Tensor], *how: Any) -> bool:
        """Take many storages at once, if they are all of one place, all apart and none is owned yet; tell whether."""
        columns = plain_storages(tensors)
        if columns is None or len(devices := set(map(_device, tensors))) > 1:
            return False
        keys, sizes = columns
        place = self._candidates(devices.pop())
        together = place and not place[0][1] and len(set(keys)) == len(keys) and 0 not in sizes
        if not together or not self._owned.keys().isdisjoint(keys):
            return False
        most = max(sizes)
        total = _Sum(sum(sizes), len(sizes), most, tensors[sizes.index(most)])
        self._owned.update(zip(keys, repeat(self._enter(place[0][0], Entry(total, *how)))))
        for nbytes in sizes if self._workspaces[place[0][0]] else ():
            self._is_storage(place[0][0], nbytes)
        return True

    def _is_storage(self, at: int, nbytes: int) -> None:
        if nbytes in self._workspaces[at]:
            self._workspaces[at].remove(nbytes)

    def _claim_workspaces(self) -> None:
        """Give what nobody holds, and is as large as workspaces of cuBLAS, to them."""
        for at, (memory, _) in enumerate(self._places):
            left = self._workspaces[at][:_MOST_WORKSPACES]
            if left and not isinstance(memory.allocated, Unavailable):
                missing = memory.allocated - sum(entry.total.bytes for entry in self._entries[at])
                count = min(len(left), max(missing, 0) // left[0])
                if count:
                    total = _Sum(bytes=count * left[0], count=count)
                    self._enter(at, Entry(total, Role.WORKSPACE, _WORKSPACES, None, False, "", _CLEARS))

    def unclaimed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of ``tensors`` that nobody has claimed, though their storages may have owners."""
        if self._claimed.issuperset(map(id, tensors)):
            return []
        return [one for one in tensors if id(one) not in self._claimed]

    def owned(self, tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Return those of ``tensors`` whose storages have an owner, by the key of the storage."""
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            for key, *_ in storages_of((tensor,)):
                if key in self._owned:
                    found.setdefault(key, []).append(tensor)
        return found

    def owner(self, key: int) -> Entry | None:
        """Return what owns a storage, None if nothing does."""
        return self._owned.get(key)

    def share(self, key: int, holder: Holder) -> None:
        """Note that ``holder``, too, holds the memory of a storage, if that has an owner."""
        owner = self._owned.get(key)
        if owner is not None:
            owner.others[holder.key] = holder

    def _at(self, device: torch.device, tensor: torch.Tensor) -> int | None:
        """Return which place a storage is at. A simulated one shares its device's name and must be asked."""
        for at, must_ask in self._candidates(device):
            if not must_ask or self._places[at][1](tensor):
                return at
        return None

    def _candidates(self, device: torch.device) -> list[tuple[int, bool]]:
        known = self._by_device.get(device)
        if known is None:
            name = str(device)
            known = self._by_device[device] = [
                (at, memory.simulated) for at, (memory, _) in enumerate(self._places) if memory.tensor_device == name
            ]
        return known

    def censuses(self, notes: tuple[str, ...], ways: Ways | None) -> tuple[Census, ...]:
        """Return one census for each place, in their order, each with ``notes``.

        ``ways`` tells who else leads to what the paths lead to; None where not all of that was looked at.
        """
        self._claim_workspaces()
        pairs = zip(self._places, self._entries, strict=True)
        return tuple(_census(memory, entries, notes, ways) for (memory, _), entries in pairs)


def _census(device: DeviceMemory, entries: list[Entry], notes: tuple[str, ...], ways: Ways | None) -> Census:
    roles: dict[Role, int] = {}
    for entry in entries:
        roles[entry.role] = roles.get(entry.role, 0) + entry.total.bytes
    found = sum(roles.values())
    if not isinstance(device.allocated, Unavailable) and device.allocated > found:
        roles[Role.UNEXPLAINED] = roles.get(Role.UNEXPLAINED, 0) + device.allocated - found
    groups = nlargest(_MOST_HOLDINGS, _groups(entries), key=_bytes)
    return Census(
        device=device.name,
        found=found,
        allocated=device.allocated,
        roles=tuple(sorted(roles.items(), key=lambda item: -item[1])),
        holdings=tuple(_holding(device.name, group, ways) for group in groups),
        notes=notes,
    )


def _bytes(group: list[Entry]) -> int:
    return sum(entry.total.bytes for entry in group)


def _groups(entries: list[Entry]) -> list[list[Entry]]:
    """Join what one path holds in one role, and the items of one sequence where there are more than a few."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.role, id(entry.path), entry.suffix, entry.items is None), []).append(entry)
    joined: list[list[Entry]] = []
    for group in groups.values():
        spans = {entry.items for entry in group}
        if group[0].items is not None and len(spans) <= _FEW:
            joined += [[entry for entry in group if entry.items == span] for span in spans]
        else:
            joined.append(group)
    return joined


def _holding(device: str, group: list[Entry], ways: Ways | None) -> Holding:
    largest = max((entry.total for entry in group), key=lambda total: total.most).largest
    largest = largest.tensor if type(largest) is Bare else largest
    spans = [entry.items for entry in group if entry.items is not None]
    items = (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None
    text, expression = group[0].path.names(items, sliceable=group[0].sliceable)
    return Holding(
        bytes=_bytes(group),
        device=device,
        role=group[0].role,
        path=text + group[0].suffix,
        expression=expression or None,
        count=sum(entry.total.count for entry in group),
        dtype=None if largest is None else str(_dtype(largest)).removeprefix("torch."),
        shape=_shape(largest),
        frees=_frees(group, ways),
        saved_in=_saved_in([part for entry in group for part in entry.saved_in]),
    )


def _saved_in(parts: list[tuple[Path, int]]) -> tuple[tuple[str, int], ...]:
    """Return modules with the bytes that graphs saved in them.

    Of very many, those that lie deepest are added to the modules around them, so that the bytes stay whole.
    """
    if not parts:
        return ()
    sizes: dict[int, tuple[Path, int]] = {}
    for path, size in parts:
        sizes[id(path)] = path, size + sizes.get(id(path), (path, 0))[1]
    while len(sizes) > _MOST_MODULES and (deepest := max(path.depth for path, _ in sizes.values())):
        for key, (path, size) in list(sizes.items()):
            if path.depth == deepest and path.parent is not None:
                del sizes[key]
                above = path.parent
                sizes[id(above)] = above, size + sizes.get(id(above), (above, 0))[1]
    return tuple((path.names()[0], size) for path, size in sorted(sizes.values(), key=lambda part: -part[1]))


def _frees(group: list[Entry], ways: Ways | None) -> str | None:
    """Return the line that frees what a group holds: everything that leads to it must go."""
    first = group[0].frees
    is_gradient = group[0].role is Role.GRADIENT
    if not is_gradient and first is not None:
        return first
    if ways is None or (is_gradient and first is None):
        return None
    own = [] if is_gradient else [entry.holder for entry in group]
    return ways.line([*own, *(other for entry in group for other in entry.others.values())], first)


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    if tensor is None or not is_plain(tensor) or tensor.is_nested:
        return None  # a subclass may answer itself
    return tuple(tensor.shape)


_base: Final = vars(torch._C.TensorBase)["_base"].__get__


def bases_of(views: Sequence[Any], held: Mapping[int, Sequence[Any]]) -> Iterator[Any]:
    """Yield what those of ``views`` were made of that lie in the same storages as ``held``, or the parts they have."""
    view: Any
    for key, _, _, view in storages_of(views):
        if key in held and type(view) is not Bare:
            yield _base(view)
        elif key in held and view.tensor is not None:
            yield from held[key]


def held_by_c(some: list[Any], others: list[Any]) -> list[Any]:
    """Return those of ``some`` that nothing of Python's holds beside these two lists, in each of which they are."""
    alone = object()
    some.append(alone)
    others.append(alone)
    counts = list(map(sys.getrefcount, some))  # this variable holds one of them, C++ the others
    some.pop()
    others.pop()
    return [one for one, count in zip(some, counts, strict=False) if count <= counts[-1]]


def _counts_of_c() -> bool:
    """Return whether Python counts a reference where C++ holds a tensor too; older versions of torch do not tell it."""
    with unobserved():
        tensor = torch.empty(0)
        before = sys.getrefcount(tensor)
        view = tensor.view(0)
        return sys.getrefcount(tensor) - before == len(view.shape)


C_COUNTS: Final = _counts_of_c()


def all_tensors() -> list[Any]:
    """Return every tensor of the program that the garbage collector knows."""
    return without_apart(alive(torch.Tensor))
