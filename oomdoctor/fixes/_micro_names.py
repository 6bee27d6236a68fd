"""What a training loop calls by which name: its models, and its losses and how they reduce."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType

from oomdoctor.fixes._chunks import layer
from oomdoctor.fixes._loss_forms import REDUCES_BY, CannotSplit, LossForm, loss_made_by
from oomdoctor.fixes._step import Split
from oomdoctor.model.code import CodeFacts, ModelFacts, TrainingLoop
from oomdoctor.program.book import Book, calls
from oomdoctor.program.dataflow import Loop, ancestors, bound
from oomdoctor.program.magics import mask

__all__ = ["known_names", "model_facts", "with_constants"]


def model_facts(code: CodeFacts, loop: TrainingLoop, text: str) -> ModelFacts | None:
    """Return the facts of the model that the loop calls ``text``, None if the namespace shows no object for it."""
    path = dict(loop.stands_for).get(text, text)
    exact = [model for model in code.models if model.path == path]
    if not exact and path.startswith("self."):
        exact = [model for model in code.models if model.path.endswith(path.removeprefix("self"))]
    return exact[0] if len(exact) == 1 else None


def with_constants(book: Book) -> Book:
    """Return a copy with the notebook's constants in place of their names where a loss is told how to reduce."""
    book = Book(pages=tuple(replace(page, tree=deepcopy(page.tree)) for page in book.pages))
    for page in book.pages:
        for call in calls(page.tree):
            for keyword in call.keywords:
                if keyword.arg in REDUCES_BY and not isinstance(keyword.value, ast.Constant):
                    value = book.constant(keyword.value, book.place(page, call))
                    if value is not None:
                        keyword.value = ast.copy_location(value, keyword.value)
    return book


def known_names(book: Book, code: CodeFacts, loop: TrainingLoop, tree: ast.Module, node: Loop) -> Split:
    """Collect what is known of the names in the loop.

    A name that the loop's function binds itself hides the object that the namespace has under it.

    Raises:
        CannotSplit: a model of it could couple the samples, as far as can be seen.
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
        if model is not None and model.batch_norm and any(re.search(r"\.train\(", source) for source in texts):
            raise CannotSplit(f"{layer(model, model.batch_norm[0])} normalises over the batch in training mode")
        models[text] = model.type_name if model is not None else ""
    known = {name: form for name, form in _of_namespace(code, loop).items() if name not in local}
    attributes = {name: form for one in trees for name, form in _constructed(one, imported, attributes=True).items()}
    made = _constructed(scope, imported, known if scope is tree else {})
    # A name that the scope binds to something else again is no longer the loss that it was.
    known = {name: form for name, form in known.items() if name in made or name not in _others(scope)}
    return Split(
        batch=loop.batch,
        models={text: kind for text, kind in models.items() if text not in known},
        losses={**attributes, **known, **made},
        optimizers=loop.optimizers,
        masks_targets=any("-100" in text for text in texts),
        imported=imported,
        functions={
            n.name: n for one in trees for n in one.body if isinstance(n, ast.FunctionDef) and n.name not in local
        },
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
        CannotSplit: how a loss reduces is neither written out nor known.
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
    except CannotSplit:
        if known is None:
            raise
        return known


def _others(scope: ast.AST) -> set[str]:
    """Return the names that ``scope`` binds at its own level, by assignments or definitions."""
    defined = {node.name for node in ast.iter_child_nodes(scope) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {name for node in ast.walk(scope) if isinstance(node, ast.Assign) for name in bound(node)}
