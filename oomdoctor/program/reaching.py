"""What the failing run had not come to when it failed: statements that stand behind the line that was running.

Told by the text and by the lines of the traceback. What stands in a loop with the line, in a function that is named
anywhere else, or behind something that may swallow an error, may have run, and does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from oomdoctor.program import words
from oomdoctor.program.definitions import Program, Scope, is_gradless
from oomdoctor.program.names import call_name

__all__ = ["is_gradless_at", "unreached"]

_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_REPEATING: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def unreached(program: Program, line: int | None, running: Collection[tuple[int, int]]) -> frozenset[int]:
    """Return the ids of the nodes of what the failing cell runs that were not reached.

    Args:
        line: of the failing cell; None where it is not known, so that all of it may have run.
        running: ``(cell, line)`` of all that was running.
    """
    top = next((one for one in program.running if one.function is None), None)
    if top is None or line is None or _is_hidden(program, line):
        return frozenset()
    if {at for cell, at in running if cell == top.cell and _home(program, cell, at) is None} - {line}:
        return frozenset()  # an error that was caught and raised again has two lines
    lines = {top: line} | {
        scope: lines[0] for scope in program.running if len(lines := _own(program, scope, running)) == 1
    }
    while True:
        behind = {id(node) for scope, at in lines.items() for one in _behind(scope.body, at) for node in ast.walk(one)}
        callers = _callers(program, top, behind)
        many = [one for one in lines if one is not top and not _is_called_once(callers.get(one, []), lines)]
        if not many:
            break
        for one in many:
            del lines[one]
    never = [scope for scope in program.running if scope is not top and scope not in callers]
    return frozenset(behind | {id(node) for scope in never for one in scope.body for node in ast.walk(one)})


def is_gradless_at(program: Program, running: Collection[tuple[int, int | None]]) -> bool:
    """Return whether a line that was running stands under ``no_grad`` or ``inference_mode``.

    Args:
        running: ``(cell, line)`` of each; of no line where that is not known.
    """
    for scope in program.scopes:
        lines = [line for number, line in running if number == scope.cell and line is not None]
        nodes = (node for statement in scope.body for node in ast.walk(statement))
        gradless: list[ast.stmt] = [
            node for node in nodes if isinstance(node, ast.With | ast.AsyncWith) and any(map(is_gradless, node.items))
        ]
        if scope.disables_grad and scope.function is not None:
            gradless.append(scope.function.node)
        if any(_covers(node, line) for node in gradless for line in lines):
            return True
    return False


def _is_hidden(program: Program, line: int) -> bool:
    """Return whether a line is IPython's own: it may show an error and go on."""
    return any(masked.endswith(f" {line}") for masked, _ in program.masked[program.failing].hidden)


def _own(program: Program, scope: Scope, running: Collection[tuple[int, int]]) -> list[int]:
    """Return the lines that are running in a function, and in none that stands within it."""
    return sorted(
        {line for cell, line in running if scope.function is not None and _home(program, cell, line) is scope}
    )


def _home(program: Program, cell: int, line: int) -> Scope | None:
    found = [
        scope
        for scope in program.scopes
        if scope.function is not None and scope.cell == cell and _covers(scope.function.node, line)
    ]
    return max(found, key=lambda scope: scope.body[0].lineno) if found else None


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _behind(body: Iterable[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """Yield the statements that are run after the one with the line, if it does not fail."""
    waiting = list(body)
    at = next((at for at, one in enumerate(waiting) if _covers(one, line)), None)
    if at is None:
        return
    now = waiting[at]
    if isinstance(now, ast.If):
        for block, other in ((now.body, now.orelse), (now.orelse, now.body)):
            if any(_covers(one, line) for one in block):
                yield from other
                yield from _behind(block, line)
    elif isinstance(now, ast.Try) and any(_covers(one, line) for one in now.body):
        yield from now.orelse
        yield from _behind(now.body, line)
    elif isinstance(now, ast.With):
        yield from _behind(now.body, line)
        if not all(call_name(item.context_expr).rpartition(".")[2] in words.LETS_ERRORS_THROUGH for item in now.items):
            return
    yield from waiting[at + 1 :]


def _callers(program: Program, top: Scope, behind: Collection[int]) -> dict[Scope, list[tuple[Scope, ast.AST]]]:
    """Return the functions that are named in what may have run, each with the places: the scope and the node."""
    named: dict[str, list[Scope]] = {}
    for scope in program.running:
        if scope.function is not None:
            named.setdefault(scope.tail, []).append(scope)
    found: dict[Scope, list[tuple[Scope, ast.AST]]] = {}
    waiting = [top]
    while waiting:
        scope = waiting.pop()
        for node in _nodes(scope.body, behind):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            for one in named.get(name or "", []):
                if one not in found:
                    waiting.append(one)
                found.setdefault(one, []).append((scope, node))
    return found


def _nodes(body: Iterable[ast.AST], behind: Collection[int]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope of its own, without what was not reached."""
    for node in body:
        if id(node) not in behind and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _nodes(ast.iter_child_nodes(node), behind)


def _is_called_once(places: list[tuple[Scope, ast.AST]], lines: dict[Scope, int]) -> bool:
    """Return whether a function was called by the line that is running alone, and that runs once."""
    if len(places) != 1:
        return False
    scope, node = places[0]
    line = lines.get(scope)
    return line is not None and not _repeats(scope.body, line) and isinstance(node, ast.Name | ast.Attribute)


def _repeats(body: Iterable[ast.stmt], line: int) -> bool:
    """Return whether the line stands in a loop, or has one in its statement."""
    for one in body:
        if _covers(one, line):
            if isinstance(one, _LOOPS):
                return True
            blocks = [getattr(one, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [part.body for part in (*getattr(one, "handlers", ()), *getattr(one, "cases", ()))]
            inside = next((block for block in blocks if any(_covers(part, line) for part in block)), None)
            if inside is not None:
                return _repeats(inside, line)
            return any(isinstance(node, _REPEATING) for node in ast.walk(one))
    return True
