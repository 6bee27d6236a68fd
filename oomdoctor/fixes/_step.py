"""Plans how a region that ends in ``backward`` is taken apart: once before, for each part of the batch, once after.

The statements are sorted by what they depend on. Those that lead from the batch to the loss are repeated for each part.
Those that do not depend on the batch (zeroing gradients) go before them; those that use their results (accounting) go
after, and get the loss of the whole batch. An ``if`` or a ``with`` around ``backward`` is divided likewise. Whether the
whole is right is not proved here: the trial of both programs tells.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from oomdoctor.fixes._samples import CannotSplit, LossForm, Samples, Shape, Value, called
from oomdoctor.program import words
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.definitions import is_gradless
from oomdoctor.program.names import blocks_of
from oomdoctor.program.regions import Region, backwards_in, read_before
from oomdoctor.program.words import Result

_WEIGHED: Final = {"rows": Value(shape=Shape.MEAN), "sum": Value(shape=Shape.SUM)}
_MOVES: Final = words.names_of(Result.MOVED, Result.CAST, Result.TRUNCATED, Result.SHAPED)
_TO_DEVICE: Final = frozenset({"to", "cuda"})
_ROWS_OF: Final = _MOVES | words.names_of(Result.DETACHED, Result.NUMBER, Result.NEW)
_SCALARS: Final = {Shape.MEAN, Shape.SUM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is known of the names and objects that the region uses.

    Attributes:
        batch: names that hold the batch where the region begins.
        makes_graph: whether an expression calls a model.
        plain: names that hold no tensor: modules, functions, models, constants.
        dim: the dimension of the batch.
    """

    batch: tuple[str, ...]
    models: Mapping[str, str]
    losses: Mapping[str, LossForm]
    makes_graph: Callable[[ast.AST], bool]
    masks_targets: bool = False
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)
    plain: Collection[str] = ()
    dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The plan.

    Attributes:
        names: what is split, in the order of the loop's target.
        kind: ``tensors`` (each name is one), ``dict`` or ``list`` (one name holds several).
        key: source text of an entry that is taken of that one name, empty where none is by itself.
        places: where each statement goes, by its identity: ``before``, ``inner``, ``after``, or ``both`` of the
            last two, where it counts the rows of a part and then those of the batch.
        losses: by the identity of each statement with ``backward``, the reduction of its loss: mean or sum, over all or
            over the counted entries of a target.
        loss: the name of the loss, None if ``backward`` is called on an expression.
        keeps_loss: the loss is used after the step.
        gathered: names whose parts are joined again because they are used after the step.
        carried: those of ``names`` that the region changes, which are joined likewise.
        summed: numbers that are used after the step, and whether each is a mean over the samples of its part.
        dim: the dimension of the batch.
        is_plain: tensors in dimension 0 that nothing has made in the program: they may be cut by ``chunk``.
    """

    names: tuple[str, ...]
    kind: str
    places: Mapping[int, str]
    losses: Mapping[int, Value]
    loss: str | None
    keeps_loss: bool
    gathered: tuple[str, ...]
    carried: tuple[str, ...] = ()
    summed: tuple[tuple[str, bool], ...] = ()
    key: str = ""
    dim: int = 0
    is_plain: bool = True


def plan(
    region: Region, split: Split, weigh: str = "", *, late: bool = False, following: Sequence[Region] = ()
) -> Step:
    """Return the plan for ``region``.

    Args:
        following: the regions behind it in its block, which need the graph of what they share with it.
        weigh: what the loss is a mean or a sum over: ``counted``, ``sum`` or ``rows``; empty to read it.
        late: begin the parts where the model is called: what is made of the batch before is made of all of it.

    Raises:
        CannotSplit: the step cannot be taken apart with its meaning kept.
    """
    needed = set[str]()
    for one in following:
        other = _Planner(one, split, late=late)
        needed |= read_before([unit for unit in other.units if id(unit) in other.leading])
    return _Planner(region, split, late=late, shared=needed).step(weigh)


class _Planner:
    """Sorts the statements of one region."""

    def __init__(self, region: Region, split: Split, *, late: bool, shared: Collection[str] = ()) -> None:
        self._region, self._split, self._shared = region, split, set(shared)
        self.units = list(_units(region.body))
        self._backwards = {id(unit): _loss_of(unit.value) for unit in self.units if backwards_in(unit)}  # type: ignore[attr-defined]
        names = [ast.unparse(loss) for loss in self._backwards.values() if called(loss)]
        if names and len(self._backwards) > 1:
            raise CannotSplit("backward is called on one of several losses")
        self._loss = next(iter(names), None)
        self._behind = {id(unit) for node in region.body for unit in _behind(node)}
        self.leading = self._lead()
        self._graph = self._with_graph()
        batch = {name for unit in self.units if id(unit) in self.leading for name in _reads(unit)} & {*split.batch}
        self._batch = tuple(name for name in split.batch if name in batch)
        self._is_late = bool(self._graph) and (late or not batch or self._is_given_more())

    def step(self, weigh: str) -> Step:
        """Return the plan."""
        carried, again, both = list[str](), set[int](), set[int]()
        taken, hoisted = self._unpacked()
        out = set(hoisted)
        while True:
            names = (*dict.fromkeys((*self._begin(taken, hoisted), *self._made(hoisted - out), *carried)),)
            places = self._sorted(names, hoisted, again)
            inner = [unit for unit in self.units if places[id(unit)] == "inner"]
            places |= dict.fromkeys(both, "both")
            used = self._used(places)
            counting, more = self._to_hoist(inner, places, names, used)
            if not more <= hoisted or not counting <= both:
                hoisted, both = hoisted | more, (both | counting) - more
                continue
            written = {name for unit in inner for name in _binds(unit)}
            loose = read_before(inner, certain=False) & written - {*names}
            if not loose:
                break
            for name in sorted(loose):
                made = [unit for unit in self.units if places[id(unit)] == "before" and name in _binds(unit)]
                if made and _is_literal(made[-1]) and id(made[-1]) not in again:
                    again.add(id(made[-1]))
                elif name in carried or name in self._split.plain:
                    raise CannotSplit(f"`{name}` is carried from one part to the next")
                else:
                    carried.append(name)
        names = tuple(name for name in names if any(name in reads(unit) for unit in inner))
        if not names:
            raise CannotSplit("no name is known to hold the batch")
        return self._of(names, places, inner, used, weigh, [name for name in carried if name in names])

    def _of(
        self,
        names: tuple[str, ...],
        places: Mapping[int, str],
        inner: list[ast.stmt],
        used: set[str],
        weigh: str,
        carried: Sequence[str],
    ) -> Step:
        split = self._split
        samples = Samples(
            names={},
            models=split.models,
            losses=split.losses,
            masks_targets=split.masks_targets or weigh == "counted",
            functions=split.functions,
        )
        kind = _kind(inner, names, split.functions)
        shape = Shape.ROWS if kind == "tensors" else Shape.BATCH
        samples.names.update({name: Value(shape=shape, entries=name) for name in names})
        forms = dict[int, Value]()
        for unit in inner:
            if id(unit) in self._backwards:
                forms[id(unit)] = _WEIGHED.get(weigh) or samples.value(self._backwards[id(unit)])
            else:
                samples.follow(unit)
        for_each = [unit for unit in inner if places[id(unit)] == "inner" and id(unit) not in self._backwards]
        made = {name for unit in for_each for name in bound(unit)}
        top_level = self._region.function is None
        made -= {self._loss, *names}
        wanted = made & used
        left = sorted(made if top_level else wanted)
        shapes = {name: samples.names[name].shape for name in left if name in samples.names}
        summed = tuple((name, one is Shape.MEAN) for name, one in shapes.items() if one in _SCALARS)
        keeps = self._loss is not None and ("." in self._loss or self._loss in used or top_level)
        return Step(
            names=names,
            kind=kind,
            places=places,
            losses=forms,
            loss=self._loss,
            keeps_loss=keeps,
            gathered=tuple(sorted(wanted - dict(summed).keys())),
            carried=tuple(name for name in carried if name in used or top_level),
            summed=summed,
            key="" if kind == "tensors" else _key(inner, names[0]),
            dim=split.dim,
            is_plain=not split.dim and not carried and self._is_given(names, places),
        )

    def _is_given_more(self) -> bool:
        """Tell whether a model is given tensors that the region makes and not of the batch, as labels and noise."""
        graph = [unit for unit in self.units if id(unit) in self._graph]
        given, tainted = {name for unit in graph for name in _data(unit, self._batch)}, {*self._batch}
        for unit in self.units:
            if _reads(unit) & tainted or id(unit) in self._graph:
                tainted |= _binds(unit)
            elif bound(unit) & given and _makes_tensor(unit):
                return True
        return False

    def _is_given(self, names: Iterable[str], places: Mapping[int, str]) -> bool:
        """Tell whether all names come from the loop or the caller, or are moved from there."""
        taken, takes = self._unpacked()
        made = [unit for unit in self.units if places[id(unit)] == "before" and id(unit) not in takes]
        made = [unit for unit in made if not _moves_only(unit, _MOVES)]
        return {*names} <= {*self._split.batch, *taken} and not any(bound(unit) & {*names} for unit in made)

    def _lead(self) -> set[int]:
        """Return the statements that lead to the loss."""
        needed, found = set[str](), set[int]()
        for unit in reversed(self.units):
            if id(unit) in self._backwards or _binds(unit) & needed:
                found.add(id(unit))
                needed |= _reads(unit)
        return found

    def _with_graph(self) -> set[int]:
        """Return those of them whose results have a graph, as they are made by a model or of what one has made."""
        names, found = set[str](), set[int]()
        for unit in self.units:
            off = isinstance(unit, ast.With) and any(map(is_gradless, unit.items))
            if id(unit) in self.leading and not off and (self._split.makes_graph(unit) or _reads(unit) & names):
                found.add(id(unit))
                names |= _binds(unit)
        return found

    def _begin(self, taken: tuple[str, ...], hoisted: set[int]) -> tuple[str, ...]:
        """Return the names that are split: the batch, or what the model is given that it has not made."""
        if not self._is_late and self._batch:
            return taken
        graph = [unit for unit in self.units if id(unit) in (self._graph or self.leading) - hoisted]
        made = {name for unit in graph for name in bound(unit)}
        given = (name for unit in graph for name in _data(unit, self._batch))
        return tuple(name for name in given if name not in made and name not in self._split.plain)

    def _made(self, hoisted: set[int]) -> tuple[str, ...]:
        """Return the names that statements make which were put before the parts."""
        return tuple(name for unit in self.units if id(unit) in hoisted for name in bound(unit))

    def _unpacked(self) -> tuple[tuple[str, ...], set[int]]:
        """Return the names that hold the tensors of the batch, and the statements that took them out of it."""
        out, places = list[str](), set[int]()
        for name in self._batch:
            readers = [unit for unit in self.units if name in reads(unit)]
            takes = [unit for unit in readers if isinstance(unit, ast.Assign) and _takes_out(unit, name)]
            got = [one for unit in takes for one in _order(unit.targets[0])]
            if takes and len(takes) == len(readers) and name not in got:
                out += got
                places |= {id(unit) for unit in takes}
            else:
                out.append(name)
        return tuple(dict.fromkeys(out)), places

    def _sorted(self, names: Sequence[str], hoisted: set[int], again: set[int]) -> dict[int, str]:
        """Return where each statement goes."""
        tainted, places = set[str]() if self._is_late else set(names), dict[int, str]()
        behind: list[ast.stmt] = []
        for at, unit in enumerate(self.units):
            leads, is_apart = id(unit) in self.leading, id(unit) in hoisted
            depends = id(unit) in self._graph or bool(_reads(unit) & tainted)
            depends = id(unit) in again or id(unit) in self._backwards or (depends and not is_apart)
            late = {name for other in behind for name in _reads(other)} & _binds(unit)
            if id(unit) in self._behind:
                depends, leads = True, False
            if not depends and (is_apart or not late):
                places[id(unit)] = "before"
                continue
            if leads and not depends:
                raise CannotSplit(f"`{', '.join(sorted(late))}` is bound anew in the middle of the step")
            anew = {name for one in self.units[at + 1 :] if id(one) in self.leading for name in _binds(one)}
            is_inner = leads or (id(unit) not in self._behind and bool(_reads(unit) & tainted & anew))
            places[id(unit)] = "inner" if is_inner else "after"
            tainted |= _binds(unit) if depends else set()
            behind.append(unit)
            if not is_inner:
                self._check_after(unit)
        for node in self._region.body:
            self._check_heads(node, tainted - set(names))
        return places

    def _check_heads(self, node: ast.stmt, tainted: set[str]) -> None:
        if not backwards_in(node) or isinstance(node, ast.Expr):
            return
        heads = [node.test] if isinstance(node, ast.If) else [item.context_expr for item in node.items]  # type: ignore[attr-defined]
        if any(reads(head) & tainted for head in heads):
            raise CannotSplit(f"line {node.lineno} decides by what the model has made whether backward is called")
        for block in blocks_of(node):
            for inner in block:
                self._check_heads(inner, tainted)

    def _check_after(self, node: ast.stmt) -> None:
        leaves = any(isinstance(part, ast.Continue | ast.Break | ast.Return | ast.Raise) for part in ast.walk(node))
        if leaves:
            raise CannotSplit(f"line {node.lineno} decides between the batch and backward how the step goes on")
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and called(part.func) in self._split.models:
                raise CannotSplit(f"`{ast.unparse(part)}` on line {part.lineno} runs the model beside the loss")

    def _used(self, places: Mapping[int, str]) -> set[str]:
        """Return the names that are read outside of the statements for each part, and not bound anew before."""
        behind = [unit for unit in self.units if places[id(unit)] in ("after", "both")]
        return read_before(behind) | self._region.read_behind

    def _to_hoist(
        self, inner: Sequence[ast.stmt], places: Mapping[int, str], names: Sequence[str], used: set[str]
    ) -> tuple[set[int], set[int]]:
        """Return statements that make what is used after the step from the batch alone.

        Those that count its rows are done for a part and again for the batch, others for the batch before, as those are
        whose graph the regions behind this one need.
        """
        counting, more, wanted = set[int](), set[int](), set[str]()
        rest = [unit for unit in self.units if places[id(unit)] == "after"]
        rest += self._region.block[self._region.end :]
        for unit in reversed(inner):
            if id(unit) in self._backwards:
                continue
            binds = _binds(unit) - {self._loss}
            is_data = id(unit) not in self._graph if self._graph else _moves_only(unit, _MOVES) or _counts_only(unit)
            if binds & wanted or (not is_data and binds & self._shared):
                more.add(id(unit))
                wanted |= _reads(unit)
            elif is_data and _counts_only(unit) and binds & used:
                counting.add(id(unit))
            elif is_data and (found := binds & used):
                moves = _moves_only(unit, _TO_DEVICE) and found <= {*names}
                if not moves or not all(_only_counted(rest, name) for name in found):
                    more.add(id(unit))
                    wanted |= _reads(unit)
        return counting, more


def _units(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, those of a branch with ``backward`` one by one."""
    for node in body:
        if backwards_in(node) and not isinstance(node, ast.Expr):
            for block in blocks_of(node):
                yield from _units(block)
        else:
            yield node


