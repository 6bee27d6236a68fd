"""Writes a training step with an inner loop over parts of the batch, in the words of the user's own source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Final, TypeVar

import libcst as cst

from oomdoctor.fixes import _cst
from oomdoctor.fixes._batch_notebook import Book, calls
from oomdoctor.fixes._dataflow import ancestors, bound
from oomdoctor.fixes._samples import REDUCES_BY, LossForm, NotProven, Shape, loss_made_by
from oomdoctor.fixes._step import Loop, Split, Step, plan
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import CodeFacts, ModelFacts, TrainingLoop
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.kinds import child_path
from oomdoctor.model.magics import mask
from oomdoctor.model.session import Cell, Cells

__all__ = ["layer", "model_facts", "rewrite", "why_not"]

_Node = TypeVar("_Node", bound=cst.CSTNode)

_COUPLES: Final = re.compile(
    r"BatchNorm|InstanceNorm|\bLSTM\b|\bGRU\b|\bRNN\b|Transformer|MultiheadAttention|torchvision|timm|smp\."
    r"|from_pretrained|resnet|efficientnet|weight_norm|hub\.load"
)


def model_facts(code: CodeFacts, loop: TrainingLoop, text: str) -> ModelFacts | None:
    """Return the facts of the model that the loop calls ``text``, None if the namespace shows no object for it."""
    path = dict(loop.stands_for).get(text, text)
    exact = [model for model in code.models if model.path == path]
    if not exact and path.startswith("self."):
        exact = [model for model in code.models if model.path.endswith(path.removeprefix("self"))]
    return exact[0] if len(exact) == 1 else None


def why_not(code: CodeFacts, loop: TrainingLoop) -> str | None:
    """Return why this loop's batch cannot be taken apart, as far as facts tell."""
    if loop.accumulates:
        return "the loop accumulates gradients already: raise its number of parts there"
    if len(loop.optimizers) > 1:
        return f"the loop steps {len(loop.optimizers)} optimizers ({', '.join(loop.optimizers)})"
    if not loop.models:
        return "no call of a model was found in the loop"
    for text in loop.models:
        model = model_facts(code, loop, text)
        if model is None:
            continue
        if model.training and model.batch_norm:
            return f"{layer(model, model.batch_norm[0])} normalises over the batch in training mode"
        if model.sequence_first:
            return f"{layer(model, model.sequence_first[0])} takes the batch in dimension 1, not 0"
    return None


def layer(model: ModelFacts, name: str) -> str:
    """Return the expression for the layer ``name`` below ``model``."""
    return reduce(child_path, filter(None, name.split(".")), model.path)


def rewrite(cells: Cells, code: CodeFacts, parts: int) -> Patch | Refused:
    """Return the patch that takes each batch of every loop of the failing run in ``parts`` parts."""
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops:
        return Refused("no training loop was found in what the failing cell runs")
    numbers = dict.fromkeys(loop.cell for loop in loops)
    return _cst.join(
        cells,
        [_cell(cells, cells.get(n), code, [loop for loop in loops if loop.cell == n], parts) for n in numbers],
    )


def _cell(cells: Cells, cell: Cell, code: CodeFacts, loops: Sequence[TrainingLoop], parts: int) -> Edit | Refused:
    parsed = _cst.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    book = Book.read(cells)
    _write_constants(book)
    tree = book.page(cell.number).tree
    changes: dict[cst.CSTNode, Sequence[_cst.Statement]] = {}
    for facts in loops:
        try:
            if why := why_not(code, facts):
                raise NotProven(why)
            old = _find_cst(parsed, facts.line)
            loop = _find_ast(tree, facts.line)
            step = plan(tree, loop, _split(book, code, facts, tree, loop))
            changes[old] = [_Writer(cells, parsed, step, parts).loop(old)]
        except NotProven as why:
            return Refused(str(why))
    return _cst.edit(cells, cell, parsed, _cst.replace_all(parsed.module, changes))


def _write_constants(book: Book) -> None:
    """Write the values of the notebook's constants in the place of their names where a loss is told how to reduce."""
    for page in book.pages:
        for call in calls(page.tree):
            for keyword in call.keywords:
                if keyword.arg in REDUCES_BY and not isinstance(keyword.value, ast.Constant):
                    value = book.constant(keyword.value, book.place(page, call))
                    if value is not None:
                        keyword.value = ast.copy_location(value, keyword.value)


def _find_ast(tree: ast.Module, line: int) -> Loop:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.While) and node.lineno == line:
            return node
    raise NotProven("the loop is not where it was found before")


def _find_cst(parsed: _cst.ParsedCell, line: int) -> cst.For | cst.While:
    for node in reversed(_cst.path_to(parsed, line)):
        if isinstance(node, cst.For | cst.While) and parsed.lines_of(node).start == line:
            return node
    raise NotProven("the loop is not where it was found before")


