"""Lets the gradients lie in the buckets that DistributedDataParallel exchanges, instead of beside them.

DDP copies each gradient into a bucket, exchanges the bucket, and copies it back: the buckets are a second copy of all
gradients, for as long as the model lives. With ``gradient_as_bucket_view=True`` the gradients are views of the buckets.
The exchange itself is the same to the bit. Programs that hold on to a gradient are refused: as a view it changes with
the next step.

Without the search for unused parameters DDP orders its buckets anew, and a sum of three numbers or more depends on its
order. So that search, ``static_graph`` and other sizes of buckets, which take no byte off the peak, are left as they
are.

There is no live form: the buckets are made with the wrapper, on every process at once.
"""

from __future__ import annotations

import re
from typing import Final

import libcst as cst

from oomdoctor.fixes import _class_calls, _ddp_ranks
from oomdoctor.fixes._unfit import Unfit, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import words
from oomdoctor.program.words import Result

_VIEW: Final = "gradient_as_bucket_view"


_PASSING: Final = re.compile(
    rf"\.grad(\.data)?(\s*[-+*/]=|\.({'|'.join(sorted(words.names_of(Result.REDUCED, Result.DISCRETE)))}|abs|square|pow"
    r"|clone|numel|item|size|dim|element_size|shape|dtype|device|is_sparse|ndim)\b)|\.grad(\s*=(?!=)|\s+is\b|\()"
    r"|^\s*(if [^:\n]*: *)?[\w.\[\]]+\.grad(\.data)?\.(zero|mul|div|add|sub|clamp|copy|nan_to_num)_\(.*"
    r"|\b(isnan|isfinite|isinf|norm|vector_norm|is_tensor)\([\w.\[\]]+\.grad\b",
    re.MULTILINE,
)
"""What leaves nothing behind that shares the gradient's memory."""
_KEEPING: Final = re.compile(r"\S*\.grad\b|create_graph\s*=\s*(?!False)\w+")


@refusing
def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...]:
    """Propose it where gradients were held beside their buckets."""
    del incident
    found = _ddp_ranks.wrapped(evidence)
    if found and all(one.bucket_views for one in found):
        raise Unfit("the gradients lie in the buckets already")
    gradients = evidence.census.bytes_of(Role.GRADIENT)
    if not gradients:
        raise Unfit("no gradient was held when the memory ran out, so the buckets are not a second copy")
    return (
        Proposal(
            dose=Dose.of(**{_VIEW: True}),
            effect=Effect.EXACT,
            saves=gradients,
            basis=f"the census found {format_size(gradients)} of gradients, of which the buckets are a second copy",
        ),
    )


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the settings where DDP is made."""
    found = _class_calls.find(cells, _ddp_ranks.DDP)
    if not found:
        raise Unfit(f"no cell makes a {_ddp_ranks.DDP}: it is made by a library")
    for cell in cells.history:
        code = re.sub(r"#.*", "", cell.source)
        if (kept := _KEEPING.search(_PASSING.sub("", code))) is not None:
            line = next(one.strip() for one in code.splitlines() if kept[0] in one)
            raise Unfit(f"`{line}` may hold on to a gradient, which as a view would change with the next step")
    known = {one.path for one in evidence.code.replicas}
    told = {one: _with_views(one) for one in found}
    live = dict[_class_calls.Call, list[str]]()
    for one in (one for one in found if one.around is None and one.is_live(cells)):
        if one.target is None or one.target not in known:
            raise Unfit(f"{one.where} makes it before the failing cell, under no name that leads to it")
        model = next(arg.value for arg in told[one].args if arg.keyword is None or arg.keyword.value == "module")
        anew = told[one].deep_replace(model, cst.parse_expression(f"{one.target}.module"))
        live[one] = [f"{one.target} = {_class_calls.code_of(anew)}"]
    return _class_calls.exchanged(cells, told, live=live)


def _with_views(one: _class_calls.Call) -> cst.Call:
    given = _class_calls.keyword(one.node, _VIEW)
    text = None if given is None else _class_calls.code_of(given)
    if text not in (None, "True", "False"):
        raise Unfit(f"{one.where} takes `{_VIEW}` from `{text}`: set it there")
    return one.node if text == "True" else _class_calls.with_keyword(one.node, _VIEW, "True")


FIX: Final = Fix(
    id="ddp_settings",
    title="Let the gradients lie in the buckets that DDP exchanges",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    patch=patch,
    guard=_ddp_ranks.alone,
    is_tried=False,
)