def _behind(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements of a branch that stand behind its backward pass."""
    for block in blocks_of(node) if backwards_in(node) else ():
        found = [bool(backwards_in(one)) for one in block]
        yield from block[found.index(True) + 1 :] if any(found) else ()
        for one in block:
            yield from _behind(one)


def _loss_of(call: ast.Call) -> ast.expr:
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if called(receiver) in {"accelerator", "fabric", "self.accelerator", "self.fabric"} and len(call.args) == 1:
        return call.args[0]
    if call.args or call.keywords:
        raise CannotSplit("backward is called with arguments")
    if isinstance(receiver, ast.Call) and words.last_name(receiver) == "scale" and len(receiver.args) == 1:
        return receiver.args[0]
    return receiver


def _parts(node: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the dotted attributes that a statement reads or sets."""
    return {
        called(part) for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, context)
    }


def _reads(node: ast.stmt) -> set[str]:
    return reads(node) | _parts(node, ast.Load)


def _binds(node: ast.stmt) -> set[str]:
    """Return what a statement binds, attributes among it, and the containers and tensors that it changes in place."""
    changed = {
        called(part.func.value)
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and (part.func.attr in words.GATHERS - {"add"} or words.is_in_place(part.func.attr))
    }
    return (bound(node) | _parts(node, ast.Store) | changed) - {""}


