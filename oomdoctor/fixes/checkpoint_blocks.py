"""Parts of a model recomputed in the backward pass instead of kept: the classic trade of time for memory.

The source gets one line where the model is made, or first in the function that is given it: ``recompute(model,
"layer1.0", "layer1.1")``. Where a dry run has told what each part saves and costs, the doses are the cheapest parts
that free more and more bytes; else every other part, then all of them. Where the model has a switch of its own, the
source turns that on: such models keep keys for each layer, which blocks run from outside would find.

For each of some budgets, dynamic programming over the calls of modules, in their order, finds the parts with the least
time of which the peak stays below: what is kept at the end of the forward, and beside it what a part brings back whole
in the backward pass, with its gradients. The problem is that of Jain et al., "Checkmate", arXiv:1910.02653.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._construction_sites import placed
from oomdoctor.fixes._preconditions import check_short, found_or_asked, layer, model_facts
from oomdoctor.fixes._refusals import FORWARD_SHARE, Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.fix import Value
from oomdoctor.model.memory import ModuleMemory
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

_BUDGETS: Final = 16
"""Budgets that parts are chosen for, each as much below the one before."""
_FINEST: Final = 80
"""A budget below the last that any parts keep to is looked for down to this fraction of the peak."""
_GRAIN: Final = 64
"""Of what two choices keep so far, differences below this fraction of all that is kept do not count."""
_GRADIENTS: Final = 2
"""Gradients as large as the largest output of a part that are there while it goes backwards."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that may be recomputed.

    Attributes:
        model: its type and the bytes of its parameters; ``name``: as ``oomdoctor.recompute`` takes it.
        kept: bytes that it keeps now; ``output``: what of them remains, as others read it.
        largest: bytes of the largest output in it; ``cost``: the share of its forward in the time of the run.
    """

    model: tuple[str, int]
    name: str
    kept: int
    output: int
    largest: int
    cost: float


class Choice(NamedTuple):
    """What was chosen of some calls: the bytes ``kept`` behind them, the time that it adds, and the most at a time."""

    kept: int = 0
    cost: float = 0.0
    peak: int = 0
    parts: tuple[Part, ...] = ()


def choices(rows: Sequence[ModuleMemory]) -> list[tuple[Choice, int]]:
    """Return what is worth recomputing of modules that were called in this order, with what it saves; mildest first."""
    models = dict.fromkeys(row.model for row in rows)
    trees = [_Tree([row for row in rows if row.model == model]) for model in models]
    whole = next(iter(_found(trees, None)), None)
    if whole is None:
        return []
    found: dict[tuple[Part, ...], Choice] = {}
    strongest: list[Choice] = []
    step, limit = whole.peak // (_BUDGETS + 1), whole.peak
    while step > whole.peak // _FINEST:
        if not (several := _found(trees, limit - step)):
            step //= 2  # the strongest lies between
            continue
        limit, strongest = limit - step, several
        found[several[0].parts] = several[0]
    # Where the peak cannot be lower, what is kept less leaves an allocator fewer holes.
    found |= {one.parts: one for one in strongest}
    return [(one, whole.peak - one.peak) for one in found.values()]


def _found(trees: Sequence[_Tree], limit: int | None) -> list[Choice]:
    """Return choices of which the peak is at most ``limit``, cheapest first; without one nothing is recomputed."""
    grain, found = max(sum(tree.total for tree in trees) // _GRAIN, 1), [Choice()]
    for tree in trees:
        search = _Search(tree, limit, grain)
        for path in tree.outermost:
            found = search.after(path, found)
    return sorted(found, key=lambda one: (one.cost, one.peak))


class _Search:
    """Follows the calls of a tree, and of the ways to come to the same call keeps those that no other one beats."""

    def __init__(self, tree: _Tree, limit: int | None, grain: int) -> None:
        self._tree, self._limit, self._grain = tree, limit, grain

    def after(self, path: str, states: list[Choice]) -> list[Choice]:
        """Return the states behind the call of a module, given those before it."""
        row, children = self._tree.rows[path], self._tree.children[path]
        again = self._again(self._tree.part([path], path), states) if path else []
        if not children:
            return self._best([*again, *self._keep(row.own, row.output, states)])
        inner = self._in_turn(path, states) if row.runs_in_turn else self._one_by_one(children, states)
        return self._best([*again, *self._keep(row.own, 0, inner)])

    def _one_by_one(self, children: Sequence[str], states: list[Choice]) -> list[Choice]:
        for child in children:
            states = self.after(child, states)
        return states

    def _in_turn(self, path: str, states: list[Choice]) -> list[Choice]:
        """Return the states behind layers that run in turn, of which every stretch may be recomputed as a whole."""
        children = self._tree.children[path]
        # What a layer writes into is not there any more for a part that would begin with it.
        inner = [at for at in range(1, len(children)) if not self._tree.rows[children[at]].in_place]
        borders = [0, *inner, len(children)]
        ends = {0: states}
        for before, end in pairwise(borders):
            found = self._one_by_one(children[before:end], ends[before])
            for begin in reversed(borders[: borders.index(end)]):
                if self._limit is None or (part := self._tree.stretch(path, begin, end)).kept > self._limit:
                    break
                if end - begin > 1:
                    found += self._again(part, ends[begin])
            ends[end] = self._best(found)
        return ends[len(children)]

    def _again(self, part: Part, states: list[Choice]) -> list[Choice]:
        if self._limit is None or part.kept <= part.output:
            return []
        backward = part.kept + _GRADIENTS * part.largest - part.output
        return [
            Choice(one.kept + part.output, one.cost + part.cost, max(one.peak, one.kept + backward), (*one.parts, part))
            for one in states
            if one.kept + backward <= self._limit
        ]

    def _keep(self, own: int, output: int, states: list[Choice]) -> list[Choice]:
        backward = own + (_GRADIENTS - 1) * output  # what it gave out is gone with the call that read it
        return [
            Choice(one.kept + own, one.cost, max(one.peak, one.kept + backward), one.parts)
            for one in states
            if self._limit is None or one.kept + backward <= self._limit
        ]

    def _best(self, states: list[Choice]) -> list[Choice]:
        """Return those that no other beats in both bytes and time; of those that keep about the same, the cheapest."""
        found: list[Choice] = []
        for one in sorted(states, key=lambda one: (one.kept, one.cost, one.peak)):
            if found and one.cost >= found[-1].cost:
                continue
            if found and one.kept // self._grain == found[-1].kept // self._grain:
                found.pop()
            found.append(one)
        return found


class _Tree:
    """The modules of one model that were called.

    Attributes:
        rows: of each module by its path; ``children``: paths of those called within it, in their order.
        outermost: those that no other one of them calls; ``total``: bytes that all keep.
    """

    def __init__(self, rows: Sequence[ModuleMemory]) -> None:
        self.rows = {row.path: row for row in rows}
        self.children: dict[str, list[str]] = {path: [] for path in self.rows}
        for path in filter(None, self.rows):
            names = path.split(".")[:-1]
            above = (".".join(names[:end]) for end in range(len(names), -1, -1))
            if (parent := next((one for one in above if one in self.children), None)) is not None:
                self.children[parent].append(path)
        inner = {child for children in self.children.values() for child in children}
        self.outermost = [path for path in self.rows if path not in inner]
        self.total = sum(row.own for row in rows)
        self._kept, self._largest = dict[str, int](), dict[str, int]()
        for path, children in reversed(self.children.items()):  # those within a module were called after it began
            self._kept[path] = self.rows[path].own + sum(self._kept[child] for child in children)
            self._largest[path] = max([self.rows[path].output, *(self._largest[child] for child in children)])
        self._stretches = dict[tuple[str, int, int], Part]()

    def part(self, paths: Sequence[str], name: str) -> Part:
        """Return the part that runs the modules of ``paths`` in turn."""
        return Part(
            model=self.rows[paths[0]].model,
            name=name,
            kept=sum(self._kept[path] for path in paths),
            output=self.rows[paths[-1]].output,
            largest=max(self._largest[path] for path in paths),
            cost=sum(self.rows[path].cost for path in paths),
        )

    def stretch(self, path: str, begin: int, end: int) -> Part:
        """Return the layers of a ``Sequential`` from one of its children up to another one."""
        key = (path, begin, end)
        if key not in self._stretches:
            layers = self.children[path][begin:end]
            names = (layers[0].rpartition(".")[2], layers[-1].rpartition(".")[2])
            first, last = map(int, names) if all(map(str.isdigit, names)) else (begin, end - 1)
            self._stretches[key] = self.part(layers, f"{path}[{first}:{last + 1}]")
        return self._stretches[key]


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
