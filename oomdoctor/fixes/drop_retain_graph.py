"""``retain_graph=True`` taken away where no further gradient is taken in the same step.

Without it, ``backward`` frees each saved tensor as soon as it has used it. With it, the activations of a step live on
until its loss is bound anew, after the next forward: two steps share the device. Gradients of gradients, and another
backward in the step, need it, and are refused; so is a state carried over steps, which has to be cut first. Gradients
are the same bit for bit: where the graph is used again otherwise, torch raises, and the attempt is rolled back.

There is no live form: an argument of a call is a matter of the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import libcst as cst

from oomdoctor.fixes._unfit import Unfit, proposing, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting, words
from oomdoctor.program.arguments import without_keyword
from oomdoctor.program.dataflow import ancestors
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.gradients import Graphs
from oomdoctor.program.ground import ground
from oomdoctor.program.names import blocks_of, own_nodes

_NOTHING: Final = "no backward keeps its graph"
_CARRIED: Final = "a state carried over steps needs the graphs of the steps before: it has to be cut first"
_LOSS: Final = re.compile(r"[^\W\d]\w*")
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_DROPS: Final = "retain_graph"


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find each ``backward`` that keeps its graph: ``retain_graph`` where that can be dropped, else named why not."""
    calls = [
        (scope, node)
        for scope in ground(program).reach
        for node in own_nodes(scope.body)
        if isinstance(node, ast.Call) and words.last_name(node) == "backward" and _keeps(node)
    ]
    graphs = Graphs(program, {}) if calls else None
    return tuple(site(_kind(graphs, scope, call), scope, call) for scope, call in calls if graphs is not None)


def _keeps(call: ast.Call) -> bool:
    values = [one.value for one in call.keywords if one.arg in {"retain_graph", "create_graph"}] + call.args[1:2]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def _kind(graphs: Graphs, scope: Scope, call: ast.Call) -> str:
    """Return ``retain_graph`` where no further gradient is taken in the step of a call, else why it is kept."""
    keywords = {one.arg: one.value for one in call.keywords}
    if "create_graph" in keywords and ast.unparse(keywords["create_graph"]) != "False":
        return "create_graph"
    if "retain_graph" not in keywords:
        return "the argument is not given by name: it is not known what else uses the graph"
    path = ancestors(ast.Module(body=list(scope.body), type_ignores=[]), call)
    loops = [outer for outer, inner in pairwise(path) if isinstance(outer, _LOOPS) and inner in outer.body]
    for node in _later(path, loops[-1] if loops else path[0]):
        every = [node, *(part for one in graphs.called([node]) for part in one.body)]
        calls = (one for part in every for one in ast.walk(part) if isinstance(one, ast.Call))
        if any(words.last_name(one) in words.TAKES_GRADIENT | {"fit"} for one in calls):
            return "another gradient is taken after it in the same step"
    return _DROPS


def _later(path: Sequence[ast.AST], step: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of ``step`` that come after the last of ``path``."""
    for outer, inner in pairwise(path[path.index(step) :]):
        for block in blocks_of(outer):
            if inner in block:
                yield from block[block.index(inner) + 1 :]


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where a backward keeps its graph and graphs take memory."""
    code, census = evidence.code, evidence.census
    place = code.first("drop_retain_graph")
    if place is None:
        raise Unfit(_NOTHING)
    if code.first("detach_state") is not None:
        raise Unfit(_CARRIED)
    loss = _LOSS.match(place.text)
    held = sum(one.bytes for one in census.holdings if loss and one.path.startswith(f"{loss[0]} → graph"))
    kept = held + census.bytes_of(Role.GRAPH_KEPT_ALIVE)
    basis = f"measured: the census found {format_size(kept)} of graphs that earlier results keep"
    if not kept:
        kept = census.bytes_of(Role.ACTIVATION) // 2
        basis = f"estimate: half of the {format_size(2 * kept)} of activations, as two steps share the device"
    if not kept:
        raise Unfit("the census found no graphs or activations that a backward keeps")
    yield Proposal(effect=Effect.EXACT, saves=kept, basis=basis)


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Take the argument out of every call that does not need it."""
    sites = evidence.code.sites.get("drop_retain_graph", ())
    dropped = [one for one in sites if one.kind == _DROPS]
    if not sites:
        raise Unfit(_NOTHING)
    if evidence.code.first("detach_state") is not None:
        raise Unfit(_CARRIED)
    if not dropped:
        why = "the gradients are differentiated themselves (create_graph)"
        raise Unfit(f"line {sites[-1].line}: {why if sites[-1].kind == 'create_graph' else sites[-1].kind}")

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New]:
        lines = {(one.line, one.end_line) for one in here}
        calls = [node for node, at in parsed.positions.items() if (at.start.line, at.end.line) in lines]
        return {
            node: without_keyword(node, _DROPS)
            for node in calls
            if isinstance(node, cst.Call) and _gives_argument(node)
        }

    return rewriting.at_sites(cells, dropped, change)


def _gives_argument(call: cst.Call) -> bool:
    return any(arg.keyword is not None and arg.keyword.value == "retain_graph" for arg in call.args)


FIX: Final = Fix(
    id="drop_retain_graph",
    title="Let backward free its graph",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    patch=patch,
    detect=detect,
)
