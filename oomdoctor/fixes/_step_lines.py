"""The step of a training loop as lines: from the first that runs a model on, to be put under a ``with`` or changed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from oomdoctor.fixes._terms import Unfit, need
from oomdoctor.model.code import TrainingLoop
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import loop_at
from oomdoctor.program.magics import Loop
from oomdoctor.program.names import own_nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLines:
    """The body of a loop, in two forms that go side by side.

    Attributes:
        loop: the loop, and ``node``: the same as ``ast`` has it.
        lines: the statements of its body, each on a line of its own, as those of ``node`` are.
        first: which of them runs a model first.
    """

    parsed: rewriting.ParsedCell
    loop: cst.For | cst.While
    node: Loop
    lines: Sequence[cst.BaseStatement]
    first: int

    def under(self, context: str, last: int) -> cst.For | cst.While:
        """Return the loop with ``with context:`` around its lines from the first that runs a model to ``last``."""
        block = under(self.parsed, context, self.lines[self.first : last + 1])
        return self._of([*self.lines[: self.first], block, *self.lines[last + 1 :]])

    def preceded_by(self, line: str) -> cst.For | cst.While:
        """Return the loop with a line before the one that runs a model first."""
        new = preceded(self.lines[self.first], line, self.parsed)
        return self._of([*self.lines[: self.first], *new, *self.lines[self.first + 1 :]])

    def _of(self, lines: Sequence[cst.BaseStatement]) -> cst.For | cst.While:
        return self.loop.with_changes(body=rewriting.block(self.loop.body, lines))


def preceded(old: cst.BaseStatement, text: str, parsed: rewriting.ParsedCell) -> list[Any]:
    """Return the statements of ``text`` and then ``old``, whose comments stand before all of them."""
    first, *rest = rewriting.statements(f"{text}\n", parsed)
    first = first.with_changes(leading_lines=getattr(old, "leading_lines", ()))
    return [first, *rest, old.with_changes(leading_lines=())]


def under(parsed: rewriting.ParsedCell, context: str, lines: Sequence[cst.BaseStatement]) -> cst.With:
    """Return ``with context:`` around statements that stand on lines of their own."""
    first, *rest = lines
    (head,) = rewriting.statements(f"with {context}:\n    pass\n", parsed)
    block = cst.ensure_type(head, cst.With).with_changes(leading_lines=getattr(first, "leading_lines", ()))
    body = [first.with_changes(leading_lines=()), *rest]
    return block.with_changes(body=cst.ensure_type(block.body, cst.IndentedBlock).with_changes(body=body))


def step_lines(parsed: rewriting.ParsedCell, facts: TrainingLoop, runners: Collection[str] = ()) -> StepLines:
    """Return the body of a loop, in which ``runners`` run a model as well as the models themselves."""
    loop, node = rewriting.loop_at(parsed, facts.line), loop_at(parsed.tree, facts.line)
    if loop is None or node is None:
        raise Unfit(f"{facts.where} is not a loop that can be rewritten")
    running = (at for at, one in enumerate(node.body) if runs(one, {*facts.models, *runners}))
    first = need(next(running, None), "the model is not called by a statement of the loop itself")
    return StepLines(parsed=parsed, loop=loop, node=node, lines=rewriting.lines_apart(loop), first=first)


def runs(node: ast.AST, runners: Collection[str]) -> bool:
    """Whether ``node`` calls one of these, or hands one over to what it calls."""
    return any(
        ast.unparse(part.func) in runners or any(ast.unparse(arg) in runners for arg in part.args)
        for part in own_nodes([node])
        if isinstance(part, ast.Call)
    )
