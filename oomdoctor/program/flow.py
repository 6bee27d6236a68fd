"""Which names and expressions of one scope carry a value on, told from the text alone.

A name carries it if anything assigned to it anywhere in the scope does: the order of the statements is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from dataclasses import dataclass

from oomdoctor.program.definitions import Scope, target_names
from oomdoctor.program.names import own_nodes

__all__ = ["Flow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The way of one kind of value through a scope.

    Attributes:
        makes: whether a call of what has this text makes such a value.
        stops: methods and functions, by the last part of their name, whose result no longer carries it.
        numbers: likewise by their whole name.
        drops: attributes that do not carry it.
    """

    makes: Callable[[str], bool]
    stops: Container[str]
    numbers: Container[str]
    drops: Container[str]

    def names(self, scope: Scope) -> set[str]:
        """Return the names of the scope that the value may be bound to, found by iterating to a fixpoint."""
        names: set[str] = set()
        while True:
            more = {
                name
                for node in own_nodes(scope.body)
                if isinstance(node, ast.Assign) and self.carries(node.value, names)
                for target in node.targets
                for name in target_names(target)
            }
            if more <= names:
                return names
            names |= more

    def carries(self, value: ast.expr, names: set[str]) -> bool:
        """Whether ``value`` carries it, if ``names`` do."""
        if isinstance(value, ast.Call):
            text = ast.unparse(value.func)
            if text.rpartition(".")[2] in self.stops or text in self.numbers:
                return False
            if self.makes(text):
                return True
            receiver = value.func.value if isinstance(value.func, ast.Attribute) else None
            parts = [*value.args, *(keyword.value for keyword in value.keywords), *([receiver] if receiver else [])]
            return any(self.carries(part, names) for part in parts)
        if isinstance(value, ast.Name):
            return value.id in names
        if isinstance(value, ast.Attribute):
            return value.attr not in self.drops and self.carries(value.value, names)
        if isinstance(value, ast.Compare | ast.Constant | ast.JoinedStr | ast.Lambda):
            return False
        return any(self.carries(child, names) for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))
