"""The way to what was found, from a name that the user can type, and the line that lets go of it.

Such a line must cut every way that leads there, or it frees nothing. The walk gives each object one path, the shortest;
here are kept the other paths by which it was met again. From what holds a storage they are followed back, up to the
names that all of it hangs on. If one of these cannot be let go of by a line that is typed, or if there are more than a
few, there is no such line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from keyword import iskeyword
from typing import Any, Final, NamedTuple

from oomdoctor.model.memory import Role
from oomdoctor.objects.kinds import is_plain_key, module_of, mro_of, name_of

ARROW: Final = " → "
"""Begins a step that no expression can follow."""
_INDEXED: Final = frozenset(
    {("torch.nn.modules.container", name) for name in ("Sequential", "ModuleList", "ParameterList")}
)


class Origin(Enum):
    """What binds a root: a name of the namespace, the output cache, a frame, or a frame of a failure before."""

    NAME = auto()
    OUTPUT = auto()
    FRAME = auto()
    EARLIER = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """Where a walk sets out.

    Attributes:
        name: a name, or an expression that stands for one.
        place: the frame that the name is a local of, in words; empty for a name of the namespace.
        ident: the ``id`` of what it is bound to.
        is_program: whether code of the notebook that drives modules binds the name, not a module's or a library's.
        ends: whether it is a local of a frame that is still running, which lets go of it by itself.
    """

    name: str
    place: str = ""
    is_program: bool = True
    ident: int = 0
    origin: Origin = Origin.NAME
    ends: bool = False


class Path(NamedTuple):
    """One step of the way from a root. ``suffix`` is Python, or words after an arrow that no expression can follow."""

    root: Root
    parent: Path | None
    suffix: str

    def child(self, suffix: str) -> Path:
        """Return the path of something that this one leads to."""
        return Path(self.root, self, suffix)

    @property
    def depth(self) -> int:
        """How many steps it takes from the root."""
        return len(self._suffixes()) - 1

    def names(self, items: tuple[int, int] | None = None, *, sliceable: bool = True) -> tuple[str, str]:
        """Return the path as a person reads it, and the expression for it or for its nearest holder.

        ``items`` are the first and last index, exclusive, of those meant of the sequence that it leads to.
        """
        steps = self._suffixes()
        holder = steps[: next((at for at, step in enumerate(steps) if step.startswith(ARROW)), len(steps))]
        if items is not None:
            first, last = items
            which = f"[{first}]" if last == first + 1 else f"[{first}:{last}]"
            if len(holder) == len(steps) and (sliceable or last == first + 1):
                holder = [*holder, which]
            steps = [*steps, which]
        text = "".join(steps)
        text = f"local `{text}` of {self.root.place}" if self.root.place else text
        return text, "".join(holder) if self.root.name else ""

    def exact(self) -> str | None:
        """Return the expression for what it leads to itself, None where none does."""
        text, expression = self.names()
        return expression if not self.root.place and text == expression else None

    def _suffixes(self) -> list[str]:
        steps: list[str] = []
        step: Path | None = self
        while step is not None:
            steps.append(step.suffix)
            step = step.parent
        return steps[::-1]


class Found(NamedTuple):
    """Tensors met on the walk.

    Attributes:
        first: index of the first, where they are items of the sequence at ``path``.
        contained: whether a container or an object other than a module holds them.
        role: what they are there for, where what holds them tells.
        node: in their stead, a node of the autograd graph; ``storage``: one without a tensor.
    """

    tensors: Sequence[Any]
    path: Path
    first: int | None = None
    sliceable: bool = True
    contained: bool = False
    role: Role | None = None
    node: Any = None
    storage: Any = None

    def path_of(self, index: int) -> Path:
        """Return the path of one of them."""
        if self.first is not None:
            return self.path.child(f"[{self.first + index}]")
        return self.path if len(self.tensors) == 1 else self.path.child(f"{ARROW}value")

    def item(self, index: int) -> tuple[int, int] | None:
        """Return the bounds of one of them as an item of the sequence, None where they are not items."""
        return None if self.first is None else (self.first + index, self.first + index + 1)


def member(module: Any, name: Any, register: str, at: int) -> str:
    """Return the part of a path that leads from a module to what one of its registers holds under ``name``.

    Containers are indexed by the place ``at`` which it is there, and not by the name.
    """
    if type(name) is not str:
        return f".{register}[{name!r}]" if is_plain_key(name) else f"{ARROW}{register}"
    if name == str(at) and not _INDEXED.isdisjoint((module_of(base), name_of(base)) for base in mro_of(type(module))):
        return f"[{name}]"
    return f".{name}" if is_attribute(name) else f".{register}[{name!r}]"


def is_attribute(name: str) -> bool:
    """Return whether a name can be written behind a dot."""
    return name.isidentifier() and not iskeyword(name)


_MOST_NAMES: Final = 6
_MOST_ROOTS: Final = 3 * _MOST_NAMES
"""One object that was shown has up to five names: its own, ``Out[7]``, ``_``, ``__`` and ``___``."""
_LONGEST: Final = 160
"""What the reports show of a line, in characters; one cut short cannot be typed."""
_MOST_STEPS: Final = 2_000_000
"""Of the search for one report; holders after that are not told how to be freed."""
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
        self._steps = 0

    def add(self, first: Holder, again: Holder) -> None:
        """Note that ``again`` leads to the object that was first met at ``first``, or to the graph there."""
        self._again.setdefault(first.key, []).append(again)

    def line(self, holders: Iterable[Holder], first: str | None) -> str | None:
        """Return the line that cuts every way to ``holders``, after the statement ``first``; None if there is none."""
        roots = self.roots(holders)
        return line(roots, first) if roots is not None else None

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
            leading = [*self._again.get(holder.key, ())] if holder.is_graph else []
            step: Path | None = holder.path
            while step is not None:
                leading += self._again.get((id(step), False), ())
                self._steps += 1
                step = step.parent
            self._steps += len(leading)
            for fork in map(self._fork, leading):
                if fork.key not in seen:
                    seen[fork.key] = fork
                    todo.append(fork)
            if not holder.path.root.ends:
                roots[holder.path.root] = None
            if self._steps > _MOST_STEPS or len(roots) > _MOST_ROOTS:
                return None
        return tuple(roots)


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
