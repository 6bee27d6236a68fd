"""Collects the evidence of one moment, what the limits say first of all: looking takes memory itself.

Where memory runs out while something is collected, that one thing is not known, and all else is. Without what the code
says nothing else can be understood, so there the look fails.

Of host memory that no tensor holds (NumPy arrays, byte strings, texts and the Python objects around them), what a name
leads to is gone through breadth first, by what the garbage collector says that an object refers to. Each thing counts
once, for the first name that leads to it. No code of the user's is run: sizes are asked of builtin types and of arrays.
Limits: memory that only C holds (PIL images, Arrow tables) has no size here; that of a file which an array maps is page
cache.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import chain, compress, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oomdoctor.evidence import host
from oomdoctor.evidence._trainers import passed
from oomdoctor.evidence.code import facts
from oomdoctor.model import baseline
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Detect
from oomdoctor.model.memory import Census, DeviceMemory, HostHolding, HostMemory
from oomdoctor.model.session import Accelerator, Session
from oomdoctor.model.sizes import MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects import jittor
from oomdoctor.objects.children import elements_of
from oomdoctor.objects.frames import (
    chained,
    earlier_errors,
    frames_of,
    home_of,
    leads_nowhere,
    lines_of,
    local_objects,
    locals_of,
    running_frames,
    standing_in,
    steps_of,
    traceback_of,
)
from oomdoctor.objects.kinds import Kind, kind_of, name_of, spelled
from oomdoctor.objects.named import class_attributes, output_cache, own_underscores, user_names
from oomdoctor.program import torch_functions
from oomdoctor.program.code_names import growing
from oomdoctor.program.names import bound_names, loop_results, loop_targets
from oomdoctor.sandbox import reserve

if TYPE_CHECKING:
    from oomdoctor.evidence import census

T = TypeVar("T")

_SHORT: Final = Unavailable("there was no memory left to look")
_UNREAD: Final = HostMemory(**{field.name: _SHORT for field in fields(HostMemory)})


def collect(
    session: Session,
    exc: BaseException | None,
    filenames: Mapping[str, int],
    *,
    line: int | None = None,
    detectors: Mapping[str, Detect] | None = None,
) -> Evidence:
    """Collect all evidence of one moment.

    Args:
        exc: the failure at hand, its frames not yet released; None for a report.
        filenames: number of the cell by the file name of its code.
        line: line of the failing cell that was running.
        detectors: what finds the practice that a fix mends, by the id of the fix.
    """
    accelerator, has_tensors = session.accelerator, "torch" in sys.modules
    whole = _if_room(host.read, _UNREAD)
    places: list[Accelerator] = [accelerator]
    if has_tensors:
        from oomdoctor.evidence import devices

        places += [other for other in devices.in_use() if other.name != accelerator.name]
    memories = tuple(place.read() for place in places)
    code = _facts(session, exc, filenames, line, detectors)
    names = list(user_names(spelled(session.namespace)))
    passed_over = frozenset({id(session.namespace), id(spelled(session.namespace).get("_oh"))})
    others: tuple[DeviceMemory, ...] = ()
    if has_tensors:
        program = partial(_program, session, names, exc, filenames, code, passed_over)
        missing = tuple(_uncounted(memory) for memory in memories)
        memories, counts = _if_room(lambda: _counted(program(), places, memories), (memories, missing))
        others = devices.not_in_use()
    else:
        counts = tuple(Census(device=memory.name, found=0, allocated=memory.allocated) for memory in memories)
        memories = tuple(replace(memory, allocated=0, reserved=0) for memory in memories)
    local = partial(_local_names, exc, filenames, spelled(session.namespace))
    variables = partial(largest, [*names, *local()], passed_over, jittor.size_of)
    lazy = _if_room(lambda: jittor.memory(variables), None)
    beside: tuple[HostHolding, ...] = _if_room(lambda: largest([*names, *local()], passed_over), ())
    beside = _if_room(lambda: tuple(_with_line(one, session, line) for one in beside), beside)
    return Evidence(
        devices=(*memories, *others),
        host=_with_bare(whole, counts, beside),
        beside_tensors=beside,
        censuses=counts,
        code=code,
        jittor=lazy,
    )


def _local_names(
    exc: BaseException | None, filenames: Mapping[str, int], namespace: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield what functions of the program held in their own names when the failure went through them."""
    for frame in frames_of(exc, filenames, namespace):
        if frame.is_program and not frame.code_names:
            yield from frame.values.items()


