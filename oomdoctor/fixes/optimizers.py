"""What an optimizer takes: another one in the place of Adam, or a step that takes the parameters one by one.

Adam keeps two values for each weight, 8 bytes in float32. ``optimizer_8bit``: by torchao or bitsandbytes, on CUDA
devices, they take 2. ``lighter_optimizer``: Adafactor keeps one value for each row and column of a matrix, SGD with
momentum one for each weight; both train in another way. The optimizer is made where it was made before, and schedulers
on it with it; it begins without a history.

``optimizer_foreach_off``: on CUDA each operation of a step works on a list of all parameters, and so do its
intermediate results; the loop over parameters needs the largest of them alone. It is offered where the memory ran out
in the step. Kernels for lists may round otherwise. Source: pytorch/pytorch issue 114165, a maintainer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Final

import libcst as cst

from oomdoctor.fixes import _construction_sites, _trainers
from oomdoctor.fixes._preconditions import in_the_step, kind_of_device
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.sizes import format_size
from oomdoctor.program import arguments, rewriting
from oomdoctor.program.earlier_cells import LOADERS, write
from oomdoctor.program.import_lines import insert_at_top, knows_torch
from oomdoctor.program.rewriting import text_of

_LIBRARIES: Final = ("torchao", "bitsandbytes")
_ANEW: Final = "it begins without what the optimizer has gathered so far, and its learning rate has to be found anew"
_CAVEATS: Final = {
    "SGD": f"SGD with momentum takes steps of another size and direction than Adam: {_ANEW}",
    "trainer": "Adafactor keeps a row and a column for each matrix and no momentum: it takes other steps than Adam, "
    "and its learning rate has to be found anew",
    "Adafactor": f"Adafactor scales its steps by rows and columns and by the size of the weights: {_ANEW}",
}

_TYPES: Final = frozenset({"Adam", "AdamW"})
_MAKES: Final = re.compile(
    LOADERS.pattern + r"|^((torch\.)?optim\.)?(Adam|AdamW|Adafactor|SGD)$|^(AdamW?8bit)(_\d+)?$|^filter$"
    r"|^[\w.\[\]'\"]+\.(named_)?parameters$"
    r"|^(itertools\.)?chain$|^((torch\.)?optim\.)?(lr_scheduler\.)?\w+LR$|^(\w+\.)?get_\w*schedule\w*$"
    r"|^((torch\.)?optim\.)?(lr_scheduler\.)?(CosineAnnealingWarmRestarts|ReduceLROnPlateau|LambdaLR)$"
)
_ALGORITHMS: Final = re.compile(r"\b(amsgrad|maximize|differentiable)\s*=\s*(?!False)")
_OF_ADAM: Final = re.compile(r"""['"](betas|eps|amsgrad)['"]\s*:""")
_LOADED: Final = re.compile(r"([\w.]*(?:optim|opt\b)\w*)\.load_state_dict\(", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """What is called in the place of Adam, whose class is ``{}`` in ``name``; it ``keeps`` some of its arguments."""

    name: str
    keeps: tuple[str, ...] = ("weight_decay", "foreach")
    momentum: str = ""
    home: str = ""


_LIGHTER: Final = {
    "SGD": _Maker(name="torch.optim.SGD", momentum="0.9"),
    "Adafactor": _Maker(name="torch.optim.Adafactor"),
}


@proposing
def _propose_8bit(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    parameters = sum(one.parameter_bytes for one in _adams(evidence))
    need(kind_of_device(evidence) == "cuda", "optimizers with a state of 8 bits are made for CUDA devices")
    why = "neither torchao nor bitsandbytes is installed, which have optimizers with a state of 8 bits"
    library = need(next(filter(_has_optimizers, _LIBRARIES), None), why)
    yield Proposal(
        dose=Dose.of(library=library),
        effect=Effect.CHANGES_RESULT,
        saves=2 * parameters * 3 // 4,
        basis=f"analytic estimate: two values for each of {format_size(parameters)} of parameters, in 1 byte and "
        "not in 4",
        caveat="Adam's averages are rounded to 8 bits in each step, and begin anew",
    )


def _has_optimizers(library: str) -> bool:
    """Whether ``library`` is installed with its ``optim``; nothing of it is imported."""
    spec = find_spec(library)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "optim").is_dir() for place in places or ())