def _data(node: ast.stmt, indices: Collection[str]) -> Iterator[str]:
    """Yield the names that a statement hands on or computes with, not what it calls or takes attributes of by name.

    Args:
        indices: names that hold positions of rows: what is subscripted with them stays whole.
    """
    apart = set[int]()
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and reads(part.slice) & {*indices}:
            apart |= {id(one) for one in ast.walk(part.value)}
        if isinstance(part, ast.Call):
            apart.add(id(part.func))
            of = part.func.value if isinstance(part.func, ast.Attribute) else part.func
            if not isinstance(part.func, ast.Attribute) or part.func.attr not in _ROWS_OF:
                apart.add(id(of))
        elif isinstance(part, ast.Attribute) and part.attr not in {"shape", "data"} and id(part) not in apart:
            apart.add(id(part.value))
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and id(part) not in apart:
            yield part.id


def _is_literal(node: ast.stmt) -> bool:
    """Tell whether a statement binds a name to a number or an empty container."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Tuple) and not reads(value)


def unmoved(node: ast.expr, moves: frozenset[str] = _TO_DEVICE) -> ast.expr:
    """Return what an expression moves, or itself."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in moves:
        node = node.func.value
    return node


def _moves_only(node: ast.stmt, moves: frozenset[str]) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return all(isinstance(unmoved(value, moves), ast.Name) for value in values)


