"""Lets the gradients lie in the buckets that DistributedDataParallel exchanges, instead of beside them.

DDP copies each gradient into a bucket, exchanges the bucket, and copies it back: the buckets are a second copy of all
gradients, for as long as the model lives. With ``gradient_as_bucket_view=True`` the gradients are views of the buckets.
The exchange itself is the same to the bit. Programs that hold on to a gradient are refused: as a view it changes with
the next step.

``find_unused_parameters=False`` comes along where DDP's own search has found every parameter in the graph of every
step, and where two processes at most take part. Without the search DDP orders its buckets anew, and a sum of three
numbers or more depends on its order. For the same reason ``static_graph`` and other sizes of buckets, which take no
byte off the peak, are left as they are.

There is no live form: the buckets are made with the wrapper, on every process at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _class_calls, _ddp_ranks
from oomdoctor.fixes._class_calls import with_keyword
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import ReplicaFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import words
from oomdoctor.program.magics import parsed
from oomdoctor.program.words import Result

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_VIEW: Final = "gradient_as_bucket_view"
_SEARCH: Final = "find_unused_parameters"
_IN_ANY_ORDER: Final = 2
"""Of so many numbers the sum is the same to the bit in whichever order they are added."""


_MEASURES: Final = frozenset(
    {
        *words.names_of(Result.REDUCED, Result.DISCRETE),
        *("abs", "square", "pow", "clone", "numel", "item", "size", "element_size", "dim"),
        *("zero_", "mul_", "div_", "add_", "sub_", "clamp_", "copy_", "nan_to_num_"),
    }
)
"""Methods whose result shares no memory with the gradient, or that change it where it is."""
_FACTS: Final = frozenset({"shape", "dtype", "device", "is_sparse", "ndim"})


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where gradients were held beside their buckets."""
    del incident
    found = _ddp_ranks.wrapped(evidence)
    if isinstance(found, Refused):
        return found
    if found and all(one.bucket_views for one in found):
        return Refused("the gradients lie in the buckets already")
    gradients = evidence.census.bytes_of(Role.GRADIENT)
    if not gradients:
        return Refused("no gradient was held when the memory ran out, so the buckets are not a second copy")
    is_idle = _searches_in_vain(found)
    return (
        Proposal(
            dose=Dose.of(**{_VIEW: True, **({_SEARCH: False} if is_idle else {})}),
            effect=Effect.EXACT,
            saves=gradients,
            slowdown=1.0,
            basis=f"the census found {format_size(gradients)} of gradients, of which the buckets are a second copy",
            caveat="a later step that leaves a parameter without a gradient would stop with an error of DDP's"
            if is_idle
            else None,
        ),
    )


def _searches_in_vain(found: tuple[ReplicaFacts, ...]) -> bool:
    searching = [one for one in found if one.searches_unused]
    return bool(searching) and all(
        one.all_used is True and one.ranks is not None and one.ranks <= _IN_ANY_ORDER for one in searching
    )


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the settings where DDP is made."""
    found = _class_calls.find(cells, _ddp_ranks.DDP)
    if isinstance(found, Refused):
        return found
    if not found:
        return Refused(f"no cell makes a {_ddp_ranks.DDP}: it is made by a library")
    if (text := _held(cells)) is not None:
        return Refused(f"`{text}` may hold on to a gradient, which as a view would change with the next step")
    known = {one.path for one in evidence.code.replicas}
    told, live = dict[_class_calls.Call, cst.Call](), dict[_class_calls.Call, list[str]]()
    for one in found:
        new = _with_settings(one, dose)
        if isinstance(new, Refused):
            return new
        told[one] = new
        if one.around is None and one.is_live(cells):
            if one.target is None or one.target not in known:
                return Refused(f"{one.where} makes it before the failing cell, under no name that leads to it")
            live[one] = [f"{one.target} = {_class_calls.code_of(_anew(new, one.target))}"]
    return _class_calls.exchanged(cells, told, live=live)


def _with_settings(one: _class_calls.Call, dose: Dose) -> cst.Call | Refused:
    call = one.node
    if any(arg.star for arg in call.args):
        return Refused(f"{one.where} unpacks the settings from something that may hold these already")
    for name, value in ((_VIEW, "True"), (_SEARCH, "False")):
        given = _class_calls.keyword(call, name)
        text = None if given is None else _class_calls.code_of(given)
        if text not in (None, "True", "False"):
            return Refused(f"{one.where} takes `{name}` from `{text}`: set it there")
        if name == _SEARCH and (text != "True" or name not in dict(dose.values)):
            continue
        if text != value:
            changed = with_keyword(call, name, value)
            if isinstance(changed, Refused):
                return changed
            call = changed
    return call


def _anew(call: cst.Call, name: str) -> cst.Call:
    """Return the call that wraps the model within the wrapper ``name`` anew."""
    inner = cst.parse_expression(f"{name}.module")
    at = next((i for i, arg in enumerate(call.args) if arg.keyword is not None and arg.keyword.value == "module"), 0)
    args = [arg.with_changes(value=inner) if index == at else arg for index, arg in enumerate(call.args)]
    return call.with_changes(args=args)


def _held(cells: Cells) -> str | None:
    """Return the text of the first expression that may keep a gradient or refuses views, None where there is none."""
    for cell in cells.history:
        if (tree := parsed(cell.source)) is None:
            continue
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if (text := _reading(node, parents)) is not None:
                return text
    return None


def _reading(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    if isinstance(node, ast.keyword) and node.arg == "create_graph" and not _is(node.value, False):
        return f"create_graph={ast.unparse(node.value)}"
    if not (isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load)):
        return None
    above = list(_above(node, parents))
    return None if _is_passing(node, above) else ast.unparse(above[0])


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _is_passing(node: ast.Attribute, above: list[ast.AST]) -> bool:
    """Whether what is done with the gradient at ``node`` leaves nothing behind that shares its memory."""
    parent = above[0]
    if isinstance(parent, ast.Call) and parent.func is node:
        return True  # torch.autograd.grad is a function
    if isinstance(parent, ast.Compare):
        return all(_is(one, None) for one in parent.comparators)
    if isinstance(parent, ast.Attribute) and parent.attr == "data":
        node, parent, above = parent, above[1], above[1:]
        if isinstance(node.ctx, ast.Store):
            return False
    if isinstance(parent, ast.Attribute):
        is_call = len(above) > 1 and isinstance(above[1], ast.Call) and above[1].func is parent
        kept = len(above) > 2 and not isinstance(above[2], ast.Expr) and parent.attr.endswith("_")
        return parent.attr in _FACTS or (is_call and parent.attr in _MEASURES and not kept)
    if isinstance(parent, ast.Call) and node in parent.args:
        called = ast.unparse(parent.func).rpartition(".")[2]
        return called in {"isnan", "isfinite", "isinf", "norm", "vector_norm", "is_tensor"}
    return isinstance(parent, ast.AugAssign) and parent.target is node


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


FIX: Final = Fix(
    id="ddp_settings",
    title="Let the gradients lie in the buckets that DDP exchanges",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=None,
    patch=patch,
    guard=_ddp_ranks.alone,
    is_tried=False,
)
