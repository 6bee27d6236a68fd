"""What objects of each kind hold beside their name: noted in a shape, and looked into in their turn."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from gc import get_referents
from logging import Logger
from threading import Condition
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodWrapperType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType

from oomdoctor.objects.foreign import Cached, Foreign, Frame, is_cached, is_frame
from oomdoctor.objects.functions import Written
from oomdoctor.objects.homes import is_installed, is_ours
from oomdoctor.objects.kinds import (
    Kind,
    child_path,
    held_by,
    kind_of,
    members_of,
    module_of,
    mro_of,
    name_of,
    plain_dict,
    registered,
)
from oomdoctor.objects.light import LIGHT_TYPES, is_light
from oomdoctor.objects.locks import is_lock, times_held
from oomdoctor.objects.parts import ATTRIBUTES, ITEMS, SLOTS, Parts, class_attributes, functions_in
from oomdoctor.objects.places import REGISTRY, STATE, Place, has_state, is_closed, is_memory, places_of
from oomdoctor.objects.recipes import Recipe, weak
from oomdoctor.objects.rng import generator_state, is_random, spawned
from oomdoctor.retry.bulk import LONG, Large, Long, Small
from oomdoctor.retry.mentions import EVERYTHING, shares

if TYPE_CHECKING:
    from oomdoctor.retry.shape import Shape

__all__ = [
    "BOUND",
    "DEPTH",
    "LIGHT_BYTES",
    "MOST_OBJECTS",
    "OBJECTS",
    "PLAIN_CONTAINERS",
    "is_open",
    "note",
    "note_atom",
    "note_class",
    "note_derived",
]

DEPTH: Final = 40
MOST_OBJECTS: Final = 200_000
LIGHT_BYTES: Final = 64 << 10
OBJECTS: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER})
_OPEN_MODULES: Final = (
    *("torch.", "types", "argparse", "collections"),
    *("transformers.train", "accelerate.", "lightning.", "pytorch_lightning."),
)
"""Classes whose ``__dict__`` is their whole state, beside the user's own: torch's scalers, samplers and the like, and
plain holders of attributes."""
_FOREIGN_DEPTH: Final = 3
"""How far objects of other libraries are looked into."""
BOUND: Final = frozenset({BuiltinFunctionType, MethodWrapperType})
_SHELL: Final = ("IPython.core.interactiveshell", "InteractiveShell")
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
PLAIN_CONTAINERS: Final = frozenset({dict, list, set, OrderedDict})
_MODULE_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})


def note(shape: Shape, value: Any, path: str, kind: Kind, held: Any, depth: int) -> None:
    """Note the state of an object: its ``__dict__``, its random stream, its closure, that it advances."""
    if kind is Kind.GENERATOR_STATE:
        _note_random(shape, value)
        note_derived(shape, value, path, kind, held, depth)
    elif kind is Kind.ITERATOR:
        shape.iterators.append((path, held))
    elif kind is Kind.ARRAY:
        _note_array(shape, value, path, held, depth)
    elif kind is Kind.CALLABLE:
        _note_callable(shape, value, path, held, depth)
    elif kind in OBJECTS or is_open(type(value)) or issubclass(type(value), BaseException):
        attributes = plain_dict(value)
        if attributes is not None:
            _note_object(shape, attributes, path, kind, held, depth)
        _note_kept(shape, value, path, held, depth)
        if (
            kind is Kind.MODULE
            and attributes is not None
            and kind_of(type(attributes.get("_modules"))) is not Kind.MAPPING
        ):
            _hold_scripted(shape, value, path, depth)
    elif kind is Kind.OBJECT:
        _note_foreign(shape, value, path, held, depth)
    if is_memory(type(value)):
        _note_memory(shape, value, path, held)
    else:
        for place in places_of(type(value)):
            _note_parts(shape, value, path, held, depth, place)


def _note_parts(shape: Shape, value: Any, path: str, held: Any, depth: int, place: Place) -> None:
    """Note what an object keeps in one place."""
    found = place.read(value)
    if found or place is not SLOTS:
        recipe = Recipe(found, path, "{}.{}".format)
        recipe.keys = list(found)
        recipe.values = [shape.hold(item, f"{path}.{name}", depth - 1) for name, item in found.items()]
        shape.parts.append(Parts(held, recipe, place))


def _note_memory(shape: Shape, value: Any, path: str, held: Any) -> None:
    """Note a piece of memory of ctypes'; of one with pointers it is not known what they point to."""
    places = places_of(type(value))
    if not places:
        shape.iterators.append((path, held))
    elif memoryview(value).nbytes > LIGHT_BYTES:
        shape.large.append(Large(value, held, path, shape.allowance))
    else:
        recipe = Recipe({}, path)
        found = places[0].read(value)
        recipe.keys, recipe.values = list(found), list(found.values())
        shape.parts.append(Parts(held, recipe, places[0]))


