"""What a step keeps with its autograd graph for later ones: a history of losses or outputs, and a recurrent state.

``detach_history``: a list of losses, or a sum of them, keeps every activation of every step alive if its tensors carry
their graph. ``detach`` and not ``item``: values and their types stay what they were, so that later code finds the same.

``detach_state``: a state that goes from one step into the next with its graph keeps the activations of all steps. In a
training loop it is detached at the end of the step, truncated backpropagation through time: gradients no longer reach
back into earlier steps. It is exact only where nothing is differentiated through the state, as in an evaluation loop.
In a module, the state is detached before it is fed back; its class is given the changed method.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

import libcst as cst

from oomdoctor.fixes._construction_sites import changed, preceded
from oomdoctor.fixes._preconditions import hangs_on
from oomdoctor.fixes._refusals import Unfit, listed, need, proposing, refusing, sites_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Site
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import called_on, kept_otherwise, kept_value
from oomdoctor.program.definitions import Program, Scope, Statement, site, statements
from oomdoctor.program.dependencies import ground
from oomdoctor.program.kept_tensors import Place, history_appends, undifferentiated
from oomdoctor.program.magics import Loop
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.rewriting import text_of, within

_NO_PLACE: Final = (
    "nothing that the failing cell runs keeps tensors with their autograd graph where it is certain that no gradient "
    "is taken through them"
)


def _detect_history(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what a loop keeps with its graph; the names are the history, and the statement that leaves the graph out."""
    found = history_appends(program, objects.kinds)
    return tuple(site("history", scope, node, (name, _without_graph(node))) for scope, node, name in found)


def _without_graph(node: ast.stmt) -> str:
    """Return the text of a statement that keeps a tensor, with the graph left behind."""
    line = cst.parse_module(ast.unparse(node)).body[0]
    kept = kept_value(line)
    return text_of(line if kept is None else line.deep_replace(kept, called_on(kept, ".detach()"))).strip()


