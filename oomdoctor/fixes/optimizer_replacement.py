"""Another optimizer in the place of Adam: its state in 8 bits, Adafactor, or SGD with momentum.

Adam keeps two values for each weight, 8 bytes in float32. ``optimizer_8bit``: by torchao or bitsandbytes, where one of
them is installed, they take 2, with a scale for each block of them; both are made for CUDA devices, so that nothing is
proposed elsewhere, the virtual accelerator included. ``lighter_optimizer``: Adafactor keeps one value for each row and
column of a matrix, SGD with momentum one for each weight. Both train in another way, and their learning rates mean
something else, so this is the user's to choose.

The optimizer is made where it was made before, and schedulers on it with it; it begins without a history. There is no
live form: a loop that holds the old optimizer would go on stepping it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._precision_dtype import kind_of_device
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import arguments, rewriting
from oomdoctor.program.book import Book, Page, Place, calls
from oomdoctor.program.import_lines import insert_at_top, knows_torch
from oomdoctor.program.names import call_name
from oomdoctor.program.replay import LOADERS, exchanged, write

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIXES"]

_LIBRARIES: Final = ("torchao", "bitsandbytes")
_NO_PARAMETERS: Final = "the optimizer has no parameters that it would keep a state for"
_ANEW: Final = "it begins without what the optimizer has gathered so far, and its learning rate has to be found anew"
_CAVEATS: Final = {
    "SGD": f"SGD with momentum takes steps of another size and direction than Adam: {_ANEW}",
    "Adafactor": f"Adafactor scales its steps by rows and columns and by the size of the weights: {_ANEW}",
}

_ADAM: Final = re.compile(r"^((torch\.)?optim\.)?(Adam|AdamW)$")
_TYPES: Final = frozenset({"Adam", "AdamW"})
_MAKES: Final = re.compile(
    LOADERS.pattern + r"|^((torch\.)?optim\.)?(Adam|AdamW|Adafactor|SGD)$|^(AdamW?8bit)(_\d+)?$|^filter$"
    r"|^[\w.\[\]'\"]+\.(named_)?parameters$"
    r"|^(itertools\.)?chain$|^((torch\.)?optim\.)?(lr_scheduler\.)?\w+LR$|^(\w+\.)?get_\w*schedule\w*$"
    r"|^((torch\.)?optim\.)?(lr_scheduler\.)?(CosineAnnealingWarmRestarts|ReduceLROnPlateau|LambdaLR)$"
)
_ALGORITHMS: Final = frozenset({"amsgrad", "maximize", "differentiable"})
_GROUP_KEYS: Final = frozenset({"betas", "eps", "amsgrad"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """What is called in the place of Adam.

    Attributes:
        name: the source text to call; ``{}`` stands for the class that it replaces.
        keeps: the arguments that are passed on.
        momentum: what is given for it, as source text.
        home: the module that the cell has to import it from.
    """

    name: str
    keeps: frozenset[str]
    momentum: str = ""
    home: str = ""


_LIGHTER: Final = {
    "SGD": _Maker(name="torch.optim.SGD", keeps=frozenset({"weight_decay", "foreach"}), momentum="0.9"),
    "Adafactor": _Maker(name="torch.optim.Adafactor", keeps=frozenset({"weight_decay", "foreach"})),
}


def _propose_8bit(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the state in 8 bits by the first library that is installed."""
    del incident
    found = _adams(evidence)
    if isinstance(found, Refused):
        return found
    if kind_of_device(evidence) != "cuda":
        return Refused("optimizers with a state of 8 bits are made for CUDA devices")
    library = next((name for name in _LIBRARIES if _has_optimizers(name)), None)
    if library is None:
        return Refused("neither torchao nor bitsandbytes is installed, which have optimizers with a state of 8 bits")
    parameters = sum(one.parameter_bytes for one in found)
    if not parameters:
        return Refused(_NO_PARAMETERS)
    return (
        Proposal(
            dose=Dose.of(library=library),
            effect=Effect.CHANGES_RESULT,
            saves=2 * parameters * 3 // 4,
            slowdown=1.0,
            basis=f"analytic estimate: two values for each of {format_size(parameters)} of parameters, in 1 byte and "
            "not in 4",
            caveat="Adam's averages are rounded to 8 bits in each step, and begin anew",
        ),
    )


