"""Parts of a model recomputed in the backward pass instead of kept: the classic trade of time for memory.

The source gets one line where the model is made, or first in the function that is given it: ``recompute(model,
"layer1.0", "layer1.1")``. Where a dry run has told what each part saves and costs, the doses are the cheapest parts
that free more and more bytes; else every other part, then all of them. Where the model has a switch of its own, the
source turns that on: such models keep keys for each layer, which blocks run from outside would find.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._construction_sites import placed
from oomdoctor.fixes._preconditions import check_short, found_or_asked, layer, model_facts
from oomdoctor.fixes._recompute_choice import choices
from oomdoctor.fixes._refusals import FORWARD_SHARE, Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.fix import Value
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import call_name, imported

_EVERY: Final = (2, 1)
"""Every other part, then all."""

_KEPT_RATIO: Final = 2 / 34
"""What a recomputed transformer block keeps of its activations. Source: Korthikanti et al., arXiv:2205.05198, table 2:
2sbh bytes of inputs out of 34sbh and more."""

_NO_PARTS: Final = "no model was found with parts that keep more than their input"
_SWITCHES: Final = frozenset(
    {"activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing"}
)
_HOMES: Final = ("torch.utils.checkpoint.", "oomdoctor.recompute")


@_trainers.first("checkpoint_blocks")
@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose parts to recompute, fewest first, where a model has parts and gradients are on."""
    code = evidence.code
    need(not code.grad_disabled, "gradients are off: nothing is kept for a backward pass")
    models = need(_trained(code), _NO_PARTS)
    if all(model.switches and not model.training for model in models):
        raise Unfit(f"`{models[0].path}` recomputes its layers in training alone, and is in evaluation mode")
    check_short(incident, evidence)
    activations = need(found_or_asked(incident, evidence), "no activations were found that recomputing could save")
    # A switch turns the cache of keys and values off as well, whose tensors may be rounded otherwise.
    switched = any(model.switches for model in models) or _trainers.owner(code, "checkpoint_blocks")
    parts = [] if switched else [(model, part) for model in models for part in model.segments]
    if not switched and evidence.modules:
        yield from _measured(evidence, models)
        return
    # In the backward pass one part after the other comes back whole.
    returned = 1 - 1 / len(parts) if len(parts) > 1 else 1.0
    for every in _EVERY if len(parts) != 1 else (1,):
        yield Proposal(
            dose=_dose(parts[::every]) if parts else Dose.of(every=every),
            effect=Effect.EQUIVALENT if switched else Effect.EXACT,
            saves=int(activations * (1 - _KEPT_RATIO) * returned / every),
            slowdown=1 + FORWARD_SHARE / every,
            basis=f"estimate: {'every part' if every == 1 else 'every other part'} keeps its inputs only, "
            f"of {format_size(activations)} of activations",
        )


def _measured(evidence: Evidence, models: Sequence[ModelFacts]) -> Iterator[Proposal]:
    """Return the cheapest parts for more and more bytes, where a dry run has told what each of them keeps."""
    by_type = {(model.type_name, model.parameter_bytes): model for model in models}
    found = choices([row for row in evidence.modules if row.model in by_type])
    for choice, saves in need(found, "what the calls of its modules keep is their input and output alone"):
        yield Proposal(
            dose=_dose([(by_type[part.model], part.name) for part in choice.parts]),
            effect=Effect.EXACT,
            saves=saves,
            slowdown=1 + choice.cost,
            basis=f"estimate: {len(choice.parts)} parts keep {format_size(saves)} less, by what each keeps",
        )


def _dose(parts: Sequence[tuple[ModelFacts, str]]) -> Dose:
    return Dose.of(modules=", ".join(f"{model.path}:{part}" for model, part in parts))


def _trained(code: CodeFacts) -> list[ModelFacts]:
    """Return the models with parts or a switch that the training loops call, all where none of them is known."""
    every = [model for model in (*code.models, *code.local_models) if model.segments or model.switches]
    called = [model_facts(code, loop, text) for loop in code.loops if loop.in_failing_run for text in loop.models]
    return [model for model in every if model in called] or every


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Put a line that marks the parts behind the one that makes each model."""
    need(not _recomputes(cells), "the code recomputes activations already")
    asked = dict(dose.values)
    through = _trainers.patched("checkpoint_blocks", cells, evidence, dose) if asked.get("every") == 1 else None
    if through is not None:
        return through
    models = _trained(evidence.code)
    lines: dict[ModelFacts, str] = {}
    name = import_lines.name_for("oomdoctor", "recompute", cells, "recompute_parts")
    imports: tuple[str, ...] = ()
    for model in models:
        if model.switches and "every" in asked:
            lines[model] = _switch(model, dose.number("every"))
        elif chosen := _chosen(model, asked):
            texts = ", ".join(f'"{part}"' for part in chosen)
            lines[model] = f"{name}({model.path}, {texts})\n"
            imports = (import_lines.source_of("oomdoctor", "recompute", name),)
    need(lines, _NO_PARTS)
    return placed(cells, lines.items(), imports)


def _chosen(model: ModelFacts, asked: dict[str, Value]) -> list[str]:
    """Return the parts as they are written: all blocks of a container as ``blocks.*``."""
    named = (text.partition(":") for text in str(asked.get("modules", "")).split(", "))
    texts = [part for path, _, part in named if path == model.path]
    texts = list(model.segments[:: int(asked["every"])]) if "every" in asked else texts
    for container in model.blocks:
        within = [part for part in model.segments if re.fullmatch(rf"{re.escape(container)}\.\d+", part)]
        if len(within) > 1 and set(within) <= set(texts):
            texts[texts.index(within[0])] = f"{container}.*"
            texts = [text for text in texts if text not in within]
    return texts


def _switch(model: ModelFacts, every: int) -> str:
    lines = []
    for path, may_leave_out in model.switches:
        owner, _, method = path.rpartition(".")
        for norm in model.batch_norm if model.training else ():
            if not owner or norm.startswith(f"{owner}."):
                raise Unfit(f"plain checkpoint would count each batch twice in the running statistics of {norm}")
        argument = method.replace("enable", "kwargs") + '={"use_reentrant": False}'
        some = f", every_n_layers={every}" if may_leave_out and every > 1 else ""
        lines.append(f"{layer(model, path)}({argument}{some})\n")
    return "".join(lines)


def _recomputes(cells: Cells) -> bool:
    """Return whether a cell uses what recomputes activations, or calls a model's switch for it."""
    nodes = [node for cell in cells.history if (tree := parsed(cell.source)) is not None for node in ast.walk(tree)]
    # Names are of one namespace: one cell imports what another one calls.
    aliases = dict(alias for node in nodes for alias in imported(node))
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=args) if name in _SWITCHES:
                if [ast.unparse(one) for one in args[:1]] != ["False"]:
                    return True
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
                root, dot, rest = call_name(node).partition(".")
                if f"{aliases.get(root, root)}{dot}{rest}".startswith(_HOMES):
                    return True
    return False


FIX: Final = Fix(
    id="checkpoint_blocks",
    title="Recompute parts of the model in the backward pass (checkpointing)",
    effect=Effect.EXACT,
    joins=True,
    cost="one more forward of each recomputed part",
    propose=propose,
    patch=patch,
    is_measured=True,
    leaves=("._forward_hooks", ".gradient_checkpointing", "._gradient_checkpointing_func"),
    tolerance=1e-4,
)
