"""What the values of a training step are to its batch, guessed by reading the expressions that make them.

Each is plain (does not depend on the batch), a tensor with one row for each sample in dimension 0, or a scalar that is
a mean or a sum over samples. What nothing is known of is taken to be rows; what ``backward`` is called on to be a mean,
and what is added up to it or multiplied into it as well. Whether the step may be taken apart so, the trial tells.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from oomdoctor.program import torch_functions
from oomdoctor.program.dataflow import bound
from oomdoctor.program.names import arguments_of
from oomdoctor.program.torch_functions import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForm:
    """How a loss of ``torch.nn`` reduces; ``ignored`` is the text of its ``ignore_index``, None where it is not set."""

    name: str
    reduction: str = "mean"
    ignored: str | None = None


_LOSS: Final = re.compile(r"(\w+Loss|cross_entropy|kl_div|binary_cross_entropy\w*|\w+_loss)$")
"""Names of torch's losses, classes and functions."""
_IGNORING: Final = re.compile(r"(cross_entropy|nll_loss|CrossEntropyLoss|NLLLoss)$")


def called(node: ast.AST) -> str:
    """Return the dotted name that ``node`` is, empty where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := called(node.value)):
        return f"{base}.{node.attr}"
    return ""


def loss_made_by(node: ast.AST) -> LossForm | None:
    """Return the loss that a constructor such as ``nn.CrossEntropyLoss(reduction="sum")`` makes, if it is one."""
    match node:
        case ast.Call(func=ast.Attribute(value=made, attr="to" | "cuda")):
            return loss_made_by(made)
        case ast.Call(func=func) if called(func).endswith("Loss"):
            return function_form(node)
    return None


def function_form(call: ast.Call) -> LossForm | None:
    """Return how the loss function that ``call`` calls reduces, if it sounds like one of torch's."""
    name = called(call.func).rpartition(".")[2]
    if not _LOSS.match(name):
        return None
    told = {one.arg: one.value for one in call.keywords}
    reduction, ignored = told.get("reduction"), told.get("ignore_index")
    return LossForm(
        name=name,
        reduction=str(reduction.value) if isinstance(reduction, ast.Constant) else "mean",
        ignored=ast.unparse(ignored) if ignored is not None else None,
    )


class Shape(Enum):
    """What a value is to the batch."""

    PLAIN = auto()
    ROWS = auto()
    BATCH = auto()
    """The batch as the loader gave it: a dictionary or a list of rows."""
    MEAN = auto()
    SUM = auto()


