"""Batches run in parts: whether they can be, in how many, and the calls of models that are given parts of one."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.model.absence import Refused
from oomdoctor.model.memory import Role
from oomdoctor.objects.kinds import child_path
from oomdoctor.program import import_lines, rewriting

if TYPE_CHECKING:
    from oomdoctor.model.code import CodeFacts, ModelFacts, TrainingLoop
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.fix import Patch
    from oomdoctor.model.session import Cells
    from oomdoctor.model.site import Site

_TO_DEVICE: Final = m.Call(func=m.Attribute(attr=m.Name("cuda")), args=[]) | m.Call(
    func=m.Attribute(attr=m.Name("to")),
    args=[m.Arg(m.SimpleString() | m.Name(m.MatchRegex(r"(?i)(\w*_)?dev(ice)?")), keyword=None)],
)
_OTHERWISE: Final = (".generate", ".forward")
"""Ends of what is called where a model is not simply called."""


def model_facts(code: CodeFacts, loop: TrainingLoop, text: str) -> ModelFacts | None:
    """Return the facts of the model that the loop calls ``text``, None if the namespace shows no object for it."""
    path = dict(loop.stands_for).get(text, text)
    exact = [model for model in code.models if model.path == path]
    if not exact and path.startswith("self."):
        exact = [model for model in code.models if model.path.endswith(path.removeprefix("self"))]
    exact = exact or [model for model in code.local_models if model.path == path]
    return exact[0] if len(exact) == 1 else None


def why_not(code: CodeFacts, loop: TrainingLoop) -> str | None:
    """Return why this loop's batch cannot be taken apart, as far as facts tell."""
    for text in loop.models:
        model = model_facts(code, loop, text)
        if model is None:
            continue
        if model.training and model.batch_norm:
            return f"{layer(model, model.batch_norm[0])} normalises over the batch in training mode"
        if (why := takes_note(model, own=True)) is not None:
            return why
    return None


def couples(model: ModelFacts) -> str | None:
    """Return why the samples of a batch cannot be run apart, None where nothing is known against it."""
    if model.training and model.batch_norm:
        return f"{child_path(model.path, model.batch_norm[0])} takes its statistics over the whole batch"
    if model.sequence_first:
        return f"{child_path(model.path, model.sequence_first[0])} takes the batch in dimension 1"
    return takes_note(model, own=False)


def takes_note(model: ModelFacts, *, own: bool) -> str | None:
    """Return what would be of each part of a batch in the place of the whole, None where nothing is known to be.

    Args:
        model: what is run.
        own: whether the hooks of the model itself would be called for each part as well.
    """
    if (hooked := next((name for name in model.hooked if name or own), None)) is not None:
        return f"{layer(model, hooked)} has forward hooks, which would be called for each part of a batch"
    if model.leaves:
        return f"a forward leaves {layer(model, model.leaves[0])} behind, which would be that of a part of the batch"
    return None


def layer(model: ModelFacts, name: str) -> str:
    """Return the expression for the layer ``name`` below ``model``, or for an attribute there."""
    return reduce(child_path, filter(None, name.split(".")), model.path)


def no_more_than_samples(counts: Sequence[int], evidence: Evidence) -> list[int] | Refused:
    """Return those of ``counts`` that the largest batch found has samples for, all where no batch was found."""
    batches = [one.shape[0] for one in evidence.census.holdings if one.role is Role.BATCH and one.shape]
    fitting = [count for count in counts if not batches or count <= max(batches)]
    return fitting or Refused("the batch has one sample: there is nothing to split")


def called_in_parts(cells: Cells, found: Sequence[Site], parts: int, *, moves: bool = False) -> Patch | Refused:
    """Return the cells with ``in_parts(model, parts)(x)`` for each call of a model in what the failing cell runs.

    Args:
        found: by ``inference_precision.detect_runs``.
        moves: let it move the parts of what a call moves to the device.
    """
    sites = [one for one in found if one.kind != "numpy" and not one.names[-1].endswith(_OTHERWISE)]
    if any("in_parts(" in cell.source for cell in cells.history):
        return Refused("a model is given parts of the batch already")
    if not sites:
        return Refused("no call of a model was found in what the failing cell runs")

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> cst.Module:
        name = import_lines.name_for("oomdoctor", "in_parts", cells.beside(cells.get(here[0].cell)), "model_in_parts")
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for call in rewriting.within(parsed.module, cst.Call):
            called = {one.names[-1] for one in here if one.line == parsed.lines_of(call)[0]}
            model = rewriting.text_of(call.func) if called else ""
            if called and ast.unparse(ast.parse(model, mode="eval")) in called:
                changes[call.func] = cst.parse_expression(f"{name}({model}, {parts})")
                first = call.args[0].value if call.args else None
                if moves and isinstance(first, cst.Call) and m.matches(first, _TO_DEVICE):
                    changes[first] = cst.ensure_type(first.func, cst.Attribute).value
        imports = [import_lines.source_of("oomdoctor", "in_parts", name)]
        return import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)

    return rewriting.at_sites(cells, sites, change)
