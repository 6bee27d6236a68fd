"""Edits of earlier cells, with the statements that have to run again so that the live objects follow.

A retry runs the failing cell alone. Where an earlier cell is changed, what was made from the changed value there and in
the cells between is made anew, in its order, as long as that has no other effect: loaders, data sets of files,
arithmetic. Where something that the failing cell needs was made in another way, the change is refused, because the
failing cell would then run with half of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from typing import Final

import libcst as cst

from oomdoctor.fixes import _cst
from oomdoctor.fixes._batch_notebook import Book, Number, Page, call_name, calls
from oomdoctor.fixes._cst import exchange
from oomdoctor.fixes._dataflow import bound, own, reads
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.magics import mask
from oomdoctor.model.names import FirstUse, first_uses
from oomdoctor.model.session import Cell, Cells

__all__ = ["LOADERS", "exchange_numbers", "node_of", "write"]

_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_PASSING: Final = (".step", ".zero_grad")
"""Methods that are part of a training that ran: what is made anew begins without it."""

LOADERS: Final = re.compile(
    r"^(len|int|float|str|min|max|sum|range|list|dict|tuple|round|partial|functools\.partial|os\.path\.join|Path"
    r"|(math\.|np\.)?(ceil|floor)"
    r"|(torch\.utils\.data\.|data\.|utils\.data\.)?(DataLoader|TensorDataset|Subset|ConcatDataset|BatchSampler"
    r"|SequentialSampler|RandomSampler|SubsetRandomSampler|WeightedRandomSampler|DistributedSampler)"
    r"|(torchvision\.|tv\.)?(datasets|transforms|T|v2|transforms\.v2)\.\w+"
    r"|Compose|ToTensor|Normalize|Resize|CenterCrop|RandomCrop|RandomResizedCrop|RandomHorizontalFlip"
    r"|MNIST|FashionMNIST|CIFAR10|CIFAR100|ImageFolder|DataCollator(With|For)\w+)$"
)
"""Calls that only make an object: they draw no random numbers, and running them again leaves nothing behind."""


def node_of(parsed: _cst.ParsedCell, node: ast.expr) -> cst.CSTNode | None:
    """Return the node of LibCST's tree that stands where ``node`` of the same cell does."""
    if node.end_lineno is None or node.end_col_offset is None:
        return None
    lines = parsed.masked.text.split("\n")
    start = node.lineno, len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    end = node.end_lineno, len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode())
    for found, where in parsed.positions.items():
        at = (where.start.line, where.start.column), (where.end.line, where.end.column)
        if at == (start, end) and isinstance(found, cst.BaseExpression):
            return found
    return None


def exchange_numbers(cells: Cells, values: Mapping[Number, int], makes: re.Pattern[str] = LOADERS) -> Patch | Refused:
    """Return the patch that writes other values where these numbers stand; ``makes`` as in ``write``."""
    changed: dict[int, tuple[_cst.ParsedCell, cst.Module]] = {}
    for cell in {number.page.cell.number: number.page.cell for number in values}.values():
        parsed = _cst.read(cell.source)
        if isinstance(parsed, Refused):
            return parsed
        places = {
            node: cst.Integer(str(value))
            for number, value in values.items()
            if number.page.cell is cell and (node := node_of(parsed, number.node)) is not None
        }
        changed[cell.number] = parsed, exchange(parsed.module, places)
    return write(cells, changed, makes)


def write(
    cells: Cells,
    changed: Mapping[int, tuple[_cst.ParsedCell, cst.Module]],
    makes: re.Pattern[str] = LOADERS,
    used_up: Set[str] = frozenset(),
) -> Patch | Refused:
    """Return the patch of cells changed from a parsed form to a module, by their numbers.

    Args:
        makes: names of the calls that may run again.
        used_up: names of what a changed statement used up or changed when it ran: they are made anew as well.
    """
    texts: dict[int, str] = {}
    for number, (parsed, module) in changed.items():
        text = _cst.write(parsed, module)
        if isinstance(text, Refused):
            return text
        texts[number] = text
    before = Book.read(cells)
    after = Book.read(
        Cells(
            history=tuple(
                Cell(number=cell.number, source=texts.get(cell.number, cell.source)) for cell in cells.history
            )
        )
    )
    again = _Again(after, makes, used_up)
    for old, new in zip(before.pages[:-1], after.pages[:-1], strict=True):
        if (why := again.take(old, new)) is not None:
            return Refused(why)
    failing = cells.failing.number
    earlier = sorted(number for number in texts if number != failing)
    if not earlier and again.texts:
        return Refused(f"cell {min(again.texts)} made what the failing cell uses up")
    edits = []
    for number, text in texts.items():
        since = number if number != min(earlier, default=0) else 0
        until = min((other for other in earlier if other > number), default=failing)
        replay = "\n".join(again.texts[of] for of in sorted(again.texts) if since <= of < until)
        edits.append(
            Edit(
                cell=number,
                before=cells.get(number).source,
                after=text,
                replay=text if number == failing else replay,
            )
        )
    return _cst.join(cells, edits)


