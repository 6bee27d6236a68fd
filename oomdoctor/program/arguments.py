"""Arguments of a call written and taken away, in the style in which the call is written; and where names are bound."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import libcst as cst

from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.model.unavailable import Refused
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import ancestors, assigned
from oomdoctor.program.earlier_cells import node_of
from oomdoctor.program.magics import Loop
from oomdoctor.program.names import call_name, own_nodes, target_names

_SEVERAL: Final = (cst.Tuple, cst.List, cst.Dict, cst.DictComp, cst.ListComp, cst.GeneratorExp, cst.Set)
_ON_HOST: Final = (".cpu()", ".item()", ".tolist()", ".numpy()")


def called_on(value: cst.CSTNode, call: str) -> cst.BaseExpression:
    """Return what a method gives of a value: ``loss.detach()`` for ``loss`` and ``.detach()``."""
    text = cst.Module([]).code_for_node(value)
    bare = isinstance(value, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or bool(getattr(value, "lpar", ()))
    return cst.parse_expression(f"{text if bare else f'({text})'}{call}")


def without_keyword(call: cst.Call, name: str) -> cst.Call:
    """Return ``call`` without what is passed by a keyword; it ends as it did."""
    kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != name]
    if not kept:
        return call.with_changes(args=[], whitespace_before_args=cst.SimpleWhitespace(""))
    if call.args[-1] not in kept:
        kept[-1] = _as_last(kept[-1], call.args[-1])
    return call.with_changes(args=kept)


def _as_last(arg: cst.Arg, last: cst.Arg) -> cst.Arg:
    """Return ``arg`` ended as ``last`` was; a comment behind it stays."""
    before = arg.comma.whitespace_after if isinstance(arg.comma, cst.Comma) else None
    has_comma = isinstance(last.comma, cst.Comma)
    space = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else last.whitespace_after_arg
    if isinstance(before, cst.ParenthesizedWhitespace) and isinstance(space, cst.ParenthesizedWhitespace):
        space = space.with_changes(first_line=before.first_line)
    if has_comma:
        return arg.with_changes(comma=cst.Comma(whitespace_after=space))
    return arg.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=space)


def with_keyword(call: cst.Call, name: str, text: str, after: str | None = None) -> cst.Call:
    """Return ``call`` with ``name=text`` in its style: where it stands, else behind ``after``, else at the end.

    That is a keyword, empty for the first argument by position.
    """
    args, value = list(call.args), cst.parse_expression(text)
    names = [arg.keyword.value if arg.keyword is not None else "" for arg in args]
    if name in names:
        at = names.index(name)
        args[at] = args[at].with_changes(value=value)
        return call.with_changes(args=args)
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    equal = next((arg.equal for arg in args if isinstance(arg.equal, cst.AssignEqual)), tight)
    new = cst.Arg(keyword=cst.Name(name), value=value, equal=equal)
    at = names.index(after) + 1 if after is not None and after in names else len(args)
    if at < len(args):
        space = cst.ensure_type(args[at - 1].comma, cst.Comma).whitespace_after
        new = new.with_changes(comma=cst.Comma(whitespace_after=_without_comment(space)))
        return call.with_changes(args=[*args[:at], new, *args[at:]])
    return call.with_changes(args=[*args[:-1], *_at_end(call, new)])


def _at_end(call: cst.Call, new: cst.Arg) -> list[cst.Arg]:
    """Return the last argument of ``call`` and ``new`` behind it; a comment behind the last one stays with it."""
    if not call.args:
        return [new]
    last = call.args[-1]
    tail = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else last.whitespace_after_arg
    space = _without_comment(_between(call, tail))
    if isinstance(space, cst.ParenthesizedWhitespace) and isinstance(tail, cst.ParenthesizedWhitespace):
        space = space.with_changes(first_line=tail.first_line)
    end = _without_comment(tail)
    if isinstance(last.comma, cst.Comma):
        new = new.with_changes(comma=cst.Comma(whitespace_after=end))
    else:
        new = new.with_changes(whitespace_after_arg=end)
    return [
        last.with_changes(comma=cst.Comma(whitespace_after=space), whitespace_after_arg=cst.SimpleWhitespace("")),
        new,
    ]


def _between(call: cst.Call, tail: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """Return what stands between two arguments of ``call``."""
    if len(call.args) > 1 and isinstance(call.args[-2].comma, cst.Comma):
        return call.args[-2].comma.whitespace_after
    one_each = isinstance(tail, cst.ParenthesizedWhitespace)
    return call.whitespace_before_args if one_each else cst.SimpleWhitespace(" ")


def _without_comment(space: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    return space.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])


def kept_value(line: cst.CSTNode) -> cst.BaseExpression | None:
    """Return what a statement puts into a container or adds to a sum, None where that is not one value."""
    match line:
        case (
            cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(args=[cst.Arg(value=value)]))])
            | cst.SimpleStatementLine(body=[cst.AugAssign(value=cst.List(elements=[cst.Element(value=value)]))])
            | cst.SimpleStatementLine(body=[cst.AugAssign(operator=cst.AddAssign(), value=value)])
            | cst.SimpleStatementLine(body=[cst.Assign(value=cst.ListComp(elt=value))])
            | cst.SimpleStatementLine(body=[cst.Assign(value=cst.BinaryOperation(operator=cst.Add(), right=value))])
        ):
            return value
    return None


def kept_otherwise(cells: Cells, sites: Sequence[Site], call: Callable[[Site], str], several: str) -> Patch | Refused:
    """Return the patch that has each site keep what ``call``, a method as text, gives of its value.

    It is empty where that was done already. ``several`` is said where more than one value is kept.
    """

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New] | Refused:
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for one in here:
            line = rewriting.statement_at(parsed, one.line)
            value = None if line is None else kept_value(line)
            if value is None or isinstance(value, _SEVERAL):
                return Refused(f"line {one.line} of {cells.get(one.cell)} {several} there")
            if not parsed.code(value).endswith(_ON_HOST):
                changes[value] = called_on(value, call(one))
        return changes

    return rewriting.at_sites(cells, sites, change)


class Binding(NamedTuple):
    """An assignment to a name.

    Attributes:
        statement: the assignment, or the statement on whose line it stands.
        value: what it is from, the whole where that is not taken apart as it stands; None where it shares a line.
        whole: the statement after which the name is bound in any case: the assignment, or the branches that it stands
            in where the name is bound outside of its own branch as well.
    """

    statement: rewriting.Statement
    value: cst.BaseExpression | None
    whole: rewriting.Statement


def _is_of_itself(value: ast.expr | None, name: str) -> bool:
    """Return whether a value is what a method of ``name`` returns: of a module, the module."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and call_name(value.func.value) == name


