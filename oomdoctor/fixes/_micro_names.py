"""What a training loop calls by which name: its models, and its losses and how they reduce."""

from __future__ import annotations

import ast

from oomdoctor.fixes._chunks import model_facts
from oomdoctor.fixes._samples import SAMPLE_LOSSES, LossForm, loss_made_by
from oomdoctor.fixes._step import Split
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.program.book import Book
from oomdoctor.program.dataflow import Loop, ancestors, bound

__all__ = ["known_names"]


def known_names(book: Book, code: CodeFacts, loop: TrainingLoop, tree: ast.Module, node: Loop) -> Split:
    """Collect what is known of the names in the loop.

    A name that the loop's function binds itself hides the object that the namespace has under it.
    """
    trees = [page.tree for page in book.pages]
    functions = [one for one in ancestors(tree, node) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    scope = functions[-1] if functions else tree
    local = bound(scope) | {part.arg for part in ast.walk(scope) if isinstance(part, ast.arg)} if functions else set()
    local -= set(dict(loop.stands_for))
    models = {text: None if text in local else model_facts(code, loop, text) for text in loop.models}
    known = {name: form for name, form in _of_namespace(code, loop).items() if name not in local}
    attributes = {name: form for one in trees for name, form in _constructed(one).items() if "." in name}
    losses = {**attributes, **(_constructed(scope) | known if scope is tree else known | _constructed(scope))}
    return Split(
        batch=loop.batch,
        models={text: model.type_name if model else "" for text, model in models.items() if text not in losses},
        losses=losses,
        optimizers=loop.optimizers,
        masks_targets=any("-100" in page.cell.source for page in book.pages),
        functions={
            n.name: n for one in trees for n in one.body if isinstance(n, ast.FunctionDef) and n.name not in local
        },
    )


def _of_namespace(code: CodeFacts, loop: TrainingLoop) -> dict[str, LossForm]:
    known = {
        facts.path: LossForm(
            name=facts.type_name,
            reduction=facts.reduction or "",
            ignored=None if facts.ignore_index is None else str(facts.ignore_index),
        )
        for facts in code.losses
        if facts.type_name in SAMPLE_LOSSES
    }
    return known | {name: known[path] for name, path in loop.stands_for if path in known}


def _constructed(scope: ast.AST) -> dict[str, LossForm]:
    """Return losses by the names that ``scope`` assigns their constructors to."""
    return {
        ast.unparse(node.targets[0]): form
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and (form := loss_made_by(node.value)) is not None
    }
