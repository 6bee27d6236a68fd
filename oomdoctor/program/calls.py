"""The calls that cells make, as values: what is called, with which literals, and where it stands.

What a rule or a fix asks of a program is most often whether it calls something with some setting. Names are the text of
the cells, or what that stands for by their imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from oomdoctor.program.definitions import Program, Scope, place, short, statements
from oomdoctor.program.names import call_name, imported, own_nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call.

    Attributes:
        cell: number of the cell that it stands in; ``line``: where it begins there.
        name: dotted name of what is called, empty where that is not a plain name.
    """

    cell: int
    line: int
    name: str
    _scope: Scope = field(repr=False)
    _node: ast.expr = field(repr=False)

    @property
    def tail(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def receiver(self) -> str:
        """The text of what a method is called on, empty for a plain function."""
        return ast.unparse(self._called.value) if isinstance(self._called, ast.Attribute) else ""

    @property
    def method(self) -> str:
        """The name of the method, or of a plain function."""
        return self._called.attr if isinstance(self._called, ast.Attribute) else ast.unparse(self._called)

    @property
    def _called(self) -> ast.expr:
        return self._node.func if isinstance(self._node, ast.Call) else self._node

    @property
    def place(self) -> str:
        """Where it stands, and its text: ``In[3] line 7: loss.backward()``."""
        return place(self._scope, self._node)

    @property
    def text(self) -> str:
        """Its text on one line, cut where it is long."""
        return short(ast.unparse(self._node))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The texts of what is passed by position."""
        return tuple(map(ast.unparse, getattr(self._node, "args", ())))

    @property
    def keywords(self) -> Mapping[str, str]:
        """The texts of what is passed by keyword, ``**`` among them where names are passed on."""
        return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in self._keywords}

    @property
    def literals(self) -> Mapping[str, object]:
        """What is passed by keyword, ``...`` for what is computed."""
        given = ((one.arg, one.value) for one in self._keywords if one.arg is not None)
        return {name: value.value if isinstance(value, ast.Constant) else ... for name, value in given}

    @property
    def _keywords(self) -> list[ast.keyword]:
        return self._node.keywords if isinstance(self._node, ast.Call) else []


def calls(scopes: Iterable[Scope]) -> Iterator[Call]:
    """Yield the calls of scopes, in the order of the text."""
    for scope in scopes:
        yield from (_call(scope, node) for node in own_nodes(scope.body) if isinstance(node, ast.Call))


def calls_at(program: Program, line: int) -> Iterator[Call]:
    """Yield the calls of the statements on a line of the failing cell."""
    for scope in program.running:
        for statement in statements(scope.body) if scope.cell == program.failing else ():
            if statement.node.lineno <= line <= (statement.node.end_lineno or statement.node.lineno):
                yield from (_call(scope, node) for node in ast.walk(statement.node) if isinstance(node, ast.Call))


def decorators(scopes: Iterable[Scope]) -> Iterator[Call]:
    """Yield the decorators of the functions among scopes."""
    for scope in scopes:
        if scope.function is not None:
            yield from (_call(scope, node) for node in scope.function.node.decorator_list)


def text_of(scope: Scope) -> str:
    """Return the text of a scope's statements, as Python writes them."""
    return "\n".join(map(ast.unparse, scope.body))


def imports_of(program: Program) -> dict[str, str]:
    """Return what the names stand for that the cells import, from wherever."""
    return dict(pair for scope in program.scopes for node in own_nodes(scope.body) for pair in imported(node))


def _call(scope: Scope, node: ast.expr) -> Call:
    return Call(cell=scope.cell, line=node.lineno, name=call_name(node), _scope=scope, _node=node)
