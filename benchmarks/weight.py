"""How heavy the house is: ``benchmarks/weight.py [--write]``.

For each room its lines and modules, the median length of a module, modules below 60 lines, those that one other module
alone imports, functions above 60 lines, and circles of imports between modules. Imports inside of functions
count, those for type checkers alone do not.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results" / "weight.txt"
SHORT: Final = 60
"""Lines below which a module is short, and above which a function is long."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module by its dotted name, with its lines, the modules that it imports and its long functions."""

    name: str
    lines: int
    imports: frozenset[str]
    long_functions: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder below the package that it stands in, ``(top)`` where it stands in none."""
        return self.name.split(".")[1] if self.name.count(".") > 1 else "(top)"


def read(path: Path) -> Module:
    """Return what is told of a file of the package."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts)
    long = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= SHORT
    ]
    return Module(name=name, lines=text.count("\n"), imports=frozenset(_imports(tree)), long_functions=tuple(long))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from _imports(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Return the modules that import one another, each circle once (Tarjan's strongly connected components)."""
    numbers, lowest, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for other in modules[name].imports & modules.keys():
            if other not in numbers:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], numbers[other])
        if lowest[name] == numbers[name]:
            circle = stack[stack.index(name) :]
            del stack[-len(circle) :]
            if len(circle) > 1:
                found.append(circle)

    for name in modules:
        if name not in numbers:
            visit(name)
    return found


def told() -> Iterator[str]:
    """Yield the table."""
    paths = (path for path in sorted((ROOT / "oomdoctor").rglob("*.py")) if "template" not in path.parts)
    modules = {one.name: one for one in map(read, paths)}
    importers = defaultdict(set)
    for module in modules.values():
        for name in module.imports & modules.keys():
            importers[name].add(module.name)
    rooms = defaultdict(list)
    for module in modules.values():
        rooms[module.room].append(module)
    head = ("lines", "modules", "median", "short", "one importer", "long functions")
    yield f"{'room':<12} {head[0]:>6} {head[1]:>7} {head[2]:>6} {head[3]:>5} {head[4]:>12} {head[5]:>14}"
    for room, inside in [*sorted(rooms.items()), ("all", list(modules.values()))]:
        written = [one for one in inside if not one.name.endswith("__init__")]
        once = sum(len(importers[one.name]) == 1 for one in written)
        short = sum(one.lines < SHORT for one in written)
        yield (
            f"{room:<12} {sum(one.lines for one in inside):>6} {len(inside):>7} "
            f"{statistics.median(one.lines for one in inside):>6.0f} {short:>5} {once:>12} "
            f"{sum(len(one.long_functions) for one in inside):>14}"
        )
    yield ""
    found = circles({name: one for name, one in modules.items() if not name.endswith("__init__")})
    yield f"circles: {len(found)}" + "".join(f"\n  {', '.join(circle)}" for circle in found)
    long = [f"{one.name}.{function}" for one in modules.values() for function in one.long_functions]
    yield f"functions above {SHORT} lines: {', '.join(long) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}")
    text = "\n".join(told()) + "\n"
    print(text, end="")
    if parser.parse_args().write:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
