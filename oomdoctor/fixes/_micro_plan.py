"""Plans how a region that ends in ``backward`` is taken apart: once before, for each part of the batch, once after.

The statements are sorted by what they depend on. Those that lead from the batch to the loss are repeated for each part.
Those that do not depend on the batch (zeroing gradients) go before them; those that use their results (accounting) go
after, and get the loss of the whole batch. An ``if`` or a ``with`` around ``backward`` is divided likewise. Whether the
whole is right is not proved here: the trial of both programs tells.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from oomdoctor.fixes._micro_statements import (
    MOVES,
    TO_DEVICE,
    behind_backward,
    binds_of,
    counts_only,
    data_of,
    is_literal,
    key_of,
    kind_of_batch,
    loss_of,
    makes_tensor,
    moves_only,
    only_counted,
    reads_of,
    selects,
    takes_out,
    units_of,
)
from oomdoctor.fixes._micro_values import SCALARS, LossForm, Samples, Shape, Value, called, scalar_names
from oomdoctor.fixes._refusals import Unfit, need
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.definitions import is_gradless
from oomdoctor.program.names import blocks_of, read_first
from oomdoctor.program.regions import Region, backwards_in

_WEIGHED: Final = {"rows": Value(shape=Shape.MEAN), "sum": Value(shape=Shape.SUM)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is known of the names and objects that the region uses.

    Attributes:
        batch: names that hold the batch where the region begins; ``dim``: its dimension.
        makes_graph: whether an expression calls a model.
        plain: names that hold no tensor: modules, functions, models, constants.
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
        places: where each statement goes, by its identity: ``before``, ``inner`` or ``after``.
        losses: by the identity of each statement with ``backward``, how its loss reduces.
        loss: the name of the loss, None if ``backward`` is called on an expression; ``keeps_loss``: it is used later.
        gathered: names whose parts are joined again because they are used after the step.
        carried: those of ``names`` that the region changes, which are joined likewise.
        summed: numbers that are used after the step, without graph, and whether each is a mean over its part's samples.
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
    summed: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    key: str = ""
    dim: int = 0
    is_plain: bool = True


def plan(
    region: Region, split: Split, weigh: str = "", *, late: bool = False, following: Sequence[Region] = ()
) -> Step:
    """Return the plan for ``region``; raise ``Unfit`` where it cannot be taken apart with its meaning kept.

    Args:
        following: the regions behind it in its block, which need the graph of what they share with it.
        weigh: what the loss is a mean or a sum over: ``counted``, ``sum`` or ``rows``; empty to read it.
        late: begin the parts where the model is called: what is made of the batch before is made of all of it.
    """
    needed = set[str]()
    for other in (_Planner(one, split, late=late) for one in following):
        needed |= read_first([unit for unit in other.units if id(unit) in other.leading], loops_run=False)
    return _Planner(region, split, late=late, shared=needed).step(weigh)


class _Planner:
    def __init__(self, region: Region, split: Split, *, late: bool, shared: Collection[str] = ()) -> None:
        self._region, self._split, self._shared = region, split, set(shared)
        self.units = list(units_of(region.body))
        self._backwards = {id(unit): loss_of(unit.value) for unit in self.units if backwards_in(unit)}  # type: ignore[attr-defined]
        names = [ast.unparse(loss) for loss in self._backwards.values() if called(loss)]
        if names and len({*map(ast.unparse, self._backwards.values())}) > 1:
            raise Unfit("backward is called on one of several losses")
        self._loss = next(iter(names), None)
        self._from_before = read_first([region.loop]) if region.loop is not None else set[str]()
        self._behind = {id(unit) for node in region.body for unit in behind_backward(node)}
        self.leading = self._lead()
        self._graph = self._with_graph()
        batch = {name for unit in self.units if id(unit) in self.leading for name in reads_of(unit)} & {*split.batch}
        self._batch = tuple(name for name in split.batch if name in batch)
        self._is_late = bool(self._graph) and (late or not batch or self._is_given_more())

    def step(self, weigh: str) -> Step:
        """Return the plan."""
        carried, again = list[str](), set[int]()
        taken, hoisted = self._unpacked()
        out = set(hoisted)
        while True:
            made = [name for unit in self.units if id(unit) in hoisted - out for name in bound(unit)]
            names = (*dict.fromkeys((*self._begin(taken, hoisted), *made, *carried)),)
            places = self._sorted(names, hoisted, again)
            inner = [unit for unit in self.units if places[id(unit)] == "inner"]
            behind = [unit for unit in self.units if places[id(unit)] == "after"]
            used = read_first(behind, loops_run=False) | self._region.read_behind  # and not bound anew before
            more = self._to_hoist(inner, places, names, used)
            if not more <= hoisted:
                hoisted |= more
                continue
            written = {name for unit in inner for name in binds_of(unit)}
            loose = read_first(inner, all_run=True) & written - {*names}
            if not loose:
                break
            for name in sorted(loose):
                before = [unit for unit in self.units if places[id(unit)] == "before" and name in binds_of(unit)]
                if before and is_literal(before[-1]) and id(before[-1]) not in again:
                    again.add(id(before[-1]))
                elif name in carried or name in self._split.plain:
                    raise Unfit(f"`{name}` is carried from one part to the next")
                else:
                    carried.append(name)
        # What a round has from the one before, it hands on to the next.
        carried += [name for name in names if name in written & self._from_before and name not in carried]
        names = tuple(name for name in names if any(name in reads(unit) for unit in inner))
        need(names, "no name is known to hold the batch")
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
            scalars=scalar_names(self._backwards.values(), inner),
        )
        kind = kind_of_batch(inner, names, split.functions)
        shape = Shape.ROWS if kind == "tensors" else Shape.BATCH
        rows = (name for name in names if name not in samples.scalars)
        samples.names.update({name: Value(shape=shape, entries=name) for name in rows})
        forms = dict[int, Value]()
        for unit in inner:
            if id(unit) in self._backwards:
                loss = samples.value(self._backwards[id(unit)])
                if loss.is_mixed:  # a trial sees nothing of it where one of them counts only later on
                    raise Unfit("the loss adds a mean over the samples and a sum over them")
                forms[id(unit)] = _WEIGHED.get(weigh) or loss
            else:
                samples.follow(unit)
        for_each = [unit for unit in inner if places[id(unit)] == "inner" and id(unit) not in self._backwards]
        made = {name for unit in for_each for name in bound(unit)}
        top_level = self._region.function is None
        made -= {self._loss, *names}
        wanted = made & used
        left = sorted(made if top_level else wanted)
        summed = {
            name: (name if value.is_number else f"{name}.detach()", value.shape is Shape.MEAN)
            for name in left
            if (value := samples.names.get(name)) and value.shape in SCALARS
        }
        keeps = self._loss is not None and ("." in self._loss or self._loss in used or top_level)
        return Step(
            names=names,
            kind=kind,
            places=places,
            losses=forms,
            loss=self._loss,
            keeps_loss=keeps,
            gathered=tuple(sorted(wanted - summed.keys())),
            carried=tuple(name for name in carried if name in used or top_level),
            summed=summed,
            key="" if kind == "tensors" else key_of(inner, names[0], split.functions),
            dim=split.dim,
            is_plain=not split.dim and not carried and self._is_given(names, places),
        )

    def _is_given_more(self) -> bool:
        """Tell whether a model is given tensors that the region makes and not of the batch, as labels and noise."""
        graph = [unit for unit in self.units if id(unit) in self._graph]
        given, tainted = {name for unit in graph for name in data_of(unit, self._batch)}, {*self._batch}
        for unit in self.units:
            if reads_of(unit) & tainted or id(unit) in self._graph:
                tainted |= binds_of(unit)
            elif bound(unit) & given and makes_tensor(unit):
                return True
        return False

    def _is_given(self, names: Iterable[str], places: Mapping[int, str]) -> bool:
        """Tell whether all names come from the loop or the caller, or are moved from there."""
        taken, takes = self._unpacked()
        made = [unit for unit in self.units if places[id(unit)] == "before" and id(unit) not in takes]
        made = [unit for unit in made if not moves_only(unit, MOVES)]
        return {*names} <= {*self._split.batch, *taken} and not any(bound(unit) & {*names} for unit in made)

    def _lead(self) -> set[int]:
        needed, found = set[str](), set[int]()
        for unit in reversed(self.units):
            if id(unit) in self._backwards or binds_of(unit) & needed:
                found.add(id(unit))
                needed |= reads_of(unit)
        return found

    def _with_graph(self) -> set[int]:
        """Return those that are made by a model or of what one has made, and what a mask selects behind a model."""
        names, found = set[str](), set[int]()
        for unit in self.units:
            off = isinstance(unit, ast.With) and any(map(is_gradless, unit.items))
            reads_graph = bool(reads_of(unit) & names)
            is_selected = bool(found) and selects(unit, self._split.batch)
            if id(unit) in self.leading and not off and (reads_graph or is_selected or self._split.makes_graph(unit)):
                found.add(id(unit))
                names |= binds_of(unit)
        return found

    def _begin(self, taken: tuple[str, ...], hoisted: set[int]) -> tuple[str, ...]:
        """Return the names that are split: the batch, or what the model is given that it has not made."""
        if not self._is_late and self._batch:
            return taken
        graph = [unit for unit in self.units if id(unit) in (self._graph or self.leading) - hoisted]
        given, first = (name for unit in graph for name in data_of(unit, self._batch)), read_first(graph)
        return tuple(name for name in given if name in first and name not in self._split.plain)

    def _unpacked(self) -> tuple[tuple[str, ...], set[int]]:
        """Return the names that hold the tensors of the batch, and the statements that took them out of it."""
        out, places = list[str](), set[int]()
        for name in self._batch:
            readers = [unit for unit in self.units if name in reads(unit)]
            takes = [unit for unit in readers if isinstance(unit, ast.Assign) and takes_out(unit, name)]
            got = [one.id for unit in takes for one in ast.walk(unit.targets[0]) if isinstance(one, ast.Name)]
            if takes and len(takes) == len(readers) and name not in got:
                out += got
                places |= {id(unit) for unit in takes}
            else:
                out.append(name)
        return tuple(dict.fromkeys(out)), places

    def _sorted(self, names: Sequence[str], hoisted: set[int], again: set[int]) -> dict[int, str]:
        tainted, places = set[str]() if self._is_late else set(names), dict[int, str]()
        behind: list[ast.stmt] = []
        for at, unit in enumerate(self.units):
            leads, is_apart = id(unit) in self.leading, id(unit) in hoisted
            depends = id(unit) in self._graph or bool(reads_of(unit) & tainted)
            depends = id(unit) in again or id(unit) in self._backwards or (depends and not is_apart)
            late = {name for other in behind for name in reads_of(other)} & binds_of(unit)
            if id(unit) in self._behind:
                depends, leads = True, False
            if not depends and (is_apart or not late):
                places[id(unit)] = "before"
                continue
            depends = depends or leads  # what it binds anew, it binds for each part
            anew = {name for one in self.units[at + 1 :] if id(one) in self.leading for name in binds_of(one)}
            is_inner = leads or (id(unit) not in self._behind and bool(reads_of(unit) & tainted & anew))
            if is_inner and not leads and self._loss in reads_of(unit):
                raise Unfit(f"line {unit.lineno} uses `{self._loss}`, which is bound anew before the backward pass")
            places[id(unit)] = "inner" if is_inner else "after"
            tainted |= binds_of(unit) if depends else set()
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
            raise Unfit(f"line {node.lineno} decides by what the model has made whether backward is called")
        for block in blocks_of(node):
            for inner in block:
                self._check_heads(inner, tainted)

    def _check_after(self, node: ast.stmt) -> None:
        if any(isinstance(part, ast.Continue | ast.Break | ast.Return | ast.Raise) for part in ast.walk(node)):
            raise Unfit(f"line {node.lineno} decides between the batch and backward how the step goes on")
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and called(part.func) in self._split.models:
                raise Unfit(f"`{ast.unparse(part)}` on line {part.lineno} runs the model beside the loss")

    def _to_hoist(
        self, inner: Sequence[ast.stmt], places: Mapping[int, str], names: Sequence[str], used: set[str]
    ) -> set[int]:
        """Return statements that make from the batch what is used after the step, or by the regions behind this one."""
        more, wanted = set[int](), set[str]()
        rest = [unit for unit in self.units if places[id(unit)] == "after"]
        rest += self._region.block[self._region.end :]
        for unit in reversed(inner):
            if id(unit) in self._backwards:
                continue
            binds = binds_of(unit) - {self._loss}
            is_data = id(unit) not in self._graph if self._graph else moves_only(unit, MOVES) or counts_only(unit)
            is_wanted = bool(binds & wanted) or (not is_data and bool(binds & self._shared))
            if is_data and not is_wanted and (found := binds & used):
                moves = moves_only(unit, TO_DEVICE) and found <= {*names}
                is_wanted = not moves or not all(only_counted(rest, name) for name in found)
            if is_wanted:
                more.add(id(unit))
                wanted |= reads_of(unit)
        return more
