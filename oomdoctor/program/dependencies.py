"""What of the notebook the failing cell rests on: the cells that made the names that it uses, and what those use.

A notebook has cells of other experiments. A hook, an attention layer or a data set of theirs is not to be blamed for
this failure. So statements are followed backwards from the failing cell by the names that they bind and mention.
Limits: what a function changes in its globals, and objects that are reached through others, are followed by name only.

What the failing run had not come to when it failed stands behind the lines of the traceback. What stands in a loop
with the line, in a function that is named anywhere else, or behind something that may swallow an error, may have run,
and does not count. But where no round of the loop can have ended, for a name that each binds is not bound yet, it was
the first round.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from oomdoctor.model.session import Standing
from oomdoctor.program import torch_functions
from oomdoctor.program.compiled import lines_of
from oomdoctor.program.definitions import Program, Scope, is_gradless
from oomdoctor.program.magics import Definition, Function, Loop
from oomdoctor.program.names import (
    call_name,
    free_names,
    loaded,
    outside,
    own_nodes,
    read_first,
    root_of,
    stored,
    target_names,
)

_REPEATING: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """Parts of a program.

    Attributes:
        reach: what the failing cell runs or may: itself, what it calls, and methods of the classes that it rests on,
            which a framework or a model calls, with what those call.
        basis: the reach, and the statements of earlier cells that made what it uses, with what those call.
    """

    reach: tuple[Scope, ...]
    basis: tuple[Scope, ...]


@lru_cache(maxsize=1)
def ground(program: Program) -> Ground:
    """Return what the failing cell of ``program`` rests on."""
    definitions = _definitions(program)
    needed = _mentioned(program.running, definitions)
    before: list[Scope] = []
    for scope in reversed([one for one in program.scopes if one.function is None and one.cell != program.failing]):
        if kept := _back(scope.body, needed, definitions):
            before.insert(0, replace(scope, body=tuple(kept)))
    basis = (*program.running, *before)
    named = _mentioned(basis, definitions, _of_modules(basis, program))
    functions = [scope for scope in program.scopes if _owner(scope) in named]
    methods = [scope for scope in functions if scope.owner]
    called = _mentioned(methods, definitions)
    helpers = [scope for scope in functions if _owner(scope) in called]
    reach = dict.fromkeys((*program.running, *methods, *helpers))
    return Ground(reach=tuple(reach), basis=tuple(dict.fromkeys((*reach, *before, *functions))))


def _back(body: Iterable[ast.stmt], needed: set[str], definitions: Mapping[str, ast.stmt]) -> list[ast.stmt]:
    """Return the statements that bind or change a needed name, blocks as a whole; what they read is added to those."""
    kept: list[ast.stmt] = []
    for node in reversed(list(body)):
        reads = set[str]()
        if isinstance(node, ast.For | ast.AsyncFor) and not needed.isdisjoint(target_names(node.target)):
            reads |= loaded(node.iter)
        parts = [*node.body, *node.orelse] if isinstance(node, Loop) else [node]
        changed = (name for part in parts for name in _changed(part))
        if not isinstance(node, Definition | ast.Import | ast.ImportFrom) and not (needed | reads).isdisjoint(changed):
            kept.insert(0, node)
            needed -= set(target_names(*node.targets)) if isinstance(node, ast.Assign) else set()
            reads |= read_first([node])
        if reads:
            needed |= reads | outside(definitions, needed | reads)
    return kept


def _definitions(program: Program) -> dict[str, ast.stmt]:
    """Return the functions and classes of the top level of all cells; the last of a name is the one meant."""
    return {
        node.name: node
        for scope in program.scopes
        if scope.function is None
        for node in own_nodes(scope.body)
        if isinstance(node, Definition)
    }


def _mentioned(
    scopes: Iterable[Scope], definitions: Mapping[str, ast.stmt], more: AbstractSet[str] = frozenset()
) -> set[str]:
    """Return the names that ``scopes`` find outside of themselves, and what the definitions among these find."""
    found = set(more)
    for scope in scopes:
        if scope.function is not None:
            found |= free_names(scope.function)
        else:
            found |= read_first(scope.body) | (loaded(*scope.body) & definitions.keys())
    return found | outside(definitions, found)


def _of_modules(scopes: Iterable[Scope], program: Program) -> set[str]:
    nodes = (node for scope in scopes for part in scope.body for node in ast.walk(part))
    taken = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {node.attr for node in taken if node.value.id in program.aliases}  # type: ignore[attr-defined]


def _owner(scope: Scope) -> str:
    """Return the name by which a function is reached: that of its class or of the outermost function around it."""
    return scope.name.partition(".")[0]


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds, or whose objects it may change: targets, receivers and arguments."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store):
            yield root_of(inner)
        elif isinstance(inner, ast.Expr):
            calls = (part for part in ast.walk(inner) if isinstance(part, ast.Call))
            yield from (root_of(part) for call in calls for part in (call.func, *call.args))


def unreached(
    program: Program,
    line: int | None,
    running: Collection[tuple[int, int]],
    standing: Mapping[tuple[int, int], Standing],
) -> frozenset[int]:
    """Return the ids of the nodes of what the failing cell runs that were not reached.

    ``line`` is that of the failing cell, None where it is not known, so that all of it may have run. ``running`` are
    ``(cell, line)`` of all that was running, and ``standing`` tells where each of these stood.
    """
    top = next((one for one in program.running if one.function is None), None)
    if top is None or line is None or program.magic_at(line) is not None:  # a magic may show an error and go on
        return frozenset()
    ran: dict[Scope | None, set[int]] = {top: {line}}
    for cell, at in running:
        ran.setdefault(_home(program, cell, at) or (top if cell == top.cell else None), set()).add(at)
    if len(ran[top]) > 1:
        return frozenset()  # an error that was caught and raised again has two lines
    lines = {scope: min(ran[scope]) for scope in program.running if len(ran.get(scope, ())) == 1}
    stood = {scope: standing[scope.cell, at] for scope, at in lines.items() if (scope.cell, at) in standing}
    unmade = {scope: _never_bound(scope, stood[scope].unbound if scope in stood else ()) for scope in lines}
    while True:
        rest = (node for scope, at in lines.items() for node in _behind(scope.body, at, unmade[scope]))
        behind = {id(part) for node in rest for part in ast.walk(node)}
        callers = _callers(program, top, behind, {scope: one.own for scope, one in stood.items()})
        many = [one for one in lines if one is not top and not _is_called_once(callers.get(one, []), lines, unmade)]
        if not many:
            break
        for scope in many:
            del lines[scope]
    never = [scope for scope in program.running if scope is not top and scope not in callers]
    return frozenset(behind | {id(part) for scope in never for node in scope.body for part in ast.walk(node)})


def lines_among(program: Program, nodes: Collection[int]) -> set[tuple[int, int]]:
    """Return ``(cell, line)`` of the statements of what runs whose ids are among ``nodes``."""
    scopes = program.running if nodes else ()
    found = ((scope.cell, node) for scope in scopes for one in scope.body for node in ast.walk(one))
    return {(cell, node.lineno) for cell, node in found if id(node) in nodes and isinstance(node, ast.stmt)}


def is_gradless_at(program: Program, running: Collection[tuple[int, int | None]]) -> bool:
    """Return whether a ``(cell, line)`` that was running stands under ``no_grad`` or ``inference_mode``."""
    for scope in program.scopes:
        lines = [line for number, line in running if number == scope.cell and line is not None]
        nodes = (node for statement in scope.body for node in ast.walk(statement))
        gradless: list[Any] = [node for node in nodes if any(map(is_gradless, getattr(node, "items", ())))]
        gradless += [scope.function] if scope.disables_grad else []
        if any(line in lines_of(node) for node in gradless for line in lines):
            return True
    return False


def _home(program: Program, cell: int, line: int) -> Scope | None:
    functions = (scope for scope in program.scopes if scope.cell == cell)
    found = [s for s in functions if s.function is not None and s.function.lineno <= line <= lines_of(s.function)[-1]]
    return max(found, key=lambda scope: scope.body[0].lineno, default=None)


def _never_bound(scope: Scope, unbound: Iterable[str]) -> frozenset[str]:
    nodes = [node for one in scope.body for node in ast.walk(one)]
    deleted = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del)}
    deleted |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    return frozenset(unbound) - deleted


def _behind(body: Iterable[ast.stmt], line: int, unbound: frozenset[str]) -> Iterator[ast.stmt]:
    """Yield the statements that are run after the one with the line, if it does not fail, or were passed by before.

    ``unbound`` are names that nothing has bound yet.
    """
    waiting = list(body)
    at = next((at for at, one in enumerate(waiting) if line in lines_of(one)), None)
    if at is None:
        return
    yield from _passed_by(waiting[:at], unbound)
    now = waiting[at]
    if isinstance(now, ast.If):
        for block, other in ((now.body, now.orelse), (now.orelse, now.body)):
            if any(line in lines_of(one) for one in block):
                yield from other
                yield from _behind(block, line, unbound)
    elif (isinstance(now, ast.Try) and any(line in lines_of(one) for one in now.body)) or (
        isinstance(now, Loop) and _is_first_round(now, line, unbound)
    ):
        yield from now.orelse
        yield from _behind(now.body, line, unbound)
    elif isinstance(now, ast.With):
        yield from _behind(now.body, line, unbound)
        if not all(
            call_name(item.context_expr).rpartition(".")[2] in torch_functions.LETS_ERRORS_THROUGH for item in now.items
        ):
            return
    yield from waiting[at + 1 :]


def _passed_by(done: Iterable[ast.stmt], unbound: frozenset[str]) -> Iterator[ast.stmt]:
    """Yield the blocks within statements that have ended that were not run: one binds a name that is not bound."""
    for node in done:
        for block in (node.body, node.orelse) if isinstance(node, ast.If | Loop) else ():
            is_left = any(isinstance(inner, ast.Break | ast.Continue) for one in block for inner in ast.walk(one))
            if not is_left and any(not unbound.isdisjoint(_always_bound(one)) for one in block):
                yield from block
            else:
                yield from _passed_by(block, unbound)


def _is_first_round(loop: Loop, line: int, unbound: frozenset[str]) -> bool:
    """Return whether no round of a loop has ended: from the line on, each binds a name that is not bound."""
    at = next((at for at, one in enumerate(loop.body) if line in lines_of(one)), None)
    for one in [] if at is None else loop.body[at:]:
        if not unbound.isdisjoint(_always_bound(one)):
            return True
        if any(isinstance(node, ast.Continue) for node in ast.walk(one)):
            return False
    return False


def _always_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.With):
        yield from (name for one in node.body for name in _always_bound(one))
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from stored(part for target in targets for part in ast.walk(target))


def _callers(
    program: Program, top: Scope, behind: Collection[int], own: Mapping[Scope, Mapping[str, frozenset[str]]]
) -> dict[Scope, list[Scope]]:
    """Return the functions that are named in what may have run, each with the scope of each place.

    ``own`` tells what the objects named in running scopes do not have from a library.
    """
    named: dict[str, list[Scope]] = {}
    for scope in program.running:
        if scope.function is not None:
            named.setdefault(f".{scope.tail}" if scope.owner else scope.tail, []).append(scope)
    found: dict[Scope, list[Scope]] = {}
    waiting = [top]
    while waiting:
        scope = waiting.pop()
        hidden = program.aliases | _own_data(scope)
        for node in _nodes(scope.body, behind):
            for function in named.get(_named(node, program, own.get(scope, {}), hidden), []):
                if function not in found:
                    waiting.append(function)
                found.setdefault(function, []).append(scope)
    return found


def _own_data(scope: Scope) -> set[str]:
    """Return the names that a function assigns for itself and calls nowhere: no function of the program."""
    if scope.function is None:
        return set()
    nodes = list(own_nodes(scope.body, lambda node: isinstance(node, ast.comprehension)))
    outer = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    return stored(nodes) - outer - {call_name(node) for node in ast.walk(scope.function) if isinstance(node, ast.Call)}


def _named(node: ast.AST, program: Program, own: Mapping[str, frozenset[str]], hidden: Container[str]) -> str:
    """Return the function that an expression names, ``.name`` for a method; of a module, as by itself.

    Nothing where the method is seen to be a library's, or the name is one of those ``hidden``, which name other things.
    """
    if isinstance(node, ast.Attribute):
        base = call_name(node.value)
        if base in own and node.attr not in own[base]:
            return ""
        is_of_module = isinstance(node.value, ast.Name) and node.value.id in program.aliases
        return node.attr if is_of_module else f".{node.attr}"
    return node.id if isinstance(node, ast.Name) and node.id not in hidden else ""


def _nodes(body: Iterable[ast.AST], behind: Collection[int]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope of its own, without what was not reached."""
    for node in body:
        if id(node) not in behind and not isinstance(node, Function):
            yield node
            yield from _nodes(ast.iter_child_nodes(node), behind)


def _is_called_once(callers: list[Scope], lines: Mapping[Scope, int], unbound: Mapping[Scope, frozenset[str]]) -> bool:
    """Return whether a function was called by the line that is running alone, and that ran once."""
    line = lines.get(callers[0]) if len(callers) == 1 else None
    return line is not None and not _repeats(callers[0].body, line, unbound[callers[0]])


def _repeats(body: Iterable[ast.stmt], line: int, unbound: frozenset[str]) -> bool:
    """Return whether the line stands in a loop that is past its first round, or has one in its statement."""
    nodes = (node for one in body for node in ast.walk(one) if isinstance(node, ast.stmt))
    around = [node for node in nodes if line in lines_of(node)]
    inner = ast.walk(around[-1]) if around else ()
    loops = [node for node in around if isinstance(node, Loop)]
    return any(not _is_first_round(one, line, unbound) for one in loops) or any(
        isinstance(node, _REPEATING) for node in inner
    )
