"""Gradient accumulation within one batch: the same effective batch, the activations of a part of it at a time.

In the source, each step, from the first use of the batch to its ``backward``, becomes an inner loop over parts,
wherever it stands; everything else (zeroing, clipping, the optimizer, accounting) stays once per batch. A state that is
carried is cut and joined again (see ``batch_parts``). What DDP wraps exchanges gradients once, with the last part. A
loss that is a mean is weighted by the part's share of the batch, or of the entries that count. Reading guesses which;
the trial of both programs shows whether it is right, and takes another way where it was not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import libcst as cst

from oomdoctor.fixes import _construction_sites, _trainers
from oomdoctor.fixes._micro_plan import Split, plan
from oomdoctor.fixes._micro_values import LossForm, called, loss_made_by
from oomdoctor.fixes._micro_writer import Writer, block_at
from oomdoctor.fixes._preconditions import check_short, check_training, model_facts, passing, why_no_parts
from oomdoctor.fixes._refusals import OVERHEAD, PARTS, Unfit, check, fitting, in_parts_of, need, proposing, refusing
from oomdoctor.fixes.ddp_memory import DDP
from oomdoctor.model import Cell, Cells, Dose, Edit, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Site
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.objects.known import Objects
from oomdoctor.program import definitions, import_lines, rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.definitions import Program, Scope, imports_library, site
from oomdoctor.program.literals import Book
from oomdoctor.program.magics import Function
from oomdoctor.program.names import all_imports_in, bound_by, own_nodes
from oomdoctor.program.regions import Region, regions
from oomdoctor.program.training_loops import batch_of, called_like_a_model, is_given_loss

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: sums over the batch are taken in another order."""

_HELPERS: Final = {"batch_parts": "parts_of", "join_parts": "joined_parts"}

_WEIGHTS: Final = tuple(Dose.of(weigh=over) for over in ("counted", "sum", "rows"))
_LATE: Final = Dose.of(late=True)
_WAYS: Final = (
    *(_LATE, Dose.of(draws=True), *_WEIGHTS, *(_LATE | one for one in _WEIGHTS)),
    *(Dose.of(dim=0), Dose.of(dim=1), _LATE | Dose.of(dim=1)),
)
"""What is made of the batch before the model is called may be of all of it; a forward may draw random numbers that no
layer and no line of the loop shows; a part's loss may be a mean over the entries of its target that are not -100, or a
sum, or a mean over its rows; and the batch may be in another dimension."""

_IN_PARTS: Final = re.compile(r"\.(chunk|split|tensor_split)\(|\b(batch_parts|parts_of)\(")

_OF_DDP: Final = ("._has_rebuilt_buckets",)
"""What DDP notes with its second forward, which the second part is. Source: ``_pre_forward`` of torch 2.4 to 2.13."""

_FEW: Final = 3
"""Tensors that are cut by ``chunk``, more of which would not fit on a line."""


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the steps that end in a backward pass in what the failing cell runs."""
    found = tuple(site("backward", one.scope, one.body[-1]) for one in regions(program))
    return found or tuple(site("step", scope, node) for scope, node in _steps(program))


def _steps(program: Program) -> Iterator[tuple[Scope, ast.Expr]]:
    """Yield the statements by which an optimizer of Jittor's takes the gradient of a loss and steps."""
    for scope in program.running if imports_library(program, "jittor") else ():
        for node in own_nodes(scope.body):
            match node:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="step"), args=[_], keywords=[])):
                    if is_given_loss(ast.unparse(of)):
                        yield scope, node


def _taken_apart(cells: Cells) -> Cells:
    """Return the cells with ``optimizer.step(loss)`` of Jittor as ``backward`` and then ``step``."""
    texts: dict[int, list[str]] = {}
    for scope, node in _steps(definitions.read(cells)):
        lines = texts.setdefault(scope.cell, cells.get(scope.cell).source.split("\n"))
        text, indent = ast.unparse(node), " " * node.col_offset
        need(lines[node.lineno - 1].strip() == text, f"line {node.lineno} has more than `{text}`")
        step = text[: text.index(".step(")] + ".step()"
        lines[node.lineno - 1] = f"{indent}{text.replace('.step(', '.backward(', 1)}\n{indent}{step}"
    return cells.changed({number: "\n".join(lines) for number, lines in texts.items()})


