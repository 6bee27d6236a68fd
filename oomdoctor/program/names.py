"""Which names a cell, or a node of its tree, binds, fills, reads and deletes; in the order in which it does so."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from functools import lru_cache
from itertools import chain, takewhile
from typing import Final, TypeAlias

from oomdoctor.program.magics import Definition, Function, Loop, tree_of

_WITH_BLOCKS: Final = (ast.stmt, ast.ExceptHandler, ast.match_case)
_INNER: TypeAlias = Definition | ast.Lambda


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


def parameters_of(function: ast.Lambda | Function) -> set[str]:
    """Return the names of the parameters of ``function``."""
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}


def arguments_of(call: ast.Call, function: Function) -> dict[str, ast.expr]:
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

    What ``without`` tells is left out, with all within it.
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
    kinds = ast.Name | ast.ExceptHandler | Definition
    named = (node for node in nodes if isinstance(node, kinds) and not isinstance(getattr(node, "ctx", None), ast.Load))
    return frozenset(node.id if isinstance(node, ast.Name) else str(node.name) for node in named)


@lru_cache(maxsize=256)
def all_imports_in(source: str) -> frozenset[tuple[str, str]]:
    """Return the same of all imports of a cell, those in functions included."""
    return frozenset(pair for node in ast.walk(tree_of(source)) for pair in imported(node))


def calls_only(source: str, names: Collection[str]) -> bool:
    """Return whether a cell calls nothing but functions of these names."""
    return all(call_name(node) in names for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call))


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

    ``loops_run``: what a loop binds is bound behind it; else it may run no time. ``all_run``: likewise of a branch.
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
    names = (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that these very nodes bind."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def free_names(node: ast.AST) -> set[str]:
    """Return the names that a statement or a definition finds outside of itself, or sets there."""
    if isinstance(node, Function):
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
    nodes = [node for node in own_nodes(tree_of(source).body) if isinstance(node, ast.Assign | ast.AnnAssign)]
    return {name: node for node in reversed(nodes) for name in stored(ast.walk(node))}


@lru_cache(maxsize=1024)
def loop_targets(source: str) -> frozenset[str]:
    """Return the names that the loops at the top level of a cell bind to items: ``layers[at]``, ``next(layers)``."""
    loops, assigned = _of_loops(source)
    items = [node for node in assigned if isinstance(node.value, ast.Subscript) or call_name(node.value) == "next"]
    heads = (loop.target for loop in loops if not isinstance(loop, ast.While))
    return frozenset(target_names(*heads, *(target for node in items for target in node.targets)))


@lru_cache(maxsize=64)
def loop_results(source: str) -> frozenset[str]:
    """Return the names that the loops at the top level of a cell bind to what a call returns, anew in each round.

    What a call was given by that name, it may return.
    """
    made = [node for node in _of_loops(source)[1] if isinstance(node.value, ast.Call)]
    return frozenset(name for node in made for name in {*target_names(*node.targets)} - names_in(node.value))


def _of_loops(source: str) -> tuple[list[Loop], list[ast.Assign]]:
    loops = [node for node in own_nodes(tree_of(source).body) if isinstance(node, Loop)]
    nodes = [node for loop in loops for node in own_nodes(loop.body)]
    return loops, [node for node in nodes if isinstance(node, ast.Assign)]


@lru_cache(maxsize=64)
def read_names(source: str) -> frozenset[str]:
    """Return every name that the cell mentions to read or delete, functions that it defines included."""
    names = (node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Name))
    return frozenset(name.id for name in names if not isinstance(name.ctx, ast.Store))


def bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds at its level."""
    if isinstance(node, Definition):
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
        if isinstance(node, Definition):
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
        is_sure = isinstance(node, ast.With | ast.AsyncWith) or (loops_run and isinstance(node, Loop))
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
