"""Keywords of a call, written in the style in which the call is written."""

from __future__ import annotations

import libcst as cst

__all__ = ["with_keyword"]


def with_keyword(call: cst.Call, keyword: str, value: cst.BaseExpression, after: str) -> cst.Call:
    """Return ``call`` with ``keyword``: where it stands, else behind the keyword ``after``, else at the end."""
    args = list(call.args)
    names = [arg.keyword.value if arg.keyword is not None else None for arg in args]
    if keyword in names:
        at = names.index(keyword)
        args[at] = args[at].with_changes(value=value)
        return call.with_changes(args=args)
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    equal = next((arg.equal for arg in args if isinstance(arg.equal, cst.AssignEqual)), tight)
    new = cst.Arg(keyword=cst.Name(keyword), value=value, equal=equal)
    at = names.index(after) + 1 if after in names else len(args)
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
