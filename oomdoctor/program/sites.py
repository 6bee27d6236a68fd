"""Sites of pieces of code: nodes of the cells' trees as the values that fixes and rules go by."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from oomdoctor.model.site import Site
from oomdoctor.program.definitions import Scope, short

__all__ = ["site"]


def site(kind: str, scope: Scope, node: ast.stmt | ast.expr, names: Iterable[str] = ()) -> Site:
    """Return where ``node`` of ``scope`` stands."""
    return Site(
        kind=kind,
        cell=scope.cell,
        line=node.lineno,
        end_line=node.end_lineno or node.lineno,
        text=short(ast.unparse(node)),
        names=tuple(names),
    )