@_trainers.first("micro_batch")
@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose 2 to 32 parts, no more than the batch has samples where that is known."""
    code = evidence.code
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops and not code.sites.get("micro_batch"):
        raise Unfit("no backward pass was found in what the failing cell runs")
    check_training(evidence)
    for loop in loops:
        check(why_no_parts(code, loop))
    check_short(incident, evidence)
    splittable = passing(incident, evidence) + (evidence.jittor.graph_bytes if evidence.jittor else 0)
    need(splittable, "no activations were found that splitting the batch could save")
    counts = fitting(PARTS, evidence)
    yield from in_parts_of(counts, "parts", splittable, "activations, batch and request", each=OVERHEAD)


def _draws(code: CodeFacts, loop: TrainingLoop) -> bool:
    """Tell whether the loop may draw random numbers, as a model that is not known may."""
    models = [model_facts(code, loop, text) for text in loop.models]
    return bool(loop.draws) or any(model is None or (model.training and model.dropout) for model in models)


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with an inner loop over ``dose["parts"]`` parts of each batch."""
    if "through" in dict(dose.values):
        through = _trainers.patched("micro_batch", cells, evidence, dose)
        return need(through, "no trainer was found in what the failing cell runs")
    if (apart := _taken_apart(cells)) != cells:
        written = need(patch(apart, evidence, dose))
        edits = (replace(one, before=cells.get(one.cell).source) for one in written.edits)
        return rewriting.join(cells, edits)
    found = need(regions(definitions.read(cells)), "no backward pass was found in what the failing cell runs")
    here: dict[int, list[Region]] = {}
    for region in found:
        here.setdefault(region.scope.cell, []).append(region)
    return rewriting.join(
        cells, [_cell(cells, cells.get(number), evidence.code, several, dose) for number, several in here.items()]
    )


def _cell(cells: Cells, cell: Cell, code: CodeFacts, found: Sequence[Region], dose: Dose) -> Edit | Refused:
    """Return the edit of a cell whose ``found`` regions are taken apart."""
    parsed = need(rewriting.read(cell.source))
    beside = cells.beside(cell)
    names = {name: import_lines.name_for("oomdoctor", name, beside, other) for name, other in _HELPERS.items()}
    changes: dict[cst.CSTNode, rewriting.New] = {}
    used = dict[str, None]()
    blocks: dict[int, list[Region]] = {}
    for region in found:
        blocks.setdefault(id(region.block), []).append(region)
    for several in blocks.values():
        each = ((one, _writer(cells, parsed, several[at:], code, dose, names, used)) for at, one in enumerate(several))
        changes[block_at(parsed, several[0])] = partial(_rewritten, list(each))
    imports = [import_lines.source_of("oomdoctor", name, names[name]) for name in used]
    module = import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)
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
    if (loop := region.loop) is not None:
        steps = any(isinstance(node, ast.Attribute) and node.attr == "step" for node in ast.walk(loop))
        if not steps and _IN_PARTS.search(ast.unparse(getattr(loop, "iter", loop.body[0]))):
            raise Unfit("the batch is taken in parts already")
    facts = facts_of(program, code, region)
    check(why_no_parts(code, facts))
    known = known_names(book, program, code, region, dose.number("dim") if "dim" in given else None)
    step = plan(region, known, str(given.get("weigh", "")), late=bool(given.get("late")), following=found[1:])
    is_more = step.kind != "tensors" or len(step.names) > _FEW or not step.is_plain
    ddp = _replica(cells, region, [text for text, kind in known.models.items() if kind == DDP])
    cuts, ending = is_more or bool(given.get("draws") or ddp) or _draws(code, facts), ""
    if import_lines.framework_of(cells) == "jittor":
        need(not is_more, "the batch is more than a few variables of Jittor's")
        cuts, ending = False, f"{need(import_lines.library_name(cells, 'jittor'))[0]}.sync_all()"
    joins = bool(step.carried or (step.dim and step.gathered))
    used |= dict.fromkeys([*["batch_parts"] * cuts, *["join_parts"] * joins])
    by = names["batch_parts"] if cuts else ""
    return Writer(cells, parsed, region, step, dose.number("parts"), by, names["join_parts"], ddp=ddp, ending=ending)


def _replica(cells: Cells, region: Region, live: Sequence[str]) -> str:
    """Return the one model that DDP wraps and the region calls: ``live``, or made in its function; empty for none."""
    outermost = next((node for node in region.path if isinstance(node, Function)), None)
    made = _construction_sites.find(cells, DDP) if outermost is not None else ()
    inside = [one for one in made if one.around is not None and one.around.name.value == getattr(outermost, "name", "")]
    found = {text for text in (*live, *(one.target for one in inside)) if text} & _called(region)
    return found.pop() if len(found) == 1 else ""


def _called(region: Region) -> set[str]:
    """Return what is called in a region."""
    nodes = (node for unit in region.body for node in ast.walk(unit))
    return {called(node.func) for node in nodes if isinstance(node, ast.Call)}


def _rewritten(writers: Sequence[tuple[Region, Writer]], block: cst.CSTNode) -> cst.CSTNode:
    lines, new, end = rewriting.lines_apart(block), list[cst.BaseStatement](), 0
    for region, writer in writers:
        new += [*lines[end : region.start], *writer.lines(lines[region.start : region.end])]
        end = region.end
    new += lines[end:]
    return rewriting.block(block, new) if isinstance(block, cst.BaseSuite) else block.with_changes(body=new)


def facts_of(program: Program, code: CodeFacts, region: Region) -> TrainingLoop:
    """Return the facts of the loop that a region stands in, or such facts of its own."""
    line, scope = region.block[region.start].lineno, region.scope
    for loop in code.loops:
        if loop.cell == scope.cell and loop.line <= line <= (loop.end_line or loop.line):
            return loop
    given = tuple(program.given(scope).items())
    return TrainingLoop(cell=scope.cell, line=line, function=scope.tail or None, in_failing_run=True, stands_for=given)


