"""Gradient accumulation within one batch: the same effective batch, the activations of a part of it at a time.

In the source, each step, from the first use of the batch to its ``backward``, becomes an inner loop over parts: in a
loop, a function, a method, a closure or a branch; everything else (zeroing, clipping, the optimizer,
accounting) stays once per batch. Random numbers are drawn as for the whole batch, and a state that is carried is cut
and joined again (see ``batch_parts``). A loss that is a mean is weighted by the part's share of the batch, or of the
entries that count. Reading guesses which, and where the batch is; that the gradients are those of the whole batch up to
rounding, and that the model treats its samples one by one, is shown by the trial of both programs, which takes another
way where the guess was wrong.
"""

from __future__ import annotations

import ast
import re
from functools import partial
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._activations import why_not_short, why_not_training
from oomdoctor.fixes._chunks import model_facts, why_not
from oomdoctor.fixes._micro_names import facts_of, known_names
from oomdoctor.fixes._micro_writer import Writer, block_at
from oomdoctor.fixes._samples import CannotSplit
from oomdoctor.fixes._step import plan
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import definitions, import_lines, rewriting
from oomdoctor.program.book import Book
from oomdoctor.program.definitions import site
from oomdoctor.program.regions import Region, regions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cell, Cells
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: sums over the batch are taken in another order."""

_PARTS: Final = (2, 4, 8, 16, 32)

_HELPERS: Final = {"batch_parts": "parts_of", "join_parts": "joined_parts"}

_WEIGHTS: Final = tuple(Dose.of(weigh=over) for over in ("counted", "sum", "rows"))
_LATE: Final = Dose.of(late=True)
_WAYS: Final = (
    *(_LATE, Dose.of(draws=True), *_WEIGHTS, *(_LATE | one for one in _WEIGHTS)),
    *(Dose.of(dim=dim) for dim in (0, 1)),
)
"""What is made of the batch before the model is called may be of all of it; a forward may draw random numbers that no
layer and no line of the loop shows; a part's loss may be a mean over the entries of its target that are not -100, or a
sum, or a mean over its rows; and the batch may be in another dimension."""

_IN_PARTS: Final = re.compile(r"\.(chunk|split|tensor_split)\(|\b(batch_parts|parts_of)\(")

_FEW: Final = 3
"""Tensors that are cut by ``chunk``, more of which would not fit on a line."""

_OVERHEAD: Final = 0.02
"""Time lost per part to launching the same kernels again, as a share of a step. A round figure, not measured."""


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the steps that end in a backward pass in what the failing cell runs."""
    del objects
    return tuple(site("backward", one.scope, one.body[-1]) for one in regions(program))


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose 2 to 32 parts, no more than the batch has samples where that is known."""
    if (through := _trainer_terms.proposed("micro_batch", incident, evidence)) is not None:
        return through
    code = evidence.code
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops and not code.sites.get("micro_batch"):
        return Refused("no backward pass was found in what the failing cell runs")
    if (why := why_not_training(evidence)) is not None:
        return Refused(why)
    for loop in loops:
        if (why := why_not(code, loop)) is not None:
            return Refused(why)
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    activations = evidence.census.bytes_of(Role.ACTIVATION) + evidence.census.bytes_of(Role.BATCH)
    splittable = activations + (incident.requested or 0)
    if not splittable:
        return Refused("no activations were found that splitting the batch could save")
    sizes = [held.shape[0] for held in evidence.census.holdings if held.role is Role.BATCH and held.shape]
    doses = [parts for parts in _PARTS if parts <= max(sizes, default=_PARTS[-1])]
    if not doses:
        return Refused("the batch has one sample: there is nothing to split")
    return tuple(
        Proposal(
            dose=Dose.of(parts=parts),
            effect=Effect.EQUIVALENT,
            saves=splittable * (parts - 1) // parts,
            slowdown=1 + _OVERHEAD * parts,
            basis=f"analytic estimate: 1/{parts} of {format_size(splittable)} of activations, batch and request",
        )
        for parts in doses
    )


def _draws(code: CodeFacts, loop: TrainingLoop) -> bool:
    """Tell whether the loop may draw random numbers, as a model that is not known may."""
    models = [model_facts(code, loop, text) for text in loop.models]
    return bool(loop.draws) or any(model is None or (model.training and model.dropout) for model in models)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with an inner loop over ``dose["parts"]`` parts of each batch."""
    if "through" in dict(dose.values):
        through = _trainer_source.patched("micro_batch", cells, evidence, dose)
        return through if through is not None else Refused("no trainer was found in what the failing cell runs")
    found = regions(definitions.read(cells))
    if not found:
        return Refused("no backward pass was found in what the failing cell runs")
    try:
        numbers = dict.fromkeys(region.scope.cell for region in found)
        return rewriting.join(
            cells,
            [_cell(cells, cells.get(n), evidence.code, [r for r in found if r.scope.cell == n], dose) for n in numbers],
        )
    except CannotSplit as why:
        return Refused(str(why))


