"""Which names a cell, or a node of its tree, binds, fills, reads and deletes; in the order in which it does so."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from functools import lru_cache
from itertools import chain, takewhile
from typing import Final

from oomdoctor.program.magics import tree_of

_WITH_BLOCKS: Final = (ast.stmt, ast.ExceptHandler, ast.match_case)
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_INNER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def call_name(node: ast.AST) -> str:
    """Return the dotted name of what is called (``torch.no_grad``), empty where it is not a plain name."""
    if isinstance(node, ast.Call):
        return call_name(node.func)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = call_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def parameters_of(function: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of the parameters of ``function``."""
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}


def arguments_of(call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """Return what a call passes for the parameters of a function, ``self`` left out, as far as it is written out."""
    args = function.args
    names = [part.arg for part in (*args.posonlyargs, *args.args)]
    plain = takewhile(lambda value: not isinstance(value, ast.Starred), call.args)
    given = dict(zip(names[1:] if names[:1] == ["self"] else names, plain, strict=False))
    return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def root_of(node: ast.AST, *, through_calls: bool = True) -> str:
    """Return the name that a chain of attributes, items and, unless told otherwise, calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript) or (through_calls and isinstance(node, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_nodes(body: Iterable[ast.AST], without: Callable[[ast.AST], bool] = lambda _: False) -> Iterator[ast.AST]:
    """Yield the nodes of ``body`` in the order of the text, not going into functions and classes defined there.

    Args:
        without: what is left out, with all within it.
    """
    for node in body:
        if not without(node):
            yield node
            if not isinstance(node, _INNER):
                yield from own_nodes(ast.iter_child_nodes(node), without)


def blocks_of(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks of statements of a loop, a branch and the like; none for a simple statement."""
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    return [block for block in blocks if isinstance(block, list) and block]


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and what it stands for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


@lru_cache(maxsize=256)
def imports_in(source: str) -> frozenset[tuple[str, str]]:
    """Return each name that a cell's own imports bind, and what it stands for: ``("F", "torch.nn.functional")``."""
    return frozenset(pair for node in own_nodes(tree_of(source).body) for pair in imported(node))


@lru_cache(maxsize=256)
def bound_otherwise(source: str) -> frozenset[str]:
    """Return the names that a cell binds at its top level by anything but an import."""
    nodes = (node for node in own_nodes(tree_of(source).body) if not isinstance(node, ast.alias))
    kinds = ast.Name, ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    named = (node for node in nodes if isinstance(node, kinds) and not isinstance(getattr(node, "ctx", None), ast.Load))
    return frozenset(node.id if isinstance(node, ast.Name) else str(node.name) for node in named)


@lru_cache(maxsize=256)
def all_imports_in(source: str) -> frozenset[tuple[str, str]]:
    """Return the same of all imports of a cell, those in functions included."""
    return frozenset(pair for part in tree_of(source).body for node in ast.walk(part) for pair in imported(node))


def calls_only(source: str, names: Collection[str]) -> bool:
    """Return whether a cell calls nothing but functions of these names."""
    nodes = (node for part in tree_of(source).body for node in ast.walk(part))
    return all(call_name(node) in names for node in nodes if isinstance(node, ast.Call))


class FirstUse(Enum):
    """What a cell does with a name before anything else."""

    BINDS = auto()
    READS = auto()
    DELETES = auto()


@lru_cache(maxsize=64)
def first_uses(source: str) -> dict[str, FirstUse]:
    """Return what the cell does first with each name that it uses.

    A binding inside ``try``, ``match`` or one branch may not happen and does not count. Functions and classes that the
    cell defines are taken to read all that they mention, from where they are defined.
    """
    uses: dict[str, FirstUse] = {}
    for name, use in _events(tree_of(source).body, loops_run=True):
        if use is not None:
            uses.setdefault(name, use)
    return uses


def read_first(body: Iterable[ast.AST], *, loops_run: bool = True, all_run: bool = False) -> set[str]:
    """Return the names that statements read, or go on from, before they bind them.

    Args:
        loops_run: what a loop binds is bound behind it; else it may run no time.
        all_run: what a branch binds is bound behind it as well.
    """
    found, made = set[str](), set[str]()
    for name, use in _events(body, loops_run):
        if use is FirstUse.BINDS or (use is None and all_run):
            made.add(name)
        elif use is not None and name not in made:
            found.add(name)
    return found


def loaded(*nodes: ast.AST) -> set[str]:
    """Return the names that are read anywhere within nodes."""
    inner = (part for node in nodes for part in ast.walk(node))
    return {part.id for part in inner if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that these very nodes bind."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def free_names(node: ast.AST) -> set[str]:
    """Return the names that a statement or a definition finds outside of itself, or sets there."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = list(ast.walk(node))
        own = {one.id for one in inside if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
        changed = {name for one in inside if isinstance(one, ast.Global) for name in one.names}
        return (loaded(node) - own - {one.arg for one in inside if isinstance(one, ast.arg)}) | changed
    if isinstance(node, ast.ClassDef):
        return loaded(*node.bases, *node.decorator_list).union(*map(free_names, node.body))
    return read_first([node]) if isinstance(node, ast.stmt) else loaded(node)


def outside(definitions: Mapping[str, ast.stmt], names: Iterable[str]) -> set[str]:
    """Return what the definitions among ``names`` find outside of themselves, and the definitions among that."""
    found, waiting = set[str](), [name for name in names if name in definitions]
    seen = set(waiting)
    while waiting:
        free = free_names(definitions[waiting.pop()])
        waiting += [name for name in free - seen if name in definitions]
        found |= free
        seen |= free
    return found


@lru_cache(maxsize=64)
def bound_names(source: str) -> frozenset[str]:
    """Return the names that the cell binds at its top level, wherever."""
    return frozenset(chain.from_iterable(map(bound_by, tree_of(source).body)))


def first_assignments(source: str) -> dict[str, ast.Assign | ast.AnnAssign]:
    """Return the first assignment of a cell's top level that binds each name."""
    found: dict[str, ast.Assign | ast.AnnAssign] = {}
    for node in own_nodes(tree_of(source).body):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            found = dict.fromkeys(stored(ast.walk(node)), node) | found
    return found


@lru_cache(maxsize=1024)
def loop_targets(source: str) -> frozenset[str]:
    """Return the names that the loops at the top level of a cell bind to items: ``layers[at]``, ``next(layers)``."""
    loops, assigned = _of_loops(source)
    targets: list[ast.AST] = [loop.target for loop in loops if not isinstance(loop, ast.While)]
    for node in assigned:
        if isinstance(node.value, ast.Subscript) or call_name(node.value) == "next":
            targets += node.targets
    return frozenset(stored(node for target in targets for node in ast.walk(target)))


@lru_cache(maxsize=64)
def loop_results(source: str) -> frozenset[str]:
    """Return the names that the loops at the top level of a cell bind to what a call returns, anew in each round.

    What a call was given by that name, it may return.
    """
    made: set[str] = set()
    for node in _of_loops(source)[1]:
        names = stored(each for target in node.targets for each in ast.walk(target))
        read = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        made |= {name for name in names if isinstance(node.value, ast.Call) and name not in read}
    return frozenset(made)


def _of_loops(source: str) -> tuple[list[ast.For | ast.AsyncFor | ast.While], list[ast.Assign]]:
    """Return the loops at the top level of a cell, and the assignments in their bodies."""
    loops = [node for node in own_nodes(tree_of(source).body) if isinstance(node, ast.For | ast.AsyncFor | ast.While)]
    nodes = [node for loop in loops for node in own_nodes(loop.body)]
    return loops, [node for node in nodes if isinstance(node, ast.Assign)]


@lru_cache(maxsize=64)
def read_names(source: str) -> frozenset[str]:
    """Return every name that the cell mentions to read or delete, functions that it defines included."""
    return frozenset(
        node.id
        for statement in tree_of(source).body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    )


def bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds at its level."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).split(".")[0]
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from bound_by(child)


def _events(body: Iterable[ast.AST], loops_run: bool) -> Iterator[tuple[str, FirstUse | None]]:
    """Yield uses in the order of execution; a binding that may not happen is None."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _reads(node)
            yield node.name, FirstUse.BINDS
            continue
        heads, blocks = [node], blocks_of(node)
        if isinstance(node, ast.For | ast.AsyncFor):
            heads = [node.iter, node.target]
        elif blocks:
            heads = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _WITH_BLOCKS)]
        for head in heads:
            yield from _reads(head)
            if isinstance(head, ast.AugAssign):
                yield from ((one.id, FirstUse.READS) for one in ast.walk(head.target) if isinstance(one, ast.Name))
            yield from ((name, FirstUse.BINDS) for name in bound_by(head))
        is_sure = isinstance(node, ast.With | ast.AsyncWith) or (loops_run and isinstance(node, _LOOPS))
        bound = list[set[str]]()
        for block in blocks:
            bound.append(set())
            for name, use in _events(block, loops_run):
                bound[-1] |= {name} if use is FirstUse.BINDS else set()
                if name not in bound[-1] or is_sure:
                    yield name, use
                elif use is FirstUse.BINDS:
                    yield name, None
        if isinstance(node, ast.If) and node.orelse:
            yield from ((name, FirstUse.BINDS) for name in bound[0] & bound[1])


def _reads(node: ast.AST) -> Iterator[tuple[str, FirstUse | None]]:
    for child in uses(node):
        if not isinstance(child.ctx, ast.Store):
            yield child.id, FirstUse.DELETES if isinstance(child.ctx, ast.Del) else FirstUse.READS


def uses(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """Yield the names within a node, without those that live within a comprehension alone."""
    if isinstance(node, ast.Name):
        if node.id not in hidden:
            yield node
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        first = node.generators[0].iter
        yield from uses(first, hidden)
        own = hidden.union(*(target_names(part.target) for part in node.generators))
        for child in ast.iter_child_nodes(node):
            parts = ast.iter_child_nodes(child) if isinstance(child, ast.comprehension) else (child,)
            yield from (name for part in parts if part is not first for name in uses(part, own))
    else:
        for child in ast.iter_child_nodes(node):
            yield from uses(child, hidden)


def target_names(*targets: ast.AST) -> tuple[str, ...]:
    """Return the names that an assignment to ``targets`` binds, or that ``del`` unbinds."""
    names = (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
    return tuple(name.id for name in names if not isinstance(name.ctx, ast.Load))


def names_in(node: ast.AST) -> set[str]:
    """Return every name that stands in ``node``."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
