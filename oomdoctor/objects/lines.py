"""The line that lets go of memory: it must cut every way that leads there, or it frees nothing.

The walk gives each object one path, the shortest; here are kept the other paths by which it was met again. From what
holds a storage they are followed back, up to the names that all of it hangs on. If one of these cannot be let go of by
a line that is typed, or if there are more than a few, there is no such line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from oomdoctor.objects.paths import Found, Origin, Path, Root

_MOST_NAMES: Final = 6
_MOST_ROOTS: Final = 3 * _MOST_NAMES
"""One object that was shown has up to five names: its own, ``Out[7]``, ``_``, ``__`` and ``___``."""
_LONGEST: Final = 160
"""What the reports show of a line, in characters; one cut short cannot be typed."""
_MOST_STEPS: Final = 2_000_000
"""Of the search for one report; holders after that are not told how to be freed."""
_OF_A_NAME: Final = 4
"""References to what a name is bound to: the namespace's, and three in ``are_all_known``."""
_RELEASE: Final = "fix release_traceback"


class Holder(NamedTuple):
    """What holds a storage: what stands at ``path``, or by ``is_graph`` the autograd graph of the tensors there."""

    path: Path
    is_graph: bool = False

    @property
    def key(self) -> tuple[int, bool]:
        """What it is known by: paths are compared by identity, as each stands for one object."""
        return id(self.path), self.is_graph


class Ways:
    """Who leads to what, beside the paths themselves. Short-lived."""

    def __init__(self) -> None:
        self._again: dict[tuple[int, bool], list[Holder]] = {}
        self._known: dict[tuple[tuple[int, bool], ...], tuple[Root, ...] | None] = {}
        self._lines: dict[tuple[tuple[Root, ...], str | None], str | None] = {}
        self._steps = 0

    def add(self, first: Holder, again: Holder) -> None:
        """Note that ``again`` leads to the object that was first met at ``first``, or to the graph there."""
        self._again.setdefault(first.key, []).append(again)

    def line(self, holders: Iterable[Holder], first: str | None) -> str | None:
        """Return the line that cuts every way to ``holders``, after the statement ``first``; None if there is none."""
        roots = self.roots(holders)
        if roots is None:
            return None
        key = roots, first
        if key not in self._lines:
            self._lines[key] = line(roots, first)
        return self._lines[key]

    def roots(self, holders: Iterable[Holder]) -> tuple[Root, ...] | None:
        """Return the roots that lead to one of ``holders``; None where they are too many to tell.

        A frame that is still running is none of them: it lets go by itself.
        """
        forks = {fork.key: fork for fork in map(self._fork, holders)}
        which = tuple(forks)
        if which not in self._known:
            self._known[which] = self._search(forks)
        return self._known[which]

    def _fork(self, holder: Holder) -> Holder:
        """Return the nearest holder above that more than one way leads to, or else the root."""
        if holder.key in self._again:
            return holder
        step = holder.path
        while step.parent is not None and (id(step), False) not in self._again:
            step = step.parent
        return Holder(step)

    def _search(self, forks: dict[tuple[int, bool], Holder]) -> tuple[Root, ...] | None:
        seen = dict(forks)
        todo = list(forks.values())
        roots: dict[Root, None] = {}
        for holder in todo:  # it grows on the way
            for fork in map(self._fork, self._leading(holder)):
                if fork.key not in seen:
                    seen[fork.key] = fork
                    todo.append(fork)
            if not holder.path.root.ends:
                roots[holder.path.root] = None
            if self._steps > _MOST_STEPS or len(roots) > _MOST_ROOTS:
                return None
        return tuple(roots)

    def _leading(self, holder: Holder) -> Iterator[Holder]:
        """Yield what leads to a holder, or to a step of the way there."""
        if holder.is_graph:
            yield from self._again.get(holder.key, ())
        step: Path | None = holder.path
        while step is not None:
            again = self._again.get((id(step), False), ())
            self._steps += 1 + len(again)
            yield from again
            step = step.parent


def are_all_known(names: Sequence[tuple[str, Any]], met: Sequence[Found]) -> bool:
    """Return whether the namespace, and containers that it has a name for, hold what was met, and nothing else does.

    Told by counting references, so that large containers need not be searched for more. Those that are known are taken
    off; if there are others, whosever they are, the answer is no.

    Args:
        names: of the namespace, in a list with a tuple for each.
        met: just now, so that nothing else of ours keeps the tensors.
    """
    bound = dict(names)
    unbound = _most_references([object()])
    for found in met:
        named = bound.get(found.path.root.name)
        if found.path.parent is not None or found.path.root.origin is not Origin.NAME or not found.tensors:
            return False
        holders = 1
        if found.first is None:
            holders = _OF_A_NAME
        elif _most_references([named]) > unbound + _OF_A_NAME:
            return False
        if _most_references(list(found.tensors)) > unbound + holders + 1:  # that of ``met``
            return False
    return True


def _most_references(values: list[Any]) -> int:
    return max(map(sys.getrefcount, values))


def line(roots: Iterable[Root], first: str | None = None) -> str | None:
    """Return the line that unbinds all of ``roots``, after the statement ``first``; None if none can be typed."""
    held = list(roots)
    origins = {root.origin for root in held}
    if Origin.FRAME in origins or not all(_can_be_typed(root.name) for root in held if root.origin is Origin.NAME):
        return None
    if first is None and origins == {Origin.EARLIER}:
        return f"%oomdoctor {_RELEASE}"
    names = {root.name: root.ident for root in held if root.origin is Origin.NAME}
    shown = _shown(held, names)
    # ``del_var`` takes the object out of the namespace by whatever names, and out of the output cache.
    left = [name for name, ident in names.items() if ident not in shown or not name.isidentifier()]
    if len(left) + len(shown) > _MOST_NAMES or not held:
        return first if not held else None
    if len(shown) == 1 and not left and first is None and Origin.EARLIER not in origins:
        return f"%xdel {next(iter(shown.values()))}"
    statements = [first] if first else []
    if Origin.EARLIER in origins:
        statements.append(f"get_ipython().run_line_magic('oomdoctor', '{_RELEASE}')")
    statements += [f"get_ipython().del_var({name!r})" for name in shown.values()]
    statements += [f"del {', '.join(left)}"] if left else []
    found = "; ".join(statements)
    return found if len(found) <= _LONGEST else None


def _can_be_typed(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _shown(held: list[Root], names: dict[str, int]) -> dict[int, str]:
    """Return a name for each object that the output cache holds, by its ``id``: the user's own where it has one."""
    shown: dict[int, str] = {}
    for root in held:
        if root.origin is Origin.OUTPUT:
            shown.setdefault(root.ident, f"_{root.name[4:-1]}" if root.name.startswith("Out[") else root.name)
    for name, ident in names.items():
        if ident in shown and name.isidentifier():
            shown[ident] = name
    return shown
