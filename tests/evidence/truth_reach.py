"""What an object holds, looked up in another way than the census does it, and in the frames that were there then."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple

import torch

from oomdoctor.model.memory import Holding

GRAPH: Final = " → graph"
LOCAL: Final = re.compile(r"local `.+` of (?P<function>[^\s,]+)(?P<called>, called)? at .+ line (?P<line>\d+)")
"""Of a library's function the line is the caller's."""


class Frame(NamedTuple):
    """A frame as it was when the census was taken."""

    function: str
    filename: str
    line: int
    locals: Mapping[str, Any]
    globals: dict[str, Any]


def running() -> list[Frame]:
    """Return the frames of the callers, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        found.append(_frame(frame, frame.f_lineno))
        frame = frame.f_back
    return found


def failed(traceback: TracebackType | None) -> list[Frame]:
    """Return the frames that a failure went through, outermost first."""
    found = []
    while traceback is not None:
        found.append(_frame(traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def _frame(frame: FrameType, line: int) -> Frame:
    local = frame.f_locals
    copy = dict(local)
    if type(local) is dict and local is not frame.f_globals:
        local.clear()  # up to Python 3.12 the frame keeps this snapshot, and what is in it, until it ends
    return Frame(frame.f_code.co_name, frame.f_code.co_filename, line, copy, frame.f_globals)


_OPAQUE: Final = (str, bytes, int, float, type, ModuleType, FrameType)


class Reach(NamedTuple):
    """Storages that an object keeps alive, and what their tensors are like."""

    storages: dict[int, int]
    kinds: set[tuple[str, tuple[int, ...]]]


def reach(value: Any, *, graph: bool) -> Reach:
    """Return the storages that ``value`` holds by its contents; with ``graph`` those of its autograd graph as well."""
    found = Reach({}, set())
    seen: set[int] = set()
    todo, kept = [value], []
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _OPAQUE):
            continue
        seen.add(id(one))
        kept.append(one)  # wrappers made on the way must not die, or another would get their id
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            found.storages[storage._cdata] = storage.nbytes()
            found.kinds.add((str(one.dtype).removeprefix("torch."), tuple(one.shape)))
            todo += [one.grad] if one.is_leaf else []
            todo += [one.grad_fn] if graph else []
        elif hasattr(type(one), "next_functions"):
            todo += _of_node(one)
        elif type(one) is torch._C._autograd.SavedTensor:
            todo += [one.data, one.unpack_hook]
        elif isinstance(one, FunctionType):
            todo += [*(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        elif isinstance(one, MethodType):
            todo += [one.__self__, one.__func__]
        else:
            todo += gc.get_referents(one)
    return found


def _of_node(node: Any) -> Iterator[Any]:
    yield from (following for following, _ in node.next_functions)
    for name in dir(type(node)):
        if name.startswith("_raw_saved_"):
            try:
                yield getattr(node, name)
            except RuntimeError:  # freed by a backward
                continue
    yield from getattr(node, "__dict__", {}).values()


def evaluated(holding: Holding, namespace: dict[str, Any], frames: Iterable[Frame]) -> Reach | None:
    """Return what the expression of ``holding`` leads to; None where it has none, or it leads nowhere."""
    if holding.expression is None:
        return None
    scopes: list[tuple[dict[str, Any], Mapping[str, Any]]] = [(namespace, namespace)]
    if place := LOCAL.match(holding.path):
        function, line = place["function"], int(place["line"])
        named = [one for one in frames if one.function == function]
        scopes = [(one.globals, one.locals) for one in named if place["called"] or one.line == line]
    whole = Reach({}, set())
    for variables, local in scopes:  # a function that calls itself is there more than once
        try:
            value = eval(holding.expression, dict(variables), dict(local))
        except (NameError, LookupError, AttributeError, TypeError, SyntaxError):
            continue
        held = reach(value, graph=holding.path.endswith(GRAPH))
        whole.storages.update(held.storages)
        whole.kinds.update(held.kinds)
    return whole if whole.storages else None
