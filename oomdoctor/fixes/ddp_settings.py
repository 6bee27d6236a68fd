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

from typing import TYPE_CHECKING, Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes import _class_calls, _ddp_ranks
from oomdoctor.fixes._class_calls import with_keyword
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import ReplicaFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting, words
from oomdoctor.program.rewriting import text_of, within
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
    {*words.names_of(Result.REDUCED, Result.DISCRETE), "abs", "square", "pow", "clone", "numel", "item", "size", "dim"}
    | {"element_size", "shape", "dtype", "device", "is_sparse", "ndim"}
)
"""Attributes, and methods whose result shares no memory with the gradient."""
_IN_PLACE: Final = frozenset({"zero_", "mul_", "div_", "add_", "sub_", "clamp_", "copy_", "nan_to_num_"})
_LOOKS: Final = frozenset({"isnan", "isfinite", "isinf", "norm", "vector_norm", "is_tensor"})


def _named(names: frozenset[str]) -> m.Name:
    return m.Name(value=m.MatchIfTrue(lambda name: name in names))


_SAVED: Final = m.SaveMatchedNode(m.Attribute(attr=m.Name("grad")), "grad")
_DATA: Final = _SAVED | m.Attribute(value=_SAVED, attr=m.Name("data"))
_STORED: Final = m.AssignTarget(target=_SAVED) | m.AugAssign(target=_DATA)
_PASSING: Final = m.OneOf(
    m.Comparison(left=_SAVED, comparisons=[m.ComparisonTarget(m.Is() | m.IsNot(), m.Name("None"))]),
    m.Call(func=_SAVED),  # torch.autograd.grad is a function
    m.Attribute(value=_DATA, attr=_named(_MEASURES)),
    m.Expr(value=m.Call(func=m.Attribute(value=_DATA, attr=_named(_IN_PLACE)))),
    m.Call(func=m.Attribute(attr=_named(_LOOKS)), args=[m.Arg(value=_DATA), m.ZeroOrMore()]),
)
"""What leaves nothing behind that shares the gradient's memory."""
_GRAPHS: Final = m.Arg(keyword=m.Name("create_graph"), value=m.DoesNotMatch(m.Name("False")))


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
        parsed = rewriting.read(cell.source)
        module = parsed.module if isinstance(parsed, rewriting.ParsedCell) else cst.Module([])
        passing = {id(found["grad"]) for found in m.extractall(module, _PASSING)}
        passing |= {id(found["grad"]) for found in m.extractall(module, _STORED)}
        keeping = [found["grad"] for found in m.extractall(module, _SAVED) if id(found["grad"]) not in passing]
        for node in (*m.findall(module, _GRAPHS), *keeping):
            lines = list(within(module, cst.SimpleStatementLine))
            around = [line.body[0] for line in lines if id(node) in map(id, within(line, cst.Attribute))]
            return text_of((*around, node)[0])  # type: ignore[arg-type]
    return None


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
