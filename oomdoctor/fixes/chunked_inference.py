"""A prediction over a large batch made over parts of it, its results put together as they come.

Without gradients nothing is kept of a part but its result. So the batch is cut, its parts take the device one after
the other, and each result goes to where the whole one was to go: into one tensor on the device, or, where the code
takes the result to the host anyway, there, part by part.

The results are equal up to rounding, not to the bit: libraries choose other kernels for other numbers of rows. That
samples do not depend on one another is shown by the trial of both programs; a model in training mode whose layers do,
or that drops values, is refused. Calls with gradients run as they are.

Moves of the whole batch and of the whole result are taken in as well: of ``torch.cat([model(part.to(device)).cpu() for
part in x.chunk(4)])`` a part of each is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._chunked_calls import rewrite
from oomdoctor.fixes._chunks import couples, no_more_than_samples
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path
from oomdoctor.program import rewriting, words

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

TOLERANCE: Final = 1e-5
"""Relative difference of outputs in float32: kernels for other numbers of rows add up in another order."""

_CHUNKS: Final = (2, 4, 16, 64)

_OVERHEAD: Final = 0.001
"""Time lost per part to launching the same kernels again, as a share of the whole. A round figure, not measured."""


_MOVES: Final = words.MOVES | words.CASTS | {"detach"}
"""Methods that treat each number alone, so that they may as well be called on a part."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose 2 to 64 parts, no more than the batch has samples where that is known."""
    if (through := _trainer_terms.proposed("chunked_inference", incident, evidence)) is not None:
        return through
    code = evidence.code
    if not code.grad_disabled:
        return Refused("the failing line runs with gradients on, so that activations of every part would be kept")
    models = [model for model in code.models if model.parameter_bytes]
    if not models:
        return Refused("no model was found among the names of the notebook")
    for model in models:
        if (why := _couples(model)) is not None:
            return Refused(why)
    size = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    if not size:
        return Refused("no activations were found that splitting the batch could save")
    doses = no_more_than_samples(_CHUNKS, evidence)
    if isinstance(doses, Refused):
        return doses
    return tuple(
        Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.EQUIVALENT,
            saves=size * (chunks - 1) // chunks,
            slowdown=1 + _OVERHEAD * chunks,
            basis=f"estimate: 1/{chunks} of {format_size(size)} of activations and request at a time",
        )
        for chunks in doses
    )


def _couples(model: ModelFacts) -> str | None:
    """Return why the samples of a batch cannot be run apart with the same results."""
    if model.training and model.dropout and not model.batch_norm:
        return f"{child_path(model.path, model.dropout[0])} drops values: `{model.path}` is in training mode"
    return couples(model)


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Split every forward of the session's models that runs without gradients; undone on exit.

    Raises:
        OomDoctorError: no model can be split; raised by a call of the model where its arguments, its output or what
            it does to them cannot be split.
    """
    from oomdoctor.fixes._split import forwards_in_parts

    with forwards_in_parts(list(session.modules), dose.number("chunks"), with_gradients=False):
        yield


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Rewrite the model's calls in the failing cell; moves to and from the device are made part by part."""
    code = evidence.code
    if (through := _trainer_source.patched("chunked_inference", cells, evidence, dose)) is not None:
        return through
    if not code.grad_disabled:
        return Refused("the failing line runs with gradients on")
    for model in code.models:
        if (why := _couples(model)) is not None:
            return Refused(why)
    if any(loop.in_failing_run for loop in code.loops):
        return Refused("the failing cell trains as well: which of its calls are predictions cannot be told")
    found = rewrite(cells, evidence, dose.number("chunks"), functions=False)
    if isinstance(found, Refused):
        return found
    (edit,) = found.edits
    after = moved_inwards(edit.after, rewriting.fresh_name("part", cells))
    return after if isinstance(after, Refused) else Patch(edits=(replace(edit, after=after, replay=after),))


def moved_inwards(source: str, part: str) -> str | Refused:
    """Return the cell with the moves around its comprehensions over ``part`` taken into them."""
    parsed = rewriting.read(source)
    if isinstance(parsed, Refused):
        return parsed
    return rewriting.write(parsed, parsed.module.visit(_Inwards(part)))


class _Inwards(cst.CSTTransformer):
    """Takes moves into the comprehensions that go over the parts of a batch."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def leave_ListComp(self, original_node: cst.ListComp, updated_node: cst.ListComp) -> cst.ListComp:  # noqa: N802
        """Take ``x.to(device).chunk(n)`` apart: the parts of ``x`` are moved one by one."""
        pieces, model = updated_node.for_in.iter, updated_node.elt
        while isinstance(model, cst.Attribute):  # of what the model returns
            model = model.value
        if not self._is_ours(updated_node) or not isinstance(model, cst.Call) or not isinstance(pieces, cst.Call):
            return updated_node
        if len(model.args) != 1 or model.args[0].star or not isinstance(pieces.func, cst.Attribute):
            return updated_node
        whole, moves = _without_moves(pieces.func.value)
        if not moves:
            return updated_node
        given = model.args[0].with_changes(value=_with_moves(cst.Name(self._part), moves))
        element = _replaced(updated_node.elt, model, model.with_changes(args=[given]))
        cut = pieces.with_changes(func=pieces.func.with_changes(value=whole))
        return updated_node.with_changes(elt=element, for_in=updated_node.for_in.with_changes(iter=cut))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """Take ``torch.cat([...]).cpu()`` apart: each result goes to the host as it comes."""
        joined, moves = _without_moves(updated_node)
        if not moves or not _to_host(moves[-1]) or not isinstance(joined, cst.Call) or not joined.args:
            return updated_node
        listed = joined.args[0].value
        if not isinstance(listed, cst.ListComp) or not self._is_ours(listed):
            return updated_node
        results = listed.with_changes(elt=_with_moves(listed.elt, moves))
        return joined.with_changes(args=[joined.args[0].with_changes(value=results), *joined.args[1:]])

    def _is_ours(self, node: cst.ListComp) -> bool:
        target = node.for_in.target
        return isinstance(target, cst.Name) and target.value == self._part


def _without_moves(node: cst.BaseExpression) -> tuple[cst.BaseExpression, list[cst.Call]]:
    """Return what is moved, and the calls that move it in their order."""
    moves: list[cst.Call] = []
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in _MOVES:
        moves.insert(0, node)
        node = node.func.value
    return node, moves


def _with_moves(node: cst.BaseExpression, moves: list[cst.Call]) -> cst.BaseExpression:
    for move in moves:
        node = move.with_changes(func=cst.ensure_type(move.func, cst.Attribute).with_changes(value=node))
    return node


def _replaced(tree: cst.BaseExpression, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    return new if tree is old else cst.ensure_type(tree.deep_replace(old, new), cst.Attribute)


def _to_host(call: cst.Call) -> bool:
    name = cst.ensure_type(call.func, cst.Attribute).attr.value
    first = call.args[0].value if call.args else None
    return name == "cpu" or (name == "to" and isinstance(first, cst.SimpleString) and first.evaluated_value == "cpu")


FIX: Final = Fix(
    id="chunked_inference",
    title="Predict over parts of the batch, and put the results together as they come",
    effect=Effect.EQUIVALENT,
    tolerance=TOLERANCE,
    cost="the same arithmetic in smaller pieces",
    propose=propose,
    apply=apply,
    patch=patch,
)