SCALARS: Final = frozenset({Shape.MEAN, Shape.SUM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value.

    Attributes:
        counted: for a mean over the entries of a target alone that differ from a number: the texts of both.
        model: the type of the model that returned it; ``labels``: source text of those that it was given by name.
        is_number: of a scalar: one of Python's, and no tensor; ``is_mixed``: a mean added to a sum.
        entries: source text, over the batch as it came, of what has the same entries in whatever shape and order.
    """

    shape: Shape
    counted: tuple[str, str] | None = None
    model: str | None = None
    labels: str | None = None
    is_number: bool = False
    entries: str | None = None
    is_mixed: bool = False


_PLAIN: Final = Value(shape=Shape.PLAIN)
_ROWS: Final = Value(shape=Shape.ROWS)
_MEAN: Final = Value(shape=Shape.MEAN)
_SUM: Final = Value(shape=Shape.SUM)
_KEEPS_ENTRIES: Final = torch_functions.names_of(
    Result.MOVED, Result.CAST, Result.TRUNCATED, Result.SHAPED, Result.DETACHED
)
_NUMBERS: Final = torch_functions.names_of(Result.NUMBER)
_IGNORED: Final = "-100"
_SHIFTED: Final = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Follows one step.

    Attributes:
        names: the values of names, filled while statements are followed; ``scalars``: those that are certain to be.
        models: class name of the model that each source text calls; ``losses``: the loss that it calls.
        functions: functions of the cells by their names, which are followed where they are called.
        masks_targets: whether -100 may stand in a target, which cross entropy passes over.
    """

    names: dict[str, Value]
    models: Mapping[str, str]
    losses: Mapping[str, LossForm]
    masks_targets: bool = False
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)
    scalars: frozenset[str] = frozenset()

    def follow(self, node: ast.stmt) -> None:
        """Take one statement of the step into account."""
        if isinstance(node, ast.With | ast.If | ast.For):
            for inner in (*node.body, *getattr(node, "orelse", ())):
                self.follow(inner)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value)
        elif self._depends(node):
            self.names.update(dict.fromkeys(bound(node), _ROWS))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else None
        for at, part in enumerate([target] if parts is None else parts):
            if isinstance(part, ast.Name):
                found = self.value(value) if parts is None else self._item(value, at, len(parts))
                is_scalar = found.shape is Shape.ROWS and part.id in self.scalars
                self.names[part.id] = _MEAN if is_scalar else found

    def _item(self, value: ast.expr, at: int, length: int) -> Value:
        """Return what one of several names is bound to that a value is taken apart into."""
        if isinstance(value, ast.Tuple) and len(value.elts) == length:
            return self.value(value.elts[at])
        if isinstance(value, ast.Call) and called(value.func) in self.functions:
            returned = self._returned(value)
            return returned[at] if len(returned) == length else _ROWS
        made = self.value(value)
        return replace(made, shape=Shape.ROWS if made.shape is Shape.BATCH else made.shape, entries=_at(made, at))

    def _returned(self, call: ast.Call) -> list[Value]:
        """Follow a function of the cells, and return what it returns last."""
        function = self.functions[called(call.func)]
        given = arguments_of(call, function)
        texts = {one: called(value) for one, value in given.items()}
        inside = replace(
            self,
            names=self.names | {one: self.value(value) for one, value in given.items()},
            models={**self.models, **{one: self.models[text] for one, text in texts.items() if text in self.models}},
            losses={**self.losses, **{one: self.losses[text] for one, text in texts.items() if text in self.losses}},
            functions={one: node for one, node in self.functions.items() if node is not function},
        )
        for node in function.body:
            inside.follow(node)
        last = next((node.value for node in reversed(function.body) if isinstance(node, ast.Return)), None)
        values = last.elts if isinstance(last, ast.Tuple) else [last] if last is not None else []
        return [replace(inside.value(value), entries=None) for value in values]

    def value(self, node: ast.expr) -> Value:
        """Return what ``node`` is to the batch."""
        if not self._depends(node):
            return _PLAIN
        match node:
            case ast.Name():
                return self.names[node.id]
            case ast.Call():
                return self._call(node)
            case ast.Attribute():
                return self._own_loss(self.value(node.value)) if node.attr == "loss" else _ROWS
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=at) if ast.unparse(at) != "0":
                return _PLAIN
            case ast.Subscript():
                of, key = self.value(node.value), ast.unparse(node.slice)
                if of.model is not None and (key == "'loss'" or (key == "0" and of.labels is not None)):
                    return self._own_loss(of)
                return replace(_ROWS, entries=_at(of, node.slice), model=of.model)
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return self.value(node.operand)
            case ast.DictComp():
                return self.value(node.generators[0].iter)
        return _ROWS

    def _depends(self, node: ast.AST) -> bool:
        found = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        return any(self.names.get(name, _PLAIN) is not _PLAIN for name in found)

    def _call(self, node: ast.Call) -> Value:
        name = called(node.func)
        if name in self.models and name not in self.functions:
            given = [self.value(keyword.value).entries for keyword in node.keywords if keyword.arg == "labels"]
            return replace(_ROWS, model=self.models[name], labels=given[0] if given else None)
        form = self.losses.get(name) or (function_form(node) if name not in self.functions else None)
        if form is None and isinstance(node.func, ast.Call):
            form = loss_made_by(node.func)
        if form is not None:
            return self._loss(node, form)
        if name in self.functions:
            returned = self._returned(node)
            return returned[0] if len(returned) == 1 else _ROWS
        of, method = (node.func.value, node.func.attr) if isinstance(node.func, ast.Attribute) else (None, name)
        if "loss" in method.lower() or "criterion" in method.lower():
            return _MEAN
        base = self.value(of) if of is not None else _PLAIN
        is_method = base is not _PLAIN
        if method in {"mean", "sum"} and not node.keywords and len(node.args) == (0 if is_method else 1):
            return _MEAN if method == "mean" else _SUM
        if name in {"float", "int"} and len(node.args) == 1:
            base = self.value(node.args[0])
        if (name in {"float", "int"} or method in _NUMBERS) and base.shape in SCALARS:
            return replace(base, is_number=True)
        if base.shape is Shape.BATCH and is_method and method != "pop":
            return base
        return replace(_ROWS, entries=base.entries if is_method and method in _KEEPS_ENTRIES else None)

    def _loss(self, node: ast.Call, form: LossForm) -> Value:
        if form.reduction in {"none", "sum"}:
            return _SUM if form.reduction == "sum" else _ROWS
        named = [keyword.value for keyword in node.keywords if keyword.arg in {"target", "labels"}]
        target = named[0] if named else node.args[-1] if node.args else node
        ignored = _IGNORED if form.ignored is None else form.ignored
        text = self.value(target).entries if isinstance(target, ast.expr) else None
        is_masked = ignored != _IGNORED or self.masks_targets or "labels'" in (text or "")
        return replace(_MEAN, counted=(text, ignored) if _IGNORING.search(form.name) and text and is_masked else None)

    def _own_loss(self, of: Value) -> Value:
        """Return the loss that a model of the transformers library computes from the labels it was given."""
        batches = (name for name, value in self.names.items() if value.shape is Shape.BATCH)
        labels = of.labels or next((f"{batch}['labels']" for batch in batches), None)
        if of.model is None or labels is None or of.model.endswith("ForSequenceClassification"):
            return _MEAN
        shifted = "[:, 1:]" if of.model.endswith(_SHIFTED) else ""
        return replace(_MEAN, counted=(f"{labels}{shifted}", _IGNORED))

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        scalars = [value for value in (left, right) if value.shape in SCALARS]
        if not scalars or Shape.ROWS in (left.shape, right.shape):
            return _ROWS
        is_mixed = len(scalars) == 2 and left.shape is not right.shape and isinstance(node.op, ast.Add | ast.Sub)
        is_mixed = is_mixed or any(value.is_mixed for value in scalars)
        return replace(min(scalars, key=lambda value: value.shape is Shape.SUM), is_mixed=is_mixed)


def scalar_names(losses: Iterable[ast.expr], units: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the names of what losses are made of in ``units`` by arithmetic alone: they have no dimension either."""
    names = {name for loss in losses for name in _operands(loss)}
    for unit in reversed(units):
        if isinstance(unit, ast.Assign) and names.intersection(bound(unit)) and isinstance(unit.targets[0], ast.Name):
            names.update(_operands(unit.value))
    return frozenset(names)


def _operands(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    for part in (node.left, node.right) if isinstance(node, ast.BinOp) else ():
        yield from _operands(part)
    if isinstance(node, ast.UnaryOp):
        yield from _operands(node.operand)


def _at(of: Value, index: ast.expr | int) -> str | None:
    """Return the source text of an item of what has entries of the batch."""
    if of.entries is None:
        return None
    place = ast.Constant(value=index) if isinstance(index, int) else index
    return ast.unparse(ast.Subscript(value=ast.parse(of.entries, mode="eval").body, slice=place, ctx=ast.Load()))
