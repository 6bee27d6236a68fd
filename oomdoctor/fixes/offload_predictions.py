"""Predictions gathered in host memory as they come, where they would add up on the device.

The statement that collects an output of the model gets a ``.cpu()``, and so does what is compared with it and was
gathered too, as labels are. What is made of the collection may round otherwise there. Refused is what the copy would
not see, as a write in place, and what is combined with a tensor that stays on the device. Outputs that have their graph
are detached where it is certain that nothing is differentiated, and refused elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._preconditions import hangs_on
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing, sites_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import torch_functions
from oomdoctor.program.arguments import kept_otherwise
from oomdoctor.program.dataflow import Flow, Way
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.gradients import ModelCalls
from oomdoctor.program.kept_tensors import gathers_predictions
from oomdoctor.program.names import names_in, own_nodes, parameters_of, root_of, stored
from oomdoctor.program.torch_functions import Result

_NOTHING: Final = "no loop that the failing cell runs collects outputs of a model on the device"
_TOLERANCE: Final = 1e-5
_FOLLOWED: Final = "followed"
_HOST_MODULES: Final = frozenset({"np", "numpy", "plt", "pd", "sns"})
_OTHERWISE: Final = torch_functions.DRAWS | (torch_functions.INDEXED - {"max", "min"}) | {"argsort", "searchsorted"}
"""Calls whose result is another one on another device, and not by rounding alone."""


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what collects outputs on the device, and what has to be moved along; the kind says why it cannot be."""
    found = gathers_predictions(program, objects.kinds)
    if found is None:
        return ()
    scope, node = found
    text = ast.unparse(node)
    name = text[: next(at for at, letter in enumerate(text) if not (letter.isalnum() or letter == "_"))]
    if not _fills(node, name):
        why = f"`{text}` collects outputs in a way that is not known: append them to a list"
        return (site(why, scope, node, (name,)),)
    uses = _Uses(program, ModelCalls(program, objects.kinds), scope)
    kind = _FOLLOWED
    try:
        uses.follow(name)
    except Unfit as why:
        kind = str(why)
    gathers = [(node, name), *((one, other) for other in uses.moved for one in uses.fills(other) if one is not node)]
    return tuple(site(kind, scope, one, (other,)) for one, other in gathers)


class _Uses:
    """What the cells make of collections of one scope; those in ``moved`` have to be moved together."""

    def __init__(self, program: Program, models: ModelCalls, scope: Scope) -> None:
        self._program, self._models, self._scope = program, models, scope
        self.moved: list[str] = []

    def fills(self, name: str) -> list[ast.stmt]:
        """Return the statements that put something into a collection."""
        return [node for node in own_nodes(self._scope.body) if isinstance(node, ast.stmt) and _fills(node, name)]

    def follow(self, name: str) -> None:
        """Raise ``Unfit`` where a collection, or one that is combined with it, cannot be in host memory."""
        self.moved.append(name)
        own = parameters_of(self._scope.function) if self._scope.function is not None else set()
        if name in own or name not in stored(own_nodes(self._scope.body)):
            raise Unfit(f"`{name}` is made elsewhere than it is filled")
        if any(self._is_written(fill) for fill in self.fills(name)):
            raise Unfit(f"what is put into `{name}` is written to in place, which a copy would not see")
        for scope, way in list(self._ways()):
            for node, _ in way.met:
                for part in own_nodes([node]):
                    self._check(scope, way, node, part)

    def _ways(self) -> Iterator[tuple[Scope, Way]]:
        """Yield the ways of what is in the collections through their scope, and where that goes."""
        filled = {id(fill): name for name in self.moved for fill in self.fills(name)}

        def adds(node: ast.AST) -> set[str]:
            return {filled[id(node)]} if id(node) in filled else set()

        way = Flow(stops=_leaves_host, of_graphs=False, adds=adds).through(self._scope.body)
        yield self._scope, way
        is_top = self._scope.function is None
        given = (node for node, _ in way.met if isinstance(node, ast.Return) and node.value is not None)
        returns = not is_top and any(way.carries(node, node.value) for node in given if node.value is not None)
        flow = Flow(
            makes=lambda call: returns and torch_functions.last_name(call) == self._scope.tail,
            stops=_leaves_host,
            of_graphs=False,
        )
        for scope in (one for one in self._program.scopes if returns or (is_top and one is not self._scope)):
            hidden = stored(own_nodes(scope.body)) if scope.function is not None else set[str]()
            yield scope, flow.through(scope.body, way.now - hidden if is_top else ())

    def _check(self, scope: Scope, way: Way, met: ast.AST, node: ast.AST) -> None:
        parts = _parts(node)
        moved = [part for part in parts if way.carries(met, part)]
        if not moved or (isinstance(met, ast.stmt) and any(_fills(met, name) for name in self.moved)):
            return
        text = f"`{' '.join(ast.unparse(node).split())[:60]}`"
        called = torch_functions.last_name(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.AugAssign) or (called and torch_functions.is_in_place(called)):
            raise Unfit(f"{text} writes in place, which the tensors on the device would not see")
        if called in _OTHERWISE:
            raise Unfit(f"{text} may draw other numbers, or order what is alike otherwise, in host memory")
        if isinstance(node, ast.Call) and self._models.path(scope, node) is not None:
            raise Unfit(f"{text} takes what was collected back to a model on the device")
        beside = {name for part in parts if part not in moved for name in names_in(part)} - {"torch", *self.moved}
        for name in sorted(beside):
            values = [value for to, value in _assigned(scope) if to == name]
            if values and all(isinstance(value, ast.Constant) for value in values):
                continue
            joins = (one for one in values if isinstance(one, ast.Call) and one.args)
            joined = (one.args[0] for one in joins if torch_functions.last_name(one) in torch_functions.JOINS)
            other = next(map(root_of, joined), name)
            if scope is not self._scope or not self.fills(other):
                raise Unfit(f"{text} combines what was collected with `{name}`, which stays on the device")
            if other not in self.moved:
                self.follow(other)

    def _is_written(self, fill: ast.stmt) -> bool:
        """Whether a name that ``fill`` puts into a collection is written to in place anywhere in the scope."""
        values = fill.value.args if isinstance(fill, ast.Expr) and isinstance(fill.value, ast.Call) else []
        names = {value.id for value in values if isinstance(value, ast.Name)}
        return any(
            root_of(target) in names and not isinstance(target, ast.Attribute)
            for node in own_nodes(self._scope.body)
            for target in _written(node)
        )


