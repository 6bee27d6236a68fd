"""Results of earlier cells taken out of IPython's output cache where they hold tensors.

``Out[n]``, ``_n``, ``_``, ``__`` and ``___`` keep what the last line of a cell showed, a whole autograd graph included.
Removed are just the entries that hold tensors and that the failing cell does not read; a name of the user's own for
the same object is left alone. What was removed stays gone when the context is left: holding it to put it back would
hold the memory.

In the source, a semicolon behind the last line of the cell keeps its result out of the cache; the line still runs.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import Kind, kind_of, plain_dict
from oomdoctor.program import rewriting
from oomdoctor.program.magics import mask, parsed
from oomdoctor.program.names import read_names

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cell, Cells, Session

_LAST: Final = ("_", "__", "___")
_ENTRY: Final = re.compile(r"Out\[(\d+)\]")
_MOST_OBJECTS: Final = 20_000
_REPLAY: Final = """\
if NUMBER in Out:
    _shell, _value = get_ipython(), Out.pop(NUMBER)
    for _names in (_shell.user_ns, _shell.user_ns_hidden, vars(_shell.displayhook)):
        _names.pop("_NUMBER", None)
        _names.update([(_name, "") for _name in ("_", "__", "___") if _names.get(_name) is _value])
    del _shell, _value, _names
"""
"""What makes a namespace as if the cell had not shown its result."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose to clear it where the census found tensors that the output cache alone keeps alive."""
    held = evidence.census.bytes_of(Role.OUTPUT_CACHE)
    if not held:
        return Refused("the output cache keeps no tensors alive")
    basis = f"measured: the census found {format_size(held)} that only the output cache keeps"
    return (Proposal(dose=Dose(), effect=Effect.EXACT, saves=held, slowdown=1.0, basis=basis),)


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Remove the entries that hold tensors; what was removed is not put back."""
    clear(session)
    yield


def clear(session: Session) -> None:
    """Take every entry that holds tensors out of the output cache, those that the failing cell reads excepted."""
    read = _names_read(session.cells.failing.source)
    found = session.namespace.get("_oh")
    outputs: dict[int, Any] = found if isinstance(found, dict) and not {"Out", "_oh"} & read else {}
    freed = {number: value for number, value in outputs.items() if f"_{number}" not in read and _holds_tensor(value)}
    places = _places(session)
    gone = [*freed.values(), *(value for name in set(_LAST) - read if _holds_tensor(value := places[-1].get(name)))]
    for names in places:
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


def _places(session: Session) -> list[dict[str, Any]]:
    """Return where IPython keeps its names for results: the namespace, its list of hidden names, the display hook."""
    hidden = getattr(session.shell, "user_ns_hidden", None)
    hook = plain_dict(getattr(session.shell, "displayhook", None)) or {}
    return [session.namespace, *([hidden] if isinstance(hidden, dict) else []), hook]


def _is_one_of(value: Any, others: Iterable[Any]) -> bool:
    return any(value is one for one in others)


def _names_read(source: str) -> set[str]:
    """Return the names that the source reads; those of IPython's own lines count as read wherever they are named."""
    hidden = {word for _, line in mask(source).hidden for word in re.findall(r"\w+", line)}
    return hidden | (set(re.findall(r"\w+", source)) if parsed(source) is None else read_names(source))


def _holds_tensor(value: Any) -> bool:
    """Tell whether a tensor hangs on ``value``, without running any code of the user's."""
    seen: set[int] = set()
    todo = [value]
    while todo and len(seen) < _MOST_OBJECTS:
        item = todo.pop()
        kind = kind_of(type(item))
        if kind is Kind.TENSOR:
            return True
        if kind in (Kind.ATOM, Kind.ITERATOR) or id(item) in seen:
            continue
        seen.add(id(item))
        if kind is Kind.MAPPING:
            todo += dict.values(item)
        elif kind in (Kind.SEQUENCE, Kind.TUPLE, Kind.SET):
            todo += list(item)
        todo += list((plain_dict(item) or {}).values())
    return False


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Put a semicolon behind the last line of every cell whose result the census found in the cache."""
    paths = [one.path for one in evidence.census.holdings if one.role is Role.OUTPUT_CACHE]
    numbers = sorted({int(match[1]) for path in paths if (match := _ENTRY.match(path))})
    if not numbers:
        return Refused("no cell is known to have shown what the output cache keeps")
    read = set().union(*(_names_read(cell.source) for cell in cells.history))
    edits = []
    for number in numbers:
        if read & {"Out", "_oh", f"_{number}", *_LAST}:
            return Refused("a cell reads its results from the output cache")
        cell = next((one for one in cells.history if one.number == number), None)
        if cell is not None and not isinstance(edit := _silenced(cell), Refused):
            edits.append(edit)
    if not edits:
        return Refused("the cells that showed it end in no expression that a semicolon could keep out of the cache")
    return Patch(edits=tuple(edits))


def _silenced(cell: Cell) -> Edit | Refused:
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    last = parsed.module.body[-1] if parsed.module.body else None
    if not isinstance(last, cst.SimpleStatementLine) or not isinstance(last.body[-1], cst.Expr):
        return Refused("the cell ends in no expression")
    final = last.body[-1]
    if not isinstance(final.semicolon, cst.MaybeSentinel):
        return Refused("the cell ends in a semicolon already")
    quiet = last.with_changes(body=[*last.body[:-1], final.with_changes(semicolon=cst.Semicolon())])
    after = rewriting.write(parsed, rewriting.replace(parsed.module, last, quiet))
    if isinstance(after, Refused):
        return after
    return Edit(cell=cell.number, before=cell.source, after=after, replay=_REPLAY.replace("NUMBER", str(cell.number)))


FIX: Final = Fix(
    id="clear_output_cache",
    title="Take tensors out of IPython's output cache",
    effect=Effect.EXACT,
    cost="the results are no longer in Out",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