def _cell(cells: Cells, cell: Cell, code: CodeFacts, found: Sequence[Region], dose: Dose) -> Edit | Refused:
    """Return the edit of a cell whose ``found`` regions are taken apart."""
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    beside = cells.beside(cell)
    names = {name: import_lines.name_for("oomdoctor", name, beside, other) for name, other in _HELPERS.items()}
    changes: dict[cst.CSTNode, rewriting.New] = {}
    used = dict[str, None]()
    blocks: dict[int, list[Region]] = {}
    for region in found:
        blocks.setdefault(id(region.block), []).append(region)
    for several in blocks.values():
        block = block_at(parsed, several[0])
        if block is None:
            return Refused("the step is not where it was found before")
        writers = [
            (one, _writer(cells, parsed, several[at:], code, dose, names, used)) for at, one in enumerate(several)
        ]
        changes[block] = partial(_rewritten, writers)
    module = import_lines.insert_at_top(
        parsed,
        rewriting.exchange(parsed.module, changes),
        [import_lines.source_of("oomdoctor", name, names[name]) for name in used],
    )
    return rewriting.edit(cells, cell, parsed, module)


def _writer(
    cells: Cells,
    parsed: rewriting.ParsedCell,
    found: Sequence[Region],
    code: CodeFacts,
    dose: Dose,
    names: Mapping[str, str],
    used: dict[str, None],
) -> Writer:
    """Return what writes the first of ``found``; the others stand behind it in its block."""
    given, program, book = dict(dose.values), definitions.read(cells), Book.read(cells)
    region = found[0]
    if region.loop is not None and _goes_through_parts(region.loop):
        raise CannotSplit("the batch is taken in parts already")
    facts = facts_of(program, code, region)
    if why := why_not(code, facts):
        raise CannotSplit(why)
    known = known_names(book, program, code, region, dose.number("dim") if "dim" in given else None)
    step = plan(region, known, str(given.get("weigh", "")), late=bool(given.get("late")), following=found[1:])
    cuts = step.kind != "tensors" or len(step.names) > _FEW or not step.is_plain
    cuts = cuts or bool(given.get("draws")) or _draws(code, facts)
    joins = bool(step.carried or (step.dim and step.gathered))
    used |= dict.fromkeys([*["batch_parts"] * cuts, *["join_parts"] * joins])
    by = names["batch_parts"] if cuts else ""
    return Writer(cells, parsed, region, step, dose.number("parts"), by, names["join_parts"])


def _goes_through_parts(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """Whether a loop goes through parts of a batch: it takes pieces of something and no optimizer steps in it."""
    steps = any(isinstance(node, ast.Attribute) and node.attr == "step" for node in ast.walk(loop))
    return not steps and _IN_PARTS.search(ast.unparse(getattr(loop, "iter", loop.body[0]))) is not None


def _rewritten(writers: Sequence[tuple[Region, Writer]], block: cst.CSTNode) -> cst.CSTNode:
    """Return a block with its regions taken apart."""
    lines, new, end = rewriting.lines_apart(block), list[cst.BaseStatement](), 0
    for region, writer in writers:
        new += [*lines[end : region.start], *writer.lines(lines[region.start : region.end])]
        end = region.end
    new += lines[end:]
    return rewriting.block(block, new) if isinstance(block, cst.BaseSuite) else block.with_changes(body=new)


FIX: Final = Fix(
    id="micro_batch",
    title="Take each batch in parts and accumulate their gradients",
    effect=Effect.EQUIVALENT,
    draws=True,
    ways=_WAYS,
    tolerance=TOLERANCE,
    cost="the same arithmetic in smaller pieces",
    propose=propose,
    apply=None,
    patch=patch,
    detect=detect,
)
