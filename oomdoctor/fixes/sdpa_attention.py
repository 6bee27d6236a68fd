"""Attention that writes out its scores exchanged for PyTorch's fused ``scaled_dot_product_attention``.

Written out, attention holds batch x heads x length x length numbers several times over; a fused kernel holds none of
them. Attention that the notebook writes itself is told by what is done: a product, a softmax of it, and a product with
that; a function that also calls the fused kernel is taken to choose it. Models of transformers bring a switch; one of
an earlier cell is switched at the top of the failing one.

The results are equal up to rounding. Dropout of weights draws other random numbers. Where a mask leaves a query nothing
to attend to, the two differ: that is looked for while a change is tried, and refused. So is attention that PyTorch has
no fused kernel for. Kernels take four dimensions (batch, heads, length, features); attention of three is left alone.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import libcst as cst

from oomdoctor.fixes._attention_source import fused, operation
from oomdoctor.fixes._construction_sites import changed
from oomdoctor.fixes._preconditions import HELD, NUMBER_BYTES, check_short
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Session, Site
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path, plain_dict, submodules
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import Flow
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.dependencies import ground
from oomdoctor.program.names import FirstUse, call_name, first_uses, own_nodes
from oomdoctor.program.rewriting import within

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: fused kernels take the softmax block by block."""

_AROUND: Final = 6
"""Lines before and after a softmax that are taken for the attention that it is a part of."""

_FRAME: Final = re.compile(r"softmax|attention|attn", re.IGNORECASE)
_NO_PLACE: Final = "no attention that writes out its scores was found in what the failing cell runs"

WRITTEN: Final = "written out"
ASKED: Final = "asked for"
DROPS: Final = "drops weights"
"""Kinds of sites: a softmax of scores; a setting of a model, with the paths of the models that stand at it and can be
switched; and what drops weights of the attention before it, its text being a setting of a model in training mode,
``model.config.attention_dropout``."""

_PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum", "baddbmm", "dot"})
_FUSED: Final = frozenset({"scaled_dot_product_attention", "flash_attn_func", "memory_efficient_attention"})
_SHAPES: Final = frozenset({"size", "dim", "shape", "sqrt"})
_HELD: Final = "_attn_implementation_internal"


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose the one dose: the attention that evidence names."""
    code = evidence.code
    first = need(code.first("sdpa_attention"), _NO_PLACE)
    drops = next((site.text for site in code.sites["sdpa_attention"] if site.kind == DROPS), None)
    need(code.compiles is None, "torch.compile has compiled the attention, or fuses it itself")
    if any(one.kind == "create_graph" for one in code.sites.get("drop_retain_graph", ())):
        raise Unfit("a gradient is taken of gradients, which fused kernels do not give")
    if evidence.device.tensor_device == "cpu" and drops is not None:
        raise Unfit(f"{drops} drops weights of attention, for which PyTorch has no fused kernel on the CPU")
    check_short(incident, evidence)
    held = evidence.census.holdings
    samples = {one.shape[0] for one in held if one.role is Role.BATCH and one.shape}
    size = sum(_square_bytes(one, samples) for one in held)
    asked = (incident.requested or 0) if _asked_there(incident, first) else 0
    need(size + asked, "no scores of attention over batch, heads and two lengths were found")
    layers = (child_path(model.path, name) for model in code.models if model.training for name in model.dropout)
    dropout = drops or next(layers, None)
    yield Proposal(
        dose=Dose.of(attention=first.where),
        effect=Effect.CHANGES_RESULT if dropout else Effect.EQUIVALENT,
        saves=size + asked,
        basis=f"estimate: at least {format_size(size)} held as scores, and {format_size(asked)} asked for",
        caveat=dropout and f"if it drops weights of attention, {dropout} draws other random numbers in the kernel",
    )


def _asked_there(incident: Incident, found: Site) -> bool:
    """Tell whether memory ran out in the attention: in the framework's, or in the lines around the softmax."""
    if _FRAME.search(incident.framework_frame or ""):
        return True
    places = [place for place in (incident.inner, incident.cell) if place is not None and place.number == found.cell]
    return any(place.line is not None and abs(place.line - found.line) <= _AROUND for place in places)


