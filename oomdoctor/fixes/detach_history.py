"""Keeps the numbers of a history without the autograd graphs behind them.

A list of losses, or a sum of them, keeps every activation of every step alive if its tensors carry their graph. What
evidence names as such a place is detached where it is kept. ``detach`` and not ``item``: the values and their types
stay bit for bit what they were, so that later code that stacks or averages them finds the same. They are proposed only
where the census saw them hold graphs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program.arguments import called_on, kept_otherwise, kept_value
from oomdoctor.program.definitions import site
from oomdoctor.program.kept_tensors import history_appends
from oomdoctor.program.rewriting import text_of

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

_NO_PLACE: Final = (
    "nothing that the failing cell runs keeps tensors with their autograd graph where it is certain that no gradient "
    "is taken through them"
)


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what a loop keeps with its graph; the names are the history, and the statement that leaves the graph out."""
    found = history_appends(program, objects.kinds)
    return tuple(site("history", scope, node, (name, _without_graph(node))) for scope, node, name in found)


def _without_graph(node: ast.stmt) -> str:
    """Return the text of a statement that keeps a tensor, with the graph left behind."""
    line = cst.parse_module(ast.unparse(node)).body[0]
    kept = kept_value(line)
    return text_of(line if kept is None else line.deep_replace(kept, called_on(kept, ".detach()"))).strip()


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
    return kept_otherwise(cells, sites, lambda _: ".detach()", "keeps more than one value: detach each of its tensors")


FIX: Final = Fix(
    id="detach_history",
    title="Keep the values of a history without their autograd graphs",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=None,
    patch=patch,
    detect=detect,
)