def _has_optimizers(library: str) -> bool:
    """Whether ``library`` is installed with its ``optim``; nothing of it is imported."""
    spec = find_spec(library)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "optim").is_dir() for place in places or ())


def _propose_lighter(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose SGD with momentum, which halves the state, and Adafactor, which leaves next to none of it."""
    del incident
    through = _trainer_source.owner(evidence.code, "lighter_optimizer")
    found = _adams(evidence)
    if isinstance(found, Refused):
        return found
    parameters = sum(one.parameter_bytes for one in found)
    if not parameters:
        return Refused(_NO_PARAMETERS)
    import torch  # an optimizer of it is there: where it is not loaded, nothing loads it after a failure

    state = evidence.census.bytes_of(Role.OPTIMIZER_STATE)
    known = f"the census found {format_size(state)} of state" if state else "its state is still to come"
    saves = {"SGD": parameters, "Adafactor": 2 * parameters}
    # Adafactor is in torch from 2.5 on.
    available = [name for name in _LIGHTER if hasattr(torch.optim, name)] if through is None else ["Adafactor"]
    return tuple(
        Proposal(
            dose=Dose.of(optimizer=name),
            effect=Effect.CHANGES_RESULT,
            saves=saves[name],
            slowdown=1.0,
            basis=f"analytic estimate: Adam keeps two values for each of {format_size(parameters)} of parameters, "
            f"{name} {'one' if name == 'SGD' else 'next to none'}; {known}",
            caveat=_CAVEATS[name] if through is None else _trainer_terms.ADAFACTOR,
        )
        for name in available
    )


def _adams(evidence: Evidence) -> tuple[OptimizerFacts, ...] | Refused:
    """Return the optimizers of the failing run that are Adam or AdamW of torch."""
    if (through := _trainer_terms.adams(evidence)) is not None:
        return through
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    paths = {dict(loop.stands_for).get(text, text) for loop in loops for text in loop.optimizers}
    if not paths:
        return Refused("no training loop that steps an optimizer was found in what the failing cell runs")
    known = [one for one in evidence.code.steppers if one.path in paths]
    if not known:
        made = ", ".join(f"`{path}`" for path in sorted(paths))
        return Refused(f"{made} is not among the notebook's objects, so what its state takes is not known")
    found = tuple(one for one in known if one.type_name in _TYPES and one.home.startswith("torch.optim"))
    return found or Refused("the loop steps no Adam or AdamW of the notebook's, whose state could be smaller")


def _patch(fix: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with every Adam of the failing run made another way."""
    if fix == "optimizer_8bit" and any("8bit" in cell.source for cell in cells.history):
        return Refused("the cells have to do with optimizers of 8 bits already")
    if (through := _trainer_source.patched(fix, cells, evidence, dose)) is not None:
        return through
    if fix == "lighter_optimizer":
        return _replaced(cells, evidence.code, _LIGHTER[str(dose["optimizer"])])
    keeps = frozenset({"betas", "eps", "weight_decay"})
    return _replaced(cells, evidence.code, _Maker(name="{}8bit", keeps=keeps, home=f"{dose['library']}.optim"))


def _replaced(cells: Cells, code: CodeFacts, maker: _Maker) -> Patch | Refused:
    """Return the cells with every Adam of the failing run made by ``maker``."""
    book = Book.read(cells)
    if not knows_torch(cells):
        return Refused("the cells do not import `torch` by its name")
    made = dict(_calls(book, code))
    if not made:
        return Refused("where the optimizer is made was not found in the cells")
    loaded = next((name for page in book.pages for name in _loaded(page.tree)), None)
    if loaded is not None:
        return Refused(f"`{loaded}` was given a state that another optimizer cannot take")
    wanted: list[tuple[Page, ast.expr, rewriting.New]] = []
    imports: dict[int, dict[str, None]] = {}
    for call, place in made.items():
        if (why := _why_not(call)) is not None:
            return Refused(why)
        cls = call_name(call).rpartition(".")[2]
        wanted.append((place.page, call, partial(_call, cls=cls, maker=maker)))
        needed = imports.setdefault(place.page.cell.number, {})
        needed |= {f"from {maker.home} import {maker.name.format(cls)}": None} if maker.home else {}
    changed = exchanged(wanted)
    if isinstance(changed, Refused):
        return changed
    changed = {n: (parsed, insert_at_top(parsed, module, [*imports[n]])) for n, (parsed, module) in changed.items()}
    used_up = {name for call, place in made.items() if place.function is None for name in _given(call)}
    return write(cells, changed, _MAKES, used_up)


def _calls(book: Book, code: CodeFacts) -> Iterator[tuple[ast.Call, Place]]:
    """Yield the calls that make the optimizers of the failing run, and where they stand."""
    for loop in (one for one in code.loops if one.in_failing_run):
        found = book.loop(loop)
        for text in loop.optimizers if found else ():
            yield from _makers(book, ast.Name(id=text, ctx=ast.Load()), found[0], depth=4)  # type: ignore[index]


def _makers(book: Book, node: ast.expr, place: Place, depth: int) -> Iterator[tuple[ast.Call, Place]]:
    if isinstance(node, ast.Call) and _ADAM.match(call_name(node)):
        yield node, place
    elif isinstance(node, ast.Name) and depth:
        for value, there in book.values(node.id, place):
            yield from _makers(book, value, there, depth - 1)


def _given(call: ast.Call) -> set[str]:
    """Return the names that stand for parameters or groups of them, not those that something is looked up in.

    An optimizer writes its settings into the groups that it is given, and a generator of parameters ends with it.
    Source: ``torch.optim.Optimizer.add_param_group``.
    """
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "params")]
    nodes = [node for one in given for node in ast.walk(one)]
    roots = [node.value for node in nodes if isinstance(node, ast.Attribute | ast.Subscript)]
    roots += [node.func for node in nodes if isinstance(node, ast.Call)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and node not in roots}


