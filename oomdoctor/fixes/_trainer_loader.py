"""The loader that a trainer is handed: where its batch size is written down, and what else its length decides."""

from __future__ import annotations

import ast
import re
from typing import Final

from oomdoctor.fixes._batch_sizes import loader_sizes, sizes_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.session import Cells
from oomdoctor.program.book import Book, Number, Place, calls
from oomdoctor.program.names import call_name

__all__ = ["numbers_in_loader", "why_counted"]

_COUNTING: Final = ("limit_train_batches", "overfit_batches", "val_check_interval", "fast_dev_run")
_SCHEDULES: Final = re.compile(r"sched|warmup|OneCycle|Cosine", re.IGNORECASE)
_LENGTH: Final = re.compile(r"\blen\(\w*(loader|dl)\w*\)", re.IGNORECASE)
_MANUAL: Final = re.compile(r"\bautomatic_optimization\s*=\s*False\b")


def numbers_in_loader(book: Book, code: CodeFacts, library: str, size: object) -> tuple[Number, ...] | Refused:
    """Return the numbers that set the batch size of the loader that a trainer of ``library`` goes through.

    Args:
        size: the batch size that was in force, None where that is not known.
    """
    if library == "accelerate":
        found = _of_loop(book, next(loop for loop in code.loops if loop.in_failing_run))
    else:
        found = _of_fit(book)
    if isinstance(found, Refused):
        return found
    if any(number.value != (size or found[0].value) for number in found):
        return Refused(f"the cells say batches of {found[0].value}, and batches of {size} were in force")
    return found


def why_counted(cells: Cells, made: ast.Call) -> str | None:
    """Return what counts batches, and would count parts of them or more of them."""
    for keyword in made.keywords:
        if keyword.arg in _COUNTING:
            return f"`{keyword.arg}` counts batches, of which there would be more"
    texts = [cell.source for cell in cells.history]
    if any(_SCHEDULES.search(text) for text in texts) and (found := _LENGTH.search("\n".join(texts))):
        return f"`{found[0]}` may set the length of a schedule, and there would be more batches"
    if any(_MANUAL.search(text) for text in texts):
        return "the module steps its optimizer itself (`automatic_optimization = False`)"
    return None


def _of_loop(book: Book, facts: TrainingLoop) -> tuple[Number, ...] | Refused:
    """Return those of the loader that a loop goes through, from before ``prepare`` of an ``Accelerator``."""
    at = book.loop(facts)
    if at is None:
        return Refused("the loop is not where it was found before")
    inside = at[0].function
    bodies = [(at[0], inside.body)] if inside is not None else [(Place(page=p), p.tree.body) for p in book.pages]
    made: list[tuple[ast.expr, Place]] = []
    for place, body in bodies:
        for node in (one for statement in body for one in ast.walk(statement) if isinstance(one, ast.Assign)):
            names = [ast.unparse(part) for target in node.targets for part in getattr(target, "elts", [target])]
            if facts.loader in names and isinstance(node.value, ast.Call) and _makes_loader(node.value):
                made.append((node.value, place))
    found = loader_sizes(book, *made[-1]) if made else sizes_of(book, facts)
    return found if found is not None else Refused(f"what made the batches of `{facts.loader}` was not found")


def _makes_loader(call: ast.Call) -> bool:
    return call_name(call).rpartition(".")[2] == "DataLoader"


def _of_fit(book: Book) -> tuple[Number, ...] | Refused:
    """Return those of the loader that ``fit`` is given, or that ``train_dataloader`` of a class returns."""
    fits = [(page, call) for page in book.pages for call in calls(page.tree) if call_name(call).endswith(".fit")]
    for page, call in reversed(fits):
        given = [one.value for one in call.keywords if one.arg == "train_dataloaders"] + call.args[1:2]
        if given and (found := loader_sizes(book, given[0], book.place(page, call))) is not None:
            return found
        break
    methods = [(page, node) for page, node in book.functions() if node.name == "train_dataloader"]
    returned = [(p, m, r.value) for p, m in methods for r in ast.walk(m) if isinstance(r, ast.Return) and r.value]
    if len(returned) == 1:
        page, method, value = returned[0]
        found = loader_sizes(book, value, Place(page=page, function=method))
        if found is not None:
            return found
    return Refused("what made the loader that `fit` goes through was not found in the cells")
