"""``retain_graph=True`` taken away where nothing uses the graph again.

Without it, ``backward`` frees each saved tensor as soon as it has used it. With it, the activations of a step live on
until its loss is bound anew, after the next forward: two steps share the device. It is taken out of each call of the
cell of which ``_frees_graphs`` finds that the graph is not used again. Two losses that share a forward, a graph made
outside of the loop, and gradients of gradients need it, and are refused; so is a state carried over steps, which has to
be cut first. Gradients are the same bit for bit; should a use have stayed unseen, torch raises instead.

There is no live form: an argument of a call is a matter of the source.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _frees_graphs, _frees_source
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_NOTHING: Final = "no backward keeps its graph"
_LOSS: Final = re.compile(r"[^\W\d]\w*")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a backward keeps its graph and graphs take memory."""
    code, census = evidence.code, evidence.census
    place = _frees_source.place_of(code.retain_graph) if code.retain_graph is not None else None
    if place is None:
        return Refused(_NOTHING)
    if code.carries_state is not None:
        return Refused("a state carried over steps needs the graphs of the steps before: it has to be cut first")
    loss = _LOSS.match(place[2])
    held = sum(one.bytes for one in census.holdings if loss and one.path.startswith(f"{loss[0]} → graph"))
    kept = held + census.bytes_of(Role.GRAPH_KEPT_ALIVE)
    basis = f"measured: the census found {format_size(kept)} of graphs that earlier results keep"
    if not kept:
        kept = census.bytes_of(Role.ACTIVATION) // 2
        basis = f"estimate: half of the {format_size(2 * kept)} of activations, as two steps share the device"
    if not kept:
        return Refused("the census found no graphs or activations that a backward keeps")
    return (Proposal(dose=Dose(), effect=Effect.EXACT, saves=kept, slowdown=1.0, basis=basis),)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Take the argument out of every call of the cell that does not need it."""
    code = evidence.code
    place = _frees_source.place_of(code.retain_graph) if code.retain_graph is not None else None
    if place is None:
        return Refused(_NOTHING)
    if code.carries_state is not None:
        return Refused("a state carried over steps needs the graphs of the steps before: it has to be cut first")
    cell = cells.get(place[0])
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    models = [model.path.partition(".")[0] for model in code.models]
    others = [loss.path.partition(".")[0] for loss in code.losses] + [
        path.partition(".")[0] for path, _ in code.optimizers
    ]
    graphs = _frees_graphs.Graphs(cells, [*models, *others], models)
    module, why = parsed.module, "the argument is not given by name: it is not known what else uses the graph"
    for call in graphs.retained(cell.number):
        why = graphs.why_used(cell.number, call) or ""
        if why:
            why = f"line {call.lineno}: {why}"
            continue
        old = _at(parsed, call)
        if old is None:
            continue
        module = rewriting.replace(module, old, _without(old))
    if module is parsed.module:
        return Refused(why)
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module)])


def _at(parsed: rewriting.ParsedCell, call: ast.Call) -> cst.Call | None:
    for node, where in parsed.positions.items():
        start = (where.start.line, where.start.column)
        end = (where.end.line, where.end.column)
        if isinstance(node, cst.Call) and (start, end) == (
            (call.lineno, call.col_offset),
            (call.end_lineno, call.end_col_offset),
        ):
            return node
    return None


def _without(call: cst.Call) -> cst.Call:
    args = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != "retain_graph"]
    if not args:
        return call.with_changes(args=[], whitespace_before_args=cst.SimpleWhitespace(""))
    args[-1] = args[-1].with_changes(comma=call.args[-1].comma)
    return call.with_changes(args=args)


FIX: Final = Fix(
    id="drop_retain_graph",
    title="Let backward free its graph",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=None,
    patch=patch,
)