def _with_line(held: HostHolding, session: Session, line: int | None) -> HostHolding:
    """Return what is held with the line of the failing cell that makes it hold more; none for what no loop grows."""
    cell = session.cells.failing
    grown = None if line is None else growing(cell.source).get(held.path)
    return held if grown is None else replace(held, grown_by=f"In[{cell.number}] line {grown}")


def _counted(
    program: census.Program, places: Sequence[Accelerator], memories: tuple[DeviceMemory, ...]
) -> tuple[tuple[DeviceMemory, ...], tuple[Census, ...]]:
    """Take the census of ``places``; return their memory, counted where no allocator does, and who holds it."""
    from oomdoctor.evidence import census

    counts = census.take(program, [(memory, place.holds) for memory, place in zip(memories, places, strict=True)])
    counted = tuple(
        replace(memory, allocated=count.found, reserved=count.found)
        if isinstance(memory.allocated, Unavailable)
        else memory
        for memory, count in zip(memories, counts, strict=True)
    )
    return counted, counts


def _program(
    session: Session,
    names: Sequence[tuple[str, Any]],
    exc: BaseException | None,
    filenames: Mapping[str, int],
    code: CodeFacts,
    passed_over: frozenset[int],
) -> census.Program:
    from oomdoctor.evidence import census

    namespace = spelled(session.namespace)
    frames = [*frames_of(exc, filenames, namespace), *running_frames(filenames, namespace)]
    own = [frame for frame in frames if frame.is_program]
    running = [frame.code_names for frame in own]
    # The namespace may have the locals of a running function in it, where that asked for the report.
    running += [frozenset(name for name, value in one.values.items() if namespace.get(name) is value) for one in own]
    bound = bound_names(session.cells.failing.source) if exc is not None else frozenset()
    earlier = earlier_errors(exc, filenames)
    return census.Program(
        borrowed=frozenset().union(*(loop_targets(cell.source) for cell in session.cells.history)),
        passed_over=passed_over,
        names=[*names, *own_underscores(namespace), *class_attributes(names, namespace.get("__name__"))],
        outputs=list(output_cache(namespace)),
        frames=frames,
        earlier=[frame for error in earlier for frame in frames_of(error, filenames, namespace)],
        batch_names=frozenset(name for loop in code.loops for name in loop.batch),
        in_step=exc is not None or any(frame.values for frame in own),
        step_names=bound.union(*running),
        step_results=loop_results(session.cells.failing.source) if exc is not None else frozenset(),
        appends={one.names[0]: one.names[1] for one in code.sites.get("detach_history", ())},
    )


def unlooked() -> Evidence:
    """Return what is known where nothing could be looked at: what the limits say, if that much."""
    memory = DeviceMemory(name="cpu", tensor_device="cpu", total=_SHORT, free=_SHORT, allocated=_SHORT, reserved=_SHORT)
    whole = _if_room(lambda: host.read(in_full=False), _UNREAD)
    return Evidence(devices=(memory,), host=whole, censuses=(_uncounted(memory),), code=CodeFacts())


def _if_room(look: Callable[[], T], otherwise: T) -> T:
    """Return what ``look`` returns; where memory runs out meanwhile, ``otherwise``.

    Source: extension modules that do not check an allocation return without an error set, a ``SystemError``.
    """
    try:
        return look()
    except (MemoryError, SystemError):
        return otherwise