@proposing
def _propose_lighter(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    through = _trainers.owner(evidence.code, "lighter_optimizer")
    parameters = sum(one.parameter_bytes for one in _adams(evidence))
    import torch  # an optimizer of it is there: where it is not loaded, nothing loads it after a failure

    state = evidence.census.bytes_of(Role.OPTIMIZER_STATE)
    known = f"the census found {format_size(state)} of state" if state else "its state is still to come"
    saves = {"SGD": parameters, "Adafactor": 2 * parameters}
    # Adafactor is in torch from 2.5 on.
    available = [name for name in _LIGHTER if hasattr(torch.optim, name)] if through is None else ["Adafactor"]
    for name in available:
        yield Proposal(
            dose=Dose.of(optimizer=name),
            effect=Effect.CHANGES_RESULT,
            saves=saves[name],
            basis=f"analytic estimate: Adam keeps two values for each of {format_size(parameters)} of parameters, "
            f"{name} {'one' if name == 'SGD' else 'next to none'}; {known}",
            caveat=_CAVEATS[name] if through is None else _CAVEATS["trainer"],
        )


def _adams(evidence: Evidence) -> tuple[OptimizerFacts, ...]:
    """Return the optimizers of the failing run that are Adam or AdamW of torch, with parameters."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    paths = {dict(loop.stands_for).get(text, text) for loop in loops for text in loop.optimizers}
    through = _trainers.adams(evidence)
    if through is None:
        need(paths, "no training loop that steps an optimizer was found in what the failing cell runs")
        made = ", ".join(f"`{path}`" for path in sorted(paths))
        known = [one for one in evidence.code.steppers if one.path in paths]
        need(known, f"{made} is not among the notebook's objects, so what its state takes is not known")
        through = tuple(one for one in known if one.type_name in _TYPES and one.home.startswith("torch.optim"))
    need(through, "the loop steps no Adam or AdamW of the notebook's, whose state could be smaller")
    size = sum(one.parameter_bytes for one in through)
    need(size, "the optimizer has no parameters that it would keep a state for")
    return through


@refusing
def _patch(fix: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with every Adam of the failing run made another way."""
    if fix == "optimizer_8bit" and any("8bit" in cell.source for cell in cells.history):
        raise Unfit("the cells have to do with optimizers of 8 bits already")
    if (through := _trainers.patched(fix, cells, evidence, dose)) is not None:
        return through
    if fix == "lighter_optimizer":
        maker = _LIGHTER[str(dose["optimizer"])]
    else:
        maker = _Maker(name="{}8bit", keeps=("betas", "eps", "weight_decay"), home=f"{dose['library']}.optim")
    need(knows_torch(cells), "the cells do not import `torch` by its name")
    made = [_construction_sites.made(cells, facts) for facts in _adams(evidence)]
    for cell in cells.history:
        if (loaded := _LOADED.search(cell.source)) is not None:
            raise Unfit(f"`{loaded[1]}` was given a state that another optimizer cannot take")
    changed = {}
    for one in made:
        here = [other for other in made if other.cell is one.cell]
        module = rewriting.exchange(one.parsed.module, {other.node: _call(other.node, maker) for other in here})
        names = dict.fromkeys(maker.name.format(other.name) for other in here if maker.home)
        imports = [f"from {maker.home} import {name}" for name in names]
        changed[one.cell.number] = one.parsed, insert_at_top(one.parsed, module, imports)
    used_up = {name for one in made if one.around is None for name in _given(one.node)}
    return write(cells, changed, _MAKES, used_up)


def _given(call: cst.Call) -> set[str]:
    """Return the names that stand for parameters or groups of them, into which an optimizer writes its settings."""
    given = [arg.value for arg in call.args if arg.keyword is None or arg.keyword.value == "params"][:1]
    nodes = [node for one in given for node in ast.walk(ast.parse(text_of(one), mode="eval"))]
    roots = [node.value for node in nodes if isinstance(node, ast.Attribute | ast.Subscript)]
    roots += [node.func for node in nodes if isinstance(node, ast.Call)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and node not in roots}


def _call(call: cst.Call, maker: _Maker) -> cst.Call:
    text = text_of(call)
    if any(arg.star for arg in call.args):
        raise Unfit(f"`{text}` unpacks its arguments, of which another optimizer may not know some")
    need(sum(arg.keyword is None for arg in call.args) <= 2, f"`{text}` gives its settings by position")
    need(not _OF_ADAM.search(text), f"`{text}` has settings of Adam in its groups of parameters")
    if (other := _ALGORITHMS.search(text)) is not None:
        raise Unfit(f"`{text}` asks for `{other[1]}`, which is another algorithm")
    func = call.func
    for name in [arg.keyword.value for arg in call.args if arg.keyword is not None]:
        call = call if name in {*maker.keeps, "params", "lr"} else arguments.without_keyword(call, name)
    call = arguments.with_keyword(call, "momentum", maker.momentum) if maker.momentum else call
    name = maker.name.format(_construction_sites.last_name(func))
    home, _, last = name.rpartition(".")
    if home == "torch.optim" and isinstance(func, cst.Attribute):  # as the cell knows it
        return call.with_changes(func=func.with_changes(attr=cst.Name(last)))
    return call.with_changes(func=cst.parse_expression(name))


TOLERANCE: Final = 1e-5
"""Relative difference of parameters in float32: single and list kernels may contract operations differently."""
_LAUNCHES: Final = 1.05
"""Time of a step with more and smaller kernels, as a ratio. A round figure, not measured."""


@proposing
def _propose_one_by_one(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    listed = _listed(evidence)
    need(in_the_step(incident), "the memory did not run out in an optimizer's step, where the lists are made")
    # A list of one intermediate result less the root and the quotient that a single parameter needs. Source:
    # ``torch.optim.adam``. Optimizers step one after the other.
    spared, most = max(((one.parameter_bytes - 2 * one.largest_bytes, one) for one in listed), key=itemgetter(0))
    need(max(spared, 0), "most of what the optimizer steps is one or two parameters: a list is hardly larger")
    yield Proposal(
        effect=Effect.EQUIVALENT,
        saves=spared,
        slowdown=_LAUNCHES,
        basis=f"estimate: an intermediate result of the {format_size(most.parameter_bytes)} of parameters of "
        f"`{most.path}`, less two of the largest",
    )


def _listed(evidence: Evidence) -> list[OptimizerFacts]:
    found = [one for one in evidence.code.steppers if one.foreach]
    return need(found, "no optimizer was found whose step goes through lists of all parameters at once")


@refusing
def _patch_one_by_one(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    found = {_construction_sites.made(cells, facts): facts for facts in _listed(evidence)}
    told = {one: _construction_sites.with_keyword(one.node, "foreach", "False") for one in found}
    # A comprehension leaves no name behind.
    lines = "{0}.defaults.update(foreach=False)", "[group.update(foreach=False) for group in {0}.param_groups]"
    live = {one: [line.format(facts.path) for line in lines] for one, facts in found.items() if one.is_live(cells)}
    return _construction_sites.exchanged(cells, told, live=live)


FIXES: Final = (
    Fix(
        id="optimizer_8bit",
        title="Use 8-bit Adam state",
        effect=Effect.CHANGES_RESULT,
        frees=(Role.OPTIMIZER_STATE,),
        cost="averages rounded to 8 bits; a little time for each step",
        propose=_propose_8bit,
        patch=partial(_patch, "optimizer_8bit"),
    ),
    Fix(
        id="lighter_optimizer",
        title="Use an optimizer with less state per weight",
        effect=Effect.CHANGES_RESULT,
        frees=(Role.OPTIMIZER_STATE,),
        joins=True,
        cost="another course of the training; its learning rate has to be found anew",
        propose=_propose_lighter,
        patch=partial(_patch, "lighter_optimizer"),
    ),
    Fix(
        id="optimizer_foreach_off",
        title="Step parameters one at a time (foreach=False)",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        joins=True,
        cost="more and smaller kernels in the optimizer's step",
        propose=_propose_one_by_one,
        patch=_patch_one_by_one,
    ),
)
