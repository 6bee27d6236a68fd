"""Weights of fewer bits where a model is run for its results alone: 16 bits, or 8 for linear layers on the CPU.

``half_weights``: a model that is not trained needs its weights in no more than the precision of its results: in
bfloat16, or float16 where the device has no bfloat16, they take half the memory, and so do activations. What the model
is given is cast too where it was seen to be floating point. ``dynamic_quantization`` keeps the weights of
``nn.Linear`` as int8 with a scale, and rounds what goes into each layer as it comes: a quarter of the memory, most
often faster on a CPU, the only place where its kernels run. Layers are exchanged one by one, so that the float weights
go as the others come. Where torch no longer has it (it moves to torchao), nothing is proposed.

Training needs the small updates that few bits lose: a cell that trains is refused. There is no live form: weights that
were rounded do not come back by themselves, and keeping them would save nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import libcst as cst

from oomdoctor.fixes._precision_dtype import native
from oomdoctor.fixes._seen import root
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import called_on
from oomdoctor.program.book import Book, Page, Place
from oomdoctor.program.dataflow import bound, own
from oomdoctor.program.import_lines import knows_torch
from oomdoctor.program.names import call_name
from oomdoctor.program.replay import node_of
from oomdoctor.program.rewriting import exchange

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIXES"]

_Tails: TypeAlias = dict[int, list[tuple[ast.expr, str]]]
"""By the number of the cell, expressions and the call of a method that is to follow each."""

_CASTS: Final = re.compile(r"\.half\(\)|\.bfloat16\(\)|torch\.(bfloat16|float16|half)\b")
_MAY_BE_TENSORS: Final = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.UnaryOp)
_DIGITS: Final = {"bfloat16": 8, "float16": 11}
_TRAINS: Final = {
    "half_weights": "the failing cell trains, and small updates would be lost in weights of 16 bits",
    "dynamic_quantization": "the failing cell trains, and weights of 8 bits cannot be trained",
}


def _may_train(fix: str, code: CodeFacts) -> Refused | None:
    if any(loop.in_failing_run for loop in code.loops):
        return Refused(_TRAINS[fix])
    if not code.grad_disabled:
        return Refused("the failing line does not run under no_grad or inference_mode, so it may be training")
    return None


def _propose_half(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one 16-bit type that the device computes in."""
    del incident
    code, census = evidence.code, evidence.census
    if (refused := _may_train("half_weights", code)) is not None:
        return refused
    if code.half_weights or code.autocast:
        return Refused("the model computes in 16 bits already")
    if not code.models:
        return Refused("no model was found among the notebook's objects")
    weights, passing = census.bytes_of(Role.PARAMETER), census.bytes_of(Role.ACTIVATION)
    if not weights:
        return Refused(f"the census found no weights on {census.device}")
    dtype = native(evidence)
    if isinstance(dtype, Refused):
        return dtype
    return (
        Proposal(
            dose=Dose.of(dtype=dtype),
            effect=Effect.CHANGES_RESULT,
            saves=(weights + passing) // 2,
            slowdown=1.0,
            basis=f"half of {format_size(weights)} of weights and {format_size(passing)} of activations in the census",
            caveat=f"weights and results are rounded to {dtype}, {_DIGITS[dtype]} significant bits in place of 24, and "
            "the weights stay so",
        ),
    )


