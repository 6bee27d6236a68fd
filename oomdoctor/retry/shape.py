"""The shape of the user's state: what names are bound to, and what lies in what they lead to.

Taken before every cell, so it looks at as little as it can: numbers and text are copied as they are, heavy values are
held weakly, tensors are watched and copied later if need be. Objects of other libraries are looked into for modules,
optimizers and tensors; see ``foreign`` for their own attributes.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodWrapperType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from oomdoctor.model.kinds import (
    Kind,
    child_path,
    held_by,
    items_of,
    kind_of,
    module_of,
    mro_of,
    plain_dict,
    registered,
)
from oomdoctor.model.names import is_users
from oomdoctor.retry.foreign import Cached, Foreign, Frame, is_cached, is_frame
from oomdoctor.retry.held import LIGHT_TYPES, Recipe, Weak, is_light, length_of, light_copy, mapped_by
from oomdoctor.retry.installed import is_installed, is_ours, own_modules
from oomdoctor.retry.parts import Parts, class_attributes, functions_in, items_of_array, slots_of
from oomdoctor.retry.rng import generator_state, is_random, spawned

if TYPE_CHECKING:
    from oomdoctor.retry.vault import TensorVault, Watched

__all__ = ["LONG", "MOST_OBJECTS", "Shape", "sample_of"]

_DEPTH: Final = 40
MOST_OBJECTS: Final = 200_000
LONG: Final = 20_000
_LIGHT_BYTES: Final = 64 << 10
_CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET})
_OBJECTS: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER})
_OPEN_MODULES: Final = (
    *("torch.", "types", "argparse", "collections"),
    *("transformers.train", "accelerate.", "lightning.", "pytorch_lightning."),
)
"""Classes whose ``__dict__`` is their whole state, beside the user's own: torch's scalers, samplers and the like, and
plain holders of attributes."""
_FOREIGN_DEPTH: Final = 3
"""How far objects of other libraries are looked into."""
_BOUND: Final = frozenset({BuiltinFunctionType, MethodWrapperType})
_OUTWARD: Final = frozenset(
    {
        *(("socket", "socket"), ("subprocess", "Popen"), ("sqlite3", "Connection"), ("sqlite3", "Cursor")),
        *(("requests.sessions", "Session"), ("mmap", "mmap"), ("queue", "Queue"), ("queue", "SimpleQueue")),
        *(("_queue", "SimpleQueue"), ("multiprocessing.queues", "Queue"), ("concurrent.futures.thread", "Executor")),
        *(("builtins", "memoryview"), ("multiprocessing.sharedctypes", "Synchronized")),
        *(("torch.utils.tensorboard.writer", "SummaryWriter"), ("h5py._hl.files", "File")),
    }
)
"""Objects of other libraries with which a cell reaches beyond the process, or that advance."""
_SAMPLES: Final = 4096
_SUMMED_BYTES: Final = 4 << 20
_REMADE: Final = frozenset({dict, list, set, tuple, OrderedDict, defaultdict})
"""Containers that can be made anew where the original is gone."""
_PLAIN_CONTAINERS: Final = frozenset({dict, list, set, OrderedDict})
_EMPTY: Final[dict[type, Any]] = {cls: cls() for cls in _PLAIN_CONTAINERS if cls is not set}
"""One copy for all that hold nothing: every module has a dozen of them. Never written to."""
_MODULE_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})


class Shape:
    """What one namespace led to.

    Args:
        namespace: the globals.
        vault: returns the vault that tensors are watched by; asked for the first tensor.
        source: the cell's text.

    Attributes:
        bindings: how each name of the user's is held.
        objects: ``(owner, recipe)`` for the ``__dict__`` of objects; ``globals`` of the user's
            own modules with theirs, ``counters`` those of them that no name leads to;
            ``foreign``: objects of other libraries, ``frames`` of pandas.
        light: containers of numbers and text, and ``copies`` of them in the same order; ``arrays``: small arrays with
            theirs; ``large``: ``(path, array, sample)`` for the others; ``closures``: ``(function, index, held)``.
        parts: slots, attributes of classes and items of arrays of objects. ``classes``: ``(owner, class)`` of objects.
        caches: of functions. ``deep``: path and value of what lies too deep to be looked at.
        long: containers too long to copy. ``iterators``: path and value of what advances. ``unknown``: sentences on
            what could not be looked at.
        random: generators with their states. ``modules``: of Python's and of libraries.
        buffers, pinned_gradients: what the first forward may change; ``gradients``: of each parameter, if it had one.
        is_whole: whether all was looked at.
    """

    def __init__(self, namespace: dict[str, Any], vault: Callable[[], TensorVault], source: str) -> None:
        self._vault = vault
        self._known: dict[int, Any] = {id(namespace): namespace}
        self.modules: list[ModuleType] = []
        self.objects: list[tuple[Any, Recipe]] = []
        self.globals: list[tuple[dict[str, Any], Recipe]] = []
        self.counters: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.foreign: list[Foreign] = []
        self.frames: list[Frame] = []
        self.light: list[Any] = []
        self.copies: list[Any] = []
        self.random: list[tuple[Any, Any]] = []
        self.spawned: list[tuple[Any, int]] = []
        self.arrays: list[tuple[Any, Any]] = []
        self.large: list[tuple[str, Any, bytes]] = []
        self.closures: list[tuple[Any, int, Any]] = []
        self.parts: list[Parts] = []
        self.classes: list[tuple[Any, type]] = []
        self.caches: list[Cached] = []
        self.deep: list[tuple[str, Any]] = []
        self.long: list[Recipe] = []
        self.iterators: list[tuple[str, Any]] = []
        self.unknown: list[str] = []
        self.buffers: list[Weak] = []
        self.gradients: list[tuple[Callable[[], Any], Watched | None]] = []
        self.pinned_gradients: list[Any] = []
        self.bindings = dict(namespace)
        for name, value in self._take_light(namespace):
            if is_users(name):
                self.bindings[name] = self._hold_guarded(value, name)
            else:  # the shell's own names for outputs: to hold them would keep the outputs
                del self.bindings[name]
        for module in own_modules():
            self._note_own_module(module, source)
        self.is_whole = len(self._known) <= MOST_OBJECTS
        # In no cycle with the snapshot, so that all is let go of when the cell ends, not when cycles are collected.
        del self._known, self._vault

    def _take_light(self, namespace: dict[str, Any]) -> list[tuple[str, Any]]:
        """Copy the lists and dicts of numbers and text; return what of the namespace is left to look into.

        One tight loop: it sees every name before every cell.
        """
        all_light, light, rest = LIGHT_TYPES.issuperset, self.light, []
        for name, value in namespace.items():
            kind = type(value)
            if kind in LIGHT_TYPES or (kind is FunctionType and _is_plain(value, namespace)):
                continue
            if kind is list and len(value) <= LONG and all_light(map(type, value)):
                light.append(value)
            else:
                rest.append((name, value))
        shells = {id(namespace[name]) for name in ("_ih", "_oh", "_dh", "In", "Out") if name in namespace}
        if shells:
            light[:] = [value for value in light if id(value) not in shells]
            rest = [item for item in rest if id(item[1]) not in shells]
        self.copies += [value.copy() for value in light]  # lists, all of them
        return rest

    def _hold_guarded(self, value: Any, name: str) -> Any:
        """Hold a value; one whose class does not let itself be looked at costs its own name alone."""
        try:
            return self._hold(value, name, _DEPTH)
        except Exception as exc:  # noqa: BLE001 - border: any class of the user's may answer in any way
            self.unknown.append(f"`{name}` could not be looked at ({type(exc).__name__})")
            return value

    def _hold(self, value: Any, path: str, depth: int) -> Any:
        """Return how to hold ``value``, noting on the way what lies in it."""
        kind = kind_of(type(value))
        if kind is Kind.ATOM or type(value) in _BOUND:
            if type(value) not in LIGHT_TYPES:
                self._note_atom(value, path, depth)
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        if depth <= 0 or len(self._known) > MOST_OBJECTS:
            if kind in _CONTAINERS or kind in _OBJECTS or (kind is Kind.OBJECT and _is_open(type(value))):
                self.deep.append((path, _weak(value)))
            return value
        if type(value) in _PLAIN_CONTAINERS and len(value) <= LONG and is_light(value):
            self._copy_light(value)
            return value
        if kind is Kind.TENSOR:
            held: Any = self._hold_tensor(value, path)
            self._known[id(value)] = held
            self._note_derived(value, path, kind, held, depth)
        elif kind in _CONTAINERS or type(value) is tuple or _is_named_tuple(type(value)):
            return self._hold_container(value, path, kind, depth)
        else:
            # A plain function costs nothing to keep, and a retry may put another one in its place.
            held = value if type(value) is FunctionType and value.__closure__ is None else _weak(value)
            self._known[id(value)] = held
            recipes = len(self.objects)
            self._note(value, path, kind, held, depth)
            if kind is Kind.OBJECT and len(self.objects) > recipes and not self.objects[recipes][1].is_heavy:
                held = value  # plain data: a cell that replaces it may have it back
        self._known[id(value)] = held
        return held

    def _note_atom(self, value: Any, path: str, depth: int) -> None:
        """Note what cannot be replaced but leads further: classes, modules, bound methods that are made in C."""
        if isinstance(value, type):
            self._note_class(value, path, depth)
        elif type(value) in _BOUND:
            self._hold(value.__self__, f"{path}.__self__", depth - 1)
        elif id(value) in self._known:
            return
        elif type(value) is ModuleType:
            self._known[id(value)] = value
            if is_installed(value.__name__):
                self.modules.append(value)
            else:
                self._note_globals(vars(value), path, depth)
        elif isinstance(value, frozenset):
            self._known[id(value)] = value
            for item in frozenset.__iter__(value):
                self._hold(item, path, depth - 1)
            self._note_derived(value, path, Kind.ATOM, value, depth)
        elif not is_installed(module_of(type(value))):
            self._known[id(value)] = value
            self._note_derived(value, path, Kind.ATOM, value, depth)

    def _note_class(self, cls: type, path: str, depth: int) -> None:
        """Note the functions and attributes of the user's own classes: of this one, and of those it derives from."""
        for base in mro_of(cls):
            if id(base) in self._known or is_installed(module_of(base)):
                continue
            self._known[id(base)] = base
            where = path if base is cls else base.__qualname__
            recipe = Recipe(vars(base), where, "{}.{}".format)
            self.parts.append(Parts(base, recipe, class_attributes))
            for name, item in class_attributes(base).items():
                held = self._hold(item, f"{where}.{name}", depth - 1)
                for function in functions_in(item):
                    self._hold(function, f"{where}.{name}", depth - 1)
                # A function is plain, and a cell that replaces it is to find it again.
                recipe.pairs.append((name, item if kind_of(type(item)) is Kind.CALLABLE else held))

    def _note_derived(self, value: Any, path: str, kind: Kind, held: Any, depth: int) -> None:
        """Note what an object of a class derived from a builtin one, or from a library's, has besides: attributes."""
        cls = type(value)
        attributes = plain_dict(value)
        if is_installed(module_of(cls)):
            if attributes and kind is Kind.TENSOR:
                self._note_object(attributes, path, kind, held, depth)
            return
        if attributes is not None:
            self._note_object(attributes, path, kind, held, depth)
        self._note_kept(value, path, held, depth)

    def _note_kept(self, value: Any, path: str, held: Any, depth: int) -> None:
        """Note the class of an object, and its slots."""
        self.classes.append((held, type(value)))
        self._note_class(type(value), type(value).__qualname__, depth)
        slots = slots_of(value)
        if slots:
            recipe = Recipe(slots, path, "{}.{}".format)
            recipe.pairs = [(name, self._hold(item, f"{path}.{name}", depth - 1)) for name, item in slots.items()]
            self.parts.append(Parts(held, recipe, slots_of))

    def _note_own_module(self, module: ModuleType, source: str) -> None:
        """Note the globals of a module of the user's that no name leads to: a function may import it.

        All of them where the cell's text has its name, and else numbers, text, and plain containers of them.
        """
        names = vars(module)
        if id(names) in self._known:
            return
        try:
            if module.__name__.rpartition(".")[2] in source:
                self._note_globals(names, module.__name__, _DEPTH)
                return
            found = [(name, item) for name, item in names.items() if name[:2] != "__"]
            self.counters.append((names, {name: item for name, item in found if type(item) in LIGHT_TYPES}))
            for _, item in found:
                if type(item) in _PLAIN_CONTAINERS and id(item) not in self._known and len(item) <= LONG:
                    self._known[id(item)] = item
                    if is_light(item):
                        self._copy_light(item)
        except Exception as exc:  # noqa: BLE001 - border: any class of the user's may answer in any way
            self.unknown.append(f"the module `{module.__name__}` could not be looked at ({type(exc).__name__})")

    def _note_globals(self, names: dict[str, Any], path: str, depth: int) -> None:
        """Note the globals of a module of the user's own."""
        if id(names) not in self._known:
            recipe = self._known[id(names)] = Recipe(names, path, "{}.{}".format)
            self.globals.append((names, recipe))
            recipe.pairs = [
                (name, item if name[:2] == "__" else self._hold(item, f"{path}.{name}", depth - 1))
                for name, item in names.items()
            ]

    def _copy_light(self, container: Any) -> None:
        self.light.append(container)
        if not container and type(container) in _EMPTY:
            self.copies.append(_EMPTY[type(container)])
        else:
            self.copies.append(light_copy(container))

    def _hold_tensor(self, tensor: Any, path: str) -> Any:
        self._vault().watch(tensor, path)
        light = tensor.grad_fn is None and tensor.numel() * tensor.element_size() <= _LIGHT_BYTES
        if tensor.is_leaf and tensor.requires_grad:
            self._note_gradient(tensor, path)
        return tensor if light else _weak(tensor)

    def _note_gradient(self, tensor: Any, path: str) -> None:
        """Hold the gradient until the first forward: by then a cell that clears gradients has let go of it."""
        gradient = tensor.grad
        watched = None
        if gradient is not None:
            watched = self._vault().watch(gradient, f"{path}.grad")
            self.pinned_gradients.append(gradient)
        self.gradients.append((ref(tensor), watched))

    def _hold_container(self, value: Any, path: str, kind: Kind, depth: int) -> Any:
        recipe = self._known[id(value)] = Recipe(value, path)
        length = length_of(value, kind)
        if length > LONG:
            recipe.original, recipe.length = value, length
            self.long.append(recipe)
        elif kind is Kind.MAPPING:
            recipe.pairs = [
                (self._hold(key, path, depth - 1), self._hold(item, recipe.item_path(path, key), depth - 1))
                for key, item in mapped_by(value).items(value)
            ]
        else:
            item_path = "{}".format if kind is Kind.SET else "{}[{}]".format
            recipe.pairs = [
                (at, self._hold(item, item_path(path, at), depth - 1)) for at, item in enumerate(items_of(value, kind))
            ]
        if type(value) not in _REMADE and type(value) is not deque and not _is_named_tuple(type(value)):
            self._note_derived(value, path, kind, _weak(value), depth)
        if recipe.length < 0 and not recipe.is_heavy:
            recipe.original = value
        elif recipe.length < 0 and type(value) not in _REMADE and not _is_named_tuple(type(value)):
            recipe.original = _weak(value)
        return recipe

    def _note(self, value: Any, path: str, kind: Kind, held: Any, depth: int) -> None:
        """Note the state of an object: its ``__dict__``, its random stream, its closure, that it advances."""
        if kind is Kind.GENERATOR_STATE:
            self._note_random(value)
            self._note_derived(value, path, kind, held, depth)
        elif kind is Kind.ITERATOR:
            self.iterators.append((path, held))
        elif kind is Kind.ARRAY:
            self._note_array(value, path, held, depth)
        elif kind is Kind.CALLABLE:
            self._note_callable(value, path, held, depth)
        elif kind in _OBJECTS or _is_open(type(value)):
            attributes = plain_dict(value)
            if attributes is not None:
                self._note_object(attributes, path, kind, held, depth)
            self._note_kept(value, path, held, depth)
            if (
                kind is Kind.MODULE
                and attributes is not None
                and kind_of(type(attributes["_modules"])) is not Kind.MAPPING
            ):
                self._hold_scripted(value, path, depth)
        elif kind is Kind.OBJECT:
            self._note_foreign(value, path, held, depth)

    def _note_random(self, generator: Any) -> None:
        self.random.append((generator, generator_state(generator)))
        self.spawned.append((generator, spawned(generator)))

    def _note_array(self, array: Any, path: str, held: Any, depth: int) -> None:
        if array.dtype.kind == "O" and array.size <= LONG:
            recipe = Recipe({}, path)
            recipe.pairs = [(at, self._hold(item, f"{path}[{at}]", depth - 1)) for at, item in enumerate(array.flat)]
            self.parts.append(Parts(held, recipe, items_of_array))
        elif array.dtype.kind in "biufcSUmM" and array.nbytes <= _LIGHT_BYTES:
            self.arrays.append((held, array.copy()))
        elif array.dtype.kind != "O":
            self.large.append((path, held, sample_of(array)))
        self._note_derived(array, path, Kind.ARRAY, held, depth)

    def _note_foreign(self, value: Any, path: str, held: Any, depth: int) -> None:
        """Note an object of another library's: its attributes, what it holds, and whether it can be wound back."""
        cls = type(value)
        if is_frame(value):
            frame = Frame(value)
            self.frames.append(frame)
            for item in frame.objects():
                self._hold(item, path, depth - 1)
        elif is_random(cls):
            self._note_random(value)
        elif is_cached(cls):
            self.caches.append(Cached(value, path))
            self._hold(value.__wrapped__, path, depth - 1)
        elif cls in (bytearray, array):
            if len(value) <= _LIGHT_BYTES:
                self._copy_light(value)
            else:
                self.large.append((path, held, sample_of(value)))
        elif (cls.__module__, cls.__name__) in _OUTWARD or any(module_of(base) == "_ctypes" for base in mro_of(cls)):
            self.iterators.append((path, held))
        else:
            self._look_into(value, path, _FOREIGN_DEPTH)

    def _note_callable(self, value: Any, path: str, held: Any, depth: int) -> None:
        closure = getattr(value, "__closure__", None) or () if type(value) is FunctionType else ()
        if type(value) is FunctionType or type(value) is partial:
            self._note_object(vars(value), path, Kind.CALLABLE, held, depth)
        for at, cell in enumerate(closure):
            with suppress(ValueError):  # an empty cell
                self.closures.append((held, at, self._hold(cell.cell_contents, path, depth - 1)))
        for suffix, item in held_by(value):
            self._hold(item, f"{path}{suffix}", depth - 1)
        if type(value) is FunctionType:
            # Not its ``__module__``: a library's wrapper bears the name of what it wraps.
            home = value.__globals__.get("__name__")
            if not is_installed(home):
                self._note_globals(value.__globals__, str(home), depth)

    def _look_into(self, value: Any, path: str, depth: int) -> None:
        """Note the attributes of an object of another library's; look for modules, optimizers and tensors in it."""
        attributes = plain_dict(value)
        if depth == 0 or not attributes or len(self._known) > MOST_OBJECTS or is_ours(type(value).__module__):
            return
        self.foreign.append(Foreign(value, attributes, path))
        for name, item in attributes.items():
            kind = kind_of(type(item))
            if kind in _OBJECTS or kind is Kind.TENSOR:
                self._hold(item, f"{path}.{name}", _DEPTH)
            elif type(item) in _PLAIN_CONTAINERS and len(item) <= LONG and is_light(item):
                self._copy_light(item)
            elif kind is Kind.OBJECT and id(item) not in self._known:
                self._known[id(item)] = item
                self._look_into(item, f"{path}.{name}", depth - 1)

    def _note_object(self, attributes: dict[str, Any], path: str, kind: Kind, held: Any, depth: int) -> None:
        recipe = Recipe(attributes, path, "{}.{}".format)
        self.objects.append((held, recipe))
        for name, item in attributes.items():
            if kind is Kind.MODULE and name in _MODULE_TABLES and kind_of(type(item)) is Kind.MAPPING:
                recipe.pairs.append((name, self._hold_table(item, path, name, depth)))
            else:
                recipe.pairs.append((name, self._hold(item, f"{path}.{name}", depth - 1)))

    def _hold_scripted(self, value: Any, path: str, depth: int) -> None:
        """Hold what a scripted module keeps in C++."""
        for table in _MODULE_TABLES:
            for name, item in registered(value, table):
                self._hold(item, child_path(path, name), depth - 1)

    def _hold_table(self, table: dict[str, Any], path: str, kind: str, depth: int) -> Recipe:
        """Hold the parameters, buffers or children of a module by the paths that a user would type."""
        recipe = self._known[id(table)] = Recipe(table, path, child_path)
        below = depth if kind == "_modules" else depth - 1
        recipe.pairs = [(name, self._hold(item, child_path(path, name), below)) for name, item in table.items()]
        if kind == "_buffers":
            self.buffers += [_weak(item) for item in table.values() if item is not None]
        return recipe


