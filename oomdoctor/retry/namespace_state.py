"""The state of a namespace at the start of a cell: what names are bound to, and what lies in what they lead to.

Taken before every cell, so it looks at as little as it can: numbers and text are copied as they are, heavy values are
held weakly, tensors are watched and copied later if need be. Objects of other libraries are looked into for modules,
optimizers and tensors; see ``foreign`` for their own attributes.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from oomdoctor.objects.containers import (
    CONTAINERS,
    LIGHT_BYTES,
    LIGHT_TYPES,
    PLAIN_CONTAINERS,
    REFILLED,
    Recipe,
    Unbegun,
    attribute_path,
    builtin_of,
    is_light,
    is_small_array,
    is_unbegun,
    items_of,
    length_of,
    weak,
)
from oomdoctor.objects.copies import LONG, Allowance, Copied, Long, may_be_copied
from oomdoctor.objects.frames import locals_of
from oomdoctor.objects.kinds import Kind, kind_of
from oomdoctor.objects.mementos import DEEP, Attributes, Light, Memento, Numbers, Reached
from oomdoctor.objects.named import is_installed, is_users
from oomdoctor.program.code_names import EVERYTHING, given_names, last_name, mentioned, names_of, written_names
from oomdoctor.retry.object_state import (
    BOUND,
    DEPTH,
    MOST_OBJECTS,
    OBJECTS,
    is_open,
    note,
    note_atom,
    note_class,
    note_derived,
)

if TYPE_CHECKING:
    from oomdoctor.retry.tensor_copies import TensorCopies

_CONTAINERS: Final = CONTAINERS - {Kind.TUPLE}
_REMADE: Final = frozenset({dict, list, set, tuple, OrderedDict, defaultdict})
"""Containers that can be made anew where the original is gone."""
_SHELLS: Final = ("_ih", "_oh", "_dh", "In", "Out")
"""Names of what IPython keeps itself: inputs, outputs and folders."""
_STILL: Final = LIGHT_TYPES | {CodeType}
_FIRST: Final = {Kind.MODULE: 0, Kind.TENSOR: 1}
_alive: Final[WeakSet[NamespaceState]] = WeakSet()


class NamespaceState:
    """What one namespace led to.

    Args:
        namespace: the globals.
        copies: what tensors are watched by.
        source: the cell's text.
        own: the modules of the user's own.
        everything: whether all names are looked at, whatever the text mentions.

    Attributes:
        names: all that there were. bindings: how each name of the user's is held that the cell may get at.
        is_everything: whether those are all.
        mementos: of objects, in the order in which they were met; the first, ``light``, of containers of numbers and
            text.
        modules: of Python's and of libraries.
        codes: of functions of the user's, each with its globals.
        unknown: sentences on what could not be looked at. is_whole: whether all was looked at.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        copies: TensorCopies,
        source: str,
        own: Iterable[ModuleType] = (),
        *,
        everything: bool = False,
    ) -> None:
        self.copies = copies
        self.known: dict[int, Any] = {id(namespace[name]): namespace[name] for name in _SHELLS if name in namespace}
        self.known[id(namespace)] = namespace
        self.modules: list[ModuleType] = []
        self.mementos: list[Memento] = []
        self.add = self.mementos.append
        self.light = Light()
        self.add(self.light)
        self.codes: list[tuple[CodeType, dict[str, Any]]] = []
        self.unknown: list[str] = []
        self.unbegun: list[Unbegun] = []
        self.allowance = Allowance(
            lambda path: any(last_name(path) in names(source) for names in (written_names, given_names))
        )
        self.bindings: dict[str, Any] = {}
        self.names = list(namespace)
        self._namespace, self._mentioned = namespace, set[str]()
        self.is_everything = False
        self.mention(EVERYTHING if everything else mentioned(source))
        for module in own:
            self._note_own_module(module, source)
        self._note_mentioned()
        self.is_whole = len(self.known) <= MOST_OBJECTS
        for generator in self.unbegun:
            generator.count()
        # In no cycle with the snapshot, so that all is let go of when the cell ends, not when cycles are collected.
        del self.known, self.copies, self.allowance, self.add, self._namespace, self._mentioned
        _alive.add(self)

    @staticmethod
    def alive() -> list[NamespaceState]:
        """Return the states that are held."""
        return list(_alive)

    def mention(self, names: frozenset[str]) -> None:
        """Have these names looked at as well, ``EVERYTHING`` for all of them."""
        if names is EVERYTHING:
            self.is_everything = True
        else:
            self._mentioned |= names

    def mention_code(self, code: CodeType, home: dict[str, Any]) -> None:
        """Have the names looked at that the code of a function mentions, whose globals are ``home``."""
        self.codes.append((code, home))
        names = names_of(code).mentioned
        if names is EVERYTHING or home is self._namespace:
            self.mention(names)

    def _note_mentioned(self) -> None:
        """Look at names until those that were looked at mention no others."""
        namespace = self._namespace
        while True:
            if self.is_everything:
                found = {name: value for name, value in namespace.items() if name not in self.bindings}
            else:
                names = (self._mentioned & namespace.keys()) - self.bindings.keys()
                found = dict(sorted(((name, namespace[name]) for name in names), key=_order))
                self._mentioned = set()
            found = {name: value for name, value in found.items() if is_users(name)}
            if not found:
                return
            self.bindings |= found
            for name, value in found.items():
                self.bindings[name] = self._hold_guarded(value, name)

    def absorb(self, other: NamespaceState) -> None:
        """Take what another look at the same state has noted besides."""
        for name, own in vars(self).items():
            if type(own) is list and own is not self.names:
                own += vars(other)[name]
        self.bindings = {**other.bindings, **self.bindings}
        self.is_everything |= other.is_everything
        self.is_whole &= other.is_whole

    def _hold_guarded(self, value: Any, name: str) -> Any:
        """Hold a value; one whose class does not let itself be looked at costs its own name alone."""
        try:
            return self.hold(value, name, DEPTH)
        except Exception as exc:  # noqa: BLE001 - border: any class of the user's may answer in any way
            self.unknown.append(f"`{name}` could not be looked at ({type(exc).__name__})")
            self.mention(EVERYTHING)
            return value

    def hold(self, value: Any, path: str, depth: int) -> Any:
        """Return how to hold ``value``, noting on the way what lies in it."""
        if type(value) in _STILL:
            return value
        if id(value) in self.known:
            known = self.known[id(value)]
            if type(known) is Unbegun:
                known.uses += 1
            return known
        if type(value) is tuple and LIGHT_TYPES.issuperset(map(type, value)):
            return value
        kind = kind_of(type(value))
        if kind is Kind.ATOM or type(value) in BOUND:
            note_atom(self, value, path, depth)
            return value
        if type(value) in REFILLED and not value:
            self.light.add(value, path)
            return value
        if depth <= 0 or len(self.known) > MOST_OBJECTS:
            if kind in _CONTAINERS or kind in OBJECTS or (kind is Kind.OBJECT and is_open(type(value))):
                self.add(Reached(weak(value), path, DEEP))
            return value
        if type(value) in PLAIN_CONTAINERS and len(value) <= LONG and is_light(value):
            self.light.add(value, path)
            return value
        if is_unbegun(value):
            return self._hold_generator(value, path, depth)
        if kind is Kind.TENSOR:
            held: Any = self._hold_tensor(value, path)
            self.known[id(value)] = held
            note_derived(self, value, path, kind, held, depth)
        elif kind in _CONTAINERS or type(value) is tuple or _is_named_tuple(type(value)):
            return self._hold_container(value, path, kind, depth)
        else:
            # A plain function costs nothing to keep, and a retry may put another one in its place.
            is_plain = type(value) is FunctionType and value.__closure__ is None
            held = value if is_plain else self._hold_array(value) if kind is Kind.ARRAY else weak(value)
            self.known[id(value)] = held
            recipe = note(self, value, path, kind, held, depth)
            if kind is Kind.OBJECT and recipe is not None and not recipe.is_heavy:
                held = value  # plain data: a cell that replaces it may have it back
        self.known[id(value)] = held
        return held

    def _note_own_module(self, module: ModuleType, source: str) -> None:
        """Note the globals of a module of the user's that no name leads to: a function may import it.

        All of them where the cell's text has its name, and else numbers, text, and plain containers of them.
        """
        names = vars(module)
        if id(names) in self.known:
            return
        try:
            if re.search(rf"\b{re.escape(module.__name__.rpartition('.')[2])}\b", source):
                self.note_globals(names, module.__name__, DEPTH)
                return
            self.add(Numbers(names, module.__name__))
            for name, item in list(names.items()):
                if name[:2] != "__" and type(item) in PLAIN_CONTAINERS and id(item) not in self.known:
                    self.known[id(item)] = item
                    if len(item) > LONG:
                        self.add(Long(item, module.__name__, self.allowance))
                    elif is_light(item):
                        self.light.add(item, f"{module.__name__}.{name}")
        except Exception as exc:  # noqa: BLE001 - border: any class of the user's may answer in any way
            self.unknown.append(f"the module `{module.__name__}` could not be looked at ({type(exc).__name__})")

    def fill(self, recipe: Recipe, held: Mapping[Any, Any], depth: int) -> None:
        """Note in a recipe what something holds, by name, key or index."""
        recipe.keys, path, item_path = list(held), recipe.path, recipe.item_path
        recipe.values = [self.hold(item, item_path(path, key), depth - 1) for key, item in held.items()]

    def note_globals(self, names: dict[str, Any], path: str, depth: int) -> None:
        """Note the globals of a module of the user's own."""
        if id(names) not in self.known:
            recipe = self.known[id(names)] = Recipe(names, path, attribute_path)
            self.add(Attributes(names, dict, recipe, path))
            items = list(names.items())
            recipe.keys = [name for name, _ in items]
            recipe.values = [
                item if name[:2] == "__" else self.hold(item, f"{path}.{name}", depth - 1) for name, item in items
            ]

    def _hold_array(self, array: Any) -> Any:
        """Return how to hold an array: a copy stands for it where there may be one, and a small view is held itself."""
        if may_be_copied(array) and (array.nbytes <= LIGHT_BYTES or self.allowance.copies_bytes(array.nbytes)):
            return Copied(array)
        return array if is_small_array(array) else weak(array)

    def _hold_tensor(self, tensor: Any, path: str) -> Any:
        watched = self.copies.watch(tensor, path)
        if tensor.grad_fn is not None or watched.hooks:  # a backward gets at what no name leads to
            self.mention(EVERYTHING)
        light = tensor.grad_fn is None and tensor.numel() * tensor.element_size() <= LIGHT_BYTES
        if tensor.is_leaf and tensor.requires_grad:
            self.copies.watch_gradient(tensor, path)
        return tensor if light else weak(tensor)

    def _hold_generator(self, value: Any, path: str, depth: int) -> Any:
        held = self.known[id(value)] = Unbegun(value, path)
        self.unbegun.append(held)
        for name, item in locals_of(value.gi_frame).items():
            held.arguments[name] = self.hold(item, f"{path}.{name}", depth - 1)
        if not is_installed(value.gi_frame.f_globals.get("__name__")):
            self.mention_code(value.gi_code, value.gi_frame.f_globals)
        return held

    def _hold_container(self, value: Any, path: str, kind: Kind, depth: int) -> Any:
        recipe = self.known[id(value)] = Recipe(value, path)
        if kind is Kind.TUPLE and type(value) is not tuple:
            note_class(self, type(value), path, depth)
        if length_of(value) > LONG:
            recipe.original, recipe.is_long = value, True
            if kind is not Kind.TUPLE:
                self.add(Long(value, path, self.allowance))
        elif kind is Kind.MAPPING:
            items = list(builtin_of(value).items(value))
            recipe.keys = [self.hold(key, path, depth - 1) for key, _ in items]
            recipe.values = [self.hold(item, recipe.item_path(path, key), depth - 1) for key, item in items]
        else:
            item_path = "{}".format if kind is Kind.SET else "{}[{}]".format
            recipe.values = [
                self.hold(item, item_path(path, at), depth - 1) for at, item in enumerate(items_of(value, kind))
            ]
            recipe.keys = range(len(recipe.values))
        if type(value) not in _REMADE and type(value) is not deque and not _is_named_tuple(type(value)):
            note_derived(self, value, path, kind, weak(value), depth)
        if not recipe.is_long and not recipe.is_heavy:
            recipe.original = value
        elif not recipe.is_long and type(value) not in _REMADE and not _is_named_tuple(type(value)):
            recipe.original = weak(value)
        return recipe


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    """Return where a name stands among others: what several lead to is called by the first."""
    return _FIRST.get(kind_of(type(item[1])), len(_FIRST)), item[0]


def _is_named_tuple(cls: type) -> bool:
    """Return whether a class is a tuple with names and nothing else, and can be made anew."""
    return issubclass(cls, tuple) and "_fields" in vars(cls) and vars(cls).get("__slots__") == ()
