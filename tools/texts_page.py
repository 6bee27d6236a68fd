"""``make docs``: writes ``docs/texts/``, one page a room with every text that a user can see, read out of the source.

``--check`` writes nothing and answers 1 where a page is not what the source says. A text is changed where it is said;
the pages are for reading all of them in one place, and for translating them. What stands in braces is filled in.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = ROOT / "docs" / "texts"
_HEAD: Final = """\
# Texts of `oomdoctor/{room}`

<!-- Written by `make docs` from the modules. Change the text there, not here. -->
"""
_WORDS: Final = re.compile(r"[^\W\d_]{2,},? +[^\W\d_]+")
"""Two words, one after the other."""
_CODE: Final = re.compile(r"\w\(|\w\[|\w\.\w+\(|\s=\s|^\s*[@#<]|;\s*\w+:|\\[bdswA-Z]|\(\?")
"""What stands in programs, patterns and markup, outside of backquotes."""
_UNSEEN: Final = frozenset({"compile", "search", "match", "sub", "fullmatch", "findall", "TypeVar", "debug"})
"""Calls whose text no user sees."""


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or say whether they are up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/texts.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page is out of date")
    args = parser.parse_args(argv)
    pages = {PAGES / f"{room.name}.md": page(room) for room in sorted((ROOT / "oomdoctor").iterdir()) if room.is_dir()}
    pages = {path: text for path, text in pages.items() if text}
    there = {path: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    if args.check:
        if there == pages:
            return 0
        print("docs/texts is out of date: make docs", file=sys.stderr)
        return 1
    PAGES.mkdir(exist_ok=True)
    for path in there.keys() - pages.keys():
        path.unlink()
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    print(f"wrote {PAGES.relative_to(ROOT)}")
    return 0


def page(room: Path) -> str:
    """Return the page of a room in Markdown; empty where it says nothing."""
    lines = []
    for module in sorted(room.rglob("*.py")):
        if said := dict.fromkeys(texts(module.read_text(encoding="utf-8"))):
            name = module.relative_to(room).with_suffix("")
            lines += ["", f"## {name.as_posix()}", "", *(f"- {' '.join(text.split())}" for text in said)]
    return "\n".join([_HEAD.format(room=room.name), *lines[1:], ""]) if lines else ""


def texts(source: str) -> Iterator[str]:
    """Yield the texts of a module in their order, with the names of what is filled in."""
    yield from _within(ast.parse(source))


def _within(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        text = _template(node)
        if _WORDS.search(text) and not _CODE.search(re.sub(r"`[^`]*`|\{\w+\}", "", text)):
            yield text
        inner = [part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.Call) and _name(node.func) in _UNSEEN:
        return
    else:
        inner = [child for child in ast.iter_child_nodes(node) if not _is_docstring(child)]
    for child in inner:
        yield from _within(child)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _template(node: ast.expr) -> str:
    if not isinstance(node, ast.JoinedStr):
        return str(node.value) if isinstance(node, ast.Constant) else ""
    parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else f"{{{_name(part)}}}" for part in parts)


def _name(node: ast.AST) -> str:
    """Return the last name in an expression: of a call, that of its function."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(attr="join"), args=[what]):
            return _name(what)
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.UnaryOp(operand=inner) | ast.Starred(value=inner):
            return _name(inner)
        case ast.BinOp(left=inner) | ast.IfExp(body=inner) | ast.BoolOp(values=[inner, *_]):
            return _name(inner)
        case ast.GeneratorExp(elt=inner) | ast.ListComp(elt=inner) | ast.NamedExpr(target=inner):
            return _name(inner)
    return "…"


if __name__ == "__main__":
    raise SystemExit(main())