def sample_of(array: Any) -> bytes:
    """Return some of the contents of a large array, from its beginning to its end; it may be a view of any kind.

    Of one that lies in a piece and is not too large, a checksum of all of it.
    """
    if not hasattr(array, "flags"):  # no array of numpy's
        return zlib.crc32(array).to_bytes(4)
    if array.flags.c_contiguous and array.nbytes <= _SUMMED_BYTES and array.dtype.kind in "biufc":
        return zlib.adler32(array.view("u1")).to_bytes(4)
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel("K") if array.flags.forc else array.flat
    return bytes(flat[:: max(1, array.size // _SAMPLES)].tobytes())


def _is_open(cls: type) -> bool:
    return str(cls.__module__).startswith(_OPEN_MODULES) or not is_installed(cls.__module__)


def _is_plain(function: FunctionType, namespace: dict[str, Any]) -> bool:
    """Return whether a function of the namespace holds nothing."""
    is_empty = function.__closure__ is None and function.__defaults__ is None and not function.__dict__
    return is_empty and function.__globals__ is namespace


def _is_named_tuple(cls: type) -> bool:
    """Return whether a class is a tuple with names and nothing else, and can be made anew."""
    return issubclass(cls, tuple) and "_fields" in vars(cls) and vars(cls).get("__slots__") == ()


def _weak(value: Any) -> Any:
    try:
        return Weak(value)
    except TypeError:  # its class allows no weak references
        return value