def _loaded(tree: ast.AST) -> Iterator[str]:
    for call in calls(tree):
        text = ast.unparse(call.func)
        if text.endswith(".load_state_dict") and re.search(r"optim|opt\b", text, re.IGNORECASE):
            yield text.removesuffix(".load_state_dict")


def _why_not(call: ast.Call) -> str | None:
    if any(keyword.arg is None for keyword in call.keywords):
        return f"`{ast.unparse(call)}` unpacks its arguments, of which another optimizer may not know some"
    if len(call.args) > 2:
        return f"`{ast.unparse(call)}` gives its settings by position"
    for node in ast.walk(call):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if keys & _GROUP_KEYS:
                return f"`{ast.unparse(call)}` has settings of Adam in its groups of parameters"
        if isinstance(node, ast.keyword) and node.arg in _ALGORITHMS and ast.unparse(node.value) != "False":
            return f"`{ast.unparse(call)}` asks for `{node.arg}`, which is another algorithm"
    return None


def _call(node: cst.CSTNode, cls: str, maker: _Maker) -> cst.CSTNode:
    """Return the call of another optimizer with those arguments that it knows."""
    call = cst.ensure_type(node, cst.Call)
    for name in [arg.keyword.value for arg in call.args if arg.keyword is not None]:
        call = call if name in maker.keeps | {"params", "lr"} else arguments.without_keyword(call, name)
    call = arguments.with_keyword(call, "momentum", maker.momentum) if maker.momentum else call
    name = maker.name.format(cls)
    home, _, last = name.rpartition(".")
    if home == "torch.optim" and isinstance(call.func, cst.Attribute):  # as the cell knows it
        return call.with_changes(func=call.func.with_changes(attr=cst.Name(last)))
    return call.with_changes(func=cst.parse_expression(name))


FIXES: Final = (
    Fix(
        id="optimizer_8bit",
        title="Keep Adam's state in 8 bits",
        effect=Effect.CHANGES_RESULT,
        cost="averages rounded to 8 bits; a little time for each step",
        propose=_propose_8bit,
        apply=None,
        patch=partial(_patch, "optimizer_8bit"),
    ),
    Fix(
        id="lighter_optimizer",
        title="Train with an optimizer that keeps less for each weight",
        effect=Effect.CHANGES_RESULT,
        cost="another course of the training; its learning rate has to be found anew",
        propose=_propose_lighter,
        apply=None,
        patch=partial(_patch, "lighter_optimizer"),
    ),
)
