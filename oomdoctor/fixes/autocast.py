"""Mixed precision: matrix products and convolutions in 16 bits, weights and their updates in 32.

bfloat16 is taken where the device computes in it: it has the range of float32. Where it does not, float16 needs its
gradients scaled, which is put in together with what belongs to it. ``BCELoss`` under autocast is refused by torch on
CUDA, and only there: it is refused here, so that what was tried on a CPU holds on a GPU.

The statements from the model's call to the loss go under ``torch.autocast``; the backward pass stays outside, as torch
advises. With float16 the loss is scaled, gradients are unscaled before they are clipped, a step is taken by the scaler,
and schedules that count steps count those that were taken.
Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._construction_sites import StepLines, preceded, runs, step_lines
from oomdoctor.fixes._preconditions import ROUNDS, check_training, kind_of_device, native, running_loops
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cell, Cells, Dose, Edit, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import ancestors, bound, reads
from oomdoctor.program.import_lines import knows_torch
from oomdoctor.program.magics import parsed as tree_of
from oomdoctor.program.rewriting import apart, text_of, within

_CLIPPING: Final = m.Name("clip_grad_norm_") | m.Name("clip_grad_value_") | m.Name("clip_grad_norm")
_CLIP: Final = m.Call(func=_CLIPPING | m.Attribute(attr=_CLIPPING))
_BACKWARD: Final = m.SimpleStatementLine([m.Expr(m.Call(func=m.Attribute(attr=m.Name("backward"))))])
_SCHEDULE: Final = re.compile(r"\S*(sched|warmup|lr_)\S*\.step\(.*\)", re.IGNORECASE)
_OWNERS: Final = re.compile(r"^(self\.)?(accelerator|fabric|manual_backward)$")


@refusing
def _under_autocast(cells: Cells, cell: Cell, loops: Sequence[TrainingLoop], device: str, dtype: str) -> Edit:
    """Return the change of ``cell`` that runs the step of its ``loops`` under autocast, with a scaler for float16."""
    parsed = need(rewriting.read(cell.source))
    need(knows_torch(cells.beside(cell)), "the cells do not import `torch` by its name")
    scaler, scale = (rewriting.fresh_name(name, cells) for name in ("scaler", "scale"))
    trees = [tree for one in cells.history if (tree := tree_of(one.source)) is not None]
    functions = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    bodies = {one.name: ast.Module(body=one.body, type_ignores=[]) for one in functions}
    changes: dict[cst.CSTNode, rewriting.New] = {}
    for facts in loops:
        helpers = {name for name, body in bodies.items() if runs(body, facts.models)}
        step = step_lines(parsed, facts, helpers)
        around = ancestors(parsed.tree, step.node)
        step = _with_named_loss(step, {*facts.models, *helpers}, rewriting.fresh_name("loss", cells))
        last = _last(step, around)
        new = step.under(f'torch.autocast("{device}", dtype=torch.{dtype})', last)
        changes[step.loop] = _scaled(parsed, new, facts, scaler, scale) if dtype == "float16" else new
    module = rewriting.exchange(parsed.module, changes)
    if dtype != "float16":
        return need(rewriting.edit(cells, cell, parsed, module))
    need(cell.file is None, f"a scaler for float16 is made when {cell.name} is imported, which has run already")
    at = parsed.module.body.index(rewriting.path_to(parsed, min(facts.line for facts in loops))[0])
    line = f'{scaler} = torch.amp.GradScaler("{device}")'
    made, first = preceded(module.body[at], line, parsed)
    blank = [cst.EmptyLine(indent=False)] * (2 if isinstance(first, cst.FunctionDef | cst.ClassDef) else 0)
    body = [*module.body[:at], made, first.with_changes(leading_lines=blank), *module.body[at + 1 :]]
    return need(rewriting.edit(cells, cell, parsed, module.with_changes(body=body), [line]))


def _backward(step: StepLines) -> tuple[int, ast.expr]:
    calls = [node for node in ast.walk(step.node) if isinstance(node, ast.Call) and _method(node) == "backward"]
    call, *others = need(calls, "backward is called in a function that the loop calls, not by the loop itself")
    if others:
        raise Unfit(f"the loop calls backward {len(calls)} times, not once")
    at = [i for i, one in enumerate(step.node.body) if isinstance(one, ast.Expr) and one.value is call]
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if _OWNERS.match(ast.unparse(receiver)):
        raise Unfit(f"`{ast.unparse(receiver)}` takes its precision from its own settings: set `mixed_precision` there")
    return need(at, "backward is not called by a statement of the loop itself")[0], receiver


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _with_named_loss(step: StepLines, runners: Collection[str], name: str) -> StepLines:
    """Return the step with a name for its loss, where ``backward`` is called on what runs the model."""
    at, receiver = _backward(step)
    line = step.lines[at]
    if not runs(receiver, runners) or not isinstance(line, cst.SimpleStatementLine):
        return step
    of = line.body[0].value.func.value  # type: ignore[attr-defined]
    lines = preceded(rewriting.exchange(line, {of: cst.Name(name)}), f"{name} = {text_of(of)}", step.parsed)
    node = copy(step.node)
    text = f"{name} = {ast.unparse(receiver)}\n{name}.backward()"
    node.body = [*node.body[:at], *ast.parse(text).body, *node.body[at + 1 :]]
    return replace(step, node=node, lines=[*step.lines[:at], *lines, *step.lines[at + 1 :]])


def _last(step: StepLines, around: Sequence[ast.AST]) -> int:
    at, receiver = _backward(step)
    before = step.node.body[:at]
    last = max((place for place, one in enumerate(before) if bound(one) & reads(receiver)), default=-1)
    need(last >= step.first, "the model and the loss are not called by statements of the loop itself")
    made = {name for one in before[step.first : last + 1] for name in bound(one)}
    scope = next((one for one in reversed(around) if isinstance(one, ast.FunctionDef)), around[0])
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and _method(node) == "numpy" and reads(node) & made:
            raise Unfit(f"`{ast.unparse(node)}` needs `{min(reads(node) & made)}` in a precision that NumPy has")
    return last


def _scaled(
    parsed: rewriting.ParsedCell, loop: cst.For | cst.While, facts: TrainingLoop, scaler: str, scale: str
) -> cst.For | cst.While:
    """Return the loop with the scaler in its step: one optimizer, clipped once, and nothing else reads gradients."""
    if len(facts.optimizers) != 1:
        names = ", ".join(facts.optimizers) or "none that is known"
        raise Unfit(f"the loop steps {len(facts.optimizers)} optimizers ({names}), and one can be scaled")
    for node in (one for one in within(loop, cst.Attribute) if one.attr.value == "grad"):
        raise Unfit(f"`{text_of(node)}` is read while gradients are scaled")
    several: dict[cst.CSTNode, rewriting.New]
    several = {line: apart(line) for line in within(loop, cst.SimpleStatementLine) if len(line.body) > 1}
    suites = [one for one in within(loop, cst.SimpleStatementSuite) if re.search(r"\.step\(|clip_grad", text_of(one))]
    loop = rewriting.exchange(loop, several | {one: cst.IndentedBlock(body=apart(one)) for one in suites})
    lines = {line: text_of(line.body[0]) for line in within(loop, cst.SimpleStatementLine)}
    optimizer = facts.optimizers[0]
    steps = [line for line, text in lines.items() if text == f"{optimizer}.step()"]
    inner = (*within(loop, cst.For), *within(loop, cst.While))
    nested = {line for one in inner for line in within(one, cst.SimpleStatementLine)}
    if len(steps) != 1 or steps[0] in nested or text_of(loop).count(f"{optimizer}.step") != 1:
        raise Unfit(f"`{optimizer}` is not stepped by one plain call of the loop itself")
    block = next(list(one.body) for one in within(loop, cst.IndentedBlock) if steps[0] in one.body)
    clips = [line for line in lines if m.findall(line, _CLIP)]
    beside = {line for one in block for line in (one, *within(one, cst.SimpleStatementLine))}
    if len(m.findall(loop, _CLIP)) > 1 or not beside.issuperset(clips):
        raise Unfit("gradients are clipped apart from the step, so they would be unscaled more than once")
    schedules = [line for line, text in lines.items() if _SCHEDULE.fullmatch(text)]
    need(bool(schedules) == ("schedule" in facts.order), "which scheduler is stepped in the loop cannot be told")
    for line in (one for one in schedules if one not in block[block.index(steps[0]) :]):
        raise Unfit(f"`{lines[line]}` does not follow the step of the optimizer")
    kept = f"{scale} = {scaler}.get_scale()\n" if schedules else ""
    changes: dict[cst.CSTNode, rewriting.New] = {
        steps[0]: preceded(steps[0], f"{scaler}.step({optimizer})\n{kept}{scaler}.update()", parsed)[:-1]
    }
    for line in clips:
        changes[line] = preceded(line, f"{scaler}.unscale_({optimizer})", parsed)
    for line in schedules:
        test = f"if {scaler}.get_scale() >= {scale}:  # no step was taken if the gradients overflowed"
        changes[line] = preceded(line, f"{test}\n    {lines[line]}", parsed)[:-1]
    for line in lines:
        if m.matches(line, _BACKWARD):
            of = line.body[0].value.func.value  # type: ignore[attr-defined]
            plain = of.with_changes(lpar=(), rpar=()) if hasattr(of, "lpar") else of
            changes[of] = cst.parse_expression(f"{scaler}.scale({text_of(plain)})")
    return rewriting.exchange(loop, changes)


_BCE: Final = re.compile(r"\bBCELoss\b|\bbinary_cross_entropy\b")
_NO_BCE: Final = (
    "torch refuses `BCELoss` under autocast: let the model return logits and take `BCEWithLogitsLoss` first"
)


@_trainers.first("autocast")
@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose the one precision that the device is made for."""
    code = evidence.code
    trainer = _trainers.owner(code, "autocast")
    if trainer is None:
        _check(evidence)
    dtype = need(native(evidence))
    if trainer is None:
        running_loops(evidence)
    # Of the trainer's model, else of the notebook's.
    trained = [one.model for one in code.trainers if one.model is not None] or code.models
    activations, weights = evidence.census.bytes_of(Role.ACTIVATION), sum(model.parameter_bytes for model in trained)
    saves = max(0, activations // 2 - weights // 2)
    if not saves:
        raise Unfit(
            f"16-bit copies of {format_size(weights)} of weights would take no less than halving "
            f"{format_size(activations)} of activations gives"
        )
    yield Proposal(
        dose=Dose.of(dtype=dtype),
        effect=Effect.CHANGES_RESULT,
        saves=saves,
        basis=f"analytic estimate: half of {format_size(activations)} of activations, less 16-bit copies of "
        f"{format_size(weights)} of weights",
        caveat=ROUNDS[dtype],
    )


def _check(evidence: Evidence) -> None:
    code = evidence.code
    need(not code.autocast, "mixed precision is in force already")
    need(not code.half_weights, "most of the weights take 2 bytes already")
    need(not code.grad_disabled, "autograd is off, so no activations are kept that a smaller type would halve")
    need(code.models, "no model was found among the notebook's objects")
    check_training(evidence)
    called = " ".join(filter(None, (loop.loss_call for loop in code.loops if loop.in_failing_run)))
    if any(loss.type_name == "BCELoss" for loss in code.losses) or _BCE.search(called):
        raise Unfit(_NO_BCE)


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with their steps under autocast."""
    through = _trainers.patched("autocast", cells, evidence, dose)
    loops = running_loops(evidence) if through is None else []
    for cell in cells.history:
        if re.search(r"\bautocast\b|\bGradScaler\b", cell.source):
            raise Unfit(f"{cell} has to do with mixed precision already")
        need(not _BCE.search(cell.source), _NO_BCE)
    if through is not None:
        return through
    dtype, kind, edits = str(dose["dtype"]), kind_of_device(evidence), []
    for number in dict.fromkeys(loop.cell for loop in loops):
        here = [loop for loop in loops if loop.cell == number]
        edits.append(_under_autocast(cells, cells.get(number), here, kind, dtype))
    return rewriting.join(cells, edits)


FIX: Final = Fix(
    id="autocast",
    title="Use mixed precision (matrix products in 16 bits)",
    effect=Effect.CHANGES_RESULT,
    joins=True,
    cost="results rounded to 16 bits within the network; most often faster on a GPU",
    propose=propose,
    patch=patch,
)