def _propose_quantized(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one dose: every linear layer of the models that are run."""
    del incident
    code = evidence.code
    if any(loop.in_failing_run for loop in code.loops):
        return Refused(_TRAINS["dynamic_quantization"])
    if evidence.device.tensor_device != "cpu" or evidence.device.simulated:
        return Refused("the kernels of dynamic quantization run on the CPU alone")
    if (refused := _may_train("dynamic_quantization", code)) is not None:
        return refused
    if code.half_weights:
        return Refused("the weights take 2 bytes each already, and are quantized from 4")
    linear = sum(model.linear_bytes for model in code.models)
    if not linear:
        return Refused("no model with linear layers was found among the notebook's objects")
    if find_spec("torch.ao.quantization.quantize") is None:
        return Refused("this torch has no dynamic quantization: it has moved to torchao")
    return (
        Proposal(
            dose=Dose.of(dtype="qint8"),
            effect=Effect.CHANGES_RESULT,
            saves=linear * 3 // 4,
            slowdown=1.0,
            basis=f"analytic estimate: 1 byte in place of 4 for each of {format_size(linear)} of linear layers",
            caveat="weights of linear layers, and what goes into them, are rounded to 8 bits, and the weights stay so",
        ),
    )


def _patch_half(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the failing cell with its models cast first, and what they are given and give cast where needed."""
    dtype, book = str(dose["dtype"]), Book.read(cells)
    found = _runs(book, evidence.code)
    if not found:
        return Refused("no call of a model of the notebook was found in what the failing cell runs")
    if any(loop.in_failing_run for loop in evidence.code.loops):
        return Refused(_TRAINS["half_weights"])
    touched = {run.place.page.cell.number: run.place.page.cell for run in found}
    for cell in touched.values():
        if _CASTS.search(cell.source):
            return Refused(f"{cell} chooses the precision already")
    for cell in (touched | {cells.failing.number: cells.failing}).values():
        if not knows_torch(cells.beside(cell)):
            return Refused(f"{'the cells do' if cell.file is None else f'{cell} does'} not import `torch` by its name")
    first = _first_lines(found, lambda path: f"{path}.to(torch.{dtype})")
    tails = _tails(book, found, evidence, dtype)
    if isinstance(tails, Refused):
        return tails
    return _written(cells, tails, first)


def _patch_quantized(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the failing cell with its models quantized before they are run."""
    if any(loop.in_failing_run for loop in evidence.code.loops):
        return Refused(_TRAINS["dynamic_quantization"])
    if any("quantiz" in cell.source for cell in cells.history):
        return Refused("the cells have to do with quantization already")
    if not knows_torch(cells):
        return Refused("the cells do not import `torch` by its name")
    book = Book.read(cells)
    found = _runs(book, evidence.code)
    if not found:
        return Refused("no call of a model of the notebook was found in what the failing cell runs")
    for model in (one for run in found for one in evidence.code.models if one.path == run.path):
        if model.type_name == "Linear":
            return Refused(f"`{model.path}` is one layer, which cannot be exchanged in place")
        if not model.linear_bytes:
            return Refused(f"`{model.path}` has no linear layers")
    call = "torch.ao.quantization.quantize_dynamic({}, {{torch.nn.Linear}}, dtype=torch." + f"{dose['dtype']}, "
    return _written(cells, {}, _first_lines(found, lambda path: call.format(path) + "inplace=True)"))


def _tails(book: Book, found: list[_Run], evidence: Evidence, dtype: str) -> _Tails | Refused:
    """Return, by cell, the expressions to follow by another call, with that call."""
    out: _Tails = {}
    for run in found:
        if any(isinstance(one, ast.Starred) for one in run.call.args) or any(k.arg is None for k in run.call.keywords):
            return Refused(f"what `{ast.unparse(run.call)}` unpacks would have to be cast, one by one")
        for one in (*run.call.args, *(keyword.value for keyword in run.call.keywords)):
            is_floating = _is_floating(one, evidence)
            if isinstance(is_floating, Refused):
                return is_floating
            if is_floating:
                out.setdefault(run.place.page.cell.number, []).append((one, f".to(torch.{dtype})"))
    if dtype == "bfloat16":
        for page, call, base in _numpy_calls(book, found):
            if base is None:
                return Refused(f"`{ast.unparse(call)}` may get bfloat16, which NumPy does not have")
            out.setdefault(page.cell.number, []).append((base, ".float()"))
    return out


def _is_floating(node: ast.expr, evidence: Evidence) -> bool | Refused:
    """Tell whether an argument is a floating-point tensor, by what the census saw; another object fails loudly."""
    if isinstance(node, ast.Constant):
        return False
    if not isinstance(node, _MAY_BE_TENSORS):
        return Refused(f"the model is given `{ast.unparse(node)}`, which is no tensor")
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    typed = [held for held in evidence.census.holdings if held.dtype]
    # In a loop that does not train, the census does not know the batch from other tensors of the user's.
    seen = [held for held in typed if root(held) in names] or [held for held in typed if held.role is Role.BATCH]
    kinds = {str(held.dtype).removeprefix("torch.").startswith(("float", "bfloat")) for held in seen}
    return kinds.pop() if len(kinds) == 1 else Refused(f"of which type `{ast.unparse(node)}` is was not seen")


def _written(cells: Cells, tails: _Tails, first: Mapping[int, Sequence[str]]) -> Patch | Refused:
    """Return the cells with ``tails`` put in, and the lines of ``first`` before the failing cell's statements."""
    edits = []
    for number in sorted({*tails, cells.failing.number}):
        parsed = rewriting.read(cells.get(number).source)
        if isinstance(parsed, Refused):
            return parsed
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for node, tail in tails.get(number, []):
            old = node_of(parsed, node)
            if old is None or old in changes:
                return Refused("an expression to cast was not found again")
            changes[old] = partial(called_on, call=tail)
        module = exchange(parsed.module, changes)
        if number == cells.failing.number:
            module = _preceded(parsed, module, first)
        edits.append(rewriting.edit(cells, cells.get(number), parsed, module))
    return rewriting.join(cells, edits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """One call of a model that the namespace holds.

    Attributes:
        path: the model by its name in the namespace.
        statement: what it stands in, the innermost.
        entry: the statement of the failing cell's top level that leads to it first.
    """

    place: Place
    call: ast.Call
    path: str
    statement: ast.stmt
    entry: int


def _reached(book: Book) -> Iterator[tuple[Place, list[ast.stmt], int]]:
    """Yield the statements of the failing cell and the bodies of the functions that they lead to, with their entry."""
    seen: set[str] = set()
    for entry, top in enumerate(book.failing.tree.body):
        is_definition = isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        waiting = [] if is_definition else [(Place(page=book.failing), [top])]
        while waiting:
            place, block = waiting.pop(0)
            yield place, block, entry
            for name in (call_name(part) for node in block for part in own(node) if isinstance(part, ast.Call)):
                if name not in seen and (made := book.function(name)) is not None:
                    seen.add(name)
                    waiting.append((Place(page=made[0], function=made[1]), made[1].body))


def _runs(book: Book, code: CodeFacts) -> list[_Run]:
    """Return the calls of models in the failing cell and in the functions that it calls."""
    paths = {model.path for model in code.models}
    found: dict[int, _Run] = {}
    for place, block, entry in _reached(book):
        statements = [node for one in block for node in own(one) if isinstance(node, ast.stmt)]
        for statement in sorted(statements, key=lambda node: (node.end_lineno or node.lineno) - node.lineno):
            for call in (part for part in own(statement) if isinstance(part, ast.Call)):
                if (path := _model(book, call, place, paths)) is not None:
                    run = _Run(place=place, call=call, path=path, statement=statement, entry=entry)
                    found.setdefault(id(call), run)
    return list(found.values())


def _model(book: Book, call: ast.Call, place: Place, paths: set[str]) -> str | None:
    text = ast.unparse(call.func).removesuffix(".generate")
    given = book.values(text, place) if isinstance(call.func, ast.Name) and place.function is not None else []
    passed = [ast.unparse(value) for value, _ in given if ast.unparse(value) in paths]
    inside = place.function is not None and text in bound(place.function)
    return next(iter(passed), text if text in paths and not inside else None)


def _first_lines(found: Sequence[_Run], line_of: Callable[[str], str]) -> dict[int, list[str]]:
    """Return a line for each model, by the statement of the failing cell in which it is run first.

    Args:
        line_of: the line for the model of this path.
    """
    first: dict[str, int] = {}
    for run in found:
        first[run.path] = min(run.entry, first.get(run.path, run.entry))
    return {place: [line_of(path) for path, at in first.items() if at == place] for place in first.values()}


def _preceded(parsed: rewriting.ParsedCell, module: cst.Module, first: Mapping[int, Sequence[str]]) -> cst.Module:
    """Return ``module`` with the lines of ``first`` before those statements of its top level."""
    body: list[cst.SimpleStatementLine | cst.BaseCompoundStatement] = []
    for index, line in enumerate(module.body):
        if first.get(index):
            new = rewriting.statements("\n".join(first[index]) + "\n", parsed)
            body += [new[0].with_changes(leading_lines=line.leading_lines), *new[1:]]
            body.append(line.with_changes(leading_lines=()))
        else:
            body.append(line)
    return module.with_changes(body=body)


def _numpy_calls(book: Book, found: Sequence[_Run]) -> Iterator[tuple[Page, ast.Call, ast.expr | None]]:
    """Yield the calls of ``numpy()`` where models are run, with the result of a model that each is of.

    That is the expression to make wider: the call of the model, or the name that its result was bound to. None where
    it is something made from it in another way.
    """
    # What ``generate`` gives are numbers of tokens, of which nothing is to be made wider.
    results = [run for run in found if not ast.unparse(run.call.func).endswith(".generate")]
    for place, block, _ in _reached(book):
        here = [
            run.statement for run in results if (run.place.page, run.place.function) == (place.page, place.function)
        ]
        plain = [(node.value, node.targets) for node in here if isinstance(node, ast.Assign)]
        models = [run.call for run in results]
        names = {one.id for value, targets in plain if value in models for one in targets if isinstance(one, ast.Name)}
        for part in (part for node in block for part in own(node)):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "numpy":
                yield place.page, part, _base(part.func.value, names, models)


def _base(node: ast.expr, made: set[str], models: Sequence[ast.Call]) -> ast.expr | None:
    method = "numpy"  # the innermost that is called: by it, what it is called on is a tensor
    while not any(node is call for call in models):
        if isinstance(node, ast.Name):
            return node if node.id in made and _is_of_tensors(method) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in made:
            return node if _is_of_tensors(method) else None  # a field of the result: ``out.logits``
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        method, node = node.func.attr, node.func.value
    return node if _is_of_tensors(method) else None


def _is_of_tensors(method: str) -> bool:
    """Whether tensors have this method, and containers have none so called."""
    import torch

    return hasattr(torch.Tensor, method) and not any(hasattr(kind, method) for kind in (dict, list, tuple))


@contextmanager
def _guard(session: Session, dose: Dose) -> Iterator[None]:
    """Have the weights kept before the patched cell casts them, so that a retry that fails can put them back.

    A retry copies weights just in time for the first step of an optimizer. A cast changes them as a step does, and
    nobody tells of it: so it is announced in the same way, by a step of an optimizer that does nothing.
    """
    from torch import nn, optim

    from oomdoctor.fixes._forward import is_shadow_run

    class Announcement(optim.Optimizer):
        """An optimizer of which only the hooks before its step matter."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing."""

    del session, dose
    original: Callable[..., nn.Module] = nn.Module._apply
    is_due = not is_shadow_run()

    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        nonlocal is_due
        if is_due and (parameters := list(module.parameters())):
            is_due = False
            Announcement(parameters, {}).step()
        return original(module, *args, **kwargs)

    nn.Module._apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


FIXES: Final = (
    Fix(
        id="half_weights",
        title="Keep the weights in 16 bits for inference",
        effect=Effect.CHANGES_RESULT,
        cost="results rounded to 16 bits",
        propose=_propose_half,
        apply=None,
        patch=_patch_half,
        guard=_guard,
    ),
    Fix(
        id="dynamic_quantization",
        title="Quantize the linear layers to 8 bits for inference on the CPU",
        effect=Effect.CHANGES_RESULT,
        cost="results rounded to 8 bits; most often faster on a CPU",
        propose=_propose_quantized,
        apply=None,
        patch=_patch_quantized,
    ),
)
