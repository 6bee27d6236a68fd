"""A recurrent state cut from the graphs of the steps before.

A state that goes from one step into the next with its graph keeps the activations of all steps. In a training loop it
is detached at the end of the step, which is truncated backpropagation through time: the values are the same, but
gradients no longer reach back into earlier steps. That is another result, so it is offered and never taken for granted.
It is exact only where evidence says that nothing is differentiated through the state, as in an evaluation loop.

In a module, the state is detached before it is fed back. Its class is given the changed method, so that the objects
that are there follow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import Loop
from oomdoctor.program.definitions import Scope, Statement, site, statements
from oomdoctor.program.ground import ground
from oomdoctor.program.kept_tensors import Place, undifferentiated
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import call_name, own_nodes, target_names
from oomdoctor.program.rewriting import within

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

_NOTHING: Final = "no recurrent state is carried over steps with its graph"
_MAKES: Final = frozenset({"zeros", "ones", "randn", "rand", "empty", "zeros_like", "new_zeros", "tensor", "full"})
_ANEW: Final = re.compile(r"detach|repackage|no_grad|\.data\b|init|zeros|reset")
_LSTM: Final = re.compile(r"\bLSTM(?:Cell)?\(")
_ONE_STATE: Final = re.compile(r"\b(?:GRU|RNN)(?:Cell)?\(")


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the state that is carried over steps: ``idle`` where nothing differentiates it, else ``carried``."""

    def idle() -> tuple[Place, ...]:
        return undifferentiated(program, objects.kinds, objects.line)

    every = [(scope, one) for scope in program.running for one in statements(scope.body) if one.loops]
    for scope, one in every:
        differentiating = [loop for loop in one.loops if _differentiates(loop)]
        if differentiating and _is_carried(one, differentiating[-1]):
            return (site("carried", scope, one.node, _fed_back(one.node)),)
    for scope in ground(program).reach:
        if (kept := _kept_in_module(program, scope)) is not None:
            is_idle = not any(loop.in_failing_run for loop in objects.loops) and bool(idle())
            return (site("idle" if is_idle else "carried", scope, kept, _fed_back(kept)),)
    for scope, one in every:
        if _is_carried(one, one.loops[-1]):
            lines = {line for number, line, _ in idle() if number == scope.cell}
            around = [node for node in own_nodes(scope.body) if isinstance(node, ast.stmt) and node.lineno in lines]
            if any(node.lineno <= one.node.lineno <= (node.end_lineno or 0) for node in around):
                return (site("idle", scope, one.node, _fed_back(one.node)),)
    return ()


def _is_carried(statement: Statement, loop: Loop) -> bool:
    """Whether a statement feeds back a state with its graph, and ``loop`` does not bind it anew."""
    fed = _fed_back(statement.node)
    rebound = any(_rebinds(node, set(fed), statement.node) for node in own_nodes(loop.body))
    return bool(fed) and not statement.is_gradless and not rebound


def _differentiates(loop: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(loop))


def _fed_back(node: ast.AST) -> tuple[str, ...]:
    """Return the names that a call of several arguments is given and gives back."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return ()
    given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
    if len(given) < 2 or _ANEW.search(ast.unparse(node.value)):
        return ()
    fed = {name for value in given[1:] for name in _texts(value)}
    return tuple(dict.fromkeys(name for target in node.targets for name in _texts(target) if name in fed))


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the plain names and attributes of ``self`` that a target or an argument is, or is a tuple of."""
    if isinstance(node, ast.Tuple | ast.List):
        for part in node.elts:
            yield from _texts(part)
    elif isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and call_name(node).startswith("self.")):
        yield ast.unparse(node)


def _rebinds(node: ast.AST, names: set[str], feeding: ast.stmt) -> bool:
    """Whether a statement other than ``feeding`` cuts the state from its past, or may."""
    match node:
        case ast.Call(func=ast.Attribute(value=base, attr="detach_")):
            return ast.unparse(base) in names
        case ast.For(target=target):
            return bool(names & set(target_names(target)))
        case ast.Assign(targets=targets) if node is not feeding:
            return bool(names & {text for one in targets for text in _texts(one)}) and not _fed_back(node)
        case ast.AnnAssign(target=target):
            return bool(names & set(_texts(target)))
    return False


def _kept_in_module(program: Program, scope: Scope) -> ast.Assign | None:
    """Return the statement of a method that feeds an attribute back which nothing binds anew."""
    if not scope.owner or scope.tail == "__init__":
        return None
    for node in own_nodes(scope.body):
        fed = {name.removeprefix("self.") for name in _fed_back(node) if name.startswith("self.")}
        if fed and isinstance(node, ast.Assign) and not _is_let_go(program, scope, fed, node):
            return node
    return None


