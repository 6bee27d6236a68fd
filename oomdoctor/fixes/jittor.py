"""What Jittor keeps for itself: graphs that nobody has asked to be computed, blocks of its pools, 32 bits.

``jittor_sync``: ``optimizer.backward`` asks for no value, so that the graphs of all parts of an accumulation live on
until ``step``. ``jt.sync_all()`` after each part computes its gradients, and lets go of its graph; operators that would
have been fused may round otherwise. ``jittor_release``: ``jt.gc()`` gives back what its allocators keep unused.
``jittor_amp``: operators prefer 16 bits from a level of ``auto_mixed_precision_level`` on.

Sources: optim.py, src/executor.cc, src/mem/allocator/sfrl_allocator.cc and src/var.cc of Jittor 1.3.11.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from typing import Final

import libcst as cst

from oomdoctor.fixes._construction_sites import changed
from oomdoctor.fixes._preconditions import check_training
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing, sites_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Site
from oomdoctor.model.memory import JittorMemory
from oomdoctor.model.sizes import MIB, format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.definitions import Program, imports_library, site, statements
from oomdoctor.program.names import own_nodes
from oomdoctor.program.torch_functions import last_name

_SYNCS: Final = frozenset({"sync_all", "sync"})
_NO_PLACE: Final = "no gradients are accumulated over several backward passes without `jt.sync_all()`"
_LEVEL: Final = "auto_mixed_precision_level"
_PREFERS_16_BITS: Final = 5
_LEAST: Final = 16 * MIB
"""Of a pool: less is not worth a change."""


def _detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find each backward pass of an accumulation after which nothing is computed."""
    if not imports_library(program, "jittor"):
        return ()
    return tuple(
        site("accumulation", scope, statement.node)
        for scope in program.running
        for statement in statements(scope.body)
        if statement.loops and _is_backward(statement.node) and not _computes(statement.loops[-1].body)
    )


def _is_backward(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call) == "backward" and bool(call.args)


def _computes(body: list[ast.stmt]) -> bool:
    """Whether each turn of a loop steps an optimizer, or asks for values."""
    lines = {last_name(one.value) for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)}
    called = {last_name(one) for one in own_nodes(body) if isinstance(one, ast.Call)}
    return "step" in lines or bool(called & _SYNCS)


def _memory(evidence: Evidence) -> JittorMemory:
    return need(evidence.jittor, "the program does not use Jittor")


@proposing
def _propose_sync(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    memory = _memory(evidence)
    sites_of(evidence, "jittor_sync", _NO_PLACE)
    need(memory.operators, "no operator of Jittor's graph was alive")
    kept = memory.alive - memory.held
    basis = f"estimate: {kept} of {memory.alive} variables that are alive belong to graphs"
    yield Proposal(effect=Effect.EQUIVALENT, saves=memory.graph_bytes, basis=basis)


@refusing
def _patch_sync(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    def change(parsed: rewriting.ParsedCell, sites: list[Site]) -> cst.Module:
        name, imports = need(import_lines.library_name(cells.beside(cells.get(sites[0].cell)), "jittor"))
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for one in sites:
            node = rewriting.statement_at(parsed, one.line)
            if not isinstance(node, cst.SimpleStatementLine) or len(node.body) > 1:
                raise Unfit(f"{one.where} has several statements")
            changes[node] = [node, *rewriting.statements(f"{name}.sync_all()\n", parsed)]
        return import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)

    return rewriting.at_sites(cells, sites_of(evidence, "jittor_sync", _NO_PLACE), change)


@proposing
def _propose_release(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    kept = _memory(evidence).pool_unused
    if kept is None or kept < _LEAST:
        raise Unfit("Jittor's pools keep nothing that could be given back")
    basis = f"measured: Jittor's pools keep {format_size(kept)} that is not in use"
    yield Proposal(effect=Effect.EXACT, saves=kept, basis=basis)


@proposing
def _propose_amp(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    used = _memory(evidence).pool_used
    if not used or used < _LEAST:
        raise Unfit("Jittor's pools hold too little for 16 bits to matter")
    check_training(evidence)
    yield Proposal(
        effect=Effect.CHANGES_RESULT,
        saves=used // 4,
        basis=f"a guess: a quarter of the {format_size(used)} that Jittor's pools hold; parameters stay in 32 bits",
        caveat="results are rounded to 16 bits; the level holds for the whole program until it is set to 0",
    )


@refusing
def _patch_top(line: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Put a line before all else of the failing cell but its imports."""
    name, imports = need(import_lines.library_name(cells, "jittor"))
    text = line.format(name)
    need(text not in cells.failing.source, f"the failing cell says `{text}` already")
    return changed(cells, cells.failing, {}, [*imports, text])


FIXES: Final = (
    Fix(
        id="jittor_sync",
        title="Compute Jittor's gradients after each part of an accumulation (jt.sync_all)",
        effect=Effect.EQUIVALENT,
        tolerance=1e-6,
        cost="operators of several parts are not fused",
        propose=_propose_sync,
        patch=_patch_sync,
        detect=_detect,
        is_tried=False,
    ),
    Fix(
        id="jittor_release",
        title="Give back what Jittor's pools keep unused (jt.gc)",
        effect=Effect.EXACT,
        cost="what is needed again has to be asked of the system",
        propose=_propose_release,
        patch=partial(_patch_top, "{}.gc()"),
        is_tried=False,
    ),
    Fix(
        id="jittor_amp",
        title="Have Jittor prefer 16 bits",
        effect=Effect.CHANGES_RESULT,
        cost="nothing on a GPU with 16-bit units; slower on most processors",
        propose=_propose_amp,
        patch=partial(_patch_top, f"{{}}.flags.{_LEVEL} = {_PREFERS_16_BITS}"),
        is_tried=False,
    ),
)
