"""Keeps the numbers of a history without the autograd graphs behind them.

A list of losses, or a sum of them, keeps every activation of every step alive if its tensors carry their graph. What
evidence names as such a place is detached where it is kept. ``detach`` and not ``item``: the values and their types
stay bit for bit what they were, so that later code that stacks or averages them finds the same. Only lists and sums of
which the cells show that no gradient is taken through them are among those places, and they are proposed only where the
census saw them hold graphs.

On live objects, the tensors that the named lists and sums hold already are detached where they stand. That frees memory
and is not taken back on exit; what a running cell goes on to append is changed by the patch alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import called_on
from oomdoctor.program.definitions import site
from oomdoctor.program.kept_tensors import history_appends

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

__all__ = ["FIX", "apply", "detect", "patch", "propose"]

_NO_PLACE: Final = (
    "nothing that the failing cell runs keeps tensors with their autograd graph where it is certain that no gradient "
    "is taken through them"
)

_SEVERAL: Final = (cst.Tuple, cst.List, cst.Dict, cst.DictComp, cst.ListComp, cst.Set)


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what a loop keeps with its graph; the names are the history, and the statement that leaves the graph out."""
    found = history_appends(program, objects.kinds)
    return tuple(site("history", scope, node, _without_graphs(node)) for scope, node in found)


def _without_graphs(node: ast.stmt) -> tuple[str, str]:
    """Return the name of what a statement adds a tensor to, and the statement that leaves the graph behind."""
    copy = ast.parse(ast.unparse(node)).body[0]  # the trees of the cells are shared
    match copy:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=kept_in), args=[kept]) as call):
            call.args = [_cut(kept)]
        case ast.AugAssign(target=kept_in, value=kept):
            copy.value = _cut(kept)
        case ast.Assign(targets=[kept_in], value=ast.BinOp(right=kept) as added):
            added.right = _cut(kept)
        case _:
            raise AssertionError(f"no statement that keeps a tensor: {ast.unparse(node)}")
    return ast.unparse(kept_in), ast.unparse(copy)


def _cut(value: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Attribute(value=value, attr="detach", ctx=ast.Load()), args=[], keywords=[])


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one dose: every place at once."""
    sites = evidence.code.sites.get("detach_history", ())
    if not sites:
        return Refused(_NO_PLACE)
    names = dict.fromkeys(one.names[0] for one in sites)
    kept = sum(holding.bytes for holding in evidence.census.holdings if any(_keeps(holding, name) for name in names))
    if not kept:
        return Refused(f"the census found no graph that {_listed(names)} keeps alive")
    if (other := _kept_elsewhere(evidence, names)) is not None:
        return Refused(f"{other} keeps the same graphs alive, whether {_listed(names)} does or not")
    return (
        Proposal(
            dose=Dose.of(names=", ".join(names)),
            effect=Effect.EXACT,
            saves=kept,
            slowdown=1.0,
            basis=f"the census found {format_size(kept)} of graphs that {_listed(names)} keeps alive",
            caveat=f"what {_listed(names)} keeps has no graph any more: a later `backward` through it raises an error",
        ),
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


def _listed(names: Iterable[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


def _keeps(holding: Holding, name: str) -> bool:
    """Whether the census found graphs that hang on ``name``, a global or a local one."""
    path = holding.path.removeprefix("local `")
    if not path.startswith(name) or path[len(name) :][:1] not in {"", "[", "`", " "}:
        return False
    # What the failing cell or its frames bound themselves counts as of the step at hand, also a sum over many steps.
    return holding.role is Role.GRAPH_KEPT_ALIVE or (holding.role is Role.ACTIVATION and path.endswith("→ graph"))


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the places with what they keep detached."""
    sites = evidence.code.sites.get("detach_history", ())
    if not sites:
        return Refused(_NO_PLACE)

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New] | Refused:
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for one in here:
            statement = rewriting.statement_at(parsed, one.line)
            kept = _kept(statement) if isinstance(statement, cst.SimpleStatementLine) else None
            if kept is None or isinstance(kept, _SEVERAL):
                where = f"line {one.line} of {cells.get(one.cell)}"
                return Refused(f"{where} keeps more than one value: detach each of its tensors there")
            changes[kept] = called_on(kept, ".detach()")
        return changes

    return rewriting.at_sites(cells, sites, change)


def _kept(line: cst.SimpleStatementLine) -> cst.BaseExpression | None:
    """Return what the statement puts into a container or adds to a sum."""
    if len(line.body) != 1:
        return None
    (node,) = line.body
    match node:
        case cst.Expr(value=cst.Call(args=[cst.Arg(value=value)])):
            return value
        case cst.AugAssign(operator=cst.AddAssign(), value=value):
            return value
        case cst.Assign(value=cst.BinaryOperation(operator=cst.Add(), right=value)):
            return value
    return None


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Detach the tensors that the named lists and sums hold. It frees memory, and is not undone on exit."""
    for name in str(dose["names"]).split(", "):
        if name in session.namespace:
            session.namespace[name] = _without_graph(session.namespace[name])
    yield


def _without_graph(value: Any) -> Any:
    """Return ``value`` without graphs: a tensor detached, a list itself with its items exchanged."""
    if isinstance(value, MutableSequence):
        for index, item in enumerate(value):
            if (new := _item_without_graph(item)) is not item:
                value[index] = new
        return value
    return _item_without_graph(value)


def _item_without_graph(item: Any) -> Any:
    """Return a tensor, or a tuple of them, without graphs. A list or dict may have other holders: it is left alone."""
    import torch

    if isinstance(item, torch.Tensor):
        return item.detach() if item.grad_fn is not None else item
    if type(item) is tuple:
        items = tuple(map(_item_without_graph, item))
        return items if any(new is not old for new, old in zip(items, item, strict=True)) else item
    return item


FIX: Final = Fix(
    id="detach_history",
    title="Keep the values of a history without their autograd graphs",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=apply,
    patch=patch,
    detect=detect,
)
