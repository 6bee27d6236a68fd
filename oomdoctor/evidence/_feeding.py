"""How data reach the device: the loaders, what is loaded or moved there as a whole, and the arrays of the failing line.

Loaders are read from their dictionaries where a name leads to one, else from the calls that make them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, Final

from oomdoctor.objects.kinds import plain_dict
from oomdoctor.program.definitions import Program, Scope, place, short, statements
from oomdoctor.program.ground import Ground
from oomdoctor.program.names import call_name, own_nodes

__all__ = [
    "batch_sizes",
    "dataset_on_device",
    "numpy_call",
    "pin_memory",
    "prefetch",
    "sequence_varies",
    "workers",
]

_WHOLE: Final = re.compile(r"(^|_)(dataset|data|graph)(_|$)", re.IGNORECASE)
_FACTORIES: Final = re.compile(r"^torch\.(tensor|as_tensor|randn|rand|randint|zeros|ones|empty|load|arange|full)$")
_DATASETS: Final = frozenset({"TensorDataset", "DataLoader", "Subset", "random_split", "StackDataset"})
_PADS: Final = re.compile(r"\bpad_sequence\(|\bpack_sequence\(|\bF\.pad\(|functional\.pad\(|\.pad\(")
_COLLATORS: Final = re.compile(r"^DataCollator(With|For)\w+$|^dynamic_padding")


def batch_sizes(loaders: Iterable[tuple[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return the batch size of each loader; one that takes batches as its data set gives them has none."""
    sizes = ((path, (plain_dict(loader) or {}).get("batch_size")) for path, loader in loaders)
    return tuple((path, size) for path, size in sizes if type(size) is int)


def workers(ground: Ground, loaders: Iterable[tuple[str, Any]]) -> int | None:
    """Return the largest number of worker processes of a loader, None where no loader is known."""
    return max(_numbers(ground, loaders, "num_workers", 0), default=None)


def prefetch(ground: Ground, loaders: Iterable[tuple[str, Any]]) -> int | None:
    """Return how many batches each worker of a loader fetches ahead, the largest; None without workers.

    Source: torch/utils/data/dataloader.py: ``prefetch_factor`` is 2 where there are workers and it is not given.
    """
    loaders = tuple(loaders)
    if not workers(ground, loaders):
        return None
    return max(_numbers(ground, loaders, "prefetch_factor", 2), default=None)


def pin_memory(ground: Ground, loaders: Iterable[tuple[str, Any]]) -> bool:
    """Whether batches pass through page-locked memory: a loader pins them, or a cell does."""
    return any(map(bool, _numbers(ground, loaders, "pin_memory", False))) or any(
        isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory" for node in _all_calls(ground)
    )


def _numbers(ground: Ground, loaders: Iterable[tuple[str, Any]], name: str, default: int) -> Iterator[int]:
    held = [plain_dict(loader) or {} for _, loader in loaders]
    if held:
        yield from (value for own in held if type(value := own.get(name)) is int or type(value) is bool)
        return
    for call in _loader_calls(ground):
        given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
        if given is None:
            yield default
        elif isinstance(given, ast.Constant) and isinstance(given.value, int):
            yield given.value


def _loader_calls(ground: Ground) -> Iterator[ast.Call]:
    return (call for call in _all_calls(ground) if call_name(call).rpartition(".")[2] == "DataLoader")


def sequence_varies(program: Program, ground: Ground, loaders: Iterable[tuple[str, Any]]) -> bool:
    """Whether batches are padded to the longest of their samples, so that their size is not that of the one before."""
    held = [(plain_dict(loader) or {}).get("collate_fn") for _, loader in loaders]
    given = [k.value for call in _loader_calls(ground) for k in call.keywords if k.arg == "collate_fn"]
    if any(isinstance(value, ast.Lambda) and _PADS.search(ast.unparse(value)) for value in given):
        return True
    names = {*map(_name_of, held), *(call_name(value).rpartition(".")[2] for value in given)}
    if any(map(_COLLATORS.match, names)):
        return True
    functions = map(program.function, names - {""})
    if any(found is not None and _pads(found) for found in functions):
        return True
    return any(map(_pads_to_longest, _all_calls(ground)))


