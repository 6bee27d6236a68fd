"""What a second run of the cell would do a second time: writes, requests, consumed iterators, commands.

Writes into a tensor past autograd, through ``.data`` or ``.numpy()``, count: a snapshot does not notice them. The list
is one of names, so it misses what a function of a library does inside, and a write through a second name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

from oomdoctor.evidence._program import Program, Scope, short
from oomdoctor.model.kinds import Kind, kind_of
from oomdoctor.model.names import call_name, own_nodes

__all__ = ["not_repeatable"]

_CALLS: Final = re.compile(
    r"^(input|raw_input|atexit\.register"
    r"|(requests|httpx|urllib|socket|subprocess|shutil|smtplib|boto3|wandb|mlflow|neptune|comet_ml)\..+"
    r"|(urllib\.request\.)?(urlopen|urlretrieve)"
    r"|os\.(system|popen|remove|unlink|rename|replace|rmdir|removedirs|kill|execv\w*|spawn\w*)"
    r"|os\.(p?readv?|p?writev?|sendfile|splice|f?truncate|lseek|link|symlink|mkfifo)"
    r"|torch\.save|(np|numpy)\.(save|savez|savez_compressed|savetxt)|(pickle|json|yaml|joblib|torch\.onnx)\.(dump|export)"
    r"|torchvision\.utils\.save_image|save_image|Popen"
    r"|.*\.(write_text|write_bytes|unlink|rename|rmdir|savefig|save_pretrained|push_to_hub|save_checkpoint|save_state"
    r"|to_csv|to_parquet|to_pickle|to_json|to_sql|add_scalar|add_scalars|add_image|add_images|add_histogram|add_graph"
    r"|add_text|log_metric|log_metrics|log_artifact))$"
)

_CHANGING: Final = frozenset({"fill", "sort", "partition", "put", "itemset"})
"""Methods of an array that change it and do not end in an underscore."""


def not_repeatable(
    program: Program, namespace: Mapping[str, Any], ahead: Container[int] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return ``line N: `call` `` for each in the failing run, for those of other cells with the cell's number.

    Args:
        ahead: ids of the nodes that were not reached; the calls among them are the second of what is returned.
    """
    found = [(scope.cell, *one) for scope in program.running for one in _python(scope, namespace)]
    behind = [(cell, node.lineno, text) for cell, node, text in found if id(node) not in ahead]
    tops = {scope.cell for scope in program.running if scope.function is None}
    behind += [(number, *command) for number in sorted(tops) for command in _commands(program, number)]
    later = [(cell, node.lineno, text) for cell, node, text in found if id(node) in ahead]
    return _told(program, behind), _told(program, later)


def _told(program: Program, found: list[tuple[int, int, str]]) -> tuple[str, ...]:
    ordered = sorted(set(found), key=lambda item: (item[0] != program.failing, item))
    return tuple(f"{_where(program, cell)}line {line}: `{text}`" for cell, line, text in ordered)


def _where(program: Program, cell: int) -> str:
    return "" if cell == program.failing else f"cell {cell}, "


def _python(scope: Scope, namespace: Mapping[str, Any]) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in own_nodes(scope.body):
        if isinstance(node, ast.Call):
            name = call_name(node) or ast.unparse(node.func)
            if (
                _CALLS.match(name)
                or _changes_unseen(node.func)
                or _writes(node, name)
                or _consumes(node, name, namespace)
            ):
                yield node, short(ast.unparse(node))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and any(
            map(_is_past_autograd, _targets(node))
        ):
            yield node, short(ast.unparse(node))
        elif isinstance(node, ast.For | ast.AsyncFor) and _is_iterator(node.iter, namespace):
            yield node, short(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")


def _changes_unseen(called: ast.expr) -> bool:
    """Whether it is a method that changes what it is called on, of something written to past autograd."""
    return (
        isinstance(called, ast.Attribute)
        and (called.attr in _CHANGING or (called.attr.endswith("_") and not called.attr.endswith("__")))
        and _leads_past_autograd(called.value)
    )


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[ast.expr]:
    waiting = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
    while waiting:
        target = waiting.pop(0)
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def _is_past_autograd(target: ast.expr) -> bool:
    """Whether assigning to ``target`` writes through ``.data`` or ``.numpy()``, or exchanges ``.data`` itself."""
    if isinstance(target, ast.Attribute):
        return target.attr == "data" or _leads_past_autograd(target.value)
    return isinstance(target, ast.Subscript) and _leads_past_autograd(target.value)


def _leads_past_autograd(value: ast.expr) -> bool:
    """Whether ``.data`` or ``.numpy()`` stands in the chain, with parts, attributes and calls after it."""
    while True:
        if isinstance(value, ast.Attribute):
            if value.attr == "data":
                return True
            value = value.value
        elif isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute) and value.func.attr in {"numpy", "__array__"}:
                return True
            value = value.func
        elif isinstance(value, ast.Subscript):
            value = value.value
        else:
            return False


def _writes(call: ast.Call, name: str) -> bool:
    if name not in {"open", "io.open", "gzip.open"} and not name.endswith(".open"):
        return False
    at = 1 if name in {"open", "io.open", "gzip.open"} else 0
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[at : at + 1]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)


def _consumes(call: ast.Call, name: str, namespace: Mapping[str, Any]) -> bool:
    return name in {"next", "anext", "list", "enumerate", "tqdm"} and any(
        _is_iterator(argument, namespace) for argument in call.args[:1]
    )


def _is_iterator(node: ast.AST, namespace: Mapping[str, Any]) -> bool:
    return isinstance(node, ast.Name) and kind_of(type(namespace.get(node.id))) is Kind.ITERATOR


def _commands(program: Program, number: int) -> Iterator[tuple[int, str]]:
    """Yield the shell commands and the cells of other languages."""
    for masked, original in program.masked[number].hidden:
        if original.startswith(("!", "%sx", "%system", "%%bash", "%%sh", "%%script", "%%writefile")) or re.match(
            r"[^=]+=\s*!", original
        ):
            yield int(masked.rpartition(" ")[2]), short(original.strip())
