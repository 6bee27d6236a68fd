"""Calls of a model in the source rewritten to run over parts of the batch.

``logits = model(x)`` becomes ``logits = torch.cat([checkpoint(model, part, use_reentrant=False) for part in
x.chunk(4)])``; where a step has several such calls, a small function does it for all. Rewritten are the calls of the
failing step, or else of a function that it calls, that take tensors of the batch by position and whose output is used
as a tensor; of any other call the reason is given.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import libcst as cst

from oomdoctor.fixes._seen import containers
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import import_lines, rewriting, words
from oomdoctor.program.rewriting import within
from oomdoctor.program.words import Result

_KEEPING_ROWS: Final = words.names_of(Result.MOVED, Result.CAST, Result.TRUNCATED) | {"detach"}
"""Methods of a tensor whose result has the same rows."""

_OF_A_TENSOR: Final = (
    words.names_of(*Result)
    | {"exp", "log", "log_softmax", "relu", "sigmoid", "softmax", "tanh", "topk", "abs", "clamp", "pow"}
    | {"T", "data", "device", "dtype", "ndim", "requires_grad", "shape"}
)
"""What a tensor has, and an object of outputs has not."""
_HELPER: Final = """

def {helper}(model, *tensors):
    \"\"\"Run a model over {chunks} parts of the batch, each recomputed in the backward pass.\"\"\"
    parts = zip(*(tensor.chunk({chunks}) for tensor in tensors), strict=True)
    return torch.cat([{checkpoint}(model, *part, use_reentrant=False) for part in parts])
"""
_HELPS: Final = re.compile(r"\bdef (in_parts\w*)\(model, \*tensors\)")
_SPLIT: Final = re.compile(r"\btorch\.cat\(\[.*\bfor \w+ in .*\.chunk\(\d+\)")
_PARTS: Final = re.compile(r"\.(chunk|split|tensor_split)\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What the new code calls things by.

    Attributes:
        checkpoint: None where gradients are off.
        helper: the function that runs a model in parts, None where the only such call does so where it stands.
    """

    checkpoint: str | None
    part: str
    chunks: int
    helper: str | None = None


def rewrite(cells: Cells, evidence: Evidence, chunks: int, *, functions: bool = True) -> Patch | Refused:
    """Return the patch that splits the calls of the failing step into ``chunks``.

    Args:
        functions: whether to look in functions that it calls where it calls no model itself.
    """
    code, several = evidence.code, containers(evidence)
    loop = next((one for one in code.loops if one.in_failing_run and one.was_running), None)
    number = loop.cell if loop else cells.failing.number
    try:
        cell = cells.get(number)
    except KeyError:
        return Refused(f"cell {number} is no longer in the history")
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    models = set(loop.models) if loop else {model.path for model in code.models if model.parameter_bytes}
    within = rewriting.statement_at(parsed, loop.line) if loop else None
    around: cst.CSTNode = within if within is not None else parsed.module
    if (there := next(filter(None, (_HELPS.search(one.source) for one in cells.history)), None)) is not None:
        return Refused(f"`{there[1]}` gives a model parts of the batch already")
    calls = _calls(parsed, around, models)
    within_loop = loop
    if not calls and functions:
        for place in _called_with(cells, parsed, around, models):
            if (calls := _calls(place[1], place[2], place[3])) or _SPLIT.search(place[1].code(place[2])):
                (cell, parsed, around, _), within_loop = place, None
                break
    if _SPLIT.search(parsed.code(around)):
        return Refused("a model is given parts of the batch already")
    for argument in (argument for one in calls for argument in one.call.args):
        if (name := next((name for name in _operands(argument.value) if name in several), None)) is not None:
            return Refused(f"`{name}` holds several tensors: it has no parts of a batch")
    if not calls:
        more = " or in a function that it calls" if functions else ""
        return Refused(f"no call of a model was found in the failing cell{more}")
    whole = sum(one.field is None for one in calls)
    names = _Names(
        checkpoint=None
        if code.grad_disabled
        else import_lines.name_for("torch.utils.checkpoint", "checkpoint", cells.beside(cell), "recompute"),
        part=rewriting.fresh_name("part", cells),
        chunks=chunks,
        helper=rewriting.fresh_name("in_parts", cells) if not code.grad_disabled and whole > 1 else None,
    )
    changed = _rewritten(parsed, around, calls, names, _batch_names(parsed, around, within_loop))
    return changed if isinstance(changed, Refused) else _edited(cells, cell, parsed, changed, names)


