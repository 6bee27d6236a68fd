"""Proves that a loss is a mean or a sum over the samples of a batch, by reading the expressions that make it.

An abstract interpreter over the statements of one training step. Each value is what it is to the batch: plain (does
not depend on it), a tensor with one row for each sample in dimension 0, the number of samples, or a scalar that is a
mean or a sum over samples. What is on no list stops the proof with a reason: a step is only split when it is known to
allow it. What happens inside of a model's ``forward`` is taken to be row by row; its modules are judged elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from oomdoctor.fixes._loss_forms import (
    IGNORING,
    NAMESPACES,
    REDUCES_BY,
    LossForm,
    NotProven,
    called,
    function_form,
    loss_made_by,
)
from oomdoctor.fixes._sample_values import COUNT, EXTENT, PLAIN, ROWS, Shape, Value
from oomdoctor.program.dataflow import bound, reads

__all__ = ["Samples"]


_MOVES: Final = frozenset(
    {"to", "cuda", "cpu", "float", "double", "half", "bfloat16", "long", "int", "bool", "type", "type_as", "detach"}
    | {"contiguous", "clone", "requires_grad_"}
)
_KEEPS_ENTRIES: Final = frozenset(
    {"to", "cuda", "cpu", "long", "int", "detach", "contiguous", "clone", "view", "reshape", "flatten", "squeeze"}
    | {"unsqueeze", "permute", "transpose"}
)
_ELEMENTWISE: Final = frozenset(
    {"abs", "pow", "square", "sqrt", "exp", "log", "log1p", "sigmoid", "tanh", "relu", "clamp", "neg", "sin", "cos"}
    | {"logsigmoid", "softplus", "gelu", "silu", "leaky_relu", "elu", "add", "sub", "mul", "div", "eq", "ne", "where"}
    | {"rand_like", "randn_like", "zeros_like", "ones_like", "full_like", "dropout", "nan_to_num", "round", "sign"}
    | {"normal", "bernoulli", "randint_like", "one_hot", "maximum", "minimum"}
)
_ALONG: Final = frozenset({"softmax", "log_softmax", "argmax", "sum", "mean", "amax", "amin", "norm", "normalize"})
_FACTORIES: Final = frozenset({"rand", "randn", "randint", "zeros", "ones", "full", "empty", "arange"})
_OUTPUTS: Final = frozenset({"logits", "last_hidden_state", "pooler_output"})
_SHIFTED: Final = ("ForCausalLM", "LMHeadModel")
_BY_TOKEN: Final = ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Follows one step.

    Attributes:
        names: the values of names, filled while statements are followed.
        models: class name of the model that each source text calls.
        losses: the loss that each source text calls.
        imported: names that the cells import from ``torch.nn`` and ``torch.nn.functional``.
        functions: functions of the cells by their names, which are followed where they are called.
        masks_targets: whether -100 may stand in a target, which cross entropy passes over.
    """

    names: dict[str, Value]
    models: Mapping[str, str]
    losses: Mapping[str, LossForm]
    masks_targets: bool = False
    imported: frozenset[str] = frozenset()
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)

    def follow(self, node: ast.stmt) -> None:
        """Take one statement of the step into account.

        Raises:
            NotProven: it does something to the samples that is not known to keep them apart.
        """
        if isinstance(node, ast.With):
            for inner in node.body:
                self.follow(inner)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return
        else:
            raise NotProven(f"line {node.lineno}, `{_brief(node)}`, is more than an assignment")

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            found = [self.value(part) for part in value.elts]
            for part, one in zip(target.elts, found, strict=True):
                self._bind(part, one)
            return
        if isinstance(target, ast.Tuple) and self._is_size(value):
            for part, one in zip(target.elts, [COUNT, *[PLAIN] * len(target.elts)], strict=False):
                self._bind(part, one)
            return
        if isinstance(value, ast.Call) and called(value.func) in self.functions and isinstance(target, ast.Tuple):
            self._assign_returned(target, value)
            return
        made = self.value(value)
        if made.shape is Shape.BATCH and isinstance(target, ast.Tuple) and isinstance(value, ast.Name):
            for at, part in enumerate(target.elts):
                self._bind(part, replace(ROWS, entries=made.entries and f"{made.entries}[{at}]"))
            return
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if len(parts) > 1 and made.shape not in {Shape.ROWS, Shape.PLAIN}:
            raise NotProven(f"`{_brief(value)}` is taken apart into several names")
        if len(parts) > 1 and made.model is None and made.shape is Shape.ROWS:
            raise NotProven(f"`{_brief(value)}` is taken apart along the batch")
        for part in parts:
            self._bind(part, made)

    def _assign_returned(self, target: ast.Tuple, call: ast.Call) -> None:
        returned = self._returned(call)
        if len(returned) != len(target.elts):
            raise NotProven(f"`{_brief(call)}` is taken apart into several names")
        for part, one in zip(target.elts, returned, strict=True):
            self._bind(part, one)

    def _returned(self, call: ast.Call) -> list[Value]:
        """Follow a function of the cells, and return what it returns."""
        name = called(call.func)
        inside, *body = self._entered(call, self.functions[name])
        *statements, last = body
        if not isinstance(last, ast.Return) or last.value is None:
            raise NotProven(f"`{name}` does not end with what it returns")
        for node in statements:
            inside.follow(node)
        values = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        return [replace(inside.value(value), entries=None) for value in values]

    def _entered(self, call: ast.Call, function: ast.FunctionDef) -> tuple[Any, ...]:
        """Return what is known within a function that is called, and its statements."""
        name, arguments = function.name, function.args
        parameters = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        known = {*parameters, *(one.arg for one in arguments.kwonlyargs)}
        hidden = known | bound(function)
        given = dict(zip(parameters, call.args, strict=False)) | {k.arg or "**": k.value for k in call.keywords}
        stars = any(isinstance(one, ast.Starred) for one in call.args)
        odd = arguments.vararg or arguments.kwarg or function.decorator_list
        if odd or stars or len(call.args) > len(parameters) or not given.keys() <= known:
            raise NotProven(f"how `{name}` takes its arguments is not followed")
        free = reads(function) - hidden
        if seen := free & {one for one, value in self.names.items() if value is not PLAIN}:
            raise NotProven(f"`{name}` reads `{min(seen)}` of the batch, which it is not given")
        texts = {one: called(value) for one, value in given.items()}
        models = {one: self.models[text] for one, text in texts.items() if text in self.models}
        losses = {one: self.losses[text] for one, text in texts.items() if text in self.losses}
        inside = replace(
            self,
            names={one: self.value(value) for one, value in given.items()},
            models={one: kind for one, kind in self.models.items() if one.partition(".")[0] not in hidden} | models,
            losses={one: form for one, form in self.losses.items() if one.partition(".")[0] not in hidden} | losses,
            functions={one: node for one, node in self.functions.items() if one not in {name, *hidden}},
        )
        return inside, *function.body

    def _is_size(self, node: ast.expr) -> bool:
        """Whether ``node`` is the shape of a value with a row for each sample."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            return node.func.attr == "size" and self.value(node.func.value).shape is Shape.ROWS
        return _is_shape(node) and isinstance(node, ast.Attribute) and self.value(node.value).shape is Shape.ROWS

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif not (isinstance(target, ast.Subscript) and self.value(target.value).shape is Shape.BATCH):
            raise NotProven(f"`{_brief(target)}` is changed in place within the step")

    def value(self, node: ast.expr) -> Value:
        """Return what ``node`` is to the batch."""
        if not self._depends(node):
            return PLAIN
        match node:
            case ast.Name():
                return self.names[node.id]
            case ast.Call():
                return self._call(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                return self._subscript(node)
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return self.value(node.operand)
            case ast.Compare():
                return self._rows(node, [node.left, *node.comparators])
            case ast.DictComp():
                return self._each_of_batch(node)
        raise NotProven(f"`{_brief(node)}` is not known to keep the samples apart")

    def _depends(self, node: ast.AST) -> bool:
        return any(
            isinstance(part, ast.Name) and self.names.get(part.id, PLAIN) is not PLAIN for part in ast.walk(node)
        )

    def _rows(self, whole: ast.AST, parts: list[ast.expr]) -> Value:
        if any(self.value(part).shape not in {Shape.ROWS, Shape.PLAIN} for part in parts):
            raise NotProven(f"`{_brief(whole)}` mixes samples with something else")
        return ROWS

    def _call(self, node: ast.Call) -> Value:
        name = called(node.func)
        if name in self.models:
            return self._model(node, name)
        if name in self.functions and name not in self.losses:
            returned = self._returned(node)
            if len(returned) != 1:
                raise NotProven(f"`{name}` returns several values")
            return returned[0]
        if name in self.losses and any(k.arg in REDUCES_BY or k.arg in {None, "weight"} for k in node.keywords):
            raise NotProven(f"how `{_brief(node)}` reduces is not read from its arguments")
        form = self.losses.get(name) or function_form(node, name, self.imported)
        if form is None and isinstance(node.func, ast.Call):
            form = loss_made_by(node.func, self.imported)
        if form is not None:
            return self._loss(node, form)
        if name == "len" and self.value(node.args[0]).shape in {Shape.ROWS}:
            return COUNT
        base, _, method = name.rpartition(".")
        if base in NAMESPACES:
            return self._torch(node, method)
        if isinstance(node.func, ast.Attribute) and self._depends(node.func.value):
            return self._method(node, node.func)
        raise NotProven(
            f"`{name or _brief(node.func)}` is not a loss or an operation that is known to keep samples apart"
        )

    def _model(self, node: ast.Call, name: str) -> Value:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            shape = self.value(argument).shape
            if shape not in {Shape.ROWS, Shape.BATCH} and not isinstance(argument, ast.Constant):
                raise NotProven(f"`{_brief(argument)}`, passed to `{name}`, may be made for the whole batch")
        return Value(shape=Shape.ROWS, model=name)

    def _loss(self, node: ast.Call, form: LossForm) -> Value:
        arguments = [*node.args, *(k.value for k in node.keywords if k.arg in {"input", "target", "labels"})]
        for argument in arguments:
            if self.value(argument).shape is not Shape.ROWS:
                raise NotProven(f"`{_brief(argument)}`, given to the loss, is not part of the batch")
        if form.reduction == "none":
            return ROWS
        if form.reduction not in {"mean", "sum", "batchmean"}:
            raise NotProven(f"the reduction {form.reduction!r} is not known")
        if form.reduction == "sum":
            return Value(shape=Shape.SUM)
        if form.weighted:
            raise NotProven("the loss has class weights, so its mean is not one over samples")
        return Value(shape=Shape.MEAN, counted=self._counted(form, arguments[-1]))

    def _counted(self, form: LossForm, target: ast.expr) -> tuple[str, int] | None:
        if form.name not in IGNORING:
            return None
        ignored = -100 if form.ignore_index is None else form.ignore_index
        text = self.value(target).entries
        if ignored == -100 and not self.masks_targets and "labels'" not in (text or ""):
            return None
        if text is None:
            raise NotProven(f"`{_brief(target)}`, whose entries of {ignored} do not count, is made from the batch")
        return text, ignored

    def _torch(self, node: ast.Call, method: str) -> Value:
        parts = [*node.args]
        if method in _FACTORIES:
            sizes = [part for argument in parts for part in getattr(argument, "elts", [argument])]
            sizes = sizes[1:] if method == "full" and len(sizes) > 1 and sizes[0] is not parts[0] else sizes
            if any(self._depends(size) and self.value(size).shape in {Shape.COUNT, Shape.PLAIN} for size in sizes):
                return ROWS
            if any(_is_shape(size) for size in sizes):
                return ROWS
        elif method == "one_hot" and len(parts) < 2 and not node.keywords:
            raise NotProven(f"`{_brief(node)}` counts the classes of what it is given")
        elif method in _ELEMENTWISE:
            return self._rows(node, parts)
        elif method in _ALONG and parts:
            return self._along(node, method, self.value(parts[0]), parts[1:])
        elif method in {"flatten"} and parts and _first(node, parts[1:], "start_dim") not in {None, 0}:
            return self._rows(node, parts[:1])
        raise NotProven(f"`{_brief(node)}` is not known to keep the samples apart")

    def _method(self, node: ast.Call, function: ast.Attribute) -> Value:
        of = self.value(function.value)
        found = self._called(node, function, of)
        return replace(found, entries=of.entries if function.attr in _KEEPS_ENTRIES else None)

    def _called(self, node: ast.Call, function: ast.Attribute, of: Value) -> Value:
        method = function.attr
        if method in _MOVES and of.shape in {Shape.ROWS, Shape.BATCH}:
            return of
        if (
            of.shape is Shape.BATCH
            and method == "pop"
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
        ):
            return replace(ROWS)
        if of.shape is Shape.ROWS:
            if method in {"view", "reshape"} and node.args and self._keeps_rows(node.args[0]):
                return ROWS
            if method == "size" and (dim := _first(node, node.args, "dim")) is not None:
                return COUNT if dim == 0 else EXTENT
            if method in _ELEMENTWISE:
                return self._rows(node, [function.value, *node.args])
            if method in _ALONG:
                return self._along(node, method, of, list(node.args))
            if method in {"unsqueeze", "squeeze", "flatten"} and _first(node, node.args, "dim") not in {None, 0}:
                return ROWS
            if method == "permute" and _first(node, node.args, "dims") == 0:
                return ROWS
            if method == "transpose" and 0 not in (axes := _constants(node.args)) and len(axes) == 2 and min(axes) > 0:
                return ROWS
        raise NotProven(f"`.{method}()` in `{_brief(node)}` is not known to keep the batch in dimension 0")

    def _keeps_rows(self, first: ast.expr) -> bool:
        return (isinstance(first, ast.UnaryOp) and ast.unparse(first) == "-1") or (
            self._depends(first) and self.value(first).shape is Shape.COUNT
        )

    def _along(self, node: ast.Call, method: str, of: Value, axes: list[ast.expr]) -> Value:
        """Follow a reduction or a softmax: over all of it, or along dimensions other than that of the batch."""
        if of.shape is not Shape.ROWS:
            raise NotProven(f"`{_brief(node)}` reduces a value that is not one of samples")
        axes = axes + [keyword.value for keyword in node.keywords if keyword.arg in {"dim", "axis"}]
        if not axes and method in {"sum", "mean"}:
            return Value(shape=Shape.MEAN if method == "mean" else Shape.SUM)
        numbers = [n for axis in axes for n in _constants(getattr(axis, "elts", [axis]))]
        if numbers and (min(numbers) > 0 or (method in {"softmax", "log_softmax"} and numbers == [-1])):
            return ROWS
        raise NotProven(f"`{_brief(node)}` may reduce over the batch")

    def _attribute(self, node: ast.Attribute) -> Value:
        of = self.value(node.value)
        if of.shape is Shape.ROWS and node.attr in {"device", "dtype"}:
            return Value(shape=Shape.PLAIN, model="metadata")
        if of.model in self.models and node.attr in _OUTPUTS:
            return ROWS
        if of.model in self.models and node.attr == "loss":
            return self._own_loss(self.models[of.model or ""])
        raise NotProven(f"`{_brief(node)}` is not known to be a value for each sample")

    def _own_loss(self, type_name: str) -> Value:
        """Return the loss that a model of the transformers library computes from the labels it was given."""
        batch = next((name for name, value in self.names.items() if value.shape is Shape.BATCH), None)
        if type_name.endswith("ForSequenceClassification"):
            return Value(shape=Shape.MEAN)
        if batch and type_name.endswith(_SHIFTED):
            return Value(shape=Shape.MEAN, counted=(f"{batch}['labels'][:, 1:]", -100))
        if batch and type_name.endswith(_BY_TOKEN):
            return Value(shape=Shape.MEAN, counted=(f"{batch}['labels']", -100))
        raise NotProven(f"how {type_name} reduces the loss that it returns is not known")

    def _subscript(self, node: ast.Subscript) -> Value:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape" and (axes := _constants([node.slice])):
            is_rows = self.value(node.value.value).shape is Shape.ROWS
            if is_rows or axes == [0]:
                return (COUNT if axes == [0] else EXTENT) if is_rows else PLAIN
        of = self.value(node.value)
        entries = of.entries and ast.unparse(
            ast.Subscript(value=ast.parse(of.entries, mode="eval").body, slice=node.slice, ctx=ast.Load())
        )
        if of.shape is Shape.BATCH and isinstance(node.slice, ast.Constant):
            return replace(ROWS, entries=entries)
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        whole = isinstance(index[0], ast.Slice) and ast.unparse(index[0]) == ":"
        fixed = all(isinstance(i, ast.Slice | ast.Constant) or ast.unparse(i) == "-1" for i in index[1:])
        if of.shape is Shape.ROWS and of.model is None and whole and fixed:
            return replace(ROWS, entries=entries)
        raise NotProven(f"`{_brief(node)}` does not show that the batch is in dimension 0")

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        shapes = {left.shape, right.shape}
        if shapes <= {Shape.ROWS, Shape.PLAIN} and not (isinstance(node.op, ast.MatMult) and Shape.PLAIN not in shapes):
            return ROWS
        if isinstance(node.op, ast.Add | ast.Sub):
            if shapes <= {Shape.MEAN, Shape.PLAIN} and (Shape.PLAIN in shapes or left.counted == right.counted):
                return left if left.shape is Shape.MEAN else right
            if shapes == {Shape.SUM}:
                return left
        elif isinstance(node.op, ast.Mult | ast.Div):
            if right.shape is Shape.PLAIN or (left.shape is Shape.PLAIN and isinstance(node.op, ast.Mult)):
                return left if right.shape is Shape.PLAIN else right
            if left.shape is Shape.SUM and right.shape is Shape.COUNT and isinstance(node.op, ast.Div):
                return Value(shape=Shape.MEAN)
        raise NotProven(f"`{_brief(node)}` combines the samples in a way that is not known to be a mean or a sum")

    def _each_of_batch(self, node: ast.DictComp) -> Value:
        """Follow ``{key: value.to(device) for key, value in batch.items()}``."""
        generator = node.generators[0]
        source = generator.iter
        if (
            len(node.generators) == 1
            and isinstance(source, ast.Call)
            and isinstance(source.func, ast.Attribute)
            and source.func.attr == "items"
            and self.value(source.func.value).shape is Shape.BATCH
            and isinstance(generator.target, ast.Tuple)
            and isinstance(generator.target.elts[1], ast.Name)
        ):
            inner = replace(self, names={**self.names, generator.target.elts[1].id: ROWS})
            if inner.value(node.value).shape is Shape.ROWS:
                return self.value(source.func.value)
        raise NotProven(f"`{_brief(node)}` is not known to keep the samples apart")


def _is_shape(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Starred) else node
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _first(node: ast.Call, positional: list[ast.expr], keyword: str) -> int | None:
    """Return the first positional argument, or the one passed by name, where it is a number written out."""
    named = [k.value for k in node.keywords if k.arg in {keyword, "dim", "start_dim"}]
    numbers = _constants([*positional, *named][:1])
    return numbers[0] if numbers else None


def _constants(nodes: list[ast.expr]) -> list[int]:
    out = []
    for node in nodes:
        try:
            value = ast.literal_eval(node)
        except ValueError:
            continue
        if isinstance(value, int):
            out.append(value)
    return out


def _brief(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