def _is_let_go(program: Program, scope: Scope, attributes: set[str], feeding: ast.Assign) -> bool:
    """Whether any method of the class but ``__init__``, or code outside of classes, binds the attribute anew."""
    others = (one for one in program.scopes if one.owner in {"", scope.owner} and one.tail != "__init__")
    for node in (node for one in others for node in own_nodes(one.body) if node is not feeding):
        match node:
            case ast.Assign():
                cut = [part for target in node.targets for part in getattr(target, "elts", [target])]
            case ast.Call(func=ast.Attribute(value=base, attr="detach_")):
                cut = [base]
            case _:
                continue
        if any(isinstance(part, ast.Attribute) and part.attr in attributes for part in cut):
            return True
    return False


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a state is carried with its graph and graphs take memory."""
    found = evidence.code.first("detach_state")
    if found is None:
        return Refused(_NOTHING)
    names = found.names
    census = evidence.census
    kept = census.bytes_of(Role.ACTIVATION) + census.bytes_of(Role.GRAPH_KEPT_ALIVE)
    if not kept:
        return Refused(f"the census found no graphs that {_listed(names)} could keep alive")
    exact = found.kind == "idle"
    return (
        Proposal(
            dose=Dose.of(state=", ".join(names)),
            effect=Effect.EXACT if exact else Effect.CHANGES_RESULT,
            saves=kept,
            slowdown=1.0,
            basis=f"at most the {format_size(kept)} of activations and graphs that the census found: "
            f"what of it belongs to earlier steps hangs on {_listed(names)}",
            caveat=None
            if exact
            else f"gradients end at the step then: they no longer reach earlier steps through {_listed(names)} "
            "(truncated backpropagation through time)",
        ),
    )


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Detach the state at the end of the step; in a module, before it is fed back."""
    found = evidence.code.first("detach_state")
    if found is None:
        return Refused(_NOTHING)
    names = found.names
    cell = cells.get(found.cell)
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    path = rewriting.path_to(parsed, found.line)
    feeding = path[-1] if path else None
    if not isinstance(feeding, cst.SimpleStatementLine) or len(feeding.body) > 1:
        return Refused(f"line {found.line} of {cell} is no statement of its own")
    in_module = all(name.startswith("self.") for name in names)
    is_idle = found.kind == "idle"
    module = _in_module(parsed, feeding, names, cells) if in_module else _in_loop(parsed, path, names, cells, is_idle)
    if isinstance(module, Refused):
        return module
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module)])


def _in_module(
    parsed: rewriting.ParsedCell, feeding: cst.SimpleStatementLine, names: tuple[str, ...], cells: Cells
) -> cst.Module | Refused:
    new = []
    for name in names:
        line = _detached((name,), cells)
        if isinstance(line, Refused):
            return line
        new.append(f"if {name} is not None:\n    {line}\n")
    before = rewriting.statements("".join(new), parsed)
    first = before[0].with_changes(leading_lines=feeding.leading_lines)
    return rewriting.replace(parsed.module, feeding, [first, *before[1:], feeding.with_changes(leading_lines=())])


def _in_loop(
    parsed: rewriting.ParsedCell,
    path: tuple[rewriting.Statement, ...],
    names: tuple[str, ...],
    cells: Cells,
    idly: bool,
) -> cst.Module | Refused:
    loops = [node for node in path if isinstance(node, cst.For | cst.While)]
    steps = loops if idly else [node for node in loops if ".backward(" in parsed.code(node)]
    if not steps or not isinstance(steps[-1].body, cst.IndentedBlock):
        return Refused("the loop that carries the state calls backward nowhere itself")
    loop = steps[-1]
    below = path[path.index(loop) + 1 :]
    if any(not isinstance(node, cst.For | cst.With | cst.SimpleStatementLine) for node in below):
        return Refused(f"{_listed(names)} is carried over under a condition")
    if _leaves_early(loop):
        return Refused("the loop has a `continue`, which would pass over the line that detaches the state")
    line = _detached(names, cells)
    if isinstance(line, Refused):
        return line
    why = "its graph is not needed" if idly else "gradients end with the step"
    added = rewriting.statements(f"{line}  # {why}\n", parsed)
    body = loop.body.with_changes(body=[*loop.body.body, *added])
    return rewriting.replace(parsed.module, loop.body, body)


def _leaves_early(loop: cst.For | cst.While) -> bool:
    """Whether a ``continue`` of the loop itself would pass over its end."""
    return any(within(loop.body, cst.Continue, (cst.For, cst.While, cst.FunctionDef)))


def _detached(names: tuple[str, ...], cells: Cells) -> str | Refused:
    """Return the assignment that detaches the names."""
    values = []
    for name in names:
        kind = "tensor" if len(names) > 1 else _kind(name, cells)
        if kind == "list":
            return Refused(f"`{name}` is a list of states: it is not known what is in it")
        parts = f"tuple(part.detach() for part in {name})"
        whole = f"{name}.detach()"
        values.append({"tensor": whole, "tuple": parts}.get(kind, f"{parts} if isinstance({name}, tuple) else {whole}"))
    return f"{', '.join(names)} = {', '.join(values)}"


def _kind(name: str, cells: Cells) -> str:
    """Return what the cells show ``name`` to be: a tensor, a tuple or a list of them; empty where they do not."""
    trees = [tree for cell in cells.history if (tree := parsed(cell.source)) is not None]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    kinds = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
            kinds.add(_kind_of(node.value, functions))
    known = kinds - {""}
    if len(known) == 1:
        return known.pop()
    text = "\n".join(cell.source for cell in cells.history)
    if not known and bool(_LSTM.search(text)) != bool(_ONE_STATE.search(text)):
        return "tuple" if _LSTM.search(text) else "tensor"
    return ""


def _kind_of(value: ast.expr, functions: dict[str, ast.FunctionDef], depth: int = 1) -> str:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in {"to", "cuda"}:
        value = value.func.value
    if isinstance(value, ast.Tuple):
        return "tuple"
    if isinstance(value, ast.List | ast.ListComp):
        return "list"
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func).rpartition(".")[2]
        if called in _MAKES:
            return "tensor"
        if called in functions and depth:
            given = [node.value for node in ast.walk(functions[called]) if isinstance(node, ast.Return)]
            kinds = {_kind_of(one, functions, depth - 1) for one in given if one is not None}
            return kinds.pop() if len(kinds) == 1 else ""
    return ""


FIX: Final = Fix(
    id="detach_state",
    title="Cut a recurrent state from the graphs of earlier steps",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=None,
    patch=patch,
    detect=detect,
)
