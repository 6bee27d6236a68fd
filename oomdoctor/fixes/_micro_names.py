"""What a region calls by which name: the batch, its models, and its losses and how they reduce."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from oomdoctor.fixes._chunks import model_facts
from oomdoctor.fixes._samples import LossForm, called, loss_made_by
from oomdoctor.fixes._step import Split
from oomdoctor.fixes._step_statements import unmoved
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.program.book import Book
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.definitions import Program
from oomdoctor.program.names import bound_by, imported
from oomdoctor.program.regions import Region
from oomdoctor.program.training_loops import batch_of, called_like_a_model

_LAYER: Final = re.compile(r"(torch\.)?nn\.[A-Z]\w+$")
_NO_FORWARD: Final = frozenset(
    {"parameters", "named_parameters", "zero_grad", "train", "eval", "state_dict", "load_state_dict", "to", "cuda"}
    | {"modules", "children", "buffers", "requires_grad_", "item", "size", "step"}
)
"""Methods of a model that run none of its layers."""


def facts_of(program: Program, code: CodeFacts, region: Region) -> TrainingLoop:
    """Return the facts of the loop that a region stands in, or such facts of its own."""
    line, scope = region.block[region.start].lineno, region.scope
    for loop in code.loops:
        if loop.cell == scope.cell and loop.line <= line <= (loop.end_line or loop.line):
            return loop
    return TrainingLoop(
        cell=scope.cell,
        line=line,
        function=scope.tail or None,
        in_failing_run=True,
        loader="",
        batch=(),
        models=(),
        optimizers=(),
        loss=None,
        loss_call=None,
        order=(),
        stands_for=tuple(program.given(scope).items()),
    )


def known_names(book: Book, program: Program, code: CodeFacts, region: Region, dim: int | None = None) -> Split:
    """Collect what is known of the names in a region.

    A name that the region's function binds itself hides the object that the namespace has under it.

    Args:
        dim: the dimension of the batch, None where it is to be guessed.
    """
    facts = facts_of(program, code, region)
    trees = [page.tree for page in book.pages]
    function, page = region.function, book.page(region.scope.cell)
    scope: ast.AST = function or page.tree
    local = bound(scope) | {part.arg for part in ast.walk(scope) if isinstance(part, ast.arg)} if function else set()
    local -= set(dict(facts.stands_for))
    texts = {called(node.func) for unit in region.body for node in ast.walk(unit) if isinstance(node, ast.Call)}
    known = {text: model_facts(code, facts, text) for text in (*facts.models, *texts) if text not in local}
    models = {text: known.get(text) for text in (*facts.models, *texts) if text in facts.models or known.get(text)}
    losses_known = {name: form for name, form in _of_namespace(code, facts).items() if name not in local}
    attributes = {name: form for one in trees for name, form in _constructed(one).items() if "." in name}
    constructed = _constructed(scope)
    losses = {**attributes, **(losses_known | constructed if function else constructed | losses_known)}
    functions = {n.name: n for one in trees for n in one.body if isinstance(n, ast.FunctionDef) and n.name not in local}
    named = dict.fromkeys(_layers(trees), "") if not function else {}
    named |= {text: facts.type_name if facts else "" for text, facts in models.items()}
    named = {text: kind for text, kind in named.items() if text not in losses}

    def is_model(text: str) -> bool:
        return text in named or (text not in losses and text not in functions and called_like_a_model(text))

    def of_model(text: str) -> bool:
        """Tell whether a call of ``text`` runs layers of a model: it is one, or a method of one."""
        owner, _, method = text.rpartition(".")
        path = model_facts(code, facts, owner) if owner and owner not in local else None
        return is_model(text) or (method not in _NO_FORWARD and bool(owner) and (path is not None or is_model(owner)))

    def makes_graph(node: ast.AST, depth: int = 2) -> bool:
        roots = {text.partition(".")[0] for text in named if not text.startswith("self.")} - {"self"}
        if roots & reads(node) and not roots & bound(node):
            return True
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            text = called(call.func)
            if of_model(text) or any(is_model(called(argument)) for argument in call.args if called(argument)):
                return True
            own = program.function(text.rpartition(".")[2]) if text and program.is_own(text) else None
            if depth and own is not None and any(makes_graph(one, depth - 1) for one in own.body):
                return True
        return False

    sequence_first = [one for one in known.values() if one is not None and one.sequence_first]
    dim = dim if dim is not None else int(any(one.training for one in sequence_first))
    plain = {*texts, *functions, *losses, *named, *(text.partition(".")[0] for text in named), "self"}
    plain |= {name for tree in trees for node in ast.walk(tree) for name, _ in imported(node)}
    plain |= {n.name for one in trees for n in ast.walk(one) if isinstance(n, ast.ClassDef)}
    plain |= {model.path for model in code.models} | {path for path, _ in code.optimizers} if not function else set()
    constants = set(_constants(book, program, region))
    batch = tuple(name for name in batch_of(region) if name not in plain | constants)
    return Split(
        batch=batch,
        models=named,
        losses=losses,
        makes_graph=makes_graph,
        masks_targets=any("-100" in page.cell.source for page in book.pages),
        functions=functions,
        plain=plain | constants,
        dim=dim,
    )


def _layers(trees: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that are bound to layers of torch."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Assign) and _LAYER.match(called(getattr(unmoved(node.value), "func", node))):
            yield ast.unparse(node.targets[0])


def _constants(book: Book, program: Program, region: Region) -> Iterator[str]:
    """Yield the names that stand for a number or a text in all that the program shows."""
    given = program.given(region.scope)
    place = book.place(book.page(region.scope.cell), region.block[region.start])
    for name in {one for unit in region.body for one in reads(unit)} - {n for u in region.body for n in bound_by(u)}:
        try:
            node = ast.parse(given.get(name, name), mode="eval").body
        except SyntaxError:
            continue
        values: list[ast.expr] = [node] if isinstance(node, ast.Constant) else []
        if isinstance(node, ast.Name):
            values = [value for value, _ in book.values(node.id, place)]
        if values and all(isinstance(value, ast.Constant) for value in values):
            yield name


def _of_namespace(code: CodeFacts, loop: TrainingLoop) -> dict[str, LossForm]:
    known = {
        facts.path: LossForm(
            name=facts.type_name,
            reduction=facts.reduction or "",
            ignored=None if facts.ignore_index is None else str(facts.ignore_index),
        )
        for facts in code.losses
    }
    return known | {name: known[path] for name, path in loop.stands_for if path in known}


def _constructed(scope: ast.AST) -> dict[str, LossForm]:
    """Return losses by the names that ``scope`` assigns their constructors to."""
    return {
        ast.unparse(node.targets[0]): form
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and (form := loss_made_by(node.value)) is not None
    }
