"""Weights of 16 bits, where a model is run for its results alone.

A model that is not trained needs its weights in no more than the precision of its results: in bfloat16, or float16
where the device has no bfloat16, they take half the memory, and so do activations. What the model is given is cast too
where it was seen to be floating point. Training needs the small updates that 16 bits lose: a cell that trains is
refused.

There is no live form: weights that were rounded do not come back by themselves, and keeping them would save nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import libcst as cst

from oomdoctor.fixes._precision_dtype import native
from oomdoctor.fixes._precision_inference import Run, first_lines, numpy_calls, preceded, runs
from oomdoctor.fixes._seen import root
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import called_on
from oomdoctor.program.book import Book
from oomdoctor.program.import_lines import knows_torch
from oomdoctor.program.replay import node_of
from oomdoctor.program.rewriting import exchange

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "guard", "patch", "propose"]

_Tails: TypeAlias = dict[int, list[tuple[ast.expr, str]]]
"""By the number of the cell, expressions and the call of a method that is to follow each."""

_CASTS: Final = re.compile(r"\.half\(\)|\.bfloat16\(\)|torch\.(bfloat16|float16|half)\b")
_MAY_BE_TENSORS: Final = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.UnaryOp)
_DIGITS: Final = {"bfloat16": 8, "float16": 11}


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one 16-bit type that the device computes in."""
    del incident
    code, census = evidence.code, evidence.census
    if any(loop.in_failing_run for loop in code.loops):
        return Refused("the failing cell trains, and small updates would be lost in weights of 16 bits")
    if not code.grad_disabled:
        return Refused("the failing line does not run under no_grad or inference_mode, so it may be training")
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


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the failing cell with its models cast first, and what they are given and give cast where needed."""
    dtype, book = str(dose["dtype"]), Book.read(cells)
    found = runs(book, evidence.code)
    if not found:
        return Refused("no call of a model of the notebook was found in what the failing cell runs")
    if any(loop.in_failing_run for loop in evidence.code.loops):
        return Refused("the failing cell trains, and small updates would be lost in weights of 16 bits")
    touched = {run.page.cell.number: run.page.cell for run in found}
    for cell in touched.values():
        if _CASTS.search(cell.source):
            return Refused(f"{cell} chooses the precision already")
    for cell in (touched | {cells.failing.number: cells.failing}).values():
        if not knows_torch(cells.beside(cell)):
            return Refused(f"{'the cells do' if cell.file is None else f'{cell} does'} not import `torch` by its name")
    first = first_lines(book, found, lambda path: f"{path}.to(torch.{dtype})")
    if isinstance(first, Refused):
        return first
    tails = _tails(book, found, evidence, dtype)
    if isinstance(tails, Refused):
        return tails
    return _written(cells, tails, first)


def _tails(book: Book, found: list[Run], evidence: Evidence, dtype: str) -> _Tails | Refused:
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
                out.setdefault(run.page.cell.number, []).append((one, f".to(torch.{dtype})"))
    if dtype == "bfloat16":
        for page, call, base in numpy_calls(book, found):
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
            module = preceded(parsed, module, first)
        edits.append(rewriting.edit(cells, cells.get(number), parsed, module))
    return rewriting.join(cells, edits)


def guard(session: Session, dose: Dose) -> AbstractContextManager[None]:
    """Have the weights kept before the patched cell casts them, so that a retry that fails can put them back."""
    from oomdoctor.fixes._precision_guard import announced

    del session, dose
    return announced()


FIX: Final = Fix(
    id="half_weights",
    title="Keep the weights in 16 bits for inference",
    effect=Effect.CHANGES_RESULT,
    cost="results rounded to 16 bits",
    propose=propose,
    apply=None,
    patch=patch,
    guard=guard,
)
