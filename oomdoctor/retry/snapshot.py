"""The user's state at the start of a cell: taken in well under a millisecond, brought back on demand.

What is saved is which name is bound to what, what containers hold, the ``__dict__`` of modules, optimizers, schedulers
and of objects whose class the notebook or torch defines, and random number generators. The contents of tensors are
those of ``TensorCopies``.

What cannot be brought back is told by ``losses`` before anything is touched. Not seen at all: what objects of other
libraries keep in C or in long containers, writes through ``tensor.data`` (see ``keep_all``) and by address, what other
threads keep, the world outside; and of what is too large to be looked into (see ``bulk``) single items that are written
by another name than its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

from oomdoctor.errors import StateError
from oomdoctor.objects.containers import GONE, Recipe, living, revive, still_holds
from oomdoctor.objects.copies import Contents
from oomdoctor.objects.kinds import Kind, kind_of, registered, submodules
from oomdoctor.objects.named import is_users, own_modules
from oomdoctor.objects.rng import RandomState
from oomdoctor.program.code_names import last_name, written_names
from oomdoctor.program.names import FirstUse, bound_names, first_uses
from oomdoctor.retry.namespace_state import NamespaceState
from oomdoctor.retry.object_state import MOST_OBJECTS
from oomdoctor.retry.reachable import Reach, held_elsewhere, is_fixed
from oomdoctor.retry.release import uncollected
from oomdoctor.retry.settings import REGISTERED, Settings
from oomdoctor.retry.tensor_copies import TensorCopies, outside_modes

_TOLD_FIRST: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.LOADER, Kind.TENSOR, Kind.ARRAY})
_LONGEST: Final = 120
"""Of an error's own words."""
_REGISTERS: Final = frozenset({"register"})
_STATISTICS: Final = frozenset({"batch_norm", "native_batch_norm"})
"""Functions of torch (2.13) that write into running statistics without counting it as a version."""


