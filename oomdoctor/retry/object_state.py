"""What is noted of objects of each kind beside their name: notes for the way back, and what is looked into in turn."""

from __future__ import annotations

from array import array
from contextvars import ContextVar
from functools import partial
from gc import get_referents
from logging import Logger
from threading import Condition
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodWrapperType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType

from oomdoctor.objects import jittor
from oomdoctor.objects.containers import (
    PLAIN_CONTAINERS,
    Recipe,
    Remade,
    attribute_path,
    is_light,
    is_small_array,
    is_unbegun,
)
from oomdoctor.objects.copies import LONG, Contents, Long
from oomdoctor.objects.kinds import (
    Kind,
    child_path,
    held_by,
    kind_of,
    module_of,
    mro_of,
    name_of,
    plain_dict,
    registered,
)
from oomdoctor.objects.mementos import (
    ADVANCES,
    CLOSED,
    LOCKED,
    SET,
    WRITTEN,
    Attributes,
    Cached,
    Foreign,
    Frame,
    Parts,
    Reached,
    is_cached,
    is_frame,
    is_lock,
)
from oomdoctor.objects.named import is_installed, is_ours, is_shell
from oomdoctor.objects.places import (
    ATTRIBUTES,
    ITEMS,
    STATE,
    Place,
    functions_in,
    has_state,
    is_closed,
    is_memory,
    places_of,
)
from oomdoctor.objects.rng import Stream, is_random
from oomdoctor.program.code_names import EVERYTHING
from oomdoctor.retry.reachable import shares

if TYPE_CHECKING:
    from oomdoctor.retry.namespace_state import NamespaceState

DEPTH: Final = 40
MOST_OBJECTS: Final = 200_000
OBJECTS: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER})
_OPEN_MODULES: Final = (
    *("torch.", "types", "argparse", "collections", "jittor"),
    *("transformers.train", "accelerate.", "lightning.", "pytorch_lightning."),
)
"""Classes whose ``__dict__`` is their whole state, beside the user's own: torch's scalers, samplers and the like, and
plain holders of attributes."""
_FOREIGN_DEPTH: Final = 3
"""How far objects of other libraries are looked into."""
BOUND: Final = frozenset({BuiltinFunctionType, MethodWrapperType})
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
_FEW: Final = 64
_OF_LOADER: Final = ("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter")
_MODULE_TABLES: Final = ("_parameters", "_buffers", "_modules")


def note(state: NamespaceState, value: Any, path: str, kind: Kind, held: Any, depth: int) -> Recipe | None:
    """Note the state of an object; return the recipe of its ``__dict__``, if that is what it is."""
    cls, recipe = type(value), None
    if cls is FunctionType:
        _note_function(state, value, path, held, depth)
        return None
    if kind is Kind.GENERATOR_STATE:
        state.add(Stream(value, path))
        _note_own(state, value, path, kind, held, depth)
    elif kind is Kind.ITERATOR:
        recipe = _note_iterator(state, value, path, held, depth)
    elif kind is Kind.ARRAY:
        _note_array(state, value, path, held, depth)
        _note_own(state, value, path, kind, held, depth)
    elif kind is Kind.CALLABLE:
        _note_callable(state, value, path, held, depth)
    elif jittor.is_var(cls):
        state.add(jittor.Value(value, path))
    elif kind in OBJECTS or is_open(cls) or issubclass(cls, BaseException):
        recipe = _note_attributes(state, value, path, kind, held, depth)
        if kind is Kind.MODULE and kind_of(type((plain_dict(value) or {}).get("_modules"))) is not Kind.MAPPING:
            _hold_scripted(state, value, path, depth)
    elif kind is Kind.OBJECT:
        _note_foreign(state, value, path, held, depth)
    _note_places(state, value, path, held, depth)
    return recipe


def note_derived(state: NamespaceState, value: Any, path: str, kind: Kind, held: Any, depth: int) -> None:
    """Note what an object of a class derived from a builtin one, or from a library's, has besides: attributes."""
    if _note_own(state, value, path, kind, held, depth):
        _note_places(state, value, path, held, depth)


def _note_own(state: NamespaceState, value: Any, path: str, kind: Kind, held: Any, depth: int) -> bool:
    is_users = not is_installed(module_of(type(value)))
    if is_users or (kind is Kind.TENSOR and plain_dict(value)):
        _note_attributes(state, value, path, kind, held, depth)
    return is_users


