"""Another optimizer in the place of Adam, where it is made in the cells, with what is made from it made anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import libcst as cst

from oomdoctor.fixes import _trainer_terms
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cells
from oomdoctor.program import rewriting
from oomdoctor.program.book import Book, Page, Place, calls
from oomdoctor.program.dataflow import reads
from oomdoctor.program.import_lines import insert_at_top, knows_torch
from oomdoctor.program.names import call_name
from oomdoctor.program.replay import LOADERS, exchanged, write

__all__ = ["Maker", "adams", "replaced"]

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
class Maker:
    """What is called in the place of Adam.

    Attributes:
        name: the source text to call, by the name of the class that it replaces.
        keeps: the arguments that are passed on.
        adds: arguments that are added, as source text.
        imports: what the cell has to import for it, by the name of that class.
    """

    name: Callable[[str], str]
    keeps: frozenset[str]
    adds: tuple[str, ...] = ()
    imports: Callable[[str], str] | None = None


def adams(evidence: Evidence) -> tuple[OptimizerFacts, ...] | Refused:
    """Return the optimizers of the failing run that are Adam or AdamW of torch."""
    if (through := _trainer_terms.adams(evidence)) is not None:
        return through
    code = evidence.code
    paths = _paths(code)
    if not paths:
        return Refused("no training loop that steps an optimizer was found in what the failing cell runs")
    found = tuple(one for one in code.steppers if one.path in paths and _is_adam(one))
    if not any(one.path in paths for one in code.steppers):
        made = ", ".join(f"`{path}`" for path in sorted(paths))
        return Refused(f"{made} is not among the notebook's objects, so what its state takes is not known")
    if not found:
        return Refused("the loop steps no Adam or AdamW of the notebook's, whose state could be smaller")
    return found


def _is_adam(one: OptimizerFacts) -> bool:
    return one.type_name in _TYPES and one.home.startswith("torch.optim")


def _paths(code: CodeFacts) -> set[str]:
    return {
        dict(loop.stands_for).get(text, text) for loop in code.loops if loop.in_failing_run for text in loop.optimizers
    }


def replaced(cells: Cells, code: CodeFacts, maker: Maker) -> Patch | Refused:
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
        needed |= {maker.imports(cls): None} if maker.imports is not None else {}
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
    """Return the names that stand for parameters or groups of them.

    An optimizer writes its settings into the groups that it is given, and a generator of parameters ends with it.
    Source: ``torch.optim.Optimizer.add_param_group``.
    """
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "params")]
    called = {part.func.id for one in given for part in calls(one) if isinstance(part.func, ast.Name)}
    return {name for one in given for name in reads(one)} - called - _rooted(given)


def _rooted(given: list[ast.expr]) -> set[str]:
    """Return the names of modules: those that something is looked up in."""
    found: set[str] = set()
    for node in (part for one in given for part in ast.walk(one)):
        if isinstance(node, ast.Attribute | ast.Subscript):
            base: ast.AST = node
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            found |= {base.id} if isinstance(base, ast.Name) else set()
    return found


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


def _call(node: cst.CSTNode, cls: str, maker: Maker) -> cst.CSTNode:
    """Return the call of another optimizer with those arguments that it knows."""
    old = cst.ensure_type(node, cst.Call)
    args = [arg for arg in old.args if arg.keyword is None or arg.keyword.value in maker.keeps | {"params", "lr"}]
    args += [_argument(text) for text in maker.adds]
    comma = next(
        (arg.comma for arg in old.args[:-1] if isinstance(arg.comma, cst.Comma)),
        cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")),
    )
    last = old.args[-1].comma if old.args else cst.MaybeSentinel.DEFAULT
    args = [arg.with_changes(comma=comma if arg.comma is cst.MaybeSentinel.DEFAULT else arg.comma) for arg in args]
    args[-1] = args[-1].with_changes(comma=last)
    return old.with_changes(func=_callee(old.func, maker.name(cls)), args=args)


def _callee(old: cst.BaseExpression, name: str) -> cst.BaseExpression:
    """Return what to call, by the name under which the cell knows ``torch.optim`` where it is from there."""
    home, _, cls = name.rpartition(".")
    if home == "torch.optim" and isinstance(old, cst.Attribute):
        return old.with_changes(attr=cst.Name(cls))
    return cst.parse_expression(name)


def _argument(text: str) -> cst.Arg:
    return cst.ensure_type(cst.parse_expression(f"f({text})"), cst.Call).args[0]