def _edited(
    cells: Cells, cell: Cell, parsed: rewriting.ParsedCell, module: cst.Module, names: _Names
) -> Patch | Refused:
    """Return the patch with the imports at the top of the cell, and before the function that a retry runs again."""
    imports = [] if import_lines.knows_torch(cells.beside(cell)) else ["import torch"]
    if names.checkpoint is not None:
        imports.append(import_lines.source_of("torch.utils.checkpoint", "checkpoint", names.checkpoint))
    if names.helper is not None:
        imports.append(_HELPER.format(helper=names.helper, checkpoint=names.checkpoint, chunks=names.chunks))
    return rewriting.join(
        cells, [rewriting.edit(cells, cell, parsed, import_lines.insert_at_top(parsed, module, imports))]
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ModelCall:
    """A call of a model, what it is an operand of, and what that is an operand of.

    Attributes:
        in_parts: it stands in a comprehension over parts of a tensor.
    """

    call: cst.Call
    parent: cst.CSTNode
    grandparent: cst.CSTNode | None
    in_parts: bool = False

    @property
    def field(self) -> str | None:
        """What is read from the output that no tensor has, such as ``logits``; a method that is called is none."""
        parent = self.parent
        if not isinstance(parent, cst.Attribute) or parent.attr.value in _OF_A_TENSOR:
            return None
        is_method = isinstance(self.grandparent, cst.Call) and self.grandparent.func is parent
        return None if is_method else parent.attr.value


def _operands(node: cst.BaseExpression) -> Iterator[str]:
    """Yield the names that an expression is made of as they are: no item of them, nothing that is called on them."""
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.BinaryOperation):
        yield from (*_operands(node.left), *_operands(node.right))


def _calls(parsed: rewriting.ParsedCell, around: cst.CSTNode, models: set[str]) -> list[_ModelCall]:
    parents = {child: node for node in parsed.positions for child in node.children}
    return [
        _ModelCall(
            call=call,
            parent=parents[call],
            grandparent=parents.get(parents[call]),
            in_parts=_in_parts(parsed, call, parents),
        )
        for call in within(around, cst.Call)
        if parsed.code(call.func) in models
    ]


def _in_parts(parsed: rewriting.ParsedCell, node: cst.CSTNode, parents: dict[cst.CSTNode, cst.CSTNode]) -> bool:
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, cst.ListComp | cst.GeneratorExp) and node is parent.elt:
            return _PARTS.search(parsed.code(parent.for_in.iter)) is not None
        node = parent
    return False


def _rewritten(
    parsed: rewriting.ParsedCell, around: cst.CSTNode, calls: list[_ModelCall], names: _Names, batch: set[str]
) -> cst.Module | Refused:
    splits: dict[cst.CSTNode, rewriting.New] = {}
    unpacked, fields = _used_apart(around)
    for one in calls:
        text = parsed.code(one.call)
        if (why := _refusal(parsed, one, batch)) is not None:
            return Refused(why)
        if one.call in unpacked:
            return Refused(f"`{text}` returns more than one tensor")
        if one.call in fields:
            return Refused(f"`{text}` returns an object, of which `{fields[one.call]}` is used later")
        splits[one.call if one.field is None else one.parent] = partial(_split, parsed, names, one.field)
    return rewriting.exchange(parsed.module, splits)


def _split(parsed: rewriting.ParsedCell, names: _Names, field: str | None, node: cst.CSTNode) -> cst.CSTNode:
    """Return the split form of a call; a call of another model among its arguments is split by now."""
    call = cst.ensure_type(node.value if isinstance(node, cst.Attribute) else node, cst.Call)
    return cst.parse_expression(_split_call(parsed, call, names, field), parsed.module.config_for_parsing)