def note_atom(shape: Shape, value: Any, path: str, depth: int) -> None:
    """Note what cannot be replaced but leads further: classes, modules, bound methods that are made in C."""
    if isinstance(value, type):
        note_class(shape, value, path, depth)
    elif type(value) in BOUND:
        shape.hold(value.__self__, f"{path}.__self__", depth - 1)
    elif id(value) in shape.known:
        return
    elif type(value) is ModuleType:
        shape.known[id(value)] = value
        if is_installed(value.__name__):
            shape.modules.append(value)
        else:
            shape.note_globals(vars(value), path, depth)
    elif isinstance(value, frozenset):
        shape.known[id(value)] = value
        for item in frozenset.__iter__(value):
            shape.hold(item, path, depth - 1)
        note_derived(shape, value, path, Kind.ATOM, value, depth)
    elif not is_installed(module_of(type(value))):
        shape.known[id(value)] = value
        note_derived(shape, value, path, Kind.ATOM, value, depth)


def note_class(shape: Shape, cls: type, path: str, depth: int) -> None:
    """Note the functions and attributes of the user's own classes: of this one, and of those it derives from."""
    for base in mro_of(cls):
        if id(base) in shape.known or is_installed(module_of(base)):
            continue
        shape.known[id(base)] = base
        where = path if base is cls else base.__qualname__
        recipe = Recipe(vars(base), where, "{}.{}".format)
        shape.parts.append(Parts(base, recipe, ATTRIBUTES))
        if "_abc_impl" in members_of(base):
            registry = Recipe({}, where)
            found = REGISTRY.read(base)
            registry.keys, registry.values = list(found), list(found.values())
            shape.parts.append(Parts(base, registry, REGISTRY))
        attributes = class_attributes(base)
        recipe.keys = list(attributes)
        for name, item in attributes.items():
            held = shape.hold(item, f"{where}.{name}", depth - 1)
            for function in functions_in(item):
                shape.hold(function, f"{where}.{name}", depth - 1)
            # A function is plain, and a cell that replaces it is to find it again.
            recipe.values.append(item if kind_of(type(item)) is Kind.CALLABLE else held)


def note_derived(shape: Shape, value: Any, path: str, kind: Kind, held: Any, depth: int) -> None:
    """Note what an object of a class derived from a builtin one, or from a library's, has besides: attributes."""
    cls = type(value)
    attributes = plain_dict(value)
    if is_installed(module_of(cls)):
        if attributes and kind is Kind.TENSOR:
            _note_object(shape, attributes, path, kind, held, depth)
        return
    if attributes is not None:
        _note_object(shape, attributes, path, kind, held, depth)
    _note_kept(shape, value, path, held, depth)


def _note_kept(shape: Shape, value: Any, path: str, held: Any, depth: int) -> None:
    """Note the class of an object, and its slots."""
    shape.classes.append((held, type(value)))
    note_class(shape, type(value), type(value).__qualname__, depth)
    _note_parts(shape, value, path, held, depth, SLOTS)


def _note_random(shape: Shape, generator: Any) -> None:
    shape.random.append((generator, generator_state(generator)))
    shape.spawned.append((generator, spawned(generator)))


def _note_array(shape: Shape, array: Any, path: str, held: Any, depth: int) -> None:
    if array.dtype.kind == "O" and array.size > LONG:
        shape.long.append(Long(array, path, shape.allowance))
    elif array.dtype.kind == "O":
        recipe = Recipe({}, path)
        recipe.keys = range(array.size)
        recipe.values = [shape.hold(item, f"{path}[{at}]", depth - 1) for at, item in enumerate(array.flat)]
        shape.parts.append(Parts(held, recipe, ITEMS))
    elif not array.dtype.hasobject and array.nbytes <= LIGHT_BYTES:
        shape.arrays.append(Small(array, held, path))
    else:
        shape.large.append(Large(array, held, path, shape.allowance))
    note_derived(shape, array, path, Kind.ARRAY, held, depth)


def _note_foreign(shape: Shape, value: Any, path: str, held: Any, depth: int) -> None:
    """Note an object of another library's: its attributes, what it holds, and whether it can be wound back."""
    cls = type(value)
    if is_frame(value):
        frame = Frame(value)
        shape.frames.append(frame)
        for item in frame.objects():
            shape.hold(item, path, depth - 1)
    elif is_random(cls):
        _note_random(shape, value)
    elif cls is ContextVar:
        shape.context.append((path, value))
        shape.hold(value.get(None), path, depth - 1)
    elif is_cached(cls):
        shape.caches.append(Cached(value, path))
        shape.hold(value.__wrapped__, path, depth - 1)
    elif is_lock(cls):
        shape.locks.append((path, held, times_held(value)))
    elif cls is MappingProxyType:
        _hold_shown(shape, value, path, depth)
    elif cls is Logger:  # put back, as far as a cell changes it, whether it has a name or not
        return
    elif _is_shell(cls):  # so is this
        shape.mention(EVERYTHING)
    elif cls in (bytearray, array):
        if len(value) <= LIGHT_BYTES:
            shape.light.add(value)
        else:
            shape.large.append(Large(value, held, path, shape.allowance))
    elif (module_of(cls), name_of(cls)) in _OUTWARD:
        shape.iterators.append((path, held))
    elif isinstance(value, ReferenceType):
        if (one := value()) is not None:
            shape.hold(one, path, depth - 1)
    else:
        if not shape.is_everything and shares(value):
            shape.mention(EVERYTHING)
        _look_into(shape, value, path, _FOREIGN_DEPTH)
        if plain_dict(value) is not None or places_of(cls) or is_memory(cls):
            return
        if has_state(value):
            _note_parts(shape, value, path, held, depth, STATE)
        elif is_closed(value):
            shape.closed.append((path, held))


