"""Which names a cell's text or a function's code mentions, and which attributes and items of others it writes.

``torch.foo = 1``, ``F.gelu += 1``, ``del torch.foo`` and ``setattr(torch, "foo", 1)`` are assignments to attributes.
The names of a function are read from its code, once for each, as it is asked about before each cell; what it writes is
read from its text. What is assigned by way of an attribute of an object, an item or an argument is not seen.

Items are written by ``x[0] = 1``, ``x[0].y = 1``, ``x.sort()``, ``shuffle(x)`` and through views of them: told from the
text alone, so that of a path the last name is known, ``rows`` of ``data.rows[3]``. What a function writes into its own
argument is not followed back to the caller.

Of loops it is told which lines make a name hold more in each round: a list, a dict, a frame or an array. What grows in
a function of a library, or by an attribute of an object of the user's, has no line.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dis import get_instructions, opmap
from functools import cached_property, lru_cache
from textwrap import dedent
from types import CodeType
from typing import Final, NamedTuple

from oomdoctor.program.compiled import with_inner
from oomdoctor.program.magics import Loop, tree_of
from oomdoctor.program.names import call_name, imported, read_names, root_of
from oomdoctor.program.torch_functions import word_list

EVERYTHING: Final[frozenset[str]] = frozenset({"*"})
"""Stands for all names."""
ANY_NAME: Final = "*"
"""Stands for the name of an attribute that the text does not tell."""
_BARE: Final = word_list("python", "everything_alone")
_ANYWHERE: Final = word_list("python", "everything")
_SHOWN: Final = word_list("python", "shown")
_MAGIC: Final = re.compile(r"^\s*[%!?]|[=(,]\s*[%!]|\?\s*$|\b_\d+\b|sys\s*\.\s*modules", re.MULTILINE)
_MAY_WRITE: Final = re.compile("STORE_SUBSCR|STORE_SLICE|CALL|BINARY_OP")
"""Instructions that may change what a name stands for in place."""
_WORDS: Final = re.compile(r"\w+")
_ALONE: Final = re.compile(r"(?<![.\w])\w+")
_GLOBAL: Final = ("_GLOBAL", "_GLOBALS", "_NAME")
_STORES: Final = frozenset({opmap["STORE_ATTR"], opmap["DELETE_ATTR"]})
_BY_NAME: Final = frozenset({"setattr", "delattr"})
_METHODS: Final = word_list("python", "changing_methods")
_GROWING: Final = word_list("python", "growing_methods")
_FUNCTIONS: Final = word_list("python", "changing_functions")
_VIEWS: Final = word_list("python", "views")
_SUBSCRIPTS: Final = re.compile(r"\[[^\]]*\]")


class AttributeWrite(NamedTuple):
    """An assignment to the attribute ``name`` of ``path``; ``imports`` tells the names that the same code imports."""

    path: str
    name: str
    imports: Mapping[str, str]


def mentioned(source: str) -> frozenset[str]:
    """Return the words of a cell's text, its strings and comments included: a name may be looked up by its text."""
    if not source.isascii():  # as Python reads identifiers
        source = f"{source}\n{unicodedata.normalize('NFKC', source)}"
    words = frozenset(_WORDS.findall(source))
    if _MAGIC.search(source) or not _ANYWHERE.isdisjoint(words):
        return EVERYTHING
    if not _BARE.isdisjoint(words) and not _BARE.isdisjoint(_ALONE.findall(source)):
        return EVERYTHING
    if not _SHOWN.isdisjoint(words) and not _SHOWN.isdisjoint(read_names(source)):
        return EVERYTHING
    return words


