"""Edits of earlier cells, with the statements that have to run again so that the live objects follow.

A retry runs the failing cell alone. Where an earlier cell is changed, what was made from the changed value there and in
the cells between is made anew, in its order, as long as that has no other effect: loaders, data sets of files,
arithmetic. Where something that the failing cell needs was made in another way, the change is refused, because the
failing cell would then run with half of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType
from typing import Final

import libcst as cst

from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.program import rewriting
from oomdoctor.program.compiled import lines_of
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.literals import SETTINGS, Book, Number, Page, binds, calls, key_of
from oomdoctor.program.magics import Definition, Function, mask, tree_of
from oomdoctor.program.names import call_name, imported, outside, own_nodes, read_first, root_of
from oomdoctor.program.rewriting import exchange

_PASSING: Final = (".step", ".zero_grad")
"""Methods that are part of a training that ran: what is made anew begins without it."""

LOADERS: Final = re.compile(
    r"^(len|int|float|str|min|max|sum|range|list|dict|tuple|round|partial|functools\.partial|os\.path\.join|Path"
    r"|(math\.|np\.)?(ceil|floor)|torch\.cuda\.is_available|(types\.)?SimpleNamespace|(argparse\.)?Namespace"
    r"|(\w+\.)?(EasyDict|edict|AttrDict|DotDict|Munch|ConfigDict)|OmegaConf\.create"
    r"|(torch\.utils\.data\.|data\.|utils\.data\.)?(DataLoader|TensorDataset|Subset|ConcatDataset|BatchSampler"
    r"|SequentialSampler|RandomSampler|SubsetRandomSampler|WeightedRandomSampler|DistributedSampler)"
    r"|(torchvision\.|tv\.)?(datasets|transforms|T|v2|transforms\.v2)\.\w+"
    r"|Compose|ToTensor|Normalize|Resize|CenterCrop|RandomCrop|RandomResizedCrop|RandomHorizontalFlip"
    r"|MNIST|FashionMNIST|CIFAR10|CIFAR100|ImageFolder|DataCollator(With|For)\w+)$"
)
"""Calls that only make an object: they draw no random numbers, and running them again leaves nothing behind."""

_LOADER: Final = re.compile(r"^([\w.]+\.)?DataLoader$")


def node_of(parsed: rewriting.ParsedCell, node: ast.expr) -> cst.CSTNode | None:
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


def exchange_numbers(cells: Cells, values: Mapping[Number, int]) -> Patch | Refused:
    """Return the patch that writes other values where these numbers stand."""
    changed = exchanged((number.page, number.node, cst.Integer(str(value))) for number, value in values.items())
    if isinstance(changed, Refused):
        return changed
    return write(cells, changed, entries={number: value for number, value in values.items() if number.entry})


def exchanged(
    wanted: Iterable[tuple[Page, ast.expr, rewriting.New]],
) -> dict[int, tuple[rewriting.ParsedCell, cst.Module]] | Refused:
    """Return the cells in which expressions are exchanged, by their numbers, each parsed and as it becomes."""
    found: dict[int, tuple[rewriting.ParsedCell, dict[cst.CSTNode, rewriting.New]]] = {}
    for page, node, new in wanted:
        parsed = rewriting.read(page.cell.source)
        if isinstance(parsed, Refused):
            return parsed
        if (old := node_of(parsed, node)) is None:
            return Refused(f"`{ast.unparse(node)}` of {page.cell} is written in a way that is not followed")
        found.setdefault(page.cell.number, (parsed, {}))[1][old] = new
    return {number: (parsed, exchange(parsed.module, nodes)) for number, (parsed, nodes) in found.items()}


def write(
    cells: Cells,
    changed: Mapping[int, tuple[rewriting.ParsedCell, cst.Module]],
    makes: re.Pattern[str] = LOADERS,
    used_up: Set[str] = frozenset(),
    entries: Mapping[Number, int] = MappingProxyType({}),
) -> Patch | Refused:
    """Return the patch of cells changed from a parsed form to a module, by their numbers.

    Args:
        makes: names of the calls that may run again.
        used_up: names of what a changed statement used up or changed when it ran: they are made anew as well.
        entries: values within settings that are all that changes in their statements.
    """
    texts: dict[int, str] = {}
    for number, (parsed, module) in changed.items():
        text = rewriting.write(parsed, module)
        if isinstance(text, Refused):
            return text
        texts[number] = text
    if any(cells.get(number).file is not None for number in texts):
        return Refused(_in_module(cells, texts))
    before = Book.read(cells)
    after = Book.read(cells.changed(texts))
    again = _Again(after, makes, used_up, entries)
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
                anew=() if number == failing else _made_by(replay),
            )
        )
    return rewriting.join(cells, edits)


def _made_by(replay: str) -> tuple[str, ...]:
    made = (node for node in tree_of(replay).body if isinstance(node, ast.Assign | ast.AnnAssign))
    names = (part for node in made for part in ast.walk(node) if isinstance(part, ast.Name))
    return tuple(dict.fromkeys(name.id for name in names if isinstance(name.ctx, ast.Store)))


def _in_module(cells: Cells, texts: Mapping[int, str]) -> str:
    """Return where a value stands in a module, which the objects made of it would not follow."""
    cell = next(cells.get(number) for number in texts if cells.get(number).file is not None)
    lines = zip(cell.source.splitlines(), texts[cell.number].splitlines(), strict=False)
    line = next((at for at, (old, new) in enumerate(lines, 1) if old != new), 1)
    return f"it is written on line {line} of {cell}, and what was made of it there is not followed: change it there"


class _Again:
    """Finds what has to run again, cell by cell: ``texts`` has those statements by the number of their changed cell."""

    def __init__(
        self,
        book: Book,
        makes: re.Pattern[str],
        used_up: Set[str],
        entries: Mapping[Number, int] = MappingProxyType({}),
    ) -> None:
        self._book, self._makes, self._used_up, self._values = book, makes, used_up, entries
        self._defining = [node for page in book.pages for node in page.tree.body if isinstance(node, Definition)]
        self._classes = [node for node in self._defining if isinstance(node, ast.ClassDef)]
        self._definitions = {node.name: node for node in self._defining}
        self._needed = _needed(book, self._definitions)
        self._stale: set[str] = set()
        self._entries: dict[str, set[str]] = {}
        self.texts: dict[int, str] = {}

    def take(self, old: Page, new: Page) -> str | None:
        """Take from one cell what has to run again; return why it cannot, None if all is well."""
        known = {ast.dump(node) for node in old.tree.body}
        text, found = mask(new.cell.source).text, []
        for place, node in enumerate(new.tree.body):
            is_changed = ast.dump(node) not in known or bool(self._used_up & _rebound(node))
            if is_changed and (lines := self._set_live(old, place, node)):
                found += lines
                continue
            if not is_changed and not self._reads_stale(node):
                self._stale -= _rebound(node)
                continue
            defines = isinstance(node, ast.Import | ast.ImportFrom | Function)
            if (is_changed and defines) or self._is_made_anew(node):
                found.append(ast.get_source_segment(text, node) or ast.unparse(node))
                self._mark(old, place, node)
            elif (instead := self._of_the_same_data(node)) is not None:
                found.append(instead)
                self._stale |= bound(node)
            elif is_changed or self._touches(node):
                where = f"line {node.lineno} of {new.cell}"
                if is_changed:
                    return f"{where} does more than to make an object, so it cannot run again for a retry"
                return f"{where} made something of it that the failing cell needs, and cannot run again for a retry"
        if found:
            self.texts[new.cell.number] = "\n".join(found)
        return None

    def _changed_entries(self, old: Page, place: int) -> dict[Number, int]:
        """Return the values within settings that change in a statement, none if others change as well."""
        lines = lines_of(old.tree.body[place]) if place < len(old.tree.body) else ()
        here = [number for number in self._values if number.page.cell.number == old.cell.number]
        return {number: self._values[number] for number in here if number.node.lineno in lines}

    def _set_live(self, old: Page, place: int, node: ast.stmt) -> list[str]:
        """Return lines that change settings where they are, where only an entry of theirs changes."""
        if not isinstance(node, ast.Assign | ast.Expr) or (isinstance(node, ast.Assign) and not _can_be_set(node)):
            return []
        changes = self._changed_entries(old, place)
        if isinstance(node, ast.Assign) and any(self._is_rebound(_entry_of(n)[0], old, place) for n in changes):
            return []
        for number in changes:
            root, key = _entry_of(number)
            self._entries.setdefault(root, set()).add(key)
        return [f"{number.entry} = {value}" for number, value in changes.items()]

    def _is_rebound(self, name: str, old: Page, place: int) -> bool:
        number = old.cell.number
        later = [node for page in self._book.pages[:-1] if page.cell.number > number for node in page.tree.body]
        return any(binds(node, name) for node in [*old.tree.body[place + 1 :], *later])

    def _mark(self, old: Page, place: int, node: ast.stmt) -> None:
        """Note what is another thing now that ``node`` runs again: all of it, or an entry of settings."""
        names = {node.name} if isinstance(node, Definition) else bound(node)
        keys = {_entry_of(number)[1] for number in self._changed_entries(old, place)}
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Call) and not keys and any(map(_holds_settings, self._named(call_name(value)))):
            keys = self._entries.get(call_name(value), set())
        if keys and (isinstance(node, ast.ClassDef) or isinstance(value, ast.Call)):
            for name in names:
                self._entries.setdefault(name, set()).update(keys)
        else:
            self._stale |= names

    def _named(self, name: str) -> list[ast.ClassDef]:
        return [node for node in self._classes if node.name == name]

    def _reads_stale(self, node: ast.stmt) -> bool:
        names = self._reads_now(node)
        if names & self._stale:
            return True
        trees: list[ast.AST] = [node]
        if any(isinstance(part, ast.Call) for part in ast.walk(node)):
            called = {call_name(call) for call in calls(node)}
            reached = called | outside(self._definitions, called)
            trees += [one for one in self._defining if one.name in reached]
        return any(
            _reads_entry(tree, root, keys) for root, keys in self._entries.items() if root in names for tree in trees
        )

    def _of_the_same_data(self, node: ast.stmt) -> str | None:
        """Return the line that makes a loader anew of the data set that the one there has, None where it is no loader.

        The data set is made in the call, and what making it again would do is not known.
        """
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=made, args=[ast.Call() as data, *rest], keywords=keywords) as call,
            ) if _LOADER.match(call_name(call)):
                others = [*rest, *(keyword.value for keyword in keywords)]
                bases = (ast.unparse(base) for one in self._named(call_name(data)) for base in one.bases)
                iterates = any("Iterable" in base for base in bases)
                is_stale = self._reads_stale(ast.copy_location(ast.Expr(data), node))
                if not iterates and not is_stale and all(map(self._is_plain, others)):
                    own = ast.parse(f"{name}.dataset", mode="eval").body
                    return f"{name} = {ast.unparse(ast.Call(func=made, args=[own, *rest], keywords=keywords))}"
        return None

    def _reads_now(self, node: ast.stmt) -> set[str]:
        """Return the names that ``node`` reads when it runs: of a function its defaults and decorators alone."""
        if isinstance(node, Function):
            given = [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list]
            return {name for part in given for name in reads(part)}
        if isinstance(node, ast.ClassDef):
            heads = (reads(part) for part in (*node.bases, *node.decorator_list))
            return set().union(*heads, *map(self._reads_now, node.body))
        return reads(node) | outside(self._definitions, {call_name(call) for call in calls(node)})

    def _is_made_anew(self, node: ast.stmt) -> bool:
        """Whether running ``node`` again does no more than to bind its names to new objects."""
        if isinstance(node, ast.ClassDef):
            return _holds_settings(node) or _only_defines(node)
        if isinstance(node, ast.If):
            branches = [*node.body, *node.orelse]
            return self._is_plain(node.test) and all(map(self._is_made_anew, branches))
        if isinstance(node, ast.Pass):
            return True
        if _is_update(node) and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return all(self._is_plain(part) for part in [*node.value.args, *(k.value for k in node.value.keywords)])
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
        if classes := self._named(name):
            return all(map(_holds_settings, classes))
        if name.endswith(".get") and name.partition(".")[0] in self._entries:
            return True
        found = self._book.function(name)
        if found is None:
            return self._makes.match(ast.unparse(call.func)) is not None
        body = [one for one in found[1].body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
        kinds = ast.Assign, ast.AnnAssign, ast.Return, ast.Pass
        return depth > 0 and all(isinstance(one, kinds) and self._is_plain(one, depth - 1) for one in body)

    def _touches(self, node: ast.stmt) -> bool:
        """Whether ``node``, which is left as it ran, made or changed something that the failing cell needs."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            return False
        if isinstance(node, Definition):
            return node.name in self._needed
        if isinstance(node, ast.Expr):
            is_lasting = not any(ast.unparse(call.func).endswith(_PASSING) for call in calls(node))
            return is_lasting and bool(_receivers(node) & (self._needed | self._stale))
        # A loop or a block of an earlier cell is history, but for what it made of the changed value itself.
        if any(_is_update(part) and _receivers(part) & self._stale for part in own_nodes([node])):
            return True
        assigned = [part for part in own_nodes([node]) if isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign)]
        return any(self._reads_stale(part) and (bound(part) | _receivers(part)) & self._needed for part in assigned)


