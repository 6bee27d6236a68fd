"""Which names a text writes items into: ``x[0] = 1``, ``x[0].y = 1``, ``x.sort()``, ``shuffle(x)``, and views of them.

Told from the text alone, so of a path it knows the last name: ``rows`` of ``data.rows[3]``. What a function writes into
its own argument is not followed back to the caller.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from textwrap import dedent
from types import CodeType
from typing import Final

from oomdoctor.program.magics import parsed
from oomdoctor.program.names import call_name

__all__ = ["given_names", "last_name", "names_written_by", "written_names"]

_METHODS: Final = frozenset(
    {
        *("sort", "reverse", "insert", "pop", "popitem", "popleft", "remove", "clear", "update", "setdefault", "add"),
        *("discard", "rotate", "move_to_end", "subtract", "intersection_update", "difference_update", "__setitem__"),
        *("symmetric_difference_update", "fill", "put", "partition", "resize", "itemset", "setfield", "byteswap"),
    }
)
"""Methods that change their object, beside those that make it longer."""
_GROWING: Final = frozenset({"append", "extend", "appendleft", "extendleft"})
_FUNCTIONS: Final = frozenset(
    {
        *("shuffle", "insort", "insort_left", "insort_right", "heapify", "heappush", "heappop", "heapreplace"),
        *("heappushpop", "copyto", "place", "put", "putmask", "fill_diagonal", "put_along_axis", "setitem", "at"),
        *("memmove", "memset"),
    }
)
"""Functions that change an argument."""
_VIEWS: Final = frozenset(
    {
        *("T", "flat", "real", "imag", "data", "values", "base", "view", "reshape", "ravel", "transpose", "swapaxes"),
        *("squeeze", "from_numpy", "as_tensor", "asarray", "numpy", "memoryview", "detach", "frombuffer", "items"),
        *("enumerate", "zip", "reversed", "iter", "islice"),
    }
)
"""What gives other access to the same items."""
_SUBSCRIPTS: Final = re.compile(r"\[[^\]]*\]")


def last_name(path: str) -> str:
    """Return the last name of a path: ``rows`` of ``data.rows[3]``."""
    return re.split(r"[. ]", _SUBSCRIPTS.sub("", path))[-1]


@lru_cache(maxsize=256)
def written_names(source: str) -> frozenset[str]:
    """Return the names that ``source``, its functions included, writes items into."""
    nodes = _nodes(source)
    written = {name for node in nodes for name in _written_by(node)}
    # What grows shows that in its length, but not the container that it is an item of.
    grown = {name for node in nodes for name in _grown_by(node)}
    aliases = [alias for node in nodes for alias in _aliases(node)]
    while True:
        more = {name for made, of, _ in aliases if made & written for name in of - written}
        more |= {name for made, of, is_item in aliases if is_item and made & grown for name in of - written}
        longer = {name for made, of, is_item in aliases if not is_item and made & grown for name in of - grown}
        if not more and not longer:
            return frozenset(written)
        written |= more
        grown |= longer


@lru_cache(maxsize=64)
def given_names(source: str) -> frozenset[str]:
    """Return the names that ``source`` hands to functions, which may write into them."""
    calls = [node for node in _nodes(source) if isinstance(node, ast.Call)]
    handed = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    return frozenset(name for one in handed for name in _items_of(one))


def names_written_by(code: CodeType) -> frozenset[str]:
    """Return the names that a function writes items into, none where its text is not known."""
    try:
        lines = inspect.getblock(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :])
    except (SyntaxError, IndexError, ValueError):
        return frozenset()
    return written_names(dedent("".join(lines)))


def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source) or ast.Module(body=[], type_ignores=[])))


def _written_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        yield from _items_of(node.value)
    elif isinstance(node, ast.AugAssign):
        yield from _items_of(node.target)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else call_name(node)
        is_in_place = name[-1:] == "_" and name[-2:] != "__"  # as torch names its methods
        is_of_item = name in _GROWING and isinstance(node.func, ast.Attribute) and _lies_in_another(node.func.value)
        if isinstance(node.func, ast.Attribute) and (name in _METHODS or is_in_place or is_of_item):
            yield from _items_of(node.func.value)
        if name in _FUNCTIONS or is_in_place:
            yield from (found for one in node.args for found in _items_of(one))
        yield from (found for one in node.keywords if one.arg == "out" for found in _items_of(one.value))


def _grown_by(node: ast.AST) -> Iterator[str]:
    """Yield the name of a container that is made longer; one that lies in another is that one's item."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWING:
        if _lies_in_another(node.func.value):
            return
        yield from _items_of(node.func.value)


def _lies_in_another(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return not isinstance(node, ast.Name)


def _aliases(node: ast.AST) -> Iterator[tuple[set[str], set[str], bool]]:
    """Yield the names that a statement binds, those whose items they may share, and whether they may be items."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        return
    for target, value in pairs:
        is_item = not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) or _lies_in_another(value)
        yield set(_items_of(target)), set(_items_of(value)), is_item


def _items_of(node: ast.AST) -> Iterator[str]:
    """Yield the names of what an expression is, or is a part or a view of."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        if node.attr in _VIEWS:
            yield from _items_of(node.value)
        else:
            yield node.attr
            if isinstance(node.value, (ast.Subscript, ast.Call)):  # it lies in an item
                yield from _items_of(node.value)
    elif isinstance(node, (ast.Subscript, ast.Starred)):
        yield from _items_of(node.value)
    elif isinstance(node, (ast.Tuple, ast.List)):
        yield from (name for one in node.elts for name in _items_of(one))
    elif isinstance(node, ast.IfExp):
        yield from (*_items_of(node.body), *_items_of(node.orelse))
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else call_name(node)
        if name in _VIEWS:
            yield from (found for one in node.args for found in _items_of(one))
            if isinstance(node.func, ast.Attribute):
                yield from _items_of(node.func.value)