@proposing
def _propose_history(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    sites = sites_of(evidence, "detach_history", _NO_PLACE)
    names = dict.fromkeys(one.names[0] for one in sites)
    either = listed(names, "or")
    kept = sum(holding.bytes for holding in evidence.census.holdings if any(_keeps(holding, name) for name in names))
    need(kept, f"the census found no graph that {either} keeps alive")
    if (other := _kept_elsewhere(evidence, names)) is not None:
        raise Unfit(f"{other} keeps the same graphs alive, whether {either} does or not")
    yield Proposal(
        dose=Dose.of(names=", ".join(names)),
        effect=Effect.EXACT,
        saves=kept,
        basis=f"the census found {format_size(kept)} of graphs that {either} keeps alive",
        caveat=f"what {either} keeps has no graph any more: a later `backward` through it raises an error",
    )


def _kept_elsewhere(evidence: Evidence, names: Iterable[str]) -> str | None:
    """Return what else keeps the graphs of the steps: outputs that are gathered, or a state that is carried over."""
    code = evidence.code
    gathered = code.first("offload_predictions")
    for name in gathered.names if gathered is not None else ():
        kept = (one for one in evidence.census.holdings if one.role is Role.GRAPH_KEPT_ALIVE)
        if name not in names and any(_keeps(one, name) for one in kept):
            return f"`{name}`"
    carried = code.first("detach_state")
    if carried is not None and any(carried.cell == one.cell for one in code.sites["detach_history"]):
        return f"the recurrent state carried over steps in {carried}"
    return None


def _keeps(holding: Holding, name: str) -> bool:
    """Whether the census found graphs that hang on ``name``, a global or a local one."""
    # What the failing cell or its frames bound themselves counts as of the step at hand, also a sum over many steps.
    is_graph = holding.role is Role.ACTIVATION and holding.path.endswith("→ graph")
    return hangs_on(holding, name) and (is_graph or holding.role is Role.GRAPH_KEPT_ALIVE)


@refusing
def _patch_history(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    sites = sites_of(evidence, "detach_history", _NO_PLACE)
    return kept_otherwise(cells, sites, lambda _: ".detach()", "keeps more than one value: detach each of its tensors")


_NOTHING: Final = "no recurrent state is carried over steps with its graph"
_ANEW: Final = re.compile(r"detach|repackage|no_grad|\.data\b|init|zeros|reset")


def _detect_state(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the state that is carried over steps: ``idle`` where nothing differentiates it, else ``carried``."""

    def idle() -> tuple[Place, ...]:
        return undifferentiated(program, objects.kinds)

    every = [(scope, one) for scope in program.running for one in statements(scope.body) if one.loops]
    for scope, one in every:
        differentiating = [
            loop for loop in one.loops if any(getattr(node, "attr", "") == "backward" for node in ast.walk(loop))
        ]
        if differentiating and _is_carried(one, differentiating[-1]):
            return (site("carried", scope, one.node, _fed_back(one.node)),)
    for scope in ground(program).reach:
        if (kept := _kept_in_module(program, scope)) is not None:
            is_idle = not any(loop.in_failing_run for loop in objects.loops) and bool(idle())
            return (site("idle" if is_idle else "carried", scope, kept, _fed_back(kept)),)
    for scope, one in every:
        if _is_carried(one, one.loops[-1]):
            around = [node for place, node in idle() if place is scope]
            if any(node.lineno <= one.node.lineno <= (node.end_lineno or 0) for node in around):
                return (site("idle", scope, one.node, _fed_back(one.node)),)
    return ()


def _is_carried(statement: Statement, loop: Loop) -> bool:
    """Whether a statement feeds back a state with its graph, and ``loop`` does not bind it anew."""
    fed = _fed_back(statement.node)
    others = (node for node in own_nodes(loop.body) if node is not statement.node and not _fed_back(node))
    rebound = {text for node in others for part in _cut(node) for text in _texts(part)}
    return bool(fed) and not statement.is_gradless and not rebound.intersection(fed)


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


def _cut(node: ast.AST) -> list[ast.expr]:
    """Return what a node cuts from its past, or may: what it binds, or detaches in place."""
    match node:
        case ast.Call(func=ast.Attribute(value=target, attr="detach_")):
            return [target]
        case ast.Assign(targets=targets):
            return targets
        case ast.For(target=target) | ast.AnnAssign(target=target):
            return [target]
    return []


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
    nodes = (node for one in others for node in own_nodes(one.body) if node is not feeding)
    parts = (part for node in nodes for cut in _cut(node) for part in getattr(cut, "elts", [cut]))
    return any(isinstance(part, ast.Attribute) and part.attr in attributes for part in parts)


@proposing
def _propose_state(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    found = need(evidence.code.first("detach_state"), _NOTHING)
    names, census = found.names, evidence.census
    kept = census.bytes_of(Role.ACTIVATION) + census.bytes_of(Role.GRAPH_KEPT_ALIVE)
    need(kept, f"the census found no graphs that {listed(names)} could keep alive")
    exact = found.kind == "idle"
    yield Proposal(
        dose=Dose.of(state=", ".join(names)),
        effect=Effect.EXACT if exact else Effect.CHANGES_RESULT,
        saves=kept,
        basis=f"at most the {format_size(kept)} of activations and graphs that the census found: "
        f"what of it belongs to earlier steps hangs on {listed(names)}",
        caveat=None
        if exact
        else f"gradients end at the step then: they no longer reach earlier steps through {listed(names)} "
        "(truncated backpropagation through time)",
    )


@refusing
def _patch_state(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    found = need(evidence.code.first("detach_state"), _NOTHING)
    cell = cells.get(found.cell)
    parsed = need(rewriting.read(cell.source))
    path = rewriting.path_to(parsed, found.line)
    feeding = path[-1] if path else None
    if not isinstance(feeding, cst.SimpleStatementLine) or len(feeding.body) > 1:
        raise Unfit(f"line {found.line} of {cell} is no statement of its own")
    if not all(name.startswith("self.") for name in found.names):
        return changed(cells, cell, _in_loop(parsed, path, found.names, found.kind == "idle"))
    new = "".join(f"if {name} is not None:\n    {_detached((name,))}\n" for name in found.names)
    return changed(cells, cell, {feeding: preceded(feeding, new, parsed)})


def _in_loop(
    parsed: rewriting.ParsedCell, path: tuple[rewriting.Statement, ...], names: tuple[str, ...], idly: bool
) -> dict[cst.CSTNode, rewriting.New]:
    loops = [node for node in path if isinstance(node, cst.For | cst.While)]
    steps = loops if idly else [node for node in loops if ".backward(" in parsed.code(node)]
    if not steps or not isinstance(steps[-1].body, cst.IndentedBlock):
        raise Unfit("the loop that carries the state calls backward nowhere itself")
    loop = steps[-1]
    below = path[path.index(loop) + 1 :]
    if any(not isinstance(node, cst.For | cst.With | cst.SimpleStatementLine) for node in below):
        raise Unfit(f"{listed(names)} is carried over under a condition")
    if any(within(loop.body, cst.Continue, (cst.For, cst.While, cst.FunctionDef))):
        raise Unfit("the loop has a `continue`, which would pass over the line that detaches the state")
    why = "its graph is not needed" if idly else "gradients end with the step"
    added = rewriting.statements(f"{_detached(names)}  # {why}\n", parsed)
    return {loop.body: loop.body.with_changes(body=[*loop.body.body, *added])}


def _detached(names: tuple[str, ...]) -> str:
    """Return the assignment that detaches the names; one name may hold a tuple, as the state of an LSTM."""
    every = "tuple(part.detach() for part in {0}) if isinstance({0}, tuple) else {0}.detach()"
    each = "{}.detach()" if len(names) > 1 else every
    return f"{', '.join(names)} = {', '.join(map(each.format, names))}"


FIXES: Final = (
    Fix(
        id="detach_history",
        title="Detach the history from its autograd graphs",
        effect=Effect.EXACT,
        joins=True,
        cost="nothing",
        propose=_propose_history,
        patch=_patch_history,
        detect=_detect_history,
    ),
    Fix(
        id="detach_state",
        title="Detach the recurrent state between steps",
        effect=Effect.EXACT,
        cost="nothing",
        propose=_propose_state,
        patch=_patch_state,
        detect=_detect_state,
    ),
)