def _refusal(parsed: rewriting.ParsedCell, one: _ModelCall, batch: set[str]) -> str | None:
    call, text = one.call, parsed.code(one.call)
    if one.in_parts:
        return f"`{text}` is given parts of the batch already"
    if not call.args:
        return f"`{text}` is called without a tensor to split"
    if any(argument.keyword is not None or argument.star for argument in call.args):
        return f"`{text}` is not called by position: what is to be split cannot be told from the code"
    if isinstance(one.parent, cst.Subscript):
        return f"of what `{text}` returns a part is used: that it is one tensor cannot be told from the code"
    if any(isinstance(argument.value, cst.List | cst.Tuple | cst.Dict) for argument in call.args):
        return f"`{text}` is called with a container, which has no parts of a batch"
    if len(call.args) > 1:
        for argument in call.args:
            if not _has_rows(argument.value, batch):
                return f"whether `{parsed.code(argument.value)}` goes with the batch cannot be told from the code"
    return None


def _split_call(parsed: rewriting.ParsedCell, call: cst.Call, names: _Names, field: str | None) -> str:
    model, arguments = parsed.code(call.func), [argument.value for argument in call.args]
    if names.helper is not None and field is None:
        return f"{names.helper}({', '.join(map(parsed.code, (call.func, *arguments)))})"
    pieces = [f"{_bracketed(parsed, argument)}.chunk({names.chunks})" for argument in arguments]
    several = len(pieces) > 1
    part = f"*{names.part}" if several else names.part
    over = f"zip({', '.join(pieces)})" if several else pieces[0]
    one = (
        f"{model}({part})" if names.checkpoint is None else f"{names.checkpoint}({model}, {part}, use_reentrant=False)"
    )
    one += f".{field}" if field else ""
    return f"torch.cat([{one} for {names.part} in {over}])"


def _bracketed(parsed: rewriting.ParsedCell, node: cst.BaseExpression) -> str:
    plain = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or bool(getattr(node, "lpar", ()))
    return parsed.code(node) if plain else f"({parsed.code(node)})"


def _used_apart(around: cst.CSTNode) -> tuple[set[cst.CSTNode], dict[cst.CSTNode, str]]:
    """Return the calls whose results are unpacked, and those of which a field is read through their name later."""
    unpacked: set[cst.CSTNode] = set()
    named: dict[cst.CSTNode, str] = {}
    fields: dict[str, str] = {}
    for node in within(around, cst.CSTNode):  # type: ignore[type-abstract]
        match node:
            case cst.Assign(targets=targets, value=value):
                unpacked |= {value for one in targets if isinstance(one.target, cst.Tuple | cst.List)}
                for name in (one.target.value for one in targets if isinstance(one.target, cst.Name)):
                    named[value] = name
            case cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value=field)) if field not in _OF_A_TENSOR:
                fields.setdefault(name, field)
            case cst.Subscript(
                value=cst.Name(value=name),
                slice=[cst.SubscriptElement(slice=cst.Index(value=cst.SimpleString() as key))],
            ):
                fields.setdefault(name, key.raw_value)
    return unpacked, {call: fields[name] for call, name in named.items() if name in fields}


def _batch_names(parsed: rewriting.ParsedCell, around: cst.CSTNode, loop: TrainingLoop | None) -> set[str]:
    """Return the names that hold tensors of the batch: those of the loop, and what is made of them row by row."""
    names = set(loop.batch) if loop else set()
    for node in within(around, cst.Assign):
        for target, value in _pairs(node):
            if isinstance(target, cst.Name):
                (names.add if _has_rows(value, names) else names.discard)(target.value)
            elif isinstance(target, cst.Tuple | cst.List) and isinstance(value, cst.Name) and value.value in names:
                names |= {one.value.value for one in target.elements if isinstance(one.value, cst.Name)}
    return names


