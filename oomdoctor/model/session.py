"""The live side: the user's namespace and objects. Only fixes, forecast and retry are handed one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from oomdoctor.model.fix import Edit, Patch
    from oomdoctor.model.memory import DeviceMemory, Measured, Usage


class Kind(Enum):
    """The kinds that the census and the snapshot treat each in its own way."""

    ATOM = auto()
    """Immutable, or code: holds no memory worth a look and no state of the run."""
    TENSOR = auto()
    MODULE = auto()
    OPTIMIZER = auto()
    SCHEDULER = auto()
    LOADER = auto()
    GENERATOR_STATE = auto()
    """A random number generator: ``torch.Generator``, ``numpy.random.Generator``, ``random.Random``."""
    ARRAY = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    SET = auto()
    TUPLE = auto()
    CALLABLE = auto()
    """A function, a bound method or a partial: what it holds is in its closure, its defaults and its arguments."""
    ITERATOR = auto()
    """Advances when it is used and cannot be wound back: generators, iterators, open files."""
    OBJECT = auto()
    """Anything else; what it holds is looked for in its ``__dict__``."""


Named: TypeAlias = "tuple[tuple[str, Any], ...]"
"""Objects of one kind, each with the path that leads to it from a name of the namespace."""


class Accelerator(Protocol):
    """A memory that fills: it can be read, its peak marked, its cache given back.

    ``measure`` says in words how ``peak_allocated`` of its readings comes about.
    """

    name: str
    measure: str

    def read(self) -> DeviceMemory:
        """Return the memory as it stands, allocating nothing there."""

    def usage(self) -> Usage:
        """Return the counters alone: no list of blocks, no other process. Threads may ask for it."""

    def peak(self) -> Measured:
        """Return the high-water mark of what ``usage`` tells as used, in bytes."""

    def holds(self, tensor: Any) -> bool:
        """Return whether the memory of a plain tensor is on this device."""

    def reset_peak(self) -> None:
        """Begin a new high-water mark."""

    def empty_cache(self) -> None:
        """Return cached, unused segments to the driver."""


@runtime_checkable
class Simulated(Protocol):
    """A memory that is simulated, whose allocator can be set as that of CUDA."""

    def allocating(self, **settings: Any) -> AbstractContextManager[None]:
        """Return a context within which its allocator has other settings."""


class Standing(NamedTuple):
    """Where a function stood when the cell failed.

    Attributes:
        unbound: its locals that were not bound: no round of a loop had bound them.
        own: by dotted name, what each of its objects, and of those that ``self`` has, does not have from a library.
    """

    unbound: frozenset[str]
    own: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell that was run, or a module of the user's own that the cells import.

    Attributes:
        number: its execution count; negative for a module.
        source: the user's text, magics and all.
        file: the path that a module was loaded from, None for a cell.
    """

    number: int
    source: str
    file: str | None = None

    @property
    def name(self) -> str:
        """What it is called: ``In[3]``, or the file of a module as seen from the working directory."""
        return f"In[{self.number}]" if self.file is None else shown_path(self.file)

    def __str__(self) -> str:
        return f"cell {self.number}" if self.file is None else shown_path(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The program: the modules of the user's own that it imports, then the cells, oldest first; the last one failed.

    Attributes:
        other_names: what functions of the program are called by beside the name of their definition, each with that.
    """

    history: tuple[Cell, ...]
    other_names: tuple[tuple[str, str], ...] = ()

    @property
    def failing(self) -> Cell:
        """The cell that ran out of memory."""
        return self.history[-1]

    @property
    def modules(self) -> tuple[Cell, ...]:
        """The modules of the user's own."""
        return tuple(cell for cell in self.history if cell.file is not None)

    def beside(self, cell: Cell) -> Cells:
        """Return what shares its names with ``cell``: a module none but itself, a cell all cells."""
        if cell.file is not None:
            return replace(self, history=(cell,))
        return replace(self, history=tuple(one for one in self.history if one.file is None)) if self.modules else self

    def changed(self, texts: Mapping[int, str]) -> Cells:
        """Return them with other texts, by the number of the cell."""
        return replace(
            self, history=tuple(replace(one, source=texts.get(one.number, one.source)) for one in self.history)
        )

    def get(self, number: int) -> Cell:
        """Return the cell with this execution count; ``KeyError`` where no such cell was run."""
        for cell in self.history:
            if cell.number == number:
                return cell
        raise KeyError(number)


def shown_path(file: str) -> str:
    """Return the path of a file as it is told: from the working directory on, or its name where it lies elsewhere."""
    path, here = PurePath(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _nothing(namespace: Mapping[str, Any]) -> Mapping[Kind, Named]:
    del namespace
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The user's program, live.

    It holds the namespace alone. Its objects are found anew whenever they are asked for: what the failed run has made
    must be freed when the state is restored, and a change must meet what is bound then.

    Attributes:
        namespace: the globals that the cells run in; never copied.
        find: finds the objects of a namespace by their kind.
        shell: the IPython shell, None in a script.
        is_kept: whether every tensor was copied when the failing cell began.
        base: a change that the cells show already and the live objects do not follow yet; None where there is none.
        ranks: how many processes run the same change together, each its own program.
    """

    namespace: dict[str, Any]
    cells: Cells
    accelerator: Accelerator
    find: Callable[[Mapping[str, Any]], Mapping[Kind, Named]] = field(default=_nothing, repr=False)
    shell: Any = None
    is_kept: bool = False
    base: Patch | None = None
    ranks: int = 1

    def objects(self) -> Mapping[Kind, Named]:
        """Find the objects, of all kinds at once."""
        return self.find(self.namespace)

    @property
    def modules(self) -> Named:
        """Every root ``nn.Module`` of the namespace."""
        return self._of(Kind.MODULE)

    @property
    def optimizers(self) -> Named:
        """Every ``torch.optim.Optimizer`` of the namespace."""
        return self._of(Kind.OPTIMIZER)

    @property
    def loaders(self) -> Named:
        """Every ``DataLoader`` of the namespace."""
        return self._of(Kind.LOADER)

    def _of(self, kind: Kind) -> Named:
        return self.objects().get(kind, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One way to run the failing cell: the same for a forecast and for a retry.

    Attributes:
        source: the text of the cell to run, magics and all.
        replays: what to run before it in the namespace: functions of earlier cells, redefined.
        cells: those earlier cells as they are with the change, one for each of ``replays``; none where it has none.
        modules: changes of modules of the user's own, whose functions take the place of those that are loaded.
        live: makes the context managers that change the live objects while all of it runs, outermost first.
    """

    source: str
    replays: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    modules: tuple[Edit, ...] = ()
    live: tuple[Callable[[], AbstractContextManager[None]], ...] = ()