def _note_attributes(state: NamespaceState, value: Any, path: str, kind: Kind, held: Any, depth: int) -> Recipe | None:
    """Note the class of an object and its ``__dict__``; return the recipe of that."""
    cls, attributes = type(value), plain_dict(value)
    recipe = None if attributes is None else Recipe(attributes, path, attribute_path)
    state.add(Attributes(held, cls, recipe, path))
    if recipe is not None and attributes and kind is Kind.MODULE:
        for name in filter(attributes.__contains__, _MODULE_TABLES):
            _hold_table(state, attributes[name], path, name, depth)
        state.fill(recipe, attributes, depth)
        own = {id(one) for _, one in registered(value, "_parameters")}
        for at, (name, item) in enumerate(attributes.items()):
            recipe.values[at] = _hold_computed(state, item, recipe.values[at], f"{path}.{name}", own)
    elif recipe is not None and attributes:
        state.fill(recipe, attributes, depth)
    if not is_installed(module_of(cls)):
        note_class(state, cls, cls.__qualname__, depth)
    return recipe


def _hold_computed(state: NamespaceState, item: Any, held: Any, path: str, parameters: set[int]) -> Any:
    """Hold a tensor that a module makes of its parameters, by itself or in a list: its copy may stand for it.

    Before the first forward it may be a parameter that the module has no longer.
    """
    if type(item) is list and type(held) is Recipe and len(item) <= _FEW:
        both = zip(item, held.values, strict=True)
        held.values = [_hold_computed(state, one, own, path, parameters) for one, own in both]
        return held
    if kind_of(type(item)) is not Kind.TENSOR or not item.requires_grad or id(item) in parameters:
        return held
    known = state.known.get(id(item))
    if not isinstance(known, Remade):
        known = state.known[id(item)] = state.copies.await_computed(item, path)
    return known


def _note_places(state: NamespaceState, value: Any, path: str, held: Any, depth: int) -> None:
    """Note what an object keeps in other places than its ``__dict__``."""
    if is_memory(type(value)):
        state.add(Reached(held, path, WRITTEN))
    for place in places_of(type(value)):
        _note_parts(state, value, path, held, depth, place)


def _note_parts(state: NamespaceState, value: Any, path: str, held: Any, depth: int, place: Place) -> None:
    """Note what an object keeps in one place."""
    found = place.read(value)
    if found or place.grows:
        recipe = Recipe(found, path, place.path)
        state.add(Parts(held, recipe, place))
        state.fill(recipe, found, depth)


def note_atom(state: NamespaceState, value: Any, path: str, depth: int) -> None:
    """Note what cannot be replaced but leads further: classes, modules, bound methods that are made in C."""
    if isinstance(value, type):
        note_class(state, value, path, depth)
    elif type(value) in BOUND:
        state.hold(value.__self__, f"{path}.__self__", depth - 1)
    elif id(value) in state.known:
        return
    elif type(value) is ModuleType:
        state.known[id(value)] = value
        if is_installed(value.__name__):
            state.modules.append(value)
        else:
            state.note_globals(vars(value), path, depth)
    elif isinstance(value, frozenset):
        state.known[id(value)] = value
        for item in frozenset.__iter__(value):
            state.hold(item, path, depth - 1)
        note_derived(state, value, path, Kind.ATOM, value, depth)
    elif not is_installed(module_of(type(value))):
        state.known[id(value)] = value
        note_derived(state, value, path, Kind.ATOM, value, depth)


def note_class(state: NamespaceState, cls: type, path: str, depth: int) -> None:
    """Note the functions and attributes of the user's own classes: of this one, and of those it derives from."""
    for base in mro_of(cls):
        if id(base) in state.known or is_installed(module_of(base)):
            continue
        state.known[id(base)] = base
        where = path if base is cls else base.__qualname__
        recipe = Recipe(vars(base), where, attribute_path)
        state.add(Parts(base, recipe, ATTRIBUTES))
        attributes = ATTRIBUTES.read(base)
        state.fill(recipe, attributes, depth)
        for at, (name, item) in enumerate(attributes.items()):
            for function in functions_in(item):
                state.hold(function, f"{where}.{name}", depth - 1)
            if kind_of(type(item)) is Kind.CALLABLE:  # plain, and a cell that replaces it is to find it again
                recipe.values[at] = item


def _note_iterator(state: NamespaceState, value: Any, path: str, held: Any, depth: int) -> Recipe | None:
    """Note what advances; one of the user's own classes, and of a loader that has not begun, by its attributes."""
    cls = type(value)
    is_torchs = (module_of(cls), name_of(cls)) == _OF_LOADER
    if cls is GeneratorType and value.gi_frame is None:  # it has ended
        return None
    if not is_installed(module_of(cls)) or (is_torchs and is_unbegun((plain_dict(value) or {}).get("_sampler_iter"))):
        return _note_attributes(state, value, path, Kind.ITERATOR, held, depth)
    state.add(Reached(held, path, ADVANCES))
    return None


def _note_array(state: NamespaceState, array: Any, path: str, held: Any, depth: int) -> None:
    if array.dtype.kind == "O" and array.size > LONG:
        state.add(Long(array, path, state.allowance))
    elif array.dtype.kind == "O":
        _note_parts(state, array, path, held, depth, ITEMS)
    else:
        state.add(Contents(array, held, path, state.allowance))