def _pairs(node: cst.Assign) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    out: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []
    for assigned in node.targets:
        target = assigned.target
        if isinstance(target, cst.Tuple) and isinstance(node.value, cst.Tuple):
            out += [(one.value, two.value) for one, two in zip(target.elements, node.value.elements, strict=False)]
        else:
            out.append((target, node.value))
    return out


def _has_rows(node: cst.BaseExpression, batch: set[str]) -> bool:
    """Tell whether the value of ``node`` has the rows of the batch, as far as the code shows."""
    if isinstance(node, cst.Name):
        return node.value in batch
    if isinstance(node, cst.Call):
        function = node.func
        if isinstance(function, cst.Attribute) and function.attr.value in _KEEPING_ROWS:
            return _has_rows(function.value, batch)
        if isinstance(function, cst.Attribute) and function.attr.value in ("randn_like", "rand_like", "zeros_like"):
            return bool(node.args) and _has_rows(node.args[0].value, batch)
        return False
    if isinstance(node, cst.Subscript):
        first = node.slice[0].slice
        if isinstance(first, cst.Slice):
            return first.lower is None and first.upper is None and first.step is None and _has_rows(node.value, batch)
        is_field = isinstance(first, cst.Index) and isinstance(first.value, cst.SimpleString)
        return is_field and isinstance(node.value, cst.Name) and node.value.value in batch
    if isinstance(node, cst.BinaryOperation):
        return _has_rows(node.left, batch) or _has_rows(node.right, batch)
    return False


def _called_with(
    cells: Cells, parsed: rewriting.ParsedCell, around: cst.CSTNode, models: Collection[str], depth: int = 2
) -> Iterator[tuple[Cell, rewriting.ParsedCell, cst.FunctionDef, set[str]]]:
    """Yield each function that ``around`` calls, with its cell and the names of the models in it, the nearest first.

    Args:
        cells: the last definition of a name is the one that is called.
        parsed: the cell of ``around``.
        around: the code that calls.
        models: source text of the models there.
        depth: how many calls deep to look.
    """
    for call in within(around, cst.Call, (cst.FunctionDef, cst.ClassDef)):
        if (found := _definition(cells, parsed.code(call.func).rpartition(".")[2])) is None:
            continue
        cell, where, function = found
        known = _known_as(parsed, call, function, models)
        yield cell, where, function, known
        if depth > 1:
            yield from _called_with(cells, where, function.body, known, depth - 1)


def _definition(cells: Cells, name: str) -> tuple[Cell, rewriting.ParsedCell, cst.FunctionDef] | None:
    """Return the last function or method of this name; None as well where several classes have one."""
    for cell in reversed(cells.history):
        if f"def {name}(" not in cell.source or isinstance(parsed := rewriting.read(cell.source), Refused):
            continue
        methods = [one for owner in parsed.module.body if isinstance(owner, cst.ClassDef) for one in owner.body.body]
        plain = [node for node in parsed.module.body if isinstance(node, cst.FunctionDef) and node.name.value == name]
        bound = [node for node in methods if isinstance(node, cst.FunctionDef) and node.name.value == name]
        if plain or len(bound) == 1:
            return cell, parsed, (plain or bound)[-1]
    return None


def _known_as(
    parsed: rewriting.ParsedCell, call: cst.Call, function: cst.FunctionDef, models: Collection[str]
) -> set[str]:
    """Return what the models are called in ``function``: globals, parameters, and attributes of ``self``."""
    parameters = [one.name.value for one in (*function.params.posonly_params, *function.params.params)]
    is_method = parameters[:1] == ["self"]
    parameters = parameters[1:] if is_method else parameters
    by_place = zip(parameters, (one for one in call.args if one.keyword is None), strict=False)
    given = {name: argument.value for name, argument in by_place}
    given |= {one.keyword.value: one.value for one in call.args if one.keyword is not None}
    every = {*parameters, *(one.name.value for one in function.params.kwonly_params)}
    passed = {name for name, value in given.items() if parsed.code(value) in models}
    own = {f"self.{path.rpartition('.')[2]}" for path in models if "." in path} if is_method else set()
    return passed | own | {path for path in models if path.partition(".")[0] not in every}