def _square_bytes(held: Holding, samples: Collection[int]) -> int:
    """Return the size of the largest tensor that is held, where that is scores: (batch, heads, length, length).

    A product of matrices keeps them with heads and batch in one dimension, which is a multiple of ``samples`` then.
    """
    shape, each = held.shape or (), NUMBER_BYTES.get(held.dtype or "", 0)
    has_heads = len(shape) == 4 or (len(shape) == 3 and any(shape[0] > one and shape[0] % one == 0 for one in samples))
    is_scores = held.role in HELD and has_heads and shape[-1] == shape[-2]
    return math.prod(shape) * each if is_scores else 0


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the attention that evidence names as a call of the fused kernel."""
    found = need(evidence.code.first("sdpa_attention"), _NO_PLACE)
    cell = need(next((one for one in cells.history if one.number == found.cell), None), f"{found.where} is not there")
    if found.kind != ASKED:
        return rewriting.join(cells, [fused(cells, cell, found.line)])
    if cell.number == cells.failing.number:
        statement = rewriting.statement_at(need(rewriting.read(cell.source)), found.line)
        texts = within(need(statement, _NO_PLACE), cst.SimpleString)
        eager = need(next((one for one in texts if one.evaluated_value == "eager"), None), _NO_PLACE)
        return changed(cells, cell, {eager: eager.with_changes(value=eager.value.replace("eager", "sdpa"))})
    models = [path for path in found.names if path.isidentifier()]
    if not models or any(first_uses(cells.failing.source).get(path) is FirstUse.BINDS for path in models):
        raise Unfit("no model that the failing cell is given has eager attention that can be switched")
    return changed(cells, cells.failing, {}, [f'{path}.set_attn_implementation("sdpa")' for path in models])


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Refuse attention that the changed cell has and no fused kernel can take, or takes otherwise."""
    from oomdoctor.fixes._forward import Checked

    with Checked():
        yield


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the softmax of scores, or the call that asks a model to write them out, and what drops weights then."""
    under = ground(program)
    for scope in under.reach:
        called = {made.name for node in own_nodes(scope.body) if (made := operation(node)) is not None}
        if "softmax" in called and not called & _FUSED and (softmax := _softmax_of_scores(scope)) is not None:
            return (site(WRITTEN, scope, softmax),)
    eager = [path for path, model in objects.modules if _can_be_switched(model)]
    for scope in under.basis:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Call | ast.Assign) and _asks_for_it(node):
                first = site(ASKED, scope, node, eager)
                drops = next(filter(None, map(_setting, objects.modules)), None)
                return (first,) if drops is None else (first, replace(first, kind=DROPS, text=drops, names=()))
    return ()


def _can_be_switched(model: Any) -> bool:
    """Tell whether a model has a switch for its attention, stands at eager, and does not return the weights."""
    if not inspect.isfunction(inspect.getattr_static(type(model), "set_attn_implementation", None)):
        return False
    todo = [(plain_dict(part) or {}).get("config") for _, part in submodules(model, "")]
    found: dict[int, Mapping[str, Any]] = {}
    while todo:
        held = plain_dict(todo.pop())
        if held is not None and _HELD in held and id(held) not in found:
            found[id(held)] = held
            todo += held.values()
    returns = any(held.get("output_attentions") or held.get("_output_attentions") for held in found.values())
    return not returns and any(held[_HELD] == "eager" for held in found.values())


def _setting(model: tuple[str, Any]) -> str | None:
    """Return the setting by which a model in training mode drops weights of its attention."""
    held = plain_dict(model[1]) or {}
    settings = (plain_dict(held.get("config")) or {}).items() if held.get("training") is True else ()
    positive = (name for name, value in settings if type(value) in (int, float) and value > 0)
    named = next((name for name in positive if "drop" in name and "att" in name), None)
    return named and f"{model[0]}.config.{named}"


def _asks_for_it(node: ast.Call | ast.Assign) -> bool:
    given: list[ast.expr] = []
    if isinstance(node, ast.Call):
        given = [one.value for one in node.keywords if one.arg in {"attn_implementation", "_attn_implementation"}]
        given += node.args[:1] if call_name(node).endswith("set_attn_implementation") else []
    elif "_attn_implementation" in ast.unparse(node.targets[0]):
        given = [node.value]
    return any(isinstance(value, ast.Constant) and value.value == "eager" for value in given)


def _softmax_of_scores(scope: Scope) -> ast.expr | None:
    """Return the softmax of what has a product in it that goes into a further product."""
    body = _products_as_calls(scope.body)
    calls = [(node, made) for node in own_nodes(body) if isinstance(node, ast.Call) and (made := operation(node))]
    of_scores = Flow(makes=_is_one_of(_PRODUCTS), stops=_is_one_of(_SHAPES), of_graphs=False)
    scores = of_scores.spread(body, ())
    for softmax, of in ((node, made.operands) for node, made in calls if made.name == "softmax"):
        ends = _is_one_of(_SHAPES | _PRODUCTS)
        of_weights = Flow(makes=partial(operator.is_, softmax), stops=ends, of_graphs=False)
        weights = of_weights.spread(body, ())
        factors = [factor for _, made in calls if made.name in _PRODUCTS for factor in made.operands]
        if any(of_scores.carries(one, scores) for one in of) and any(
            of_weights.carries(one, weights) for one in factors
        ):
            return softmax
    return None


def _is_one_of(names: Collection[str]) -> Callable[[ast.Call], bool]:
    return lambda call: (made := operation(call)) is not None and made.name in names


def _products_as_calls(part: Any) -> Any:
    """Return a copy of nodes with each product of matrices as a call.

    Nodes are copied by their fields: their attributes may lead far away, as executing, which IPython's tracebacks
    use, sets ``parent`` on ``ast.Load()``, of which Python has but one.
    """
    if isinstance(part, list | tuple):
        return [_products_as_calls(one) for one in part]
    if not isinstance(part, ast.AST):
        return part
    fields = {name: _products_as_calls(value) for name, value in ast.iter_fields(part)}
    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
        product = ast.Name("matmul", ast.Load())
        return ast.copy_location(ast.Call(product, [fields["left"], fields["right"]], []), part)
    return ast.copy_location(type(part)(**fields), part)


FIX: Final = Fix(
    id="sdpa_attention",
    title="Use fused attention (scaled_dot_product_attention)",
    effect=Effect.EQUIVALENT,
    draws=True,
    tolerance=TOLERANCE,
    joins=True,
    cost="nothing",
    propose=propose,
    patch=patch,
    detect=detect,
    guard=guard,
)