@lru_cache(maxsize=64)
def attributes_written(source: str) -> tuple[AttributeWrite, ...]:
    """Return the assignments to attributes in a cell."""
    nodes = list(ast.walk(tree_of(source)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    imports = dict(pair for node in nodes if not getattr(node, "level", 0) for pair in imported(node))
    found = [(call_name(node.value), node.attr) for node in attributes if not isinstance(node.ctx, ast.Load)]
    for node in nodes:
        if isinstance(node, ast.Call) and call_name(node) in _BY_NAME and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ANY_NAME
            if type(name) is str:
                found.append((call_name(node.args[0]), name))
    return tuple(AttributeWrite(path, name, imports) for path, name in dict.fromkeys(found) if path)


class CodeNames:
    """The names of a function's code, and of the functions in it; each kind is read when it is first asked for."""

    def __init__(self, code: CodeType) -> None:
        self.codes = tuple(with_inner(code))

    @cached_property
    def names(self) -> frozenset[str]:
        """All names that are no locals: globals, attributes, imports."""
        return frozenset(name for code in self.codes for name in code.co_names)

    @cached_property
    def loaded(self) -> frozenset[str]:
        """The globals."""
        steps = (step for code in self.codes for step in get_instructions(code))
        return frozenset(step.argval for step in steps if step.opname.endswith(_GLOBAL))

    @cached_property
    def mentioned(self) -> frozenset[str]:
        """The globals that it may get at: all where it may get at any."""
        texts = (text for code in self.codes for text in code.co_consts if type(text) is str)
        if not (_BARE | _SHOWN).isdisjoint(self.loaded) or not _ANYWHERE.isdisjoint(self.names):
            return EVERYTHING
        if {"sys", "modules"} <= self.names or any("__main__" in _WORDS.findall(text) for text in texts):
            return EVERYTHING
        return self.loaded

    @cached_property
    def written(self) -> tuple[AttributeWrite, ...]:
        """The assignments to attributes, none where the text is not known."""
        may = (not _STORES.isdisjoint(code.co_code[::2]) or _BY_NAME & {*code.co_names} for code in self.codes)
        return attributes_written(_text_of(self.codes[0])) if any(may) else ()


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> CodeNames:
    """Return the names of ``code``; they are read once for each."""
    return CodeNames(code)


def last_name(path: str) -> str:
    """Return the last name of a path: ``rows`` of ``data.rows[3]``."""
    return re.split(r"[. ]", _SUBSCRIPTS.sub("", path))[-1]


@lru_cache(maxsize=256)
def written_names(source: str) -> frozenset[str]:
    """Return the names that ``source``, its functions included, writes items into."""
    nodes = list(ast.walk(tree_of(source)))
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
    calls = [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call)]
    handed = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    return frozenset(name for one in handed for name in _items_of(one))


def names_written_by(code: CodeType) -> frozenset[str]:
    """Return the names that a function writes items into: all that it has where its text is not known and it may."""
    if text := _text_of(code):
        return written_names(text)
    codes = list(with_inner(code))
    writes = any(_MAY_WRITE.match(one.opname) for inner in codes for one in dis.get_instructions(inner))
    names = (name for inner in codes for name in (*inner.co_names, *inner.co_varnames, *inner.co_freevars))
    return frozenset(names if writes else ())


def _text_of(code: CodeType) -> str:
    """Return the text of a function, nothing where it is not known."""
    try:
        lines = inspect.getblock(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :])
    except (SyntaxError, IndexError, ValueError):
        return ""
    return dedent("".join(lines))


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
        if isinstance(target, ast.Subscript) and is_item:
            continue  # an item of one becomes an item of another, whose own items are written far more often
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


@lru_cache(maxsize=1024)
def asserts_at(code: CodeType | None, line: int) -> bool:
    """Tell whether an ``assert`` stands on a line."""
    if code is None:
        return False
    lines, at, raising = dict(dis.findlinestarts(code)), 0, set[int | None]()
    for one in dis.get_instructions(code):
        at = lines.get(one.offset) or at
        if one.opname == "LOAD_ASSERTION_ERROR" or one.argrepr == "AssertionError":
            raising.add(at)
    return line in raising


_ADDS: Final = word_list("python", "adding_methods")


@lru_cache(maxsize=64)
def growing(source: str) -> dict[str, int]:
    """Return the first line in a loop that makes each name of a cell hold more, by the name.

    Those are ``name.append(...)`` and its like, ``name[key] = ...``, ``name += ...``, and ``name = join(name, ...)``.
    """
    found: dict[str, int] = {}
    for loop in ast.walk(tree_of(source)):
        if isinstance(loop, Loop):
            for statement in loop.body:
                for node in ast.walk(statement):
                    for name in filter(None, _filled_by(node)):
                        found[name] = min(found.get(name, node.lineno), node.lineno)  # type: ignore[attr-defined]
    return found


def _filled_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that one node of a loop's body makes hold more."""
    if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS:
            yield root_of(call.func.value)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        yield root_of(node.target)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield root_of(target.value)
            elif isinstance(target, ast.Name) and isinstance(node.value, ast.Call) and _passes(node.value, target.id):
                yield target.id


def _passes(call: ast.Call, name: str) -> bool:
    """Whether a call is given a name, in a list or a tuple too: ``np.concatenate([kept, part])``."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    inner = [item for one in given if isinstance(one, ast.List | ast.Tuple) for item in one.elts]
    return any(isinstance(one, ast.Name) and one.id == name for one in (*given, *inner))