def _facts(
    session: Session,
    exc: BaseException | None,
    filenames: Mapping[str, int],
    line: int | None,
    detectors: Mapping[str, Detect] | None,
) -> CodeFacts:
    cells, found = session.cells, session.objects()
    objects = [found.get(kind, ()) for kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.LOADER)]
    running = [] if line is None else lines_of(exc, filenames, (cells.failing.number, line))
    with _unobserved():
        code = facts(
            cells,
            spelled(session.namespace),
            *objects,
            local=local_objects(exc, filenames, Kind.MODULE, objects[0]),
            local_optimizers=local_objects(exc, filenames, Kind.OPTIMIZER, objects[1]),
            line=line,
            running=running,
            standing={} if line is None else standing_in(exc, filenames, (cells.failing.number, line)),
            passed=passed(exc),
            detectors=detectors,
            is_kept=session.is_kept,
            tries=exc is not None and session.accelerator.name == "cpu",
        )
    return replace(code, grad_disabled=code.grad_disabled or is_within_no_grad(exc))


def is_within_no_grad(exc: BaseException | None) -> bool:
    """Return whether the innermost decorator that turns gradients on or off turned them off, in a library as well.

    Source: ``torch.utils._contextlib.context_decorator``, whose wrapper holds the method of the context that it enters.
    """
    frames = (step.tb_frame for link in chained(exc) for step in steps_of(traceback_of(link)))
    wrappers = (one for one in frames if home_of(one) == "torch.utils._contextlib")
    entered = (locals_of(one).get("ctx_factory") for one in wrappers)
    kinds = [type(getattr(one, "__self__", None)).__name__ for one in entered]
    return next(
        (
            kind in torch_functions.GRADLESS
            for kind in reversed(kinds)
            if kind in {*torch_functions.GRADLESS, "enable_grad"}
        ),
        False,
    )


def _unobserved() -> Any:
    if "torch" not in sys.modules:
        return nullcontext()
    from oomdoctor.objects.storages import unobserved

    return unobserved()


def _with_bare(whole: HostMemory, counts: Iterable[Census], beside: Iterable[HostHolding]) -> HostMemory:
    """Return the host's memory with what the bare process takes of it."""
    tensors = sum(count.found for count in counts if count.device == "cpu")
    held = tensors + sum(holding.bytes for holding in beside)
    bare = baseline.bare(whole.process_used, held) if isinstance(whole.process_used, int) else None
    return whole if bare is None else replace(whole, bare=bare)


def _uncounted(memory: DeviceMemory) -> Census:
    notes = (f"Holders were not looked for: {_SHORT.reason}.",)
    return Census(device=memory.name, found=0, allocated=_SHORT, notes=notes)


_MOST_OBJECTS: Final = 300_000
_ROOM_FOR_ALL: Final = 96 * MIB
_MOST_WHERE_SHORT: Final = 30_000
"""To note an object takes some 150 bytes."""
_AT_ONCE: Final = 10_000
_LISTED: Final = 5
_SIZED: Final = frozenset(map(id, (bytes, bytearray, str, int, float, complex, list, tuple, dict, set, frozenset)))
"""By their ``id``: builtin types whose size is told by the interpreter itself."""
_LEAVES: Final = frozenset(map(id, (bytes, bytearray, str, int, float, complex, bool, type(None))))
"""By their ``id``: builtin types that lead to nothing. Most names of a long notebook hold one of them."""
_OPEN: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET, Kind.TUPLE, Kind.OBJECT, Kind.LOADER, Kind.MODULE})
_ARRAYS: Final = frozenset({Kind.ARRAY})


def largest(
    names: Iterable[tuple[str, Any]],
    passed_over: frozenset[int] = frozenset(),
    of_variable: Callable[[Any], int] | None = None,
) -> tuple[HostHolding, ...]:
    """Return the names that lead to the most memory that is no tensor's, from a MiB on, the largest first.

    Objects whose ``id`` is ``passed_over`` lead nowhere here. ``of_variable`` returns the size of a variable of
    Jittor's; these alone are looked for then.
    """
    search = _Search(set(passed_over), of_variable)
    leading = (one for one in names if id(type(one[1])) not in _LEAVES or sys.getsizeof(one[1]) >= MIB)
    found = (search.below(name, value) for name, value in leading)
    return tuple(sorted(filter(None, found), key=lambda one: -one.bytes)[:_LISTED])


