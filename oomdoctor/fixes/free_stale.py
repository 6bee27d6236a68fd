"""An old model and its optimizer let go of before a cell that is run again builds the new ones.

A name is bound when the new object is complete, so a second run of ``model = Net()`` needs room for two models. The
names are set to None right before the statement that binds the first of them, and reference cycles are collected. What
is let go of cannot be brought back, should the new cell fail: it is done only when the user asks for it, with the names
said beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import libcst as cst

from oomdoctor.fixes._construction_sites import changed, preceded
from oomdoctor.fixes._refusals import Unfit, listed, need, proposing, refusing, root_of, sites_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Session, Site
from oomdoctor.model.memory import LASTING
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import Kind, kind_of, plain_dict, registered, submodules
from oomdoctor.objects.known import Objects
from oomdoctor.objects.named import is_users
from oomdoctor.objects.paths import Root
from oomdoctor.objects.walk import Walk
from oomdoctor.program import rewriting
from oomdoctor.program.compiled import is_in_definition
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.names import FirstUse, first_assignments, first_uses, names_in, read_names

_HEAVY: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER})
_ROLES: Final = frozenset({*LASTING, Role.BUFFER})
_NOTHING: Final = "no old model or optimizer that could be let go of is bound while the failing cell builds a new one"


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find models, optimizers and schedulers that are still bound while the failing cell makes their successors.

    Those that it is about to bind anew are ``rebound``, optimizers and schedulers of theirs that it does not use are
    ``left``; models come first. There are none where another object of the namespace would keep the same thing alive.
    """
    namespace, line = objects.namespace, objects.line
    top = next((one for one in program.scopes if one.cell == program.failing and one.function is None), None)
    source = program.masked[program.failing].text
    if line is None or top is None or is_in_definition(source, line):
        return ()
    uses, read, bindings = first_uses(source), _read(program, source), first_assignments(source)
    heavy = {name: value for name, value in namespace.items() if is_users(name) and kind_of(type(value)) in _HEAVY}
    bound = {name: bindings[name] for name in heavy if uses.get(name) is FirstUse.BINDS and name in bindings}
    rebound = [name for name, node in bound.items() if (node.end_lineno or node.lineno) >= line]
    named = list(rebound)
    weights = {id(one) for name in rebound for one in _weights(heavy[name])}
    for kind in (Kind.OPTIMIZER, Kind.SCHEDULER):
        for name, value in heavy.items():
            own = {id(one) for one in _weights(value)} if kind_of(type(value)) is kind else set[int]()
            if own and own <= weights and name not in named:  # it steps parameters of the old models alone
                if name in read:
                    return ()  # the cell uses what keeps the old one alive
                named.append(name)
    if not weights or _is_held_elsewhere(weights, namespace, set(named)):
        return ()
    named.sort(key=lambda name: kind_of(type(heavy[name])) is not Kind.MODULE)
    first = min((bound[name] for name in rebound), key=lambda node: node.lineno)
    return tuple(site("rebound" if name in rebound else "left", top, bound.get(name, first), (name,)) for name in named)


def _read(program: Program, source: str) -> frozenset[str]:
    """Return the names that the failing cell reads, and those that the functions which it calls read."""
    functions = (scope.function for scope in program.running if scope.function is not None)
    inner = set[str]().union(*map(names_in, functions))
    bound_first = {name for name, use in first_uses(source).items() if use is FirstUse.BINDS}
    return frozenset((read_names(source) | inner) - bound_first)


def _weights(value: Any) -> list[Any]:
    """Return the parameters of a module, or those that an optimizer steps."""
    if kind_of(type(value)) is Kind.MODULE:
        every = [one for _, part in submodules(value) for _, one in registered(part, "_parameters")]
        return [one for one in every if kind_of(type(one)) is Kind.TENSOR]
    held = plain_dict(value) or {}
    groups = held.get("param_groups")
    if type(groups) is list:
        return [one for group in groups if type(group) is dict for one in group.get("params") or ()]
    inner = held.get("optimizer")
    return _weights(inner) if kind_of(type(inner)) is Kind.OPTIMIZER else []


def _is_held_elsewhere(weights: set[int], namespace: Mapping[str, Any], names: set[str]) -> bool:
    others = [(Root(name), value) for name, value in namespace.items() if is_users(name) and name not in names]
    walk = Walk()
    tensors = [tensor for found in (*walk.run(others), *walk.resume()) for tensor in found.tensors]
    owners = [value for _, value in (*walk.modules, *walk.optimizers)]
    return any(id(one) in weights for one in (*tensors, *(one for owner in owners for one in _weights(owner))))


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it, by name, where the census found what the old objects hold."""
    sites = sites_of(evidence, "free_stale", _NOTHING)
    names = [one.names[0] for one in sites]
    held = sum(one.bytes for one in evidence.census.holdings if one.role in _ROLES and root_of(one.path) in names)
    need(held, f"the census found no parameters or optimizer state on the device that {listed(names)} holds")
    unbound = [one.names[0] for one in sites if one.kind == "left"]
    caveat = f"deletes {listed(names)} as they stand, for good: save what you still need of them"
    if unbound:
        caveat += f"; the cell does not make {listed(unbound)} anew, do so afterwards"
    yield Proposal(
        dose=Dose.of(names=", ".join(names)),
        effect=Effect.CHANGES_RESULT,
        saves=held,
        basis=f"measured: the census found {format_size(held)} that the old {listed(names)} hold",
        caveat=caveat,
    )


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Set the names to None right before the first of them is bound anew."""
    sites = sites_of(evidence, "free_stale", _NOTHING)
    cell = cells.failing
    parsed = need(rewriting.read(cell.source))
    names = [one.names[0] for one in sites]
    first = rewriting.statement_at(parsed, min(one.line for one in sites if one.kind == "rebound"))
    if not isinstance(first, cst.SimpleStatementLine):
        raise Unfit(f"no statement of {cell} that binds {listed(names)} was found")
    need(not any(one.text.endswith("= None") for one in sites), f"{listed(names)} are set to None already")
    text = f"{' = '.join(names)} = None  # let go of the old before the new is built\ngc.collect()"
    return changed(cells, cell, {first: preceded(first, text, parsed)}, ["import gc"])


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Have oomdoctor itself let go, for good, of the named objects, which it would keep alive while the cell runs."""
    names = set(str(dose["names"]).split(", "))
    # A snapshot cannot refer weakly to this mapping, so that the moments would outlive their optimizer.
    for state in [optimizer.state for path, optimizer in session.optimizers if path in names]:
        state.clear()
    yield


FIX: Final = Fix(
    id="free_stale",
    title="Free the old model and optimizer before building new ones",
    effect=Effect.EXACT,
    frees=LASTING,
    cost="the old ones cannot be brought back",
    propose=propose,
    patch=patch,
    detect=detect,
    guard=guard,
    asks=True,
    is_tried=False,
)