class _Again:
    """Finds what has to run again, cell by cell.

    Attributes:
        texts: those statements, as they stand in the changed cells, by the number of their cell.
    """

    def __init__(self, book: Book, makes: re.Pattern[str], used_up: Set[str]) -> None:
        self._book, self._makes, self._used_up = book, makes, used_up
        self._needed = _needed(book)
        self._stale: set[str] = set()
        self.texts: dict[int, str] = {}

    def take(self, old: Page, new: Page) -> str | None:
        """Take from one cell what has to run again; return why it cannot, None if all is well."""
        known = {ast.dump(node) for node in old.tree.body}
        text, found = _masked_text(new), []
        for node in new.tree.body:
            is_changed = ast.dump(node) not in known or bool(self._used_up & _rebound(node))
            if not is_changed and not self._stale & self._reads_now(node):
                self._stale -= _rebound(node)
                continue
            if is_changed and isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef):
                rerun = True
            else:
                rerun = self._is_made_anew(node)
            if rerun:
                found.append(ast.get_source_segment(text, node) or ast.unparse(node))
                self._stale |= {node.name} if isinstance(node, _DEFINITIONS) else bound(node)
            elif is_changed or self._touches(node):
                return self._why(new, node, is_changed)
        if found:
            self.texts[new.cell.number] = "\n".join(found)
        return None

    def _reads_now(self, node: ast.stmt) -> set[str]:
        """Return the names that ``node`` reads when it runs: of a function its defaults and decorators alone."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list]
            return {name for part in given for name in reads(part)}
        if isinstance(node, ast.ClassDef):
            outside = {name for part in [*node.bases, *node.decorator_list] for name in reads(part)}
            return outside.union(*(self._reads_now(part) for part in node.body))
        return reads(node) | _closed(self._book, {call_name(call) for call in calls(node)})

    def _is_made_anew(self, node: ast.stmt) -> bool:
        """Whether running ``node`` again does no more than to bind its names to new objects."""
        if isinstance(node, ast.ClassDef):
            return _holds_settings(node)
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [part for target in targets for part in getattr(target, "elts", [target])]
        return all(isinstance(part, ast.Name) for part in names) and self._is_plain(node)

    def _is_plain(self, node: ast.AST, depth: int = 4) -> bool:
        if any(isinstance(part, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr) for part in ast.walk(node)):
            return False
        return all(self._may_run(call, depth) for call in calls(node))

    def _may_run(self, call: ast.Call, depth: int) -> bool:
        name = call_name(call)
        classes = [n for page in self._book.pages for n in page.tree.body if isinstance(n, ast.ClassDef)]
        if any(node.name == name for node in classes):
            return all(_holds_settings(node) for node in classes if node.name == name)
        found = self._book.function(name)
        if found is None:
            return self._makes.match(ast.unparse(call.func)) is not None
        return (
            depth > 0
            and all(
                isinstance(node, ast.Assign | ast.AnnAssign | ast.Return | ast.Pass)
                or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                for node in found[1].body
            )
            and all(self._is_plain(node, depth - 1) for node in found[1].body)
        )

    def _touches(self, node: ast.stmt) -> bool:
        """Whether ``node``, which is left as it ran, made or changed something that the failing cell needs."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            return False
        if isinstance(node, _DEFINITIONS):
            return node.name in self._needed
        if isinstance(node, ast.Expr):
            is_lasting = not any(ast.unparse(call.func).endswith(_PASSING) for call in calls(node))
            return is_lasting and bool(_receivers(node) & (self._needed | self._stale))
        # A loop or a block of an earlier cell is history, but for what it made of the changed value itself.
        assigned = [part for part in own(node) if isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign)]
        return any(self._stale & reads(part) and (bound(part) | _receivers(part)) & self._needed for part in assigned)

    def _why(self, page: Page, node: ast.stmt, is_changed: bool) -> str:
        where = f"line {node.lineno} of cell {page.cell.number}"
        if is_changed:
            return f"{where} does more than to make an object, so it cannot run again for a retry"
        return f"{where} made something of it that the failing cell needs, and cannot run again for a retry"


def _needed(book: Book) -> set[str]:
    """Return the names that the failing cell finds bound, and those that functions and classes among them mention."""
    source = _masked_text(book.failing)
    found = {name for name, use in first_uses(source).items() if use is not FirstUse.BINDS}
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for page in book.pages
        for node in ast.walk(page.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return (found | _closed(book, found | bound(book.failing.tree))) - imported


def _closed(book: Book, names: set[str]) -> set[str]:
    """Return what the functions and classes among ``names`` find outside of themselves, and those among that."""
    definitions = {node.name: node for page in book.pages for node in page.tree.body if isinstance(node, _DEFINITIONS)}
    waiting, seen, found = [name for name in names if name in definitions], set(names), set[str]()
    while waiting:
        node = definitions[waiting.pop()]
        inside = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        parameters = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        free = inside - parameters - _local(node)
        found |= free
        waiting += [name for name in free - seen if name in definitions]
        seen |= free
    return found


def _local(node: ast.AST) -> set[str]:
    shared = {name for part in ast.walk(node) if isinstance(part, ast.Global) for name in part.names}
    return bound(node) - shared


def _rebound(node: ast.stmt) -> set[str]:
    return bound(node) if isinstance(node, ast.Assign | ast.AnnAssign) else set()


def _receivers(node: ast.AST) -> set[str]:
    """Return the names of objects that ``node`` calls methods of or sets items or attributes of."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            base: ast.AST = part.func.value
        elif isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            base = part.value
        else:
            continue
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            found.add(base.id)
    return found


def _holds_settings(node: ast.ClassDef) -> bool:
    """Whether a class only gives values to names."""
    return all(
        (isinstance(part, ast.Assign | ast.AnnAssign) and not any(calls(part)))
        or isinstance(part, ast.Pass)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )


def _masked_text(page: Page) -> str:
    return mask(page.cell.source).text