def _only_counted(nodes: Iterable[ast.stmt], name: str) -> bool:
    """Whether statements ask ``name`` for its length alone, which a move to a device leaves as it is."""
    counts = {f"len({name})", f"{name}.size(0)", f"{name}.shape[0]"}
    return all(
        sum(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))
        == sum(ast.unparse(part) in counts for part in ast.walk(node) if isinstance(part, ast.expr))
        for node in nodes
    )


def _makes_tensor(node: ast.stmt) -> bool:
    value = unmoved(node.value) if isinstance(node, ast.Assign) else None
    return isinstance(value, ast.Call) and called(value.func).partition(".")[0] == "torch"


def _counts_only(node: ast.stmt) -> bool:
    """Tell whether a statement binds a name to a size of a tensor."""
    value = node.value if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None
    match value:
        case ast.Call(func=ast.Name(id="len")) | ast.Call(func=ast.Attribute(attr="size")):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
    return False


def _takes_out(node: ast.Assign, batch: str) -> bool:
    target, value = node.targets[0], node.value
    if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple):
        return all(_is_item(unmoved(part), batch) for part in value.elts)
    if isinstance(target, ast.Tuple):
        return isinstance(value, ast.Name) and value.id == batch
    return isinstance(target, ast.Name) and _is_item(unmoved(value), batch)