class Snapshot:
    """The state at the start of one cell.

    Args:
        namespace: the globals that the cell is about to run in.
        source: the cell's text, to tell which names it needs from before.
        room: how many bytes of host memory copies of tensors may take.

    Attributes:
        is_kept: whether every tensor that was seen was copied before the cell began.
    """

    def __init__(self, namespace: dict[str, Any], source: str, room: Callable[[], int]) -> None:
        self.source = source
        self._namespace = namespace
        self._copies = TensorCopies(room)
        with uncollected() as collects:
            with outside_modes():
                self._rng = RandomState.take()
                self._state = NamespaceState(namespace, self._copies, source, own_modules())
            self._settings = Settings(self._state.modules, source, namespace, self._state.codes, collects=collects)
        self.is_kept = False
        self._left, self._texts = set[str](), list[str]()
        self._unrestored: dict[str, str] = {}

    @property
    def kept_bytes(self) -> int:
        """Size of the copies made so far."""
        return self._copies.kept_bytes

    def follow_devices(self) -> None:
        """See ``TensorCopies.follow_devices``."""
        self._copies.follow_devices()

    @property
    def waits_for_forward(self) -> bool:
        """Whether a forward may change something that is not copied yet."""
        return self._copies.waits_for_forward

    def before_forward(self, module: Any) -> None:
        """Copy buffers and gradients, before the first forward of the cell, and let go of the gradients.

        Tensors of the user's may have become buffers of the module since the cell began.
        """
        parts = (part for _, part in submodules(module))
        self._copies.before_forward(
            [buffer for part in parts for _, buffer in registered(part, "_buffers") if buffer is not None]
        )

    def keep_all(self) -> None:
        """Copy every tensor that was seen, when the cell is about to begin."""
        self._copies.keep_all()
        self.is_kept = not self._copies.full

    def before_step(self, optimizer: Any) -> None:
        """Copy every watched tensor, what the step writes first, before the first step of an optimizer in the cell."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        state = [tensor for held in optimizer.state.values() if isinstance(held, dict) for tensor in held.values()]
        self._copies.keep([*weights, *(weight.grad for weight in weights), *state])
        written = frozenset[str]().union(*map(written_names, self._texts))
        self._copies.keep_all(lambda label: last_name(label) not in written and not self._reach().writes(label))
        if optimizer.state and not any(self._copies.watches(weight) for weight in weights):
            name = type(optimizer).__name__
            self._state.unknown.append(
                f"an {name} that no name leads to was used before, and its weights were not seen"
            )

    def widen(self, texts: Iterable[str]) -> None:
        """Look at what the texts of an attempt get at as well, which run in the place of the cell."""
        self._texts = [*texts]
        source = "\n".join(self._texts)
        if not self._state.is_everything:
            with uncollected(), outside_modes():
                self._state.absorb(NamespaceState(self._namespace, self._copies, source, own_modules()))

    def kept_by_name(self, names: frozenset[str]) -> dict[str, Any]:
        """Return what these names stood for, as far as it is alive; a container is known as itself from then on."""
        kept: dict[str, Any] = {}
        for name in names & self._state.bindings.keys() & self._namespace.keys():
            held, value = self._state.bindings[name], self._namespace[name]
            if type(held) is Recipe and held.ident == id(value):
                held.original = value
            if is_users(name) and revive(held) is not GONE:
                kept[name] = value
        for name in names & self._left & self._namespace.keys():  # the attempt needs it after all
            kept[name] = self._state.bindings[name] = self._namespace[name]
        self._left -= names
        return kept

    def leave(self, names: Iterable[str]) -> None:
        """Have these names stay as they are whenever the state is restored: later cells have bound or deleted them."""
        for name in names:
            self._left.add(name)
            self._state.bindings.pop(name, None)

    def leave_settings(self, later: Snapshot) -> None:
        """Have settings stay as they are whenever the state is restored that a later cell has changed."""
        self._settings.leave(later._settings)

    def set_by(self, later: Snapshot) -> str | None:
        """Return a setting that the cell ran under and a later one has changed, None where there is none."""
        return next((setting.name for setting in later._settings.chosen() if setting.is_torchs), None)

    def check_left(self, names: frozenset[str]) -> None:
        """Raise ``StateError`` for names that later cells have bound since."""
        if later := sorted(names & self._left):
            raise StateError(f"`{later[0]}` was bound by a later cell, and the change needs what it was before")

    def uses(self) -> frozenset[str]:
        """Return the names that the cell reads and binds, and those that the functions it calls read."""
        reach = self._reach()
        everything = self._state.bindings.keys() | self._namespace.keys() if reach.is_all else frozenset[str]()
        return frozenset(reach.names | bound_names(self.source) | everything)

    def set_aside(self, kept: dict[str, Any], holds: Callable[[Any], bool]) -> None:
        """Move tensors that ``kept`` alone leads to into host memory until they are restored, those that ``holds``."""

        def watched(names: dict[str, Any]) -> TensorCopies:
            copies = TensorCopies(lambda: 0)
            with outside_modes():
                NamespaceState(names, copies, "", everything=True)
            return copies

        now = watched(self._namespace)
        alive = filter(holds, watched(kept).alive())
        self._copies.set_aside([tensor for tensor in alive if not now.watches(tensor)])

    def give_up_copies(self) -> str:
        """Return why copies could not be made, empty if all were, and forget them: nothing has changed yet."""
        return self._copies.give_up()

    def end(self) -> None:
        """Note what the cell leaves, when it ends."""
        self._settings.end()

    def losses(self, *, hidden: bool = True) -> tuple[str, ...]:
        """Return what cannot be brought back, a sentence each; nothing is touched.

        Args:
            hidden: whether code is looked for that no name leads to, which goes through all objects of the process.
        """
        around = list(self._settings.lost())
        with outside_modes():
            return tuple(dict.fromkeys((*self._lost(hidden), *around)))

    def doubts(self) -> tuple[str, ...]:
        """Return what was changed that is not put back, and that no result depends on, a sentence each."""
        found = list(self._settings.doubts())
        if REGISTERED in found and not self._reach().mentions(_REGISTERS):
            found.remove(REGISTERED)
        return tuple(f"{setting.name} differ from before the cell, and are not put back" for setting in found)

    def _reach(self) -> Reach:
        return Reach(self.source, self._namespace, self._stood_for)

    def _lost(self, hidden: bool) -> Iterator[str]:
        uses, reach = first_uses(self.source), self._reach()
        rebound = {name for name, use in uses.items() if use is not FirstUse.READS}
        for name, held in self._state.bindings.items():
            if name in reach.names and name not in rebound and revive(held) is GONE:
                yield f"`{name}` was replaced or deleted by the cell, which needs the old one"
        yield from self._not_looked_at(reach, hidden)
        for path in self._gone_items():
            if _root(path) not in rebound:
                yield f"`{path}` was replaced by the cell, and the old one is gone"
        yield from self._copies.lost()
        for tensor, label in self._copies.unsure() if reach.mentions(_STATISTICS) else ():
            if reach.reaches(tensor):
                yield f"`{label}` may have been written to by a batch_norm, which leaves no trace"
        yield from self._state.unknown
        for generator in self._state.unbegun:
            yield from generator.lost()
        for memento in self._state.mementos:
            yield from memento.lost(reach)
        if not self._state.is_whole:
            yield f"the namespace leads to more than {MOST_OBJECTS} objects, and not all were looked at"

    def _not_looked_at(self, reach: Reach, hidden: bool) -> Iterator[str]:
        """Yield a sentence for each name that was not looked at, and that the cell may have got at all the same."""
        if self._state.is_everything:
            return
        known, now = self._state.bindings, self._namespace
        unread = [name for name in self._state.names if name not in known and is_users(name) and name not in self._left]
        unread = [name for name in unread if name in now and not is_fixed(now[name])]
        reached = set(unread) if reach.is_all else reach.names.intersection(unread)
        if hidden and not reached:
            reached = held_elsewhere(now, NamespaceState.alive(), frozenset(unread))
        for name in sorted(reached):
            yield f"`{name}` was not saved before the cell, and code that runs without being named in it may change it"

    def _stood_for(self, name: str) -> Iterator[Any]:
        """Yield what a name stood for at the start of the cell, and what it stands for now."""
        held = self._state.bindings.get(name)
        yield from (living(item) for _, item in held.pairs) if type(held) is Recipe else (living(held),)
        yield self._namespace.get(name)

    def _gone_items(self) -> Iterator[str]:
        todo = [held for held in self._state.bindings.values() if type(held) is Recipe]
        todo += chain.from_iterable(memento.recipes() for memento in self._state.mementos)
        seen: set[int] = set()
        while todo:
            recipe = todo.pop()
            if id(recipe) not in seen:
                seen.add(id(recipe))
                yield from recipe.gone()
                todo += [held for held in recipe.values if type(held) is Recipe]

    def restore(self) -> None:
        """Bring everything back, in place. May be called again after a further attempt.

        What cannot be put back is told by ``unrestored``; the rest is put back all the same.
        """
        self._unrestored = {}
        with outside_modes():
            for path, put in self._pieces({}):
                self._put(path, put)
        for path, put in self._settings.pieces():
            self._put(path, put)

    def _put(self, path: str, put: Callable[[], None]) -> None:
        try:
            put()
        except Exception as exc:  # noqa: BLE001 - border: one object that refuses must not keep the others from it
            why = f"{type(exc).__name__}: {exc}".partition("\n")[0][:_LONGEST]
            self._unrestored[path] = f"{path} could not be brought back ({why})"

    def _pieces(self, memo: dict[int, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield all that is put back, each with what it is called, in the order in which it is to be done."""
        state, uses = self._state, first_uses(self.source)
        before = set(state.names)
        for name in [name for name in self._namespace if name not in before and self._is_mine(name)]:
            del self._namespace[name]
        for name in filter(is_users, state.bindings):
            yield f"`{name}`", partial(self._bind, name, uses.get(name), memo)
        arrays = [memento for memento in state.mementos if isinstance(memento, Contents)]
        others = (memento for memento in state.mementos if not isinstance(memento, Contents))
        yield from chain.from_iterable(memento.pieces(memo) for memento in others)
        yield from self._copies.pieces()
        # After the tensors, which may share the memory and are copied later than when the cell begins.
        yield from chain.from_iterable(memento.pieces(memo) for memento in arrays)
        yield "the random number generators", self._rng.restore

    def _bind(self, name: str, use: FirstUse | None, memo: dict[int, Any]) -> None:
        value = revive(self._state.bindings[name], self._namespace.get(name), memo)
        if value is not GONE or use is FirstUse.DELETES:
            self._namespace[name] = value
        else:
            self._namespace.pop(name, None)

    def unrestored(self) -> list[str]:
        """Return what ``restore`` failed to bring back, a sentence each."""
        return list(self._unrestored.values())

    def settle(self) -> tuple[str, ...]:
        """Bring everything back for good; return what could not be, a sentence each."""
        self.restore()
        gone = [name for name, held in self._state.bindings.items() if is_users(name) and revive(held) is GONE]
        for name in gone:
            self._namespace.pop(name, None)
        missing = [f"`{name}` was replaced or deleted by the cell and is gone" for name in gone]
        return (*missing, *self.unrestored())

    @property
    def bytes_to_copy(self) -> int:
        """Host memory that copies not made yet would take."""
        return self._copies.bytes_to_copy

    def _is_mine(self, name: str) -> bool:
        return is_users(name) and name not in self._left

    def made(self) -> list[str]:
        """Return the names that were not there at the start of the cell: models, optimizers and data first."""
        before, now = set(self._state.names), self._namespace
        made = [name for name in now if name not in before and self._is_mine(name)]
        return sorted(made, key=lambda name: kind_of(type(now[name])) not in _TOLD_FIRST)

    def rebound(self) -> list[str]:
        """Return the names that were bound, bound anew or deleted since the start of the cell."""
        names, before = dict.fromkeys([*self._state.names, *self._namespace]), set(self._state.names)
        return [name for name in names if self._is_mine(name) and not self._stands(name, before)]

    def changes(self) -> Iterator[str]:
        """Yield what else is not as it was at the start of the cell, each as what was done: ``written `x```."""
        with outside_modes():
            yield from self._copies.changed()
            yield from filter(None, (memento.changed() for memento in self._state.mementos))
            for name, held in self._state.bindings.items():
                if (
                    type(held) is Recipe
                    and self._stands(name, self._state.bindings)
                    and not still_holds(self._namespace[name], held)
                ):
                    yield f"changed `{name}`"
            if self._rng.has_moved():
                yield "drawn random numbers"

    def _stands(self, name: str, before: Collection[str]) -> bool:
        if name not in before or name not in self._namespace:
            return False
        if name not in self._state.bindings:  # the cell could not get at it
            return True
        held, value = self._state.bindings[name], self._namespace[name]
        return id(value) == held.ident if type(held) is Recipe else revive(held) is value


def _root(path: str) -> str:
    return re.split(r"[.\[ ]", path, maxsplit=1)[0]