def _needed(book: Book, definitions: Mapping[str, ast.stmt]) -> set[str]:
    """Return the names that the failing cell finds bound, and those that functions and classes among them mention."""
    found = read_first(book.failing.tree.body)
    nodes = [node for page in book.pages for node in ast.walk(page.tree)]
    return (found | outside(definitions, found | bound(book.failing.tree))) - {
        name for node in nodes for name, _ in imported(node)
    }


def _rebound(node: ast.stmt) -> set[str]:
    return bound(node) if isinstance(node, ast.Assign | ast.AnnAssign) else set()


def _entry_of(number: Number) -> tuple[str, str]:
    """Return the name of the settings that a number is an entry of, and the key right below that name."""
    expr: ast.AST = ast.parse(number.entry or "", mode="eval").body
    key = ""
    while isinstance(expr, ast.Attribute | ast.Subscript):
        key, expr = key_of(expr) or "", expr.value
    return (expr.id if isinstance(expr, ast.Name) else ""), key


def _can_be_set(node: ast.Assign) -> bool:
    """Whether what ``node`` makes is settings of which an entry can be changed afterwards."""
    if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        return isinstance(node.value, ast.Constant)
    return isinstance(node.value, ast.Dict) or (
        isinstance(node.value, ast.Call) and SETTINGS.match(call_name(node.value)) is not None
    )