def _is_looped(parsed: rewriting.ParsedCell, node: ast.AST) -> bool:
    return any(isinstance(one, Loop) for one in ancestors(parsed.tree, node))


def last_binding(
    parsed: rewriting.ParsedCell,
    name: str,
    *,
    function: ast.FunctionDef | None = None,
    bound_before: bool = False,
) -> Binding | None:
    """Return the last assignment to ``name`` in the text of the cell, ``name = name.train()`` in a loop apart.

    Args:
        function: one of the cell, where it is assigned to in that.
        bound_before: whether an earlier cell binds the name.
    """
    nodes = (node for node in own_nodes((function or parsed.tree).body) if isinstance(node, ast.Assign | ast.AnnAssign))
    every = [
        (node, value)
        for node in nodes
        for target, value in assigned(node)
        if name in target_names(target) and not (_is_of_itself(value, name) and _is_looped(parsed, node))
    ]
    if not every:
        return None
    node, value = every[-1]
    path = rewriting.path_to(parsed, node.lineno)
    is_line = isinstance(path[-1], cst.SimpleStatementLine)
    above = ancestors(parsed.tree, node)
    whole = path[-1]
    for outer, below in reversed(list(pairwise(above))):
        if isinstance(outer, ast.If | ast.Try):
            # What the branch of the assignment does not bind is bound elsewhere.
            blocks = (outer.body, outer.orelse, getattr(outer, "finalbody", ()))
            branch = next((block for block in blocks if below in block), (below,))
            inside = {id(inner) for one in branch for inner in ast.walk(one)}
            if bound_before or any(id(other) not in inside for other, _ in every):
                whole = next(one for one in path if parsed.lines_of(one).start == outer.lineno)
    found = node_of(parsed, value) if is_line else None
    return Binding(path[-1], found if isinstance(found, cst.BaseExpression) else None, whole)
