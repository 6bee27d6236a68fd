"""Writes one training loop anew from the plan of its step."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TypeVar

import libcst as cst

from oomdoctor.fixes._samples import CannotSplit, Shape
from oomdoctor.fixes._step import Step
from oomdoctor.model.session import Cells
from oomdoctor.program import rewriting
from oomdoctor.program.import_lines import knows_torch

__all__ = ["Writer"]

_Node = TypeVar("_Node", bound=cst.CSTNode)


class Writer:
    """Writes one loop anew from its plan.

    Args:
        by: the name of ``batch_parts``, where the batch is more than tensors or the step draws random numbers.
    """

    def __init__(self, cells: Cells, parsed: rewriting.ParsedCell, step: Step, parts: int, by: str = "") -> None:
        self._parsed, self._step, self._parts, self._by = parsed, step, parts, by
        self._taken: list[str] = []
        self._cells = cells
        self._micro = {name: self._fresh(f"micro_{name}") for name in step.names}
        self._sum = self._fresh("batch_loss") if step.keeps_loss else ""
        self._sums = {name: self._fresh(f"batch_{name}") for name, _ in step.summed}
        self._lists = {name: self._fresh(f"{name}_parts") for name in step.gathered}

    def _fresh(self, stem: str) -> str:
        self._taken.append(rewriting.fresh_name(stem, self._cells, self._taken))
        return self._taken[-1]

    def loop(self, old: cst.For | cst.While) -> rewriting.Statement:
        """Return ``old`` with its body taken apart.

        Raises:
            CannotSplit: what is used after the step cannot be put together again.
        """
        lines = rewriting.lines_apart(old)
        step = self._step
        start = [f"{self._sum} = 0.0"] if self._sum else []
        start += [f"{total} = 0.0" for total in self._sums.values()]
        start += [f"{parts} = []" for parts in self._lists.values()]
        end = [f"{step.loss} = {self._sum}"] if self._sum else []
        end += [f"{name} = {total}" for name, total in self._sums.items()]
        end += [f"{name} = torch.cat({parts})" for name, parts in self._lists.items()]
        if self._lists and not knows_torch(self._cells):
            raise CannotSplit(
                f"`{next(iter(self._lists))}` is used after the step, and `torch` is not imported to join it"
            )
        inner = [lines[place] for place in step.inner]
        inner[0], gap = _without_gap(inner[0])
        opened = [*self._statements(start), self._inner(inner)]
        opened[0] = opened[0].with_changes(leading_lines=(*gap, *opened[0].leading_lines))
        new = [
            *(lines[place] for place in step.before),
            *opened,
            *self._statements(end),
            *(lines[place] for place in step.after),
            *lines[max(step.inner) + 1 :],
        ]
        return old.with_changes(body=rewriting.block(old, new))

    def _inner(self, lines: list[cst.BaseStatement]) -> rewriting.Statement:
        step = self._step
        head, first = self._head()
        *forward, backward = _renamed(cst.IndentedBlock(body=lines), self._micro).body
        body = [*self._statements(first), *forward, *self._weighted(backward)]
        if step.keeps_loss:
            body += self._statements([f"{self._sum} += {step.loss}.detach()"])
        for name, is_mean in step.summed:
            share = f" * ({self._share()})" if is_mean else ""
            body += self._statements([f"{self._sums[name]} += {name}.detach(){share}"])
        body += self._statements([f"{parts}.append({name}.detach())" for name, parts in self._lists.items()])
        comment = f"# In {self._parts} parts: the gradients of the whole batch, the activations of one part at a time."
        (loop,) = self._statements([f"{head}:", "    pass"])
        loop = cst.ensure_type(loop, cst.For)
        above = cst.EmptyLine(comment=cst.Comment(comment))
        return loop.with_changes(leading_lines=(above,), body=loop.body.with_changes(body=body))

    def _head(self) -> tuple[str, list[str]]:
        """Return the head of the inner loop and the statements that it begins with."""
        step, first = self._step, list[str]()
        head = f"for {', '.join(self._micro.values())} in "
        if self._by:
            head += f"{self._by}({self._parts}, {', '.join(step.names)})"
            if step.kind == "dict" and not step.key and step.form.counted is None:  # it may be emptied in the step
                self._rows = self._fresh("rows")
                first = [f"{self._rows} = len(next(iter({self._micro[step.names[0]]}.values())))"]
        else:
            chunks = [f"{name}.chunk({self._parts})" for name in step.names]
            head += chunks[0] if len(chunks) == 1 else f"zip({', '.join(chunks)}, strict=True)"
        if step.form.counted is not None:
            if self._lists:
                raise CannotSplit("the loss passes over some targets, and results are used after the step")
            self._kept = self._fresh("counted")
            first += [f"{self._kept} = {self._counts(micro=True)}", f"if not {self._kept}:", "    continue"]
        return head, first

    def _counts(self, *, micro: bool) -> str:
        target, ignored = self._step.form.counted or ("", "0")
        names = {node.id for node in ast.walk(ast.parse(target)) if isinstance(node, ast.Name)}
        if not names <= set(self._step.names):
            raise CannotSplit(f"`{target}`, whose entries of {ignored} do not count, is not a part of the batch itself")
        text = self._quoted(target)
        if micro:
            text = _renamed(cst.parse_module(text), self._micro).code
        return f"({text} != {ignored}).sum()"

    def _quoted(self, text: str) -> str:
        """Return a text with the quotes that the cell has most of."""
        doubly = self._parsed.source.count('"') > self._parsed.source.count("'")
        return text.replace("'", '"') if doubly else text

    def _share(self) -> str:
        step = self._step
        if step.form.counted is not None:
            return f"{self._kept} / {self._counts(micro=False)}"
        name, micro = next(iter(self._micro.items()))
        if step.key:
            key = self._quoted(step.key)
            return f"len({micro}[{key}]) / len({name}[{key}])"
        if step.kind == "dict":
            return f"{self._rows} / len(next(iter({name}.values())))"
        item = "[0]" if step.kind == "list" else ""
        return f"len({micro}{item}) / len({name}{item})"

    def _weighted(self, backward: cst.BaseStatement) -> list[cst.BaseStatement]:
        """Return ``backward`` with the loss of a part weighted by its share of the batch; sums have no weight."""
        if self._step.form.shape is Shape.SUM:
            return [backward]
        call = cst.ensure_type(cst.ensure_type(backward, cst.SimpleStatementLine).body[0], cst.Expr).value
        inner = _loss_node(cst.ensure_type(call, cst.Call))
        name = self._step.loss or self._fresh("loss")
        text = cst.Module([]).code_for_node(inner)
        value = text if self._step.loss else f"({text})"
        (weigh,) = self._statements([f"{name} = {value} * ({self._share()})"])
        line = cst.ensure_type(backward, cst.SimpleStatementLine)
        called = cst.ensure_type(line.with_changes(leading_lines=()).deep_replace(inner, cst.Name(name)), type(line))
        return [weigh.with_changes(leading_lines=line.leading_lines), called]

    def _statements(self, lines: Sequence[str]) -> tuple[rewriting.Statement, ...]:
        return rewriting.statements("\n".join(lines) + "\n", self._parsed) if lines else ()


def _without_gap(line: cst.BaseStatement) -> tuple[cst.BaseStatement, Sequence[cst.EmptyLine]]:
    """Return a statement without the blank lines above it and above its comments, and those lines."""
    above = list(getattr(line, "leading_lines", ()))
    blank = next((at for at, one in enumerate(above) if one.comment is not None), len(above))
    return line.with_changes(leading_lines=above[blank:]), above[:blank]


def _loss_node(call: cst.Call) -> cst.BaseExpression:
    """Return the expression that ``backward`` is called on: ``loss``, also in ``scaler.scale(loss).backward()``."""
    if call.args:
        return call.args[0].value
    receiver = cst.ensure_type(call.func, cst.Attribute).value
    if (
        isinstance(receiver, cst.Call)
        and isinstance(receiver.func, cst.Attribute)
        and receiver.func.attr.value == "scale"
    ):
        return receiver.args[0].value
    return receiver


def _renamed(node: _Node, names: Mapping[str, str]) -> _Node:
    return cst.ensure_type(node.visit(_Rename(names)), type(node))


class _Rename(cst.CSTTransformer):
    """Renames variables, and leaves attributes and keywords of the same name alone."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:  # noqa: N802
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:  # noqa: N802
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:  # noqa: N802
        return updated_node.with_changes(value=self._names.get(updated_node.value, updated_node.value))