class _Search:
    def __init__(self, seen: set[int], of_variable: Callable[[Any], int] | None) -> None:
        self._seen, self._of_variable = seen, of_variable
        self._left = _MOST_OBJECTS if reserve.has_room(_ROOM_FOR_ALL) else _MOST_WHERE_SHORT
        self._of_tensors: frozenset[int] | None = None

    def below(self, name: str, value: Any) -> HostHolding | None:
        """Return what hangs on one name and on none before it, None where that is less than a MiB."""
        own, in_arrays, arrays, objects = 0, 0, 0, 0
        level: list[Any] = [value]
        while level and self._left > 0:
            fresh = self._fresh(level)
            keys = list(map(id, map(type, fresh)))
            classes = dict(zip(keys, map(type, fresh), strict=True))
            sized = list(compress(fresh, map(_SIZED.__contains__, keys))) if self._of_variable is None else []
            own += sum(map(sys.getsizeof, sized))
            objects += len(sized)
            variables = {key for key, cls in classes.items() if jittor.is_var(cls)}
            arrays_of = _keys(classes, _ARRAYS) if self._of_variable is None else variables
            met = list(compress(fresh, map(arrays_of.__contains__, keys)))
            for size in map(self._of_variable or self._of_array, met):
                in_arrays += size
                arrays += size > 0
            inner = {key for key in _keys(classes, _OPEN) if not leads_nowhere(classes[key])}
            level = gc.get_referents(*compress(fresh, map(inner.__contains__, keys)))
            level += chain.from_iterable(map(elements_of, met)) if self._of_variable is None else ()
        size = own + in_arrays
        if size < MIB:
            return None
        kind = name_of(type(value))
        return HostHolding(path=name, bytes=size, array_bytes=in_arrays, arrays=arrays, objects=objects, kind=kind)

    def _fresh(self, level: list[Any]) -> list[Any]:
        """Return those that were not met before, each once, as far as the budget goes, and note them."""
        fresh: list[Any] = []
        for first in range(0, len(level), _AT_ONCE):
            some = level[first : first + _AT_ONCE]
            by_id = dict(zip(map(id, some), some, strict=True))
            if not self._seen.isdisjoint(by_id):
                by_id = {key: one for key, one in by_id.items() if key not in self._seen}
            by_id = dict(islice(by_id.items(), self._left)) if len(by_id) > self._left else by_id
            self._seen.update(by_id)
            self._left -= len(by_id)
            fresh += by_id.values()
            if not self._left:
                break
        return fresh

    def _of_array(self, array: Any) -> int:
        """Return the bytes that an array keeps alive and nothing before it did, 0 where they are not its own."""
        told = vars(sys.modules["numpy"].ndarray)
        base_of = told["base"].__get__
        while (base := base_of(array)) is not None:
            if kind_of(type(base)) is not Kind.ARRAY:
                return 0  # a mapped file, a tensor, or a byte string that is counted by itself
            array = base
            if id(array) in self._seen:
                return 0
            self._seen.add(id(array))
        size = int(told["nbytes"].__get__(array))
        if size >= MIB and told["__array_interface__"].__get__(array)["data"][0] in self._tensors():
            return 0
        return size

    def _tensors(self) -> frozenset[int]:
        """Return where tensors of the host begin: ``torch.from_numpy`` makes one in the memory of an array."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return frozenset()
        if self._of_tensors is None:
            from oomdoctor.objects.storages import PLAIN, begin_of

            plain = frozenset(map(id, PLAIN))
            ours = [one for one in gc.get_referrers(*PLAIN) if id(type(one)) in plain]
            self._of_tensors = frozenset(begin_of(one) for one in ours if one.is_cpu and one.layout is torch.strided)
        return self._of_tensors


def _keys(classes: dict[int, type], kinds: frozenset[Kind]) -> set[int]:
    return {key for key, cls in classes.items() if kind_of(cls) in kinds}
