"""Which names still carry a value, statement by statement, in the order in which statements run.

A name that is surely bound to something else carries nothing any more: one that each step of a training loop binds anew
is no way from an evaluation into the next step. What may not happen lets go of nothing: branches, loops that may run no
time, what a jump or an error leaves out, and blocks of a ``with`` that may swallow an error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from oomdoctor.program.names import call_name
from oomdoctor.program.naming import names_captured

__all__ = ["Passage"]

_TRIES: Final = (ast.Try, ast.TryStar)
_RAISING_ON: Final = frozenset(
    {"no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "autocast", "tqdm", "trange", "record_function"}
    | {"profile", "device", "sdpa_kernel", "open", "accumulate", "save_on_cpu", "no_sync"}
)
"""Contexts that let every error through."""


class Passage:
    """One way through statements.

    Args:
        names: those that carry the value at the beginning.
        spread: returns names, with those that get the value where nodes run while these names have it.
        carries: whether an expression has the value while these names have it.

    Attributes:
        met: each statement and each head of a block, with the names that may carry the value there.
    """

    def __init__(
        self,
        names: set[str],
        spread: Callable[[ast.AST, set[str]], set[str]],
        carries: Callable[[ast.expr, set[str]], bool],
    ) -> None:
        self._spread, self._carries = spread, carries
        self._ever, self._jumped = set(names), set[str]()
        self._now = set(names)
        self._met: dict[int, tuple[ast.AST, set[str]]] = {}

    @property
    def now(self) -> set[str]:
        """The names that carry it behind what was gone through."""
        return self._now

    @property
    def ever(self) -> set[str]:
        """The names that carry it anywhere."""
        return self._ever

    @property
    def met(self) -> Iterator[tuple[ast.stmt, set[str]]]:
        """The statements, heads of blocks as statements of their own, and the names that carry it there."""
        for node, names in self._met.values():
            yield (node if isinstance(node, ast.stmt) else ast.Expr(node)), names  # type: ignore[arg-type]

    def through(self, body: Iterable[ast.stmt]) -> None:
        """Go on through ``body``; a jump in it may lead to any place behind it."""
        for node in body:
            self._now = self._statement(node, self._now) | self._jumped

    def _block(self, body: Iterable[ast.stmt], names: set[str]) -> set[str]:
        for node in body:
            names = self._statement(node, names)
        return names

    def _meet(self, node: ast.AST, names: set[str]) -> set[str]:
        found = self._spread(node, names)
        self._met[id(node)] = node, self._met.get(id(node), (node, set()))[1] | found
        self._ever |= found
        return found

    def _statement(self, node: ast.stmt, names: set[str]) -> set[str]:
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return self._loop(node, names)
        if isinstance(node, ast.If):
            names = self._meet(node.test, names)
            return self._block(node.body, names) | self._block(node.orelse, names)
        if isinstance(node, ast.Match):
            names = self._meet(node.subject, names)
            if self._carries(node.subject, names):
                names = names | {name for part in ast.walk(node) for name in names_captured(part)}
            return names.union(*(self._block(case.body, names) for case in node.cases))
        if isinstance(node, ast.With | ast.AsyncWith):
            return self._with(node, names)
        if isinstance(node, _TRIES):
            return self._try(node, names)
        return self._simple(node, names)

    def _simple(self, node: ast.stmt, names: set[str]) -> set[str]:
        found = self._meet(node, names)
        if isinstance(node, ast.Break | ast.Continue):
            self._jumped |= found
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if self._carries(node.value, found):
                return found
            return found - _plain(node.targets if isinstance(node, ast.Assign) else [node.target])
        return found - _plain(node.targets) if isinstance(node, ast.Delete) else found

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, names: set[str]) -> set[str]:
        outside, self._jumped = self._jumped, set()
        head = set(names)
        entered: set[str] | None = None
        while head != entered:
            entered = head
            head = self._meet(node.test if isinstance(node, ast.While) else node.iter, head)
            inside = head
            if not isinstance(node, ast.While):
                bound = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
                inside = head | bound if self._carries(node.iter, head) else head - _plain([node.target])
            head = head | self._block(node.body, inside) | self._jumped
        after = head | self._block(node.orelse, head)
        self._jumped = outside
        return after

    def _with(self, node: ast.With | ast.AsyncWith, names: set[str]) -> set[str]:
        for item in node.items:
            names = self._meet(item.context_expr, names)
            if item.optional_vars is not None and self._carries(item.context_expr, names):
                names = names | {part.id for part in ast.walk(item.optional_vars) if isinstance(part, ast.Name)}
        after = self._block(node.body, names)
        is_raising = all(call_name(item.context_expr).rpartition(".")[2] in _RAISING_ON for item in node.items)
        return after if is_raising else after | self._ever

    def _try(self, node: ast.Try | ast.TryStar, names: set[str]) -> set[str]:
        after = self._block(node.orelse, self._block(node.body, names))
        for handler in node.handlers:
            after = after | self._block(handler.body, names | self._ever)
        self._block(node.finalbody, after | self._ever)
        return self._block(node.finalbody, after)


def _plain(targets: Iterable[ast.expr]) -> set[str]:
    """Return the names among targets, those in tuples and lists included."""
    found: set[str] = set()
    for target in targets:
        if isinstance(target, ast.Name):
            found.add(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            found |= _plain(target.elts)
        elif isinstance(target, ast.Starred):
            found |= _plain([target.value])
    return found