def _note_foreign(state: NamespaceState, value: Any, path: str, held: Any, depth: int) -> None:
    """Note an object of another library's: its attributes, what it holds, and whether it can be wound back."""
    cls = type(value)
    if is_frame(value):
        frame = Frame(value, path)
        state.add(frame)
        for item in frame.objects():
            state.hold(item, path, depth - 1)
    elif is_random(cls):
        state.add(Stream(value, path))
    elif cls is ContextVar:
        state.add(Reached(held, path, SET))
        state.hold(value.get(None), path, depth - 1)
    elif is_cached(cls):
        state.add(Cached(value, path))
        state.hold(value.__wrapped__, path, depth - 1)
    elif is_lock(cls):
        state.add(Reached(held, path, LOCKED))
    elif cls is MappingProxyType:
        for item in get_referents(value):  # the dict that it shows to be read, but for that of a class
            if type(item) is dict and "__module__" not in item:
                state.hold(item, path, depth - 1)
    elif cls is Logger:  # put back, as far as a cell changes it, whether it has a name or not
        return
    elif is_shell(cls):
        state.mention(EVERYTHING)
    elif cls in (bytearray, array):
        state.add(Contents(value, value, path, state.allowance))
    elif (module_of(cls), name_of(cls)) in _OUTWARD:
        state.add(Reached(held, path, ADVANCES))
    elif isinstance(value, ReferenceType):
        if (one := value()) is not None:
            state.hold(one, path, depth - 1)
    else:
        if not state.is_everything and shares(value):
            state.mention(EVERYTHING)
        _look_into(state, value, path, _FOREIGN_DEPTH)
        if plain_dict(value) is not None or places_of(cls) or is_memory(cls):
            return
        if has_state(value):
            _note_parts(state, value, path, held, depth, STATE)
        elif is_closed(value):
            state.add(Reached(held, path, CLOSED))


def _note_callable(state: NamespaceState, value: Any, path: str, held: Any, depth: int) -> None:
    if type(value) is partial:
        _note_attributes(state, value, path, Kind.CALLABLE, held, depth)
    for suffix, item in held_by(value):
        state.hold(item, f"{path}{suffix}", depth - 1)


def _note_function(state: NamespaceState, value: Any, path: str, held: Any, depth: int) -> None:
    """Note a function: in one go, as there are thousands."""
    recipe = Recipe(value.__dict__, path, attribute_path)
    state.add(Attributes(held, FunctionType, recipe, path))
    state.fill(recipe, value.__dict__, depth)
    for place in places_of(FunctionType):
        _note_parts(state, value, path, held, depth, place)
    # Not its ``__module__``: a library's wrapper bears the name of what it wraps.
    home = value.__globals__.get("__name__")
    if not is_installed(home):
        state.mention_code(value.__code__, value.__globals__)
        state.note_globals(value.__globals__, str(home), depth)


def _look_into(state: NamespaceState, value: Any, path: str, depth: int) -> None:
    """Note the attributes of an object of another library's; look for modules, optimizers and tensors in it."""
    attributes = plain_dict(value)
    if depth == 0 or not attributes or len(state.known) > MOST_OBJECTS or is_ours(module_of(type(value))):
        return
    if type(value) is Condition:  # it knows of the threads that wait for it, and nothing else
        return
    state.add(Foreign(value, attributes, path))
    for name, item in attributes.items():
        kind = kind_of(type(item))
        if kind in OBJECTS or kind is Kind.TENSOR or is_small_array(item):
            state.hold(item, f"{path}.{name}", DEPTH)
        elif type(item) in PLAIN_CONTAINERS and len(item) <= LONG and is_light(item):
            state.light.add(item, f"{path}.{name}")
        elif kind is Kind.OBJECT and id(item) not in state.known:
            state.known[id(item)] = item
            _look_into(state, item, f"{path}.{name}", depth - 1)


def _hold_table(state: NamespaceState, table: Any, path: str, name: str, depth: int) -> None:
    """Hold the parameters, buffers or children of a module by the paths that a user would type."""
    if kind_of(type(table)) is Kind.MAPPING:
        recipe = state.known[id(table)] = Recipe(table, path, child_path)
        state.fill(recipe, table, depth + 1 if name == "_modules" else depth)
        if name == "_buffers" and table:
            state.copies.await_buffers(one for one in table.values() if one is not None)


def _hold_scripted(state: NamespaceState, value: Any, path: str, depth: int) -> None:
    """Hold what a scripted module keeps in C++."""
    for table in _MODULE_TABLES:
        for name, item in registered(value, table):
            state.hold(item, child_path(path, name), depth - 1)


def is_open(cls: type) -> bool:
    """Return whether the ``__dict__`` of its objects is their whole state: the user's own classes, and some others."""
    return module_of(cls).startswith(_OPEN_MODULES) or not is_installed(module_of(cls))