def _name_of(collate: Any) -> str:
    """Return the name of a function, or of the class of another callable."""
    return collate.__code__.co_name if type(collate) is FunctionType else type(collate).__name__


def _pads(scope: Scope) -> bool:
    return any(_PADS.search(ast.unparse(statement)) for statement in scope.body)


def _pads_to_longest(call: ast.Call) -> bool:
    """Whether it is a tokenizer's call with ``padding=True``, which pads to the longest of what it is given."""
    if "token" not in call_name(call).lower() and not call_name(call).endswith("processor"):
        return False
    return any(
        keyword.arg == "padding"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value in {True, "longest"}
        for keyword in call.keywords
    )


def dataset_on_device(ground: Ground) -> str | None:
    """Return the statement that puts a whole data set on the device, outside of any loop.

    What is put there counts as a data set if batches are cut from it, if it is handed to a ``Dataset``, or if it is
    called one.
    """
    for scope in ground.basis:
        for statement in statements(scope.body):
            if statement.loops:
                continue
            for name, value in _placed(statement.node):
                if _WHOLE.search(name) or _is_data_set(ground, name):
                    return place(scope, value)
            if _hands_over(statement.node):
                return place(scope, statement.node)
    return None


def _placed(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that is bound to something that is put on a device as a whole."""
    if not isinstance(node, ast.Assign):
        return
    pairs = [(target, node.value) for target in node.targets]
    if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
    for target, value in pairs:
        if isinstance(target, ast.Name | ast.Attribute) and _puts_on_device(value):
            yield ast.unparse(target), value


def _puts_on_device(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if _FACTORIES.match(call_name(value)):
        return any(keyword.arg == "device" and _is_device(keyword.value) for keyword in value.keywords)
    if value.func.attr == "cuda":
        return True
    if value.func.attr == "to":
        return any(
            _is_device(part) for part in [*value.args[:1], *(k.value for k in value.keywords if k.arg == "device")]
        )
    return _puts_on_device(value.func.value)  # moved, and then cast or shaped


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str | int) and value.value not in {"cpu", "meta"}
    text = ast.unparse(value)
    return re.search(r"device|cuda|^dev$|^gpu", text, re.IGNORECASE) is not None and "'cpu'" not in text


def _is_data_set(ground: Ground, name: str) -> bool:
    """Whether batches are cut from ``name`` by an index that varies, or it is handed to a ``Dataset``."""
    for scope in ground.basis:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name and isinstance(node.ctx, ast.Load):
                inside = list(ast.walk(node.slice))
                if any(isinstance(part, ast.Name) for part in inside) and _in_loop_or_function(scope, node):
                    return True
            if _is_handed_over(node, name):
                return True
    return False


def _is_handed_over(node: ast.AST, name: str) -> bool:
    makes = isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in _DATASETS
    return makes and isinstance(node, ast.Call) and name in map(ast.unparse, node.args)


def _in_loop_or_function(scope: Scope, node: ast.AST) -> bool:
    if scope.function is not None:
        return True
    loops = (n for n in own_nodes(scope.body) if isinstance(n, ast.For | ast.While))
    return any(node is inner for loop in loops for inner in ast.walk(loop))


def _hands_over(node: ast.stmt) -> bool:
    """Whether a data set is made of what is moved on the way."""
    return any(
        isinstance(call, ast.Call)
        and call_name(call).rpartition(".")[2] == "TensorDataset"
        and any(map(_puts_on_device, call.args))
        for call in ast.walk(node)
    )


def numpy_call(program: Program, line: int | None) -> str | None:
    """Return the call of NumPy in the line of the failing cell that was running."""
    if line is None:
        return None
    for scope in program.running:
        for statement in statements(scope.body) if scope.cell == program.failing else ():
            if statement.node.lineno <= line <= (statement.node.end_lineno or statement.node.lineno):
                for node in ast.walk(statement.node):
                    if isinstance(node, ast.Call) and call_name(node).startswith(("np.", "numpy.")):
                        return short(ast.unparse(node))
    return None


def _all_calls(ground: Ground) -> Iterator[ast.Call]:
    return (node for scope in ground.basis for node in own_nodes(scope.body) if isinstance(node, ast.Call))