def known_names(book: Book, program: Program, code: CodeFacts, region: Region, dim: int | None = None) -> Split:
    """Collect what is known of the names in a region; ``dim`` is None where the dimension of the batch is guessed.

    A name that the region's function binds itself hides the object that the namespace has under it.
    """
    facts = facts_of(program, code, region)
    trees = [page.tree for page in book.pages]
    function, page = region.function, book.page(region.scope.cell)
    scope: ast.AST = function or page.tree
    local = bound(scope) | {part.arg for part in ast.walk(scope) if isinstance(part, ast.arg)} if function else set()
    local -= set(dict(facts.stands_for))
    texts = _called(region)
    known = {text: model_facts(code, facts, text) for text in (*facts.models, *texts) if text not in local}
    models = {text: known.get(text) for text in (*facts.models, *texts) if text in facts.models or known.get(text)}
    losses = {name: form for one in trees for name, form in _constructed(one).items() if "." in name}
    there = {name: form for name, form in _of_namespace(code, facts).items() if name not in local}
    losses |= there | _constructed(scope) if function else _constructed(scope) | there
    functions = {n.name: n for one in trees for n in one.body if isinstance(n, ast.FunctionDef) and n.name not in local}
    owned = {f"self.{one.tail}": one.function for one in program.scopes if one.owner}
    bodies = {one.name: one.function for one in program.scopes}
    owned |= {text: bodies.get(f"{facts.type_name}.forward") for text, facts in models.items() if facts is not None}
    methods = {text: node for text, node in owned.items() if isinstance(node, ast.FunctionDef)}
    named = {text: facts.type_name if facts else "" for text, facts in models.items() if text not in losses}

    def makes_graph(node: ast.AST, depth: int = 2) -> bool:
        roots = {text.partition(".")[0] for text in named if not text.startswith("self.")} - {"self"}
        if roots & reads(node) and not roots & bound(node):
            return True
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            text = called(call.func)
            given = {text, text.rpartition(".")[0], *map(called, call.args)} - {""}
            if given & named.keys() or any(map(called_like_a_model, given - losses.keys() - functions.keys())):
                return True
            own = program.function(text.rpartition(".")[2]) if text and program.is_own(text) else None
            if depth and own is not None and any(makes_graph(one, depth - 1) for one in own.body):
                return True
        return False

    sequence_first = [one for one in known.values() if one is not None and one.sequence_first]
    dim = dim if dim is not None else int(any(one.training for one in sequence_first))
    plain = {*texts, *functions, *losses, *named, *(text.partition(".")[0] for text in named), "self"}
    plain.update(_named_otherwise(book, code, program, region))
    batch = tuple(name for name in batch_of(region) if name not in plain)
    return Split(
        batch=batch,
        models=named,
        losses=losses,
        makes_graph=makes_graph,
        masks_targets=any("-100" in page.cell.source for page in book.pages),
        functions=functions | methods,
        plain=plain,
        dim=dim,
    )


def _named_otherwise(book: Book, code: CodeFacts, program: Program, region: Region) -> Iterator[str]:
    """Yield names that hold no part of a batch: of imports, classes, constants, and of models and optimizers."""
    for page in book.pages:
        yield from (name for name, _ in all_imports_in(page.cell.source))
        yield from (node.name for node in ast.walk(page.tree) if isinstance(node, ast.ClassDef))
    if not region.function:
        yield from (model.path for model in code.models)
        yield from (path for path, _ in code.optimizers)
    given = program.given(region.scope)
    place = book.place(book.page(region.scope.cell), region.block[region.start])
    for name in {one for unit in region.body for one in reads(unit)} - {n for u in region.body for n in bound_by(u)}:
        text = given.get(name, name)
        values = [value for value, _ in book.values(text, place)] if text.isidentifier() else []
        with suppress(SyntaxError):
            values = values or [ast.parse(text, mode="eval").body]
        if values and all(isinstance(value, ast.Constant) for value in values):
            yield name


def _of_namespace(code: CodeFacts, loop: TrainingLoop) -> dict[str, LossForm]:
    known = {}
    for one in code.losses:
        ignored = None if one.ignore_index is None else str(one.ignore_index)
        known[one.path] = LossForm(name=one.type_name, reduction=one.reduction or "", ignored=ignored)
    return known | {name: known[path] for name, path in loop.stands_for if path in known}


def _constructed(scope: ast.AST) -> dict[str, LossForm]:
    """Return losses by the names that ``scope`` assigns their constructors to."""
    return {
        ast.unparse(node.targets[0]): form
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and (form := loss_made_by(node.value)) is not None
    }


FIX: Final = Fix(
    id="micro_batch",
    title="Split each batch and accumulate gradients",
    effect=Effect.EQUIVALENT,
    draws=True,
    ways=_WAYS,
    tolerance=TOLERANCE,
    joins=True,
    leaves=_OF_DDP,
    cost="the same arithmetic in smaller pieces",
    propose=propose,
    patch=patch,
    detect=detect,
)
