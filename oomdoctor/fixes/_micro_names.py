"""What a training loop calls by which name: its models, and its losses and how they reduce."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oomdoctor.fixes._chunks import layer
from oomdoctor.fixes._loss_forms import REDUCES_BY, LossForm, NotProven, called, function_form, loss_made_by
from oomdoctor.fixes._step import Split
from oomdoctor.model.code import CodeFacts, ModelFacts, TrainingLoop
from oomdoctor.program.book import Book, Place, calls
from oomdoctor.program.dataflow import Loop, ancestors, bound
from oomdoctor.program.magics import mask

__all__ = ["known_names", "model_facts", "with_constants"]

_COUPLES: Final = re.compile(
    r"BatchNorm|InstanceNorm|\bLSTM\b|\bGRU\b|\bRNN\b|Transformer|MultiheadAttention|torchvision|timm|smp\."
    r"|from_pretrained|resnet|efficientnet|weight_norm|hub\.load"
)

_DRAWS: Final = re.compile(
    r"(torch|np\.random|random)\.(rand|randn|randint|randperm|rand_like|randn_like|randint_like|normal|bernoulli"
    r"|multinomial|random|choice|uniform)$|.*\.(normal_|uniform_|bernoulli_|rsample|sample|exponential_)$"
)


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
        if drawn := _drawn(models[text], trees):
            raise NotProven(f"`{text}` draws random numbers itself (`{drawn}`), others for parts than for the whole")
    known = {name: form for name, form in _of_namespace(code, loop).items() if name not in local}
    attributes = {name: form for one in trees for name, form in _constructed(one, imported, attributes=True).items()}
    made = _constructed(scope, imported, known if scope is tree else {})
    # A name that the scope binds to something else again is no longer the loss that it was.
    known = {name: form for name, form in known.items() if name in made or name not in _others(scope)}
    asked = {name for call in calls(scope) if (name := called(call.func)) and "." not in name} - {*known, *made}
    passed = _passed(book, book.place(book.page(loop.cell), node), asked, imported)
    return Split(
        batch=loop.batch,
        models={text: kind for text, kind in models.items() if text not in known},
        losses={**attributes, **passed, **known, **made},
        optimizers=loop.optimizers,
        masks_targets=any("-100" in text for text in texts),
        imported=imported,
        functions={
            n.name: n for one in trees for n in one.body if isinstance(n, ast.FunctionDef) and n.name not in local
        },
    )


def _drawn(type_name: str, trees: Sequence[ast.Module]) -> str | None:
    """Return the call by which a class of the cells, or one that it names, draws random numbers as it runs."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for source in _sources(type_name, classes, set()):
        methods = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        for call in (one for method in methods if method.name != "__init__" for one in calls(method)):
            if _DRAWS.match(ast.unparse(call.func)):
                return ast.unparse(call)
    return None


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


def _passed(book: Book, place: Place, asked: Set[str], imported: frozenset[str]) -> dict[str, LossForm]:
    """Return the losses that a call writes out, or that are functions of torch by another name: ``F.mse_loss``."""
    found: dict[str, LossForm] = {}
    for name in asked:
        given = book.value(name, place)
        if given is not None and isinstance(given[0], ast.Name):
            given = book.value(given[0].id, given[1]) or given
        if given is None:
            continue
        value = given[0]
        alias = function_form(ast.Call(func=value, args=[], keywords=[]), called(value), imported)
        form = alias or loss_made_by(value, imported)
        if form is not None:
            found[name] = form
    return found


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