def _is_item(node: ast.expr, batch: str) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == batch
        and isinstance(node.slice, ast.Constant)
    )


def _order(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _kind(block: Sequence[ast.stmt], names: Sequence[str], functions: Mapping[str, ast.FunctionDef]) -> str:
    if len(names) != 1:
        return "tensors"
    (name,) = names
    for part in (part for node in block for part in ast.walk(node)):
        if isinstance(part, ast.Subscript) and called(part.value) == name and isinstance(part.slice, ast.Constant):
            return "dict" if isinstance(part.slice.value, str) else "list"
        if isinstance(part, ast.keyword) and part.arg is None and called(part.value) == name:
            return "dict"
        if isinstance(part, ast.Call) and called(part.func) in {f"{name}.items", f"{name}.pop"}:
            return "dict"
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Tuple) and called(part.value) == name:
            return "list"
        if isinstance(part, ast.Call) and (function := functions.get(called(part.func))) is not None:
            parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            given = [p for p, value in zip(parameters, part.args, strict=False) if called(value) == name]
            given += [keyword.arg for keyword in part.keywords if keyword.arg and called(keyword.value) == name]
            inner = {one: node for one, node in functions.items() if node is not function}
            found = _kind(function.body, given, inner) if given else "tensors"
            if found != "tensors":
                return found
    return "tensors"


def _key(block: Sequence[ast.stmt], name: str) -> str:
    """Return the first constant that ``name`` is subscripted with, empty where there is none."""
    parts = (part for node in block for part in ast.walk(node))
    taken = (part for part in parts if isinstance(part, ast.Subscript) and called(part.value) == name)
    return next((ast.unparse(one.slice) for one in taken if isinstance(one.slice, ast.Constant)), "")