def _is_shell(cls: type) -> bool:
    """Return whether a class is of IPython's shells, which hold the namespace itself."""
    return any((module_of(one), name_of(one)) == _SHELL for one in mro_of(cls))


def _hold_shown(shape: Shape, value: Any, path: str, depth: int) -> None:
    """Hold the dict that another object shows to be read, but for that of a class."""
    for item in get_referents(value):
        if type(item) is dict and "__module__" not in item:
            shape.hold(item, path, depth - 1)


def _note_callable(shape: Shape, value: Any, path: str, held: Any, depth: int) -> None:
    closure = getattr(value, "__closure__", None) or () if type(value) is FunctionType else ()
    if type(value) is FunctionType or type(value) is partial:
        _note_object(shape, vars(value), path, Kind.CALLABLE, held, depth)
    for at, cell in enumerate(closure):
        with suppress(ValueError):  # an empty cell
            name = value.__code__.co_freevars[at]
            shape.closures.append((held, at, shape.hold(cell.cell_contents, f"{path} → {name}", depth - 1)))
    if type(value) is FunctionType:
        if not is_installed(value.__globals__.get("__name__")):
            shape.mention_code(value)
        defaults, by_name = value.__defaults__, value.__kwdefaults__
        if defaults is not None and not LIGHT_TYPES.issuperset(map(type, defaults)):
            defaults = shape.hold(defaults, f"{path}.__defaults__", depth - 1)
        if by_name is not None:
            by_name = shape.hold(by_name, f"{path}.__kwdefaults__", depth - 1)
        shape.functions.append(Written(held, value.__code__, defaults, by_name))
    for suffix, item in held_by(value):
        shape.hold(item, f"{path}{suffix}", depth - 1)
    if type(value) is FunctionType:
        # Not its ``__module__``: a library's wrapper bears the name of what it wraps.
        home = value.__globals__.get("__name__")
        if not is_installed(home):
            shape.note_globals(value.__globals__, str(home), depth)


def _look_into(shape: Shape, value: Any, path: str, depth: int) -> None:
    """Note the attributes of an object of another library's; look for modules, optimizers and tensors in it."""
    attributes = plain_dict(value)
    if depth == 0 or not attributes or len(shape.known) > MOST_OBJECTS or is_ours(module_of(type(value))):
        return
    if type(value) is Condition:  # it knows of the threads that wait for it, and nothing else
        return
    shape.foreign.append(Foreign(value, attributes, path))
    for name, item in attributes.items():
        kind = kind_of(type(item))
        if kind in OBJECTS or kind is Kind.TENSOR:
            shape.hold(item, f"{path}.{name}", DEPTH)
        elif type(item) in PLAIN_CONTAINERS and len(item) <= LONG and is_light(item):
            shape.light.add(item)
        elif kind is Kind.OBJECT and id(item) not in shape.known:
            shape.known[id(item)] = item
            _look_into(shape, item, f"{path}.{name}", depth - 1)


def _note_object(shape: Shape, attributes: dict[str, Any], path: str, kind: Kind, held: Any, depth: int) -> None:
    recipe = Recipe(attributes, path, "{}.{}".format)
    shape.objects.append((held, recipe))
    items = list(attributes.items())
    recipe.keys = [name for name, _ in items]
    for name, item in items:
        if kind is Kind.MODULE and name in _MODULE_TABLES and kind_of(type(item)) is Kind.MAPPING:
            recipe.values.append(_hold_table(shape, item, path, name, depth))
        else:
            recipe.values.append(shape.hold(item, f"{path}.{name}", depth - 1))


def _hold_scripted(shape: Shape, value: Any, path: str, depth: int) -> None:
    """Hold what a scripted module keeps in C++."""
    for table in _MODULE_TABLES:
        for name, item in registered(value, table):
            shape.hold(item, child_path(path, name), depth - 1)


def _hold_table(shape: Shape, table: dict[str, Any], path: str, kind: str, depth: int) -> Recipe:
    """Hold the parameters, buffers or children of a module by the paths that a user would type."""
    recipe = shape.known[id(table)] = Recipe(table, path, child_path)
    below = depth if kind == "_modules" else depth - 1
    items = list(table.items())
    recipe.keys = [name for name, _ in items]
    recipe.values = [shape.hold(item, child_path(path, name), below) for name, item in items]
    if kind == "_buffers":
        shape.buffers += [weak(item) for _, item in items if item is not None]
    return recipe


def is_open(cls: type) -> bool:
    """Return whether the ``__dict__`` of its objects is their whole state: the user's own classes, and some others."""
    return module_of(cls).startswith(_OPEN_MODULES) or not is_installed(module_of(cls))