def _split(book: Book, code: CodeFacts, loop: TrainingLoop, tree: ast.Module, node: Loop) -> Split:
    """Collect what is known of the names in the loop.

    A name that the loop's function binds itself hides the object that the namespace has under it.

    Raises:
        NotProven: a model of it could couple the samples, as far as can be seen.
    """
    texts = [mask(page.cell.source).text for page in book.pages]
    trees = [page.tree for page in book.pages]
    imported = _imported(trees)
    scope = next(
        (n for n in reversed(ancestors(tree, node)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), tree
    )
    local = bound(scope) | {part.arg for part in ast.walk(scope) if isinstance(part, ast.arg)}
    local -= set(dict(loop.stands_for)) | (bound(tree) if scope is tree else set())
    models: dict[str, str] = {}
    for text in loop.models:
        model = None if text in local else model_facts(code, loop, text)
        if model is None:
            models[text] = _built_by_row(text, [scope] if text in local else trees, trees)
        elif model.batch_norm and any(re.search(r"\.train\(", source) for source in texts):
            raise NotProven(f"{layer(model, model.batch_norm[0])} normalises over the batch in training mode")
        else:
            models[text] = model.type_name
    known = {name: form for name, form in _of_namespace(code, loop).items() if name not in local}
    attributes = {name: form for one in trees for name, form in _constructed(one, imported, attributes=True).items()}
    made = _constructed(scope, imported, known if scope is tree else {})
    # A name that the scope binds to something else again is no longer the loss that it was.
    known = {name: form for name, form in known.items() if name in made or name not in _others(scope)}
    return Split(
        batch=loop.batch,
        models=models,
        losses={**attributes, **known, **made},
        optimizers=loop.optimizers,
        masks_targets=any("-100" in text for text in texts),
        imported=imported,
    )


def _imported(trees: Sequence[ast.AST]) -> frozenset[str]:
    return frozenset(
        alias.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in {"torch.nn", "torch.nn.functional", "torch.nn.modules"}
        for alias in node.names
        if alias.asname in {None, alias.name}
    )


def _of_namespace(code: CodeFacts, loop: TrainingLoop) -> dict[str, LossForm]:
    known = {
        facts.path: LossForm(
            name=facts.type_name,
            reduction=facts.reduction or "",
            ignore_index=facts.ignore_index,
            weighted=facts.weighted,
        )
        for facts in code.losses
        if loss_made_by(ast.parse(f"nn.{facts.type_name}()", mode="eval").body)
    }
    return known | {name: known[path] for name, path in loop.stands_for if path in known}


def _constructed(
    scope: ast.AST,
    imported: frozenset[str],
    known: Mapping[str, LossForm] = MappingProxyType({}),
    *,
    attributes: bool = False,
) -> dict[str, LossForm]:
    """Return losses by the names that ``scope`` assigns their constructors to, and nothing else.

    Args:
        scope: what is looked through.
        imported: names that the cells import from ``torch.nn``.
        known: the losses that the names lead to, which tell what their constructors do not write out.
        attributes: look for ``self.loss`` and the like alone.

    Raises:
        NotProven: how a loss reduces is neither written out nor known.
    """
    found: dict[str, set[LossForm | None]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = ast.unparse(node.targets[0])
            if "." in name or not attributes:
                found.setdefault(name, set()).add(_form(node.value, imported, known.get(name)))
    return {name: form for name, forms in found.items() if len(forms) == 1 and (form := next(iter(forms))) is not None}


def _form(value: ast.expr, imported: frozenset[str], known: LossForm | None) -> LossForm | None:
    try:
        return loss_made_by(value, imported)
    except NotProven:
        if known is None:
            raise
        return known


def _others(scope: ast.AST) -> set[str]:
    """Return the names that ``scope`` binds at its own level, by assignments or definitions."""
    defined = {node.name for node in ast.iter_child_nodes(scope) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {name for node in ast.walk(scope) if isinstance(node, ast.Assign) for name in bound(node)}


def _built_by_row(text: str, scopes: Sequence[ast.AST], trees: Sequence[ast.Module]) -> str:
    """Return the class name of a model that only the source tells of, if nothing in it is known to couple samples.

    Raises:
        NotProven: it is not built in the cells, or of modules that may couple the samples of a batch.
    """
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if (
            not isinstance(node, ast.Assign)
            or ast.unparse(node.targets[0]) != text
            or not isinstance(node.value, ast.Call)
        ):
            continue
        made: ast.expr = node.value
        while (
            isinstance(made, ast.Call)
            and isinstance(made.func, ast.Attribute)
            and isinstance(made.func.value, ast.Call)
        ):
            made = made.func.value
        name = ast.unparse(made.func) if isinstance(made, ast.Call) else ""
        source = ast.unparse(node.value) + "".join(_sources(name, classes, set()))
        if (name in classes or re.match(r"(torch\.)?nn\.", name)) and not _COUPLES.search(source):
            return name
        break
    raise NotProven(f"`{text}` is not among the notebook's objects, so that its normalisation layers are not known")


def _sources(name: str, classes: Mapping[str, ast.ClassDef], seen: set[str]) -> Iterator[str]:
    """Yield the source of a class of the cells and of all classes of the cells that it names."""
    if name in classes and name not in seen:
        seen.add(name)
        yield ast.unparse(classes[name])
        for node in ast.walk(classes[name]):
            if isinstance(node, ast.Name):
                yield from _sources(node.id, classes, seen)


class _Writer:
    """Writes one loop anew from its plan."""

    def __init__(self, cells: Cells, parsed: _cst.ParsedCell, step: Step, parts: int) -> None:
        self._parsed, self._step, self._parts = parsed, step, parts
        self._taken: list[str] = []
        self._cells = cells
        self._micro = {name: self._fresh(f"micro_{name}") for name in step.names}
        self._sum = self._fresh("batch_loss") if step.keeps_loss else ""
        self._lists = {name: self._fresh(f"{name}_parts") for name in step.gathered}

    def _fresh(self, stem: str) -> str:
        self._taken.append(_cst.fresh_name(stem, self._cells, self._taken))
        return self._taken[-1]

    def loop(self, old: cst.For | cst.While) -> _cst.Statement:
        """Return ``old`` with its body taken apart.

        Raises:
            NotProven: its statements cannot be told apart line by line.
        """
        body = old.body
        if not isinstance(body, cst.IndentedBlock) or any(
            isinstance(node, cst.SimpleStatementLine) and len(node.body) != 1 for node in body.body
        ):
            raise NotProven("several statements of the loop share a line")
        lines = list(body.body)
        step = self._step
        start = [f"{self._sum} = 0.0"] if self._sum else []
        start += [f"{parts} = []" for parts in self._lists.values()]
        end = [f"{step.loss} = {self._sum}"] if self._sum else []
        end += [f"{name} = torch.cat({parts})" for name, parts in self._lists.items()]
        if self._lists and not any(re.search(r"^\s*import torch\b(?!\.)", c.source, re.M) for c in self._cells.history):
            raise NotProven(
                f"`{next(iter(self._lists))}` is used after the step, and `torch` is not imported to join it"
            )
        new = [
            *(lines[place] for place in step.before),
            *self._statements(start),
            self._inner([lines[place] for place in step.inner]),
            *self._statements(end),
            *(lines[place] for place in step.after),
            *lines[max(step.inner) + 1 :],
        ]
        return old.with_changes(body=body.with_changes(body=new))

    def _inner(self, lines: list[cst.BaseStatement]) -> _cst.Statement:
        step = self._step
        head, first = self._head()
        *forward, backward = _renamed(cst.IndentedBlock(body=lines), self._micro).body
        body = [*self._statements(first), *forward, *self._weighted(backward)]
        if step.keeps_loss:
            body += self._statements([f"{self._sum} += {step.loss}.detach()"])
        body += self._statements([f"{parts}.append({name}.detach())" for name, parts in self._lists.items()])
        comment = f"# In {self._parts} parts: the gradients of the whole batch, the activations of one part at a time."
        (loop,) = self._statements([f"{head}:", "    pass"])
        loop = cst.ensure_type(loop, cst.For)
        above = cst.EmptyLine(comment=cst.Comment(comment))
        return loop.with_changes(leading_lines=(above,), body=loop.body.with_changes(body=body))

    def _head(self) -> tuple[str, list[str]]:
        """Return the head of the inner loop and the statements that it begins with."""
        step, parts = self._step, self._parts
        first: list[str] = []
        if step.kind == "tensors":
            chunks = [f"{name}.chunk({parts})" for name in step.names]
            head = f"for {', '.join(self._micro.values())} in "
            head += chunks[0] if len(chunks) == 1 else f"zip({', '.join(chunks)}, strict=True)"
        else:
            ((name, micro),) = self._micro.items()
            values = f"{name}.values()" if step.kind == "dict" else name
            each = self._fresh("chunks") if step.kind == "dict" else micro
            head = f"for {each} in zip(*(value.chunk({parts}) for value in {values}), strict=True)"
            if step.kind == "dict":
                first = [f"{micro} = dict(zip({name}, {each}, strict=True))"]
        if step.form.counted is not None:
            if self._lists:
                raise NotProven("the loss passes over some targets, and results are used after the step")
            self._kept = self._fresh("counted")
            first += [f"{self._kept} = {self._counts(micro=True)}", f"if not {self._kept}:", "    continue"]
        return head, first

    def _counts(self, *, micro: bool) -> str:
        target, ignored = self._step.form.counted or ("", 0)
        names = {node.id for node in ast.walk(ast.parse(target)) if isinstance(node, ast.Name)}
        if not names <= set(self._step.names):
            raise NotProven(f"`{target}`, whose entries of {ignored} do not count, is not a part of the batch itself")
        text = target
        if micro:
            text = _renamed(cst.parse_module(target), self._micro).code
        return f"({text} != {ignored}).sum()"

    def _share(self) -> str:
        step = self._step
        if step.form.counted is not None:
            return f"{self._kept} / {self._counts(micro=False)}"
        name, micro = next(iter(self._micro.items()))
        if step.kind == "dict":
            return f"len(next(iter({micro}.values()))) / len(next(iter({name}.values())))"
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

    def _statements(self, lines: Sequence[str]) -> tuple[_cst.Statement, ...]:
        return _cst.statements("\n".join(lines) + "\n", self._parsed) if lines else ()


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
