"""The way to what was found, from a name that the user can type, step by step."""

from __future__ import annotations

from collections.abc import Sequence
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

        Args:
            items: first and last index, exclusive, of the items that are meant of the sequence that it leads to.
            sliceable: whether an expression can ask for them.
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
        first: index of the first, where they are items of the sequence at ``path``; None for one of its own.
        sliceable: whether that sequence can be sliced.
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

    Args:
        at: which of those in the register it is; containers are indexed by that, and not by the name.
    """
    if type(name) is not str:
        return f".{register}[{name!r}]" if is_plain_key(name) else f"{ARROW}{register}"
    if name == str(at) and not _INDEXED.isdisjoint((module_of(base), name_of(base)) for base in mro_of(type(module))):
        return f"[{name}]"
    return f".{name}" if is_attribute(name) else f".{register}[{name!r}]"


def is_attribute(name: str) -> bool:
    """Return whether a name can be written behind a dot."""
    return name.isidentifier() and not iskeyword(name)
