"""Writes one region anew from the plan of its step."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import libcst as cst

from oomdoctor.fixes._micro_plan import Step
from oomdoctor.fixes._micro_values import Shape
from oomdoctor.fixes._refusals import Unfit, need
from oomdoctor.model.session import Cells
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound
from oomdoctor.program.import_lines import knows_torch
from oomdoctor.program.regions import Region, backwards_in

_Node = TypeVar("_Node", bound=cst.CSTNode)
Block: TypeAlias = cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite


def block_at(parsed: rewriting.ParsedCell, region: Region) -> Block:
    """Return the block that a region is a stretch of."""
    first = region.block[0]
    for node in parsed.positions:
        if isinstance(node, cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite) and node.body:
            start = parsed.positions[node.body[0]].start
            if (start.line, start.column) == (first.lineno, first.col_offset):
                return node
    raise Unfit("the step is not where it was found before")


class Writer:
    """Writes one region anew from its plan.

    Args:
        by: the name of ``batch_parts``, where it cuts; ``join``: that of ``join_parts``.
        ddp: the expression for the model that DDP wraps, where one is called.
        ending: a line that each part ends with, empty for none.
    """

    def __init__(
        self,
        cells: Cells,
        parsed: rewriting.ParsedCell,
        region: Region,
        step: Step,
        parts: int,
        by: str = "",
        join: str = "",
        ddp: str = "",
        ending: str = "",
    ) -> None:
        self._parsed, self._region, self._step, self._parts, self._by = parsed, region, step, parts, by
        self._join, self._taken, self._cells, self._is_weighed = join, list[str](), cells, False
        self._ddp, self._ending = ddp, [ending] if ending else []
        self._micro = {name: self._fresh(f"micro_{name}") for name in step.names}
        self._sum = self._fresh("batch_loss") if step.keeps_loss else ""
        self._sums = {name: self._fresh(f"batch_{name}") for name in step.summed}
        self._lists = {name: self._fresh(f"{name}_parts") for name in (*step.gathered, *step.carried)}

    def _fresh(self, stem: str) -> str:
        self._taken.append(rewriting.fresh_name(stem, self._cells, self._taken))
        return self._taken[-1]

    def lines(self, lines: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        """Return the statements of the region, given as they were, taken apart."""
        step, self._opening = self._step, self._head()
        start = [f"{self._sum} = 0.0"] if self._sum else []
        start += [f"{self._sums[name]} = {0.0 if is_mean else 0}" for name, (_, is_mean) in step.summed.items()]
        start += [f"{parts} = []" for parts in self._lists.values()]
        end = [f"{step.loss} = {self._sum}"] if self._sum else []
        end += [f"{name} = {total}" for name, total in self._sums.items()]
        joins = {name: self._join if name in step.carried or step.dim else "torch.cat" for name in self._lists}
        end += [f"{name} = {joins[name]}({parts})" for name, parts in self._lists.items()]
        if "torch.cat" in joins.values() and not knows_torch(self._cells):
            raise Unfit(f"`{next(iter(self._lists))}` is used after the step, and `torch` is not imported to join it")
        pairs = list(zip(self._region.body, lines, strict=True))
        of_part = _renamed(cst.IndentedBlock(body=lines), self._micro).body
        inner = self._chosen(list(zip(self._region.body, of_part, strict=True)), "inner")
        # Blank lines above the first statement of a part come to stand above the loop over parts.
        above = list(getattr(inner[0], "leading_lines", ()))
        blank = next((at for at, one in enumerate(above) if one.comment is not None), len(above))
        inner[0] = inner[0].with_changes(leading_lines=above[blank:])
        opened = [*self._statements(start), self._inner(inner)]
        opened[0] = opened[0].with_changes(leading_lines=(*above[:blank], *opened[0].leading_lines))
        before, after = self._chosen(pairs, "before"), self._chosen(pairs, "after")
        return [*before, *opened, *self._statements(end), *after]

    def _chosen(self, pairs: Sequence[tuple[ast.stmt, cst.BaseStatement]], where: str) -> list[cst.BaseStatement]:
        """Return the statements that go to a place, those of a branch with ``backward`` in a branch of their own."""
        found = list[cst.BaseStatement]()
        for at, (node, line) in enumerate(pairs):
            if isinstance(node, ast.Expr) or not backwards_in(node):
                if self._step.places[id(node)] == where:
                    found += self._weighted(node, line) if id(node) in self._step.losses else [line]
                continue
            found += self._share_of_branch(node, [one for one, _ in pairs[:at]]) if where == "inner" else []
            if (branch := self._branch(node, line, where)) is not None:
                found.append(branch)
        return found

    def _share_of_branch(self, node: ast.stmt, before: Sequence[ast.stmt]) -> list[cst.BaseStatement]:
        """Return what weighs a loss that is made before a branch, where backward may not be called."""
        form = next(form for at, form in self._step.losses.items() if at in {id(one) for one in backwards_in(node)})
        made = {name for one in before for name in bound(one)}
        if form.shape is Shape.SUM or self._step.loss not in made:
            return []
        self._is_weighed = True
        return [*self._statements([f"{self._step.loss} = {self._step.loss} * ({self._share()})"])]

    def _branch(self, node: ast.stmt, line: cst.BaseStatement, where: str) -> cst.BaseStatement | None:
        """Return a branch with the statements in it that go to a place, None where there are none."""
        whole = cst.ensure_type(line, cst.If) if isinstance(node, ast.If) else cst.ensure_type(line, cst.With)
        body = self._chosen(list(zip(node.body, rewriting.lines_apart(whole), strict=True)), where)  # type: ignore[attr-defined]
        otherwise = getattr(whole, "orelse", None)
        rest: cst.BaseStatement | None = None
        if isinstance(otherwise, cst.If):
            rest = self._branch(node.orelse[0], otherwise, where)  # type: ignore[attr-defined]
        elif otherwise is not None:
            lines = self._chosen(list(zip(node.orelse, rewriting.lines_apart(otherwise), strict=True)), where)  # type: ignore[attr-defined]
            rest = otherwise.with_changes(body=cst.IndentedBlock(body=lines)) if lines else None
        if not body and rest is None:
            return None
        lines = body or [*self._statements(["pass"])]
        made = whole.with_changes(body=rewriting.block(whole.body, lines))
        if where != "inner":
            made = made.with_changes(leading_lines=())
        return made.with_changes(orelse=rest) if isinstance(whole, cst.If) else made

    def _inner(self, lines: list[cst.BaseStatement]) -> rewriting.Statement:
        step, (head, first) = self._step, self._opening
        end = [f"{self._sum} += {step.loss}.detach()"] if step.keeps_loss else []
        for name, (value, is_mean) in step.summed.items():
            end.append(f"{self._sums[name]} += {value}{f' * ({self._share()})' if is_mean else ''}")
        for name, parts in self._lists.items():
            kept = self._micro[name] if name in step.carried else name if step.dim else f"{name}.detach()"
            end.append(f"{parts}.append({kept})")
        body = [*self._statements(first), *lines, *self._statements([*end, *self._ending])]
        comment = f"# In {self._parts} parts: the gradients of the whole batch, the activations of one part at a time."
        (loop,) = self._statements([f"{head}:", "    pass"])
        loop = cst.ensure_type(loop, cst.For)
        above = cst.EmptyLine(comment=cst.Comment(comment))
        return loop.with_changes(leading_lines=(above,), body=loop.body.with_changes(body=body))

    def _head(self) -> tuple[str, list[str]]:
        step, first = self._step, list[str]()
        head = f"for {', '.join(self._micro.values())} in "
        if self._by:
            dim = f", dim={step.dim}" if step.dim else ""
            ddp = f", ddp={self._ddp}" if self._ddp else ""
            head += f"{self._by}({self._parts}, {', '.join(step.names)}{dim}{ddp})"
            if step.kind == "dict" and not step.key and self._counted is None:  # it may be emptied in the step
                self._rows = self._fresh("rows")
                first = [f"{self._rows} = len(next(iter({self._micro[step.names[0]]}.values())))"]
        else:
            chunks = [f"{name}.chunk({self._parts})" for name in step.names]
            head += chunks[0] if len(chunks) == 1 else f"zip({', '.join(chunks)}, strict=True)"
        if self._counted is not None:
            if self._ddp:
                raise Unfit("a part without targets that count exchanges nothing, and other ranks would wait for it")
            need(not self._lists, "the loss passes over some targets, and results are used after the step")
            self._kept = self._fresh("counted")
            first += [f"{self._kept} = {self._counts(micro=True)}", f"if not {self._kept}:", "    continue"]
        return head, first

    def _counts(self, *, micro: bool) -> str:
        target, ignored = self._counted or ("", "0")
        names = {node.id for node in ast.walk(ast.parse(target)) if isinstance(node, ast.Name)}
        if not names <= set(self._step.names):
            raise Unfit(f"`{target}`, whose entries of {ignored} do not count, is not a part of the batch itself")
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
        if self._counted is not None:
            return f"{self._kept} / {self._counts(micro=False)}"
        name, micro = next(iter(self._micro.items()))
        if step.key:
            key = self._quoted(step.key)
            return f"len({micro}[{key}]) / len({name}[{key}])"
        if step.kind == "dict":
            return f"{self._rows} / len(next(iter({name}.values())))"
        item = "[0]" if step.kind == "list" else ""
        if step.dim:
            return f"{micro}{item}.size({step.dim}) / {name}{item}.size({step.dim})"
        return f"len({micro}{item}) / len({name}{item})"

    @property
    def _counted(self) -> tuple[str, str] | None:
        return next((form.counted for form in self._step.losses.values() if form.counted is not None), None)

    def _weighted(self, node: ast.stmt, line: cst.BaseStatement) -> list[cst.BaseStatement]:
        """Return ``backward`` with the loss of a part weighted by its share of the batch; sums have no weight."""
        if self._is_weighed or self._step.losses[id(node)].shape is Shape.SUM:
            return [line]
        backward = cst.ensure_type(line, cst.SimpleStatementLine)
        inner = _loss_node(cst.ensure_type(cst.ensure_type(backward.body[0], cst.Expr).value, cst.Call))
        text = cst.Module([]).code_for_node(inner)
        name = self._step.loss or self._fresh("loss")
        value = text if self._step.loss else f"({text})"
        (weigh,) = self._statements([f"{name} = {value} * ({self._share()})"])
        new = cst.parse_expression(name)
        called = cst.ensure_type(backward.with_changes(leading_lines=()).deep_replace(inner, new), type(backward))
        return [weigh.with_changes(leading_lines=backward.leading_lines), called]

    def _statements(self, lines: Sequence[str]) -> tuple[rewriting.Statement, ...]:
        return rewriting.statements("\n".join(lines) + "\n", self._parsed) if lines else ()


def _loss_node(call: cst.Call) -> cst.BaseExpression:
    """Return the expression that ``backward`` is called on: ``loss``, also in ``scaler.scale(loss).backward()``."""
    if call.args:
        return call.args[0].value
    match receiver := cst.ensure_type(call.func, cst.Attribute).value:
        case cst.Call(func=cst.Attribute(attr=cst.Name(value="scale")), args=[scaled, *_]):
            return scaled.value
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