def _reads_entry(tree: ast.AST, root: str, keys: set[str]) -> bool:
    """Whether ``tree`` reads one of these entries of ``root``, or ``root`` as a whole."""
    nodes = list(ast.walk(tree))
    parts = [node for node in nodes if isinstance(node, ast.Attribute | ast.Subscript)]
    taken = [node for node in parts if not (isinstance(node, ast.Attribute) and node.attr == "get")]
    others = {id(node.value) for node in taken if (key := key_of(node)) is not None and key not in keys}
    names = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return any(node.id == root and id(node) not in others for node in names)


def _is_update(node: ast.AST) -> bool:
    """Whether ``node`` puts more into settings: ``kwargs.update(...)``."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") in {"update", "setdefault"}
    return False


def _only_defines(node: ast.ClassDef) -> bool:
    """Whether a class runs nothing when it is defined but the definitions of its methods."""
    values = [part for part in node.body if not isinstance(part, Function)]
    methods = [part for part in node.body if isinstance(part, Function)]
    runs = [*node.decorator_list, *(one for part in methods for one in (*part.args.defaults, *part.decorator_list))]
    return not any(any(calls(part)) for part in [*values, *runs])


def _receivers(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            base: ast.AST = part.func.value
        elif isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            base = part.value
        else:
            continue
        if name := root_of(base, through_calls=False):
            found.add(name)
    return found


def _holds_settings(node: ast.ClassDef) -> bool:
    return all(
        (isinstance(part, ast.Assign | ast.AnnAssign) and not any(calls(part)))
        or isinstance(part, ast.Pass)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )
