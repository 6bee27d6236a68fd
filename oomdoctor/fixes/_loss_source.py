"""Cross-entropies in the source rewritten as calls of a small function that takes them over chunks of rows.

``loss = F.cross_entropy(logits, y)`` becomes ``loss = chunked_cross_entropy(logits, y, chunks=8)``, and the function is
put at the top of the cell that needs it first. It is as short as these calls allow: it has the parameters that they
use, and divides by what their reduction divides by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import LossFacts
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.rewriting import within

__all__ = ["rewrite"]

_NAME: Final = "chunked_cross_entropy"
_LONGEST: Final = 100
_OPTIONS: Final = ("weight", "ignore_index", "label_smoothing")
_DEFAULTS: Final = {"ignore_index": "-100", "label_smoothing": "0.0"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Loss:
    """One call of a cross-entropy, and its arguments by the names that the function has for them."""

    call: cst.Call
    arguments: Mapping[str, cst.BaseExpression]
    reduction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Helper:
    """The function that takes a loss in chunks, and the imports that it needs.

    Attributes:
        options: those of ``_OPTIONS`` that it takes.
    """

    name: str
    text: str
    imports: tuple[str, ...]


def rewrite(cells: Cells, sites: Sequence[Site], known: Sequence[LossFacts], chunks: int) -> Patch | Refused:
    """Return the patch that takes the cross-entropies at ``sites`` over ``chunks`` chunks."""
    if any(re.search(rf"\bdef {_NAME}\w*\(", cell.source) for cell in cells.history):
        return Refused("the code takes its cross-entropy in chunks already")
    if not sites:
        return Refused("no cell takes the cross-entropy: what a library does cannot be changed in the source")
    found: dict[int, tuple[rewriting.ParsedCell, list[_Loss]]] = {}
    for number in dict.fromkeys(site.cell for site in sites):
        if number not in {cell.number for cell in cells.history}:
            return Refused(f"cell {number} is no longer in the history")
        parsed = rewriting.read(cells.get(number).source)
        if isinstance(parsed, Refused):
            return parsed
        losses = _losses(cells, known, [site for site in sites if site.cell == number], parsed)
        if isinstance(losses, Refused):
            return losses
        found[number] = parsed, losses
    around = cells
    if any(cells.get(number).file is not None for number in found):
        if len(found) > 1:
            return Refused("modules and cells take cross-entropies, which share no helper")
        around = cells.beside(cells.get(min(found)))
    helper = _helper(around, sites, [loss for _, losses in found.values() for loss in losses])
    if isinstance(helper, Refused):
        return helper
    edits: list[Edit | Refused] = []
    for number, (parsed, losses) in found.items():
        module = rewriting.exchange(parsed.module, {loss.call: _call(loss, helper.name, chunks) for loss in losses})
        if number == min(found):
            new = [*helper.imports, helper.text.strip()]
            module = _spaced(import_lines.insert_at_top(parsed, module, new), helper.name)
        edits.append(rewriting.edit(cells, cells.get(number), parsed, module))
    return rewriting.join(cells, edits)


def _losses(
    cells: Cells, known: Sequence[LossFacts], sites: Sequence[Site], parsed: rewriting.ParsedCell
) -> list[_Loss] | Refused:
    every = list(within(parsed.module, cst.Call))
    out: list[_Loss] = []
    for site in sites:
        called, stands_for = site.names
        calls = [
            call
            for call in every
            if parsed.code(call.func) == called and parsed.positions[call].start.line == site.line
        ]
        if not calls:
            return Refused(f"line {site.line} of {cells.get(site.cell)} calls no `{called}` that can be rewritten")
        for call in calls:
            module = next((loss for loss in known if loss.path == stands_for), None)
            if module is None and (why := _not_torchs(cells.beside(cells.get(site.cell)), called)) is not None:
                return Refused(why)
            loss = _of_function(parsed, call) if module is None else _of_module(parsed, call, called, module)
            if isinstance(loss, Refused):
                return loss
            out.append(loss)
    return out


def _not_torchs(cells: Cells, called: str) -> str | None:
    if import_lines.qualified_name(cells, called) != "torch.nn.functional.cross_entropy":
        return f"whether `{called}` is torch's cross_entropy cannot be told from the cells"
    return None


def _of_function(parsed: rewriting.ParsedCell, call: cst.Call) -> _Loss | Refused:
    """Return the loss that a call of ``F.cross_entropy`` takes."""
    positions = ("logits", "targets", "weight")
    arguments: dict[str, cst.BaseExpression] = {}
    for at, argument in enumerate(call.args):
        keyword = argument.keyword.value if argument.keyword is not None else None
        name = {"input": "logits", "target": "targets"}.get(keyword or "", keyword)
        if argument.star or (name is None and at >= len(positions)):
            return Refused(f"the arguments of `{parsed.code(call)}` cannot be told apart")
        arguments[name or positions[at]] = argument.value
    reduction = arguments.pop("reduction", cst.SimpleString('"mean"'))
    if not isinstance(reduction, cst.SimpleString) or not {"logits", "targets"} <= arguments.keys():
        return Refused(f"how `{parsed.code(call)}` reduces cannot be told from the code")
    if unknown := arguments.keys() - {"logits", "targets", *_OPTIONS}:
        return Refused(f"`{min(unknown)}` of `{parsed.code(call)}` is not an option that chunks can keep")
    if "weight" in arguments and parsed.code(arguments["weight"]) == "None":
        del arguments["weight"]
    return _Loss(call=call, arguments=arguments, reduction=str(reduction.evaluated_value))


def _of_module(parsed: rewriting.ParsedCell, call: cst.Call, called: str, loss: LossFacts) -> _Loss | Refused:
    """Return the loss that a call of an ``nn.CrossEntropyLoss`` takes, its options read from the object."""
    if len(call.args) != 2 or any(argument.star or argument.keyword for argument in call.args):
        return Refused(f"`{parsed.code(call)}` is not given its logits and targets by position")
    if loss.reduction is None:
        return Refused(f"how `{called}` reduces cannot be told")
    arguments = dict(zip(("logits", "targets"), (argument.value for argument in call.args), strict=True))
    used = {
        "weight": loss.weighted,
        "ignore_index": loss.ignore_index not in (None, -100),
        "label_smoothing": loss.label_smoothing != 0.0,
    }
    arguments |= {name: cst.parse_expression(f"{called}.{name}") for name in _OPTIONS if used[name]}
    return _Loss(call=call, arguments=arguments, reduction=loss.reduction)


def _helper(cells: Cells, sites: Sequence[Site], losses: list[_Loss]) -> _Helper | Refused:
    reductions = {loss.reduction for loss in losses}
    if len(reductions) > 1 or len({"weight" in loss.arguments for loss in losses}) > 1:
        return Refused("the cross-entropies of the code are reduced or weighted in different ways")
    (reduction,) = reductions
    if reduction not in ("mean", "sum", "none"):
        return Refused(f"a reduction {reduction!r} is not known")
    used = [name for name in _OPTIONS if any(name in loss.arguments for loss in losses)]
    name = rewriting.fresh_name(_NAME, cells)
    checkpoint = import_lines.name_for("torch.utils.checkpoint", "checkpoint", cells, "recompute")
    imports = [] if import_lines.knows_torch(cells) else ["import torch"]
    imports.append(import_lines.source_of("torch.utils.checkpoint", "checkpoint", checkpoint))
    return _Helper(
        name=name, text=_text(name, checkpoint, _function(cells, sites), reduction, used), imports=tuple(imports)
    )


def _function(cells: Cells, sites: Sequence[Site]) -> str:
    """Return by what text the function is to call torch's ``cross_entropy``: the user's own where there is one."""
    own = [stands for site in sites for stands in site.names[1:] if _not_torchs(cells, stands) is None]
    if own:
        return own[0]
    if _not_torchs(cells, "F.cross_entropy") is None:
        return "F.cross_entropy"
    return "torch.nn.functional.cross_entropy"


def _text(name: str, checkpoint: str, function: str, reduction: str, used: list[str]) -> str:
    parameters = ["logits", "targets", "chunks", *(["weight"] if "weight" in used else [])]
    parameters += [f"{option}={_DEFAULTS[option]}" for option in used if option in _DEFAULTS]
    passed = ['reduction="none"', *(f"{option}={option}" for option in used), "use_reentrant=False"]
    ignored = "ignore_index" if "ignore_index" in used else "-100"
    kind = {"mean": "mean ", "sum": "summed ", "none": ""}[reduction]
    of_rows = " of each row" if reduction == "none" else ""
    lines = [
        f"def {name}({', '.join(parameters)}):",
        f'    """Take the {kind}cross-entropy{of_rows} with the log-probabilities of one chunk of rows at a time."""',
        "    losses = [",
        *_laid_out(f"{checkpoint}(", [function, "*rows", *passed], ")"),
        "        for rows in zip(logits.chunk(chunks), targets.chunk(chunks))",
        "    ]",
    ]
    if reduction == "none":
        lines += ["    return torch.cat(losses)"]
    elif reduction == "sum":
        lines += ["    return torch.cat(losses).sum()"]
    elif "weight" in used:
        lines += [f"    return torch.cat(losses).sum() / weight[targets[targets != {ignored}]].sum()"]
    else:
        lines += [f"    return torch.cat(losses).sum() / (targets != {ignored}).sum()"]
    return "\n".join(lines) + "\n"


def _laid_out(opening: str, arguments: list[str], closing: str) -> list[str]:
    """Return a call within the list, over several lines where it is too long for one."""
    outer, inner = " " * 8, " " * 12
    joined = ", ".join(arguments)
    if len(line := f"{outer}{opening}{joined}{closing}") <= _LONGEST:
        return [line]
    inside = [f"{inner}{joined}"]
    if len(inside[0]) > _LONGEST:
        inside = [f"{inner}{argument}," for argument in arguments]
    return [f"{outer}{opening}", *inside, f"{outer}{closing}"]


def _call(loss: _Loss, name: str, chunks: int) -> cst.Call:
    """Return the call of the function, laid out as the call was: what the function takes beside comes behind."""
    old = loss.call
    own = {id(value) for value in loss.arguments.values()}
    args = [_renamed(at, arg) for at, arg in enumerate(old.args) if id(arg.value) in own]
    given = {id(arg.value) for arg in args}
    new = {"chunks": cst.Integer(str(chunks))} | {n: v for n, v in loss.arguments.items() if id(v) not in given}
    args[2:2] = [_named(cst.Arg(value), keyword) for keyword, value in new.items()]
    between = _line_of(old.args[0].comma, cst.TrailingWhitespace())
    args = [arg.with_changes(comma=_line_of(between, _line(arg.comma))) for arg in args]
    last = args[-1].with_changes(comma=_line_of(old.args[-1].comma, cst.TrailingWhitespace()))
    return old.with_changes(func=cst.Name(name), args=[*args[:-1], last])


def _renamed(at: int, arg: cst.Arg) -> cst.Arg:
    """Return an argument of ``cross_entropy`` as the function takes it, by position only logits and targets."""
    keyword = arg.keyword.value if arg.keyword is not None else ("", "", "weight")[at]
    return _named(arg, {"input": "logits", "target": "targets"}.get(keyword, keyword)) if keyword else arg


def _named(arg: cst.Arg, keyword: str) -> cst.Arg:
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return arg.with_changes(keyword=cst.Name(keyword), equal=arg.equal if arg.keyword is not None else tight)


def _line(comma: cst.Comma | cst.MaybeSentinel) -> cst.TrailingWhitespace:
    """Return what stands behind a comma on its line."""
    after = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    return after.first_line if isinstance(after, cst.ParenthesizedWhitespace) else cst.TrailingWhitespace()


def _line_of(comma: cst.Comma | cst.MaybeSentinel, line: cst.TrailingWhitespace) -> cst.Comma | cst.MaybeSentinel:
    """Return a comma with this behind it, where another line follows."""
    after = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    if not isinstance(comma, cst.Comma) or not isinstance(after, cst.ParenthesizedWhitespace):
        return comma
    return comma.with_changes(whitespace_after=after.with_changes(first_line=line))


def _spaced(module: cst.Module, name: str) -> cst.Module:
    """Return the module with two blank lines around the function of this name at its top level."""
    body = list(module.body)
    at = next(i for i, node in enumerate(body) if isinstance(node, cst.FunctionDef) and node.name.value == name)
    for place in (at, at + 1):
        if 0 < place < len(body):
            comments = [line for line in body[place].leading_lines if line.comment is not None]
            body[place] = body[place].with_changes(
                leading_lines=[cst.EmptyLine(indent=False), cst.EmptyLine(indent=False), *comments]
            )
    return module.with_changes(body=body)
