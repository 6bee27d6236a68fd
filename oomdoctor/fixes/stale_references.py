"""What nobody needs any more let go of: shown results, the traceback of an earlier failure, PyTorch's unused cache.

``clear_output_cache``: ``Out[n]``, ``_n``, ``_``, ``__`` and ``___`` keep what the last line of a cell showed, a whole
autograd graph included. Removed are the entries that hold tensors and that the failing cell does not read.

``release_traceback``: IPython and the interpreter keep the last failure for ``%debug`` and ``%tb``, and its frames keep
every local variable that they had. The failure at hand is left alone, and an exception that a name of the user's holds.

``release_cache``: the caching allocator gives its free segments back by itself before it fails. What asks the driver
does not have that: the handles and workspaces of cuBLAS and cuDNN, CuPy, JAX and TensorFlow. It is proposed for those
alone, where segments are wholly free, and makes room for what is allocated once and early.

What was let go of stays gone when the context is left: holding it to put it back would hold the memory.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import takewhile
from types import TracebackType
from typing import Any, Final

from oomdoctor.fixes._construction_sites import changed
from oomdoctor.fixes._refusals import Unfit, need, proposing, refused, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Session, Unavailable
from oomdoctor.model.incident import Family
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.frames import chained, set_traceback, traceback_of
from oomdoctor.objects.kinds import plain_dict
from oomdoctor.objects.paths import Root
from oomdoctor.objects.walk import Walk
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.magics import mask, parsed
from oomdoctor.program.names import read_names

_LAST: Final = ("_", "__", "___")
_ENTRY: Final = re.compile(r"Out\[(\d+)\]")


def _letting_go(release: Callable[[Session], None]) -> Callable[[Session, Dose], AbstractContextManager[None]]:
    """Return an ``apply`` that lets go of something on entering; nothing is put back."""

    @contextmanager
    def applied(session: Session, dose: Dose) -> Iterator[None]:
        release(session)  # whose local names would keep it
        yield

    return applied


@proposing
def _propose_outputs(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    held = need(evidence.census.bytes_of(Role.OUTPUT_CACHE), "the output cache keeps no tensors alive")
    basis = f"measured: the census found {format_size(held)} that only the output cache keeps"
    yield Proposal(effect=Effect.EXACT, saves=held, basis=basis)


def _clear(session: Session) -> None:
    """Take every entry that holds tensors out of the output cache, those that the failing cell reads excepted."""
    read = _names_read(session.cells.failing.source)
    found = session.namespace.get("_oh")
    outputs: dict[int, Any] = found if isinstance(found, dict) and not {"Out", "_oh"} & read else {}
    freed = {number: value for number, value in outputs.items() if f"_{number}" not in read and _holds_tensor(value)}
    hidden = getattr(session.shell, "user_ns_hidden", None)
    hook = plain_dict(getattr(session.shell, "displayhook", None)) or {}
    gone = [*freed.values(), *(value for name in set(_LAST) - read if _holds_tensor(value := hook.get(name)))]
    for names in (session.namespace, *([hidden] if isinstance(hidden, dict) else []), hook):
        for number, value in freed.items():
            if names.get(f"_{number}") is value:
                del names[f"_{number}"]
        for name in set(_LAST) - read:
            if _is_one_of(names.get(name), gone):
                names[name] = ""
    for number in freed:
        del outputs[number]
    result = getattr(session.shell, "last_execution_result", None)
    if result is not None and _is_one_of(result.result, gone):
        result.result = None
    del freed, gone, result
    gc.collect()


def _is_one_of(value: Any, others: Iterable[Any]) -> bool:
    return any(value is one for one in others)


def _names_read(source: str) -> set[str]:
    """Return the names that the source reads; those that IPython's own lines name count as read."""
    hidden = {word for _, line in mask(source).hidden for word in re.findall(r"\w+", line)}
    return hidden | (set(re.findall(r"\w+", source)) if parsed(source) is None else read_names(source))


def _holds_tensor(value: Any) -> bool:
    """Tell whether a tensor hangs on ``value``, without running any code of the user's."""
    walk = Walk()
    return bool(walk.run([(Root("Out"), value)]) or walk.modules or walk.optimizers or walk.resume())


