"""Where a loop's batch size is written down: in the call that made its loader, or in the slices that it takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from oomdoctor.fixes._refusals import OVERHEAD, PARTS, Unfit, need
from oomdoctor.model import Cells, Dose, Effect, Proposal
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.sizes import format_size
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.literals import Book, Number, Place, calls, literal
from oomdoctor.program.magics import Function, Loop
from oomdoctor.program.names import call_name

_NAMED: Final = re.compile(r"^(\w*_)?(batch_?size|bs|bsz|n_batch|mb_size|(?-i:BATCH))$", re.IGNORECASE)
_LOADER: Final = re.compile(r"^([\w.]+\.)?DataLoader$")
_COUNTING: Final = ("limit_train_batches", "overfit_batches", "val_check_interval", "fast_dev_run")
_SCHEDULES: Final = re.compile(r"sched|warmup|OneCycle|Cosine", re.IGNORECASE)
_LENGTH: Final = re.compile(r"\blen\(\w*(loader|dl)\w*\)", re.IGNORECASE)
_MANUAL: Final = re.compile(r"\bautomatic_optimization\s*=\s*False\b")


def sizes_of(book: Book, facts: TrainingLoop) -> tuple[Number, ...]:
    """Return the numbers that set the batch size of a loop, or why none can be told."""
    place, loop = need(book.loop(facts), "the loop is not where it was found before")
    loaders = loader_calls(book, facts.loader, place)
    if loaders:
        return _of_loaders(book, facts.loader, loaders)
    if isinstance(loop, ast.For) and (step := _step(loop.iter)) is not None:
        if (data := _cut_across(loop)) is not None:
            raise Unfit(
                f"the loop cuts `{data}` along a later dimension: how many samples a batch has was decided where "
                f"`{data}` was made"
            )
        if literal(step) is not None:
            return _literal_slices(place, loop, step)
        named = book.numbers(step, place)
        return tuple(need(named, f"`{ast.unparse(step)}` is not set by a number in the cells"))
    return _of_name(book, place, loop, facts)


def loader_calls(book: Book, text: str, place: Place) -> list[tuple[ast.Call, Place]]:
    """Return the calls of ``DataLoader`` that made what ``text`` stands for at ``place``."""
    with suppress(SyntaxError):
        return list(dict.fromkeys(_loaders(book, ast.parse(text, mode="eval").body, place)))
    return []


def loader_sizes(book: Book, node: ast.expr, place: Place) -> tuple[Number, ...] | None:
    """Return the numbers behind the batch size of what ``node`` stands for, None where it is no loader of the cells."""
    loaders = list(dict.fromkeys(_loaders(book, node, place)))
    return _of_loaders(book, ast.unparse(node), loaders) if loaders else None


def _loaders(
    book: Book, node: ast.expr, place: Place, index: int | None = None, depth: int = 6
) -> Iterator[tuple[ast.Call, Place]]:
    """Yield the calls that made ``node``, or the value at ``index`` of what it returns."""
    if isinstance(node, ast.Call) and _LOADER.match(call_name(node)):
        yield node, place
    elif depth:
        for source, there, at in _sources(book, node, place, index):
            yield from _loaders(book, source, there, at, depth - 1)


def _sources(
    book: Book, node: ast.expr, place: Place, index: int | None
) -> Iterator[tuple[ast.expr, Place, int | None]]:
    """Yield what ``node`` comes from: returned, handed through a call, or bound to a name."""
    match node:
        case ast.Call(args=args):
            if (made := book.function(call_name(node))) is not None:
                inside = Place(page=made[0], function=made[1])
                yield from ((value, inside, None) for value in _returned(made[1], index))
            elif args:
                prepared = call_name(node).endswith(".prepare") and index is not None and index < len(args)
                yield args[index or 0] if prepared else args[0], place, None
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            yield from ((value, there, None) for value, there in book.of_self(attr, place))
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) | ast.Attribute(value=ast.Name(id=name)):
            for value, there in book.values(name, place):
                if isinstance(value, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
                    yield value, there, _index(name, value, there)
                elif isinstance(value, ast.Dict | ast.DictComp | ast.ListComp):
                    items = value.values if isinstance(value, ast.Dict) else ()
                    yield from ((one, there, None) for one in (*calls(value), *items))


def _index(name: str, value: ast.expr, there: Place) -> int | None:
    """Return which of the values that ``value`` returns is bound to ``name``, None where it is the whole."""
    for node in ast.walk(there.page.tree):
        if isinstance(node, ast.Assign) and node.value is value:
            for target in node.targets:
                names = [getattr(part, "id", "") for part in getattr(target, "elts", ())]
                if name in names:
                    return names.index(name)
    return None


def _returned(function: Function, index: int | None) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            several = isinstance(node.value, ast.Tuple | ast.List) and index is not None
            yield node.value.elts[index] if several else node.value  # type: ignore[attr-defined]


def _of_loaders(book: Book, text: str, loaders: Sequence[tuple[ast.Call, Place]]) -> tuple[Number, ...]:
    check_class(book)
    numbers: list[Number] = []
    for call, place in loaders:
        size, there = _size(book, call, place)
        why = f"the batch size of `{text}`, `{ast.unparse(size)}`, is not set by a number in the cells"
        numbers += need(book.numbers(size, there), why)
    return tuple({id(number.node): number for number in numbers}.values())


def check_class(book: Book) -> None:
    """Raise ``Unfit`` where the cells define a ``DataLoader`` themselves, whose arguments are not known."""
    if any(isinstance(n, ast.ClassDef) and n.name == "DataLoader" for p in book.pages for n in ast.walk(p.tree)):
        raise Unfit("`DataLoader` is a class of the cells' own")


def _size(book: Book, call: ast.Call, place: Place) -> tuple[ast.expr, Place]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    need("batch_sampler" not in given, "the loader has a sampler of batches, which decides on their size")
    if "batch_size" in given:
        return given["batch_size"], place
    if len(call.args) > 1:
        return call.args[1], place
    # DataLoader(data, **settings), where the settings are a dictionary of the cells.
    unpacked = given.get(None)
    if isinstance(unpacked, ast.Name):
        key = ast.Subscript(value=unpacked, slice=ast.Constant("batch_size"), ctx=ast.Load())
        if book.numbers(key, place):
            return key, place
        raise Unfit(f"the batch size is somewhere in `**{unpacked.id}`")
    raise Unfit("the loader gives single samples: there is no batch to make smaller")


def _step(node: ast.expr) -> ast.expr | None:
    """Return the step of the ``range`` within ``enumerate``, ``tqdm`` and the like."""
    while isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] not in {"range", "trange"} and node.args:
        node = node.args[0]
    named = isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in {"range", "trange"}
    return node.args[2] if named and isinstance(node, ast.Call) and len(node.args) == 3 else None


def _cut_across(loop: ast.For) -> str | None:
    """Return what the loop cuts pieces from along another dimension than the first, None where it cuts samples."""
    counter = bound(loop.target)
    found: dict[bool, str] = {}
    for part in ast.walk(loop):
        if isinstance(part, ast.Subscript):
            index = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
            cut = [at for at, one in enumerate(index) if isinstance(one, ast.Slice) and counter & reads(one)]
            if cut:
                found.setdefault(cut[0] > 0, ast.unparse(part.value))
    return None if False in found else found.get(True)


def _literal_slices(place: Place, loop: ast.For, step: ast.expr) -> tuple[Number, ...]:
    """Return the step and the same number in the slices ``x[i:i + 64]`` of the loop."""
    size = literal(step)
    widths = [
        part.upper.right
        for part in ast.walk(loop)
        if isinstance(part, ast.Slice) and isinstance(part.upper, ast.BinOp) and isinstance(part.upper.op, ast.Add)
    ]
    if not widths or any(literal(width) != size for width in widths):
        raise Unfit("the slices of the loop are not of the step that it takes")
    found = [node for node in (step, *widths) if isinstance(node, ast.Constant)]
    return tuple(Number(page=place.page, node=node) for node in found)


def _of_name(book: Book, place: Place, loop: Loop, facts: TrainingLoop) -> tuple[Number, ...]:
    """Return the number behind the name of a batch size that the loop, or what it calls, cuts batches with."""
    called = {call_name(call).rpartition(".")[2] for call in calls(loop)}
    parts: list[tuple[ast.AST, Place]] = [(loop, place)]
    parts += [(node, Place(page=page, function=node)) for page, node in book.functions() if node.name in called]
    for tree, where in parts:
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and _NAMED.match(n.id)}
        if names & bound(loop):
            raise Unfit(f"`{min(names & bound(loop))}` is bound anew in the loop")
        for name in sorted(names):
            found = book.numbers(ast.Name(id=name, ctx=ast.Load()), where)
            if found:
                return tuple(found)
    raise Unfit(f"what made the batches of `{facts.loader}` was not found in the cells")


def check_not_counted(cells: Cells, made: ast.Call) -> None:
    """Raise ``Unfit`` where something counts batches, and would count parts of them or more of them."""
    for keyword in made.keywords:
        need(keyword.arg not in _COUNTING, f"`{keyword.arg}` counts batches, of which there would be more")
    text = "\n".join(cell.source for cell in cells.history)
    if _SCHEDULES.search(text) and (found := _LENGTH.search(text)):
        raise Unfit(f"`{found[0]}` may set the length of a schedule, and there would be more batches")
    need(not _MANUAL.search(text), "the module steps its optimizer itself (`automatic_optimization = False`)")


def sizes_of_fit(book: Book) -> tuple[Number, ...]:
    """Return those of the loader that ``fit`` is given, or that ``train_dataloader`` of a class returns."""
    fits = [(page, call) for page in book.pages for call in calls(page.tree) if call_name(call).endswith(".fit")]
    for page, call in fits[-1:]:
        given = [one.value for one in call.keywords if one.arg == "train_dataloaders"] + call.args[1:2]
        if given and (found := loader_sizes(book, given[0], book.place(page, call))) is not None:
            return found
    methods = [(page, node) for page, node in book.functions() if node.name == "train_dataloader"]
    returned = [(page, method, value) for page, method in methods for value in _returned(method, None)]
    why = "what made the loader that `fit` goes through was not found in the cells"
    need(len(returned) == 1, why)
    page, method, value = returned[0]
    return need(loader_sizes(book, value, Place(page=page, function=method)), why)


def fixed_schedule(book: Book) -> str | None:
    """Return a call that makes a schedule over a number of steps that is written down, and that raises beyond it."""
    for page in book.pages:
        for call in calls(page.tree):
            if call_name(call).rpartition(".")[2] != "OneCycleLR":
                continue
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            steps = given.get("total_steps") or given.get("steps_per_epoch") or next(iter(call.args[2:]), None)
            if steps is not None and book.numbers(steps, book.place(page, call)):
                return f"OneCycleLR(..., {ast.unparse(steps)})"
    return None


def takes_fixed_steps(loops: Sequence[TrainingLoop]) -> bool:
    """Whether loops take as many steps as are written down, however small their batches."""
    return all(re.fullmatch(r"t?range\(\d+(, \d+)?\)", loop.loader) for loop in loops)


def smaller(size: int, scales: int, *, least: int = 1, is_fixed: bool = False) -> Iterator[Proposal]:
    """Propose batches of a whole part of ``size`` samples, ``least`` or more; ``scales`` are its bytes."""
    parts = [one for one in PARTS if size % one == 0 and size // one >= least]
    for one in need(parts, f"a batch of {size} samples has no half"):
        fixed = f"the loop takes as many steps as before, so it sees 1/{one} of the samples"
        steps = fixed if is_fixed else f"the same samples take {one} times as many steps"
        yield Proposal(
            dose=Dose.of(batch_size=size // one),
            effect=Effect.CHANGES_RESULT,
            saves=scales - scales // one,
            slowdown=(1 + OVERHEAD * one) / (one if is_fixed else 1),
            basis=f"analytic estimate: 1/{one} of {format_size(scales)} of activations, batch and request remains",
            caveat=f"batches of {size // one} instead of {size}, and {steps}: different results; consider a lower "
            "learning rate",
        )
