"""What statements of earlier cells need: names, entries of settings, and what the failing cell finds bound."""

from __future__ import annotations

import ast
from typing import Final

from oomdoctor.program.book import SETTINGS, Book, Number, Page, calls, key_of
from oomdoctor.program.dataflow import bound
from oomdoctor.program.magics import mask
from oomdoctor.program.names import FirstUse, call_name, first_uses, root_of

__all__ = [
    "DEFINITIONS",
    "can_be_set",
    "closed",
    "entry_of",
    "holds_settings",
    "is_update",
    "masked_text",
    "needed",
    "only_defines",
    "reads_entry",
    "rebound",
    "receivers",
]

DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def entry_of(number: Number) -> tuple[str, str]:
    """Return the name of the settings that a number is an entry of, and the key right below that name."""
    expr: ast.AST = ast.parse(number.entry or "", mode="eval").body
    key = ""
    while isinstance(expr, ast.Attribute | ast.Subscript):
        key, expr = key_of(expr) or "", expr.value
    return (expr.id if isinstance(expr, ast.Name) else ""), key


def can_be_set(node: ast.Assign) -> bool:
    """Whether what ``node`` makes is settings of which an entry can be changed afterwards."""
    if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        return isinstance(node.value, ast.Constant)
    return isinstance(node.value, ast.Dict) or (
        isinstance(node.value, ast.Call) and SETTINGS.match(call_name(node.value)) is not None
    )


def reads_entry(tree: ast.AST, root: str, keys: set[str]) -> bool:
    """Whether ``tree`` reads one of these entries of ``root``, or ``root`` as a whole."""
    others = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute | ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == root
        ):
            key = key_of(node)
            if isinstance(node, ast.Attribute) and key == "get":
                continue
            if key is not None and key not in keys:
                others.add(id(node.value))
    return any(
        isinstance(node, ast.Name) and node.id == root and isinstance(node.ctx, ast.Load) and id(node) not in others
        for node in ast.walk(tree)
    )


def is_update(node: ast.AST) -> bool:
    """Whether ``node`` puts more into settings: ``kwargs.update(...)``."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") in {"update", "setdefault"}
    return False


def only_defines(node: ast.ClassDef) -> bool:
    """Whether a class runs nothing when it is defined but the definitions of its methods."""
    values = [part for part in node.body if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    runs = [*node.decorator_list, *(one for part in methods for one in (*part.args.defaults, *part.decorator_list))]
    return not any(any(calls(part)) for part in [*values, *runs])


def needed(book: Book) -> set[str]:
    """Return the names that the failing cell finds bound, and those that functions and classes among them mention."""
    source = masked_text(book.failing)
    found = {name for name, use in first_uses(source).items() if use is not FirstUse.BINDS}
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for page in book.pages
        for node in ast.walk(page.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return (found | closed(book, found | bound(book.failing.tree))) - imported


def closed(book: Book, names: set[str]) -> set[str]:
    """Return what the functions and classes among ``names`` find outside of themselves, and those among that."""
    definitions = {node.name: node for page in book.pages for node in page.tree.body if isinstance(node, DEFINITIONS)}
    waiting, seen, found = [name for name in names if name in definitions], set(names), set[str]()
    while waiting:
        node = definitions[waiting.pop()]
        inside = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        parameters = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        free = inside - parameters - local_to(node)
        found |= free
        waiting += [name for name in free - seen if name in definitions]
        seen |= free
    return found


def local_to(node: ast.AST) -> set[str]:
    shared = {name for part in ast.walk(node) if isinstance(part, ast.Global) for name in part.names}
    return bound(node) - shared


def rebound(node: ast.stmt) -> set[str]:
    """Return the names that an assignment binds; none for other statements."""
    return bound(node) if isinstance(node, ast.Assign | ast.AnnAssign) else set()


def receivers(node: ast.AST) -> set[str]:
    """Return the names of objects that ``node`` calls methods of or sets items or attributes of."""
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


def holds_settings(node: ast.ClassDef) -> bool:
    """Whether a class only gives values to names."""
    return all(
        (isinstance(part, ast.Assign | ast.AnnAssign) and not any(calls(part)))
        or isinstance(part, ast.Pass)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )


def masked_text(page: Page) -> str:
    """Return the text of a cell with its magics masked."""
    return mask(page.cell.source).text