def _patch_outputs(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    paths = [one.path for one in evidence.census.holdings if one.role is Role.OUTPUT_CACHE]
    shown = sorted({f"In[{match[1]}]" for path in paths if (match := _ENTRY.match(path))})
    where = " and ".join(shown) or "the cell that showed it"
    return Refused(f"nothing in the code has to change: with a semicolon at its end, {where} keeps no result")


_LAST_FAILURE: Final = ("last_exc", "last_type", "last_value", "last_traceback")


@proposing
def _propose_traceback(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    held = need(evidence.census.bytes_of(Role.TRACEBACK), "no earlier traceback keeps tensors alive")
    basis = f"measured: the census found {format_size(held)} in the frames of an earlier failure"
    yield Proposal(effect=Effect.EXACT, saves=held, basis=basis)


def _release(session: Session) -> None:
    """Cut every holder of an earlier failure's traceback, then collect the cycles that frames form."""
    shown = getattr(sys, "last_value", None)
    if shown is not None and not _is_at_hand(session, shown):
        _forget(session, shown)
        for name in _LAST_FAILURE:
            if hasattr(sys, name):
                delattr(sys, name)
    result = getattr(session.shell, "last_execution_result", None)
    for name in ("error_in_exec", "error_before_exec"):
        failed = getattr(result, name, None)
        if isinstance(failed, BaseException) and not _is_at_hand(session, failed):
            _forget(session, failed)
    printer: Any = getattr(session.shell, "InteractiveTB", None)
    printed = getattr(printer, "tb", None)
    if isinstance(printed, TracebackType) and not _goes_through_failing_cell(session, printed):
        printer.tb = None
    del shown, result, printed
    gc.collect()


def _forget(session: Session, exc: BaseException) -> None:
    """Take the tracebacks off ``exc`` and what it is chained to, leaving types and messages as they are."""
    users = {id(value) for value in list(session.namespace.values()) if isinstance(value, BaseException)}
    for link in chained(exc):
        if id(link) not in users:
            set_traceback(link, None)


def _is_at_hand(session: Session, exc: BaseException) -> bool:
    """Tell whether ``exc`` is the failure that is being looked at: handled now, or raised by the failing cell."""
    handled = sys.exc_info()[1]
    if handled is not None and any(exc is link for link in chained(handled)):
        return True
    return any(_goes_through_failing_cell(session, traceback_of(link)) for link in chained(exc))


def _goes_through_failing_cell(session: Session, tb: TracebackType | None) -> bool:
    numbers: dict[str, Any] = getattr(getattr(session.shell, "compile", None), "_filename_map", None) or {}
    while tb is not None:
        if numbers.get(tb.tb_frame.f_code.co_filename) == session.cells.failing.number:
            return True
        tb = tb.tb_next
    return False


_BESIDE: Final = {
    Family.CUBLAS: "cuBLAS",
    Family.CUDNN: "cuDNN",
    Family.CUPY: "CuPy",
    Family.JAX: "JAX",
    Family.TF: "TensorFlow",
}
_KINDS: Final = frozenset({"cuda", "xpu"})
_CLEARS: Final = re.compile(r"\bempty_cache\(")


@proposing
def _propose_cache(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    why = "PyTorch's allocator gives its unused cache back by itself before it fails"
    asker, device = need(_BESIDE.get(incident.family), why), evidence.device
    kind = device.name.partition(":")[0]
    if device.simulated or kind not in _KINDS:
        raise Unfit(f"no cache of PyTorch's is in use on {device.name}")
    held: list[int] = []
    for counted in (device.reserved, device.allocated, device.inactive_split):
        if isinstance(counted, Unavailable):
            raise Unfit(f"what PyTorch holds unused is not known: {counted.reason}")
        held.append(counted)
    # A segment with a live block cannot be given back.
    free = need(max(0, held[0] - held[1] - held[2]), f"PyTorch holds no segment on {device.name} that is wholly free")
    basis = f"measured: {format_size(free)} of PyTorch's segments are wholly free, and {asker} asks the driver"
    yield Proposal(dose=Dose.of(kind=kind), effect=Effect.EXACT, saves=free, basis=basis)


@refusing
def _patch_cache(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    cell = cells.failing
    need(not _CLEARS.search(cell.source), "the cell empties the cache already")
    parsed = need(rewriting.read(cell.source))
    leading = "\n".join(parsed.code(node) for node in takewhile(rewriting.is_import, parsed.module.body))
    torch = import_lines.library_name(Cells(history=(*cells.history[:-1], replace(cell, source=leading))))
    name, imports = need(torch)
    need(torch == import_lines.library_name(cells), "torch is imported in the middle of the cell")
    line = f"{name}.{dose['kind']}.empty_cache()  # room for what is allocated beside PyTorch's cache"
    return changed(cells, cell, {}, [*imports, line])


FIXES: Final = (
    Fix(
        id="clear_output_cache",
        title="Clear tensors from IPython's output cache",
        effect=Effect.EXACT,
        cost="the results are no longer in Out",
        propose=_propose_outputs,
        apply=_letting_go(_clear),
        patch=_patch_outputs,
        is_tried=False,
    ),
    Fix(
        id="release_traceback",
        title="Release the traceback of an earlier failure",
        effect=Effect.EXACT,
        cost="%debug and %tb no longer reach that failure",
        propose=_propose_traceback,
        apply=_letting_go(_release),
        patch=refused(
            "nothing in the code to change: IPython and the interpreter keep the traceback of the last failure"
        ),
        is_tried=False,
    ),
    Fix(
        id="release_cache",
        title="Empty PyTorch's unused cache",
        effect=Effect.EXACT,
        cost="segments are allocated anew as they are needed",
        propose=_propose_cache,
        apply=_letting_go(lambda session: session.accelerator.empty_cache()),
        patch=_patch_cache,
        is_tried=False,
    ),
)
