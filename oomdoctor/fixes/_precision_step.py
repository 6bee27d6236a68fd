"""Writes a training step under autocast, and with gradients scaled where the precision needs it.

The statements from the model's call to the loss go under ``torch.autocast``; the backward pass stays outside, as torch
advises. With float16 the loss is scaled, gradients are unscaled before they are clipped, a step is taken by the scaler,
and schedules that count steps count those that were taken.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html

By what expression the cells name the device that a step runs on, so that a changed step goes with them to another.

``torch.autocast`` and ``GradScaler`` take the type of a device as text: ``device.type`` of a ``torch.device``, the
text itself where a string says it, ``torch.device(device).type`` where the cells do not show which of the two it is.

Source: ``torch.amp.autocast_mode.autocast`` refuses ``cuda:0``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.fix import Edit
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import Loop, ancestors, bound, loop_at, own, reads
from oomdoctor.program.import_lines import knows_torch
from oomdoctor.program.magics import parsed as tree_of
from oomdoctor.program.names import blocks_of

__all__ = ["under_autocast"]

_CLIPS: Final = frozenset({"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"})
_CLIPPING: Final = m.Name(value=m.MatchIfTrue(lambda name: name in _CLIPS))
_SCHEDULER: Final = re.compile(r"sched|warmup|lr_", re.IGNORECASE)
_DEVICE: Final = re.compile(r"(torch\.)?device\(|.*\.device$")
_TYPE: Final = re.compile(r"'\w+'")
_OWNERS: Final = re.compile(r"^(self\.)?(accelerator|fabric|manual_backward)$")


class _NotSafe(Exception):
    """The step cannot be written so that it is right; the text says why, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Places in the body of the loop.

    Attributes:
        start, end: the first and the last statement that go under autocast.
        backward: the statement that calls ``backward``; ``loss`` the source of what it is called on.
    """

    start: int
    end: int
    backward: int
    loss: str


def under_autocast(cells: Cells, cell: Cell, loops: Sequence[TrainingLoop], device: str, dtype: str) -> Edit | Refused:
    """Return the change of ``cell`` that runs the step of its ``loops`` under autocast.

    Args:
        device: the type of the device, ``cuda``.
        dtype: ``bfloat16`` or ``float16``; with the latter a ``GradScaler`` is put in.
    """
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    if not knows_torch(cells.beside(cell)):
        return Refused("the cells do not import `torch` by its name")
    tree = parsed.tree
    scaler = rewriting.fresh_name("scaler", cells) if dtype == "float16" else ""
    scale = rewriting.fresh_name("scale", cells)
    read = {one.number: known for one in cells.history if (known := tree_of(one.source)) is not None}
    changes: dict[cst.CSTNode, Sequence[rewriting.Statement]] = {}
    tops: list[cst.CSTNode] = []
    try:
        for facts in loops:
            old, node = _loops(parsed, tree, facts.line)
            step = _plan(tree, node, _helpers(cells, facts))
            there = _device_text(node, ancestors(tree, node), read.values(), device)
            new = _wrapped(parsed, old, step, there, dtype)
            if scaler:
                _check_scaled(node, facts)
                new = cst.ensure_type(new.visit(_Scale(parsed, facts, scaler, scale)), type(new))
            changes[old] = [new]
            tops.append(rewriting.path_to(parsed, facts.line)[0])
    except _NotSafe as why:
        return Refused(str(why))
    edit = rewriting.edit(cells, cell, parsed, rewriting.exchange(parsed.module, changes))
    if isinstance(edit, Refused) or not scaler:
        return edit
    index = min(i for i, node in enumerate(parsed.module.body) if any(node is top for top in tops))
    above = ast.Module(body=[], type_ignores=[])  # nothing of the function, whose parameters are not known there
    before = [one for number, one in read.items() if number < cell.number]
    there = _device_text(above, (), [*before, ast.Module(body=tree.body[:index], type_ignores=[])], device)
    return _with_scaler(cells, edit, index, f"{scaler} = torch.amp.GradScaler({there})")


def _loops(parsed: rewriting.ParsedCell, tree: ast.Module, line: int) -> tuple[cst.For | cst.While, Loop]:
    """Return the loop that begins on ``line`` in both forms."""
    node, loop = rewriting.loop_at(parsed, line), loop_at(tree, line)
    if node is None or loop is None:
        raise _NotSafe("the loop is not where it was found before")
    return node, loop


def _helpers(cells: Cells, facts: TrainingLoop) -> frozenset[str]:
    """Return the models of the loop, and the functions of the cells that call one of them."""
    found = set(facts.models)
    for cell in cells.history:
        parsed = rewriting.read(cell.source)
        if isinstance(parsed, Refused):
            continue
        for node in ast.walk(parsed.tree):
            if isinstance(node, ast.FunctionDef) and _runs(ast.Module(body=node.body, type_ignores=[]), facts.models):
                found.add(node.name)
    return frozenset(found)


def _plan(tree: ast.Module, loop: Loop, runners: Collection[str]) -> _Step:
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and _method(node) == "backward"]
    if not calls:
        raise _NotSafe("backward is called in a function that the loop calls, not by the loop itself")
    if len(calls) != 1:
        raise _NotSafe(f"the loop calls backward {len(calls)} times, not once")
    (call,) = calls
    at = next((i for i, node in enumerate(loop.body) if isinstance(node, ast.Expr) and node.value is call), None)
    if at is None:
        raise _NotSafe("backward is not called by a statement of the loop itself")
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if _OWNERS.match(ast.unparse(receiver)):
        raise _NotSafe(f"`{ast.unparse(receiver)}` takes its precision from its own settings")
    if _runs(receiver, runners):
        raise _NotSafe("backward is called on an expression that runs the model: give the loss a name")
    before = loop.body[:at]
    start = next((place for place, node in enumerate(before) if _runs(node, runners)), None)
    end = max((place for place, node in enumerate(before) if bound(node) & reads(receiver)), default=None)
    if start is None or end is None or end < start:
        raise _NotSafe("the model and the loss are not called by statements of the loop itself")
    made = {name for node in before[start : end + 1] for name in bound(node)}
    _check_numpy(tree, loop, made)
    return _Step(start=start, end=end, backward=at, loss=ast.unparse(receiver))


def _runs(node: ast.AST, runners: Collection[str]) -> bool:
    """Whether ``node`` calls one of these, or hands one over to what it calls."""
    return any(
        ast.unparse(part.func) in runners or any(ast.unparse(arg) in runners for arg in part.args)
        for part in own(node)
        if isinstance(part, ast.Call)
    )


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _check_numpy(tree: ast.Module, loop: Loop, made: set[str]) -> None:
    """Refuse where what autocast makes is handed to NumPy, which has no bfloat16."""
    path = ancestors(tree, loop)
    scope = next((one for one in reversed(path) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)), tree)
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and _method(node) == "numpy" and reads(node) & made:
            name = min(reads(node) & made)
            raise _NotSafe(f"`{ast.unparse(node)}` needs `{name}` in a precision that NumPy has")


def _wrapped(
    parsed: rewriting.ParsedCell, old: cst.For | cst.While, step: _Step, device: str, dtype: str
) -> cst.For | cst.While:
    lines = rewriting.lines_apart(old)
    inner = lines[step.start : step.end + 1]
    (head,) = rewriting.statements(f"with torch.autocast({device}, dtype=torch.{dtype}):\n    pass\n", parsed)
    first = inner[0]
    above = getattr(first, "leading_lines", ())
    inner[0] = first.with_changes(leading_lines=()) if hasattr(first, "leading_lines") else first
    block = cst.ensure_type(head, cst.With)
    block = block.with_changes(leading_lines=above, body=block.body.with_changes(body=inner))
    body = [*lines[: step.start], block, *lines[step.end + 1 :]]
    return old.with_changes(body=rewriting.block(old, body))


def _check_scaled(loop: Loop, facts: TrainingLoop) -> None:
    """Check that a scaler can take the step: one optimizer, clipped once, with nothing else that reads gradients.

    Raises:
        _NotSafe: something looks at scaled gradients, or steps stand where they cannot be told to belong together.
    """
    if len(facts.optimizers) != 1:
        names = ", ".join(facts.optimizers) or "none that is known"
        raise _NotSafe(f"the loop steps {len(facts.optimizers)} optimizers ({names}), and one can be scaled")
    calls = [node for node in own(loop) if isinstance(node, ast.Call)]
    for node in own(loop):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            raise _NotSafe(f"`{ast.unparse(node)}` is read while gradients are scaled")
    steps = [call for call in calls if _is_step_of(call, facts.optimizers[0])]
    if len(steps) != 1 or steps[0].args or steps[0].keywords:
        raise _NotSafe(f"`{facts.optimizers[0]}` is not stepped by one plain call of the loop itself")
    block = _block(loop, steps[0])
    clips = [call for call in calls if _last(call) in _CLIPS]
    if len(clips) > 1 or any(not any(clip is part for one in block for part in ast.walk(one)) for clip in clips):
        raise _NotSafe("gradients are clipped apart from the step, so they would be unscaled more than once")
    schedules = [call for call in calls if _is_schedule(call)]
    if bool(schedules) != ("schedule" in facts.order):
        raise _NotSafe("which scheduler is stepped in the loop cannot be told")
    for call in schedules:
        after = block[next(i for i, one in enumerate(block) if any(steps[0] is part for part in ast.walk(one))) :]
        if not any(isinstance(one, ast.Expr) and one.value is call for one in after):
            raise _NotSafe(f"`{ast.unparse(call)}` does not follow the step of the optimizer")


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_step_of(call: ast.Call, owner: str) -> bool:
    return ast.unparse(call.func) == f"{owner}.step"


def _is_schedule(call: ast.Call) -> bool:
    return _method(call) == "step" and _SCHEDULER.search(ast.unparse(call.func)) is not None


def _block(loop: Loop, call: ast.Call) -> list[ast.stmt]:
    """Return the statements among which ``call`` is one.

    Raises:
        _NotSafe: it is not a statement of its own, or stands in a loop within the loop.
    """
    path = ancestors(loop, call)
    if not isinstance(path[-2], ast.Expr) or any(isinstance(node, ast.For | ast.While) for node in path[1:]):
        raise _NotSafe(f"`{ast.unparse(call)}` is not a statement of the loop itself")
    return next(block for block in blocks_of(path[-3]) if path[-2] in block)


class _Scale(cst.CSTTransformer):
    """Puts the scaler into the statements of a loop."""

    def __init__(self, parsed: rewriting.ParsedCell, facts: TrainingLoop, scaler: str, scale: str) -> None:
        super().__init__()
        self._parsed, self._scaler, self._optimizer = parsed, scaler, facts.optimizers[0]
        self._scale = scale if "schedule" in facts.order else ""

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        lines = [new for line in rewriting.apart(updated_node) for new in self._with_scaler(line)]
        if lines == [updated_node]:
            return updated_node
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(  # noqa: N802
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        old = rewriting.apart(updated_node)
        lines = [new for line in old for new in self._with_scaler(line)]
        return updated_node if lines == old else cst.IndentedBlock(body=lines)

    def _with_scaler(self, line: cst.SimpleStatementLine) -> list[cst.BaseStatement]:
        (small,), bare = line.body, line.with_changes(leading_lines=())
        match small:
            case cst.Expr(value=cst.Call(func=cst.Attribute(value=of, attr=cst.Name(value="backward")))):
                plain = of.with_changes(lpar=(), rpar=()) if hasattr(of, "lpar") else of
                scaled = cst.parse_expression(f"{self._scaler}.scale({rewriting.text_of(plain)})")
                return [cst.ensure_type(line.deep_replace(of, scaled), cst.SimpleStatementLine)]
            case cst.Expr(value=cst.Call(func=cst.Attribute(attr=cst.Name(value="step")) as func)):
                owner = rewriting.text_of(func.value)
                if owner == self._optimizer:
                    kept = f"{self._scale} = {self._scaler}.get_scale()\n" if self._scale else ""
                    return self._parse(f"{self._scaler}.step({owner})\n{kept}{self._scaler}.update()")
                if self._scale and _SCHEDULER.search(owner):
                    condition = f"if {self._scaler}.get_scale() >= {self._scale}:"
                    (block,) = self._parse(f"{condition}  # no step was taken if the gradients overflowed\n    pass")
                    return [block.with_changes(body=cst.ensure_type(block, cst.If).body.with_changes(body=[bare]))]
        if m.findall(small, m.Call(func=_CLIPPING | m.Attribute(attr=_CLIPPING))):
            return [*self._parse(f"{self._scaler}.unscale_({self._optimizer})"), bare]
        return [line]

    def _parse(self, text: str) -> list[cst.BaseStatement]:
        return list(rewriting.statements(text + "\n", self._parsed))


def _with_scaler(cells: Cells, edit: Edit, index: int, line: str) -> Edit | Refused:
    """Return ``edit`` with the scaler made once, by ``line`` before the statement that uses it."""
    changed = rewriting.read(edit.after)
    if isinstance(changed, Refused):
        return changed
    before, first, rest = changed.module.body[:index], changed.module.body[index], changed.module.body[index + 1 :]
    above = list(getattr(first, "leading_lines", ()))
    blank = [cst.EmptyLine(indent=False)] * (2 if isinstance(first, cst.FunctionDef | cst.ClassDef) else 0)
    (new,) = rewriting.statements(line + "\n", changed)
    body = [*before, new.with_changes(leading_lines=above), first.with_changes(leading_lines=blank), *rest]
    after = rewriting.write(changed, changed.module.with_changes(body=body))
    if isinstance(after, Refused):
        return after
    if edit.file is not None:
        return Refused(f"a scaler for float16 is made when {edit.name} is imported, which has run already")
    is_failing = edit.cell == cells.failing.number
    replay = after if is_failing else f"{line}\n\n\n{edit.replay}"
    return Edit(cell=edit.cell, before=edit.before, after=after, replay=replay)


def _device_text(loop: ast.AST, around: Iterable[ast.AST], trees: Iterable[ast.Module], kind: str) -> str:
    """Return the source text of the type of the device that ``loop`` moves its batches to, else ``kind`` in quotes.

    Args:
        loop: where the step stands.
        around: the functions that it stands in.
        trees: the cells, for what is said about the device at their top level.
        kind: ``cuda``, as it was found to be.
    """
    trees = list(trees)
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = _moved_to(loop) or {name for tree in trees for name in _moved_to(tree) if "." not in name}
    name = min(names, default="")
    root = name.partition(".")[0]
    given = {part.arg for one in functions for part in ast.walk(one.args) if isinstance(part, ast.arg)}
    known = {one for node in (*functions, *(node for tree in trees for node in tree.body)) for one in bound(node)}
    if len(names) != 1 or root not in given | known:
        return f'"{kind}"'
    places = [] if root in given else [part for one in (*functions, *trees) for part in ast.walk(one)]
    made = [one for one in places if isinstance(one, ast.Assign) and name in map(ast.unparse, one.targets)]
    values = {ast.unparse(value) for one in made for value in _choices(one.value)}
    if name.endswith(".device") or (values and all(map(_DEVICE.match, values))):
        return f"{name}.type"
    return name if values and all(map(_TYPE.fullmatch, values)) else f"torch.device({name}).type"


def _moved_to(node: ast.AST) -> set[str]:
    """Return what ``.to`` is told by a name: dtypes and other tensors are told apart by how they are called."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and _method(part) == "to"]
    given = [one for call in calls for one in (*call.args[:1], *(k.value for k in call.keywords if k.arg == "device"))]
    texts = [ast.unparse(one) for one in given if isinstance(one, ast.Name | ast.Attribute)]
    return {text for text in texts if "dev" in text.lower()}


def _choices(value: ast.expr) -> list[ast.expr]:
    return [*_choices(value.body), *_choices(value.orelse)] if isinstance(value, ast.IfExp) else [value]