def _written(node: ast.AST) -> list[ast.expr]:
    """Return what a node writes into in place."""
    match node:
        case ast.Call(func=ast.Attribute(value=base, attr=method)) if torch_functions.is_in_place(method):
            return [base]
        case ast.AugAssign(target=target) | ast.Subscript(value=target, ctx=ast.Store()):
            return [target]
    return []


def _leaves_host(call: ast.Call) -> bool:
    """Whether what a call gives is no tensor in host memory: a number, an array, or moved to a device again."""
    name = torch_functions.last_name(call)
    plain = isinstance(call.func, ast.Name) and name in torch_functions.PLAIN_FUNCTIONS
    away = name in torch_functions.names_of(Result.NUMBER) | {"to", "cuda"}
    return plain or away or root_of(call.func) in _HOST_MODULES


def _parts(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.BoolOp(values=values):
            return values
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.AugAssign(target=target):
            return [target]
        case ast.Call(func=func, args=args, keywords=keywords):
            receiver = [func.value] if isinstance(func, ast.Attribute) else []
            values = [one.value for one in keywords if one.arg not in {"dim", "axis", "keepdim"}]
            is_apart = torch_functions.last_name(node) in {"zip", "enumerate"}  # what they go through is met one by one
            return [] if is_apart or _leaves_host(node) else [*receiver, *args, *values]
    return []


def _assigned(scope: Scope) -> Iterator[tuple[str, ast.expr]]:
    for node in own_nodes(scope.body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value


def _fills(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is a statement that puts something into ``name``."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr="append" | "extend"))):
            return found == name
        case ast.AugAssign(target=ast.Name(id=found), op=ast.Add(), value=ast.List()):
            return found == name
        case ast.Assign(targets=[ast.Name(id=found)], value=ast.ListComp()):
            return found == name
    return False


@_trainers.first("offload_predictions")
@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where the census found on the device what the collection holds."""
    first, device = evidence.code.first("offload_predictions"), evidence.device
    if first is not None and device.tensor_device.partition(":")[0] == "cpu":
        raise Unfit(f"the tensors of `{first.names[0]}` are in host memory already")
    found = _gathers(evidence)
    (name,) = found[0].names
    holdings = (one for one in evidence.census.holdings if not one.path.endswith("→ graph"))
    held = sum(one.bytes for one in holdings if hangs_on(one, name))
    need(held, f"the census found nothing on {device.name} that `{name}` holds")
    yield Proposal(
        effect=Effect.EQUIVALENT,
        saves=held,
        basis=f"measured: the census found {format_size(held)} on {device.name} that `{name}` holds",
        caveat=f"`{name}` is in host memory then: later cells that need it on the device have to move it",
    )


def _gathers(evidence: Evidence) -> tuple[Site, ...]:
    found = sites_of(evidence, "offload_predictions", _NOTHING)
    if found[0].kind != _FOLLOWED:
        raise Unfit(found[0].kind)
    return found


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Move what is collected to host memory, and what is compared with it."""
    if (through := _trainers.patched("offload_predictions", cells, evidence, dose)) is not None:
        return through
    found = _gathers(evidence)
    detached = {(one.cell, one.line) for one in evidence.code.sites.get("detach_history", ())}
    for one in found:
        holdings = (held for held in evidence.census.holdings if hangs_on(held, one.names[0]))
        if (one.cell, one.line) not in detached and any(held.path.endswith("→ graph") for held in holdings):
            raise Unfit(f"`{one.names[0]}` keeps the autograd graph of what it holds, which would stay on the device")

    def call(one: Site) -> str:
        return ".detach().cpu()" if (one.cell, one.line) in detached else ".cpu()"

    return kept_otherwise(cells, found, call, "collects more than one tensor: move each of them")


FIX: Final = Fix(
    id="offload_predictions",
    title="Collect predictions in host memory",
    effect=Effect.EXACT,
    cost="a copy to the host in each step",
    propose=propose,
    patch=patch,
    detect=detect,
    tolerance=_TOLERANCE,
)
