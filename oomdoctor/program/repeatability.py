"""What a second run of the cell would do a second time: writes, requests, consumed iterators, commands.

What is called is followed to where its name comes from: imports, ``name = dotted.name`` in any cell, and what the live
names stand for. A listed function that is only mentioned (in a dictionary, a ``partial``, a default) counts as called:
what is done with it later has no name. Writes into a tensor past autograd, through ``.data`` or ``.numpy()``, count
where not every tensor was copied first: a snapshot does not notice them. The list is one of names, so it misses what a
function of a library does inside, what is fetched by a computed name, and a write to a tensor through a second name.

What writes a file anew as a whole is told apart: the second run writes the same in its place.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from inspect import getattr_static
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from oomdoctor.program import torch_functions
from oomdoctor.program.definitions import Program, Scope, short
from oomdoctor.program.dependencies import Ground
from oomdoctor.program.magics import Function
from oomdoctor.program.names import call_name, imported, stored

_FUNCTIONS: Final = re.compile(
    r"^(input|raw_input|atexit\.register"
    r"|(requests|httpx|urllib|socket|subprocess|shutil|smtplib|boto3|wandb|mlflow|neptune|comet_ml)\..+"
    r"|(urllib\.request\.)?(urlopen|urlretrieve)"
    r"|os\.(system|popen|remove|unlink|rename|replace|rmdir|removedirs|kill|execv\w*|spawn\w*)"
    r"|os\.(p?readv?|p?writev?|sendfile|splice|f?truncate|lseek|link|symlink|mkfifo)|(pickle|json|yaml)\.dump|Popen)$"
)
_METHODS: Final = re.compile(
    r".*\.(unlink|rename|rmdir|push_to_hub|to_sql|add_scalar|add_scalars|add_image|add_images|add_histogram|add_graph"
    r"|add_text|log_metric|log_metrics|log_artifact)$"
)
"""Count where they are called; an attribute of the name that is only read may be anything."""

_REWRITING: Final = re.compile(
    r"^(torch\.(serialization\.)?save|(np|numpy)\.(save|savez|savez_compressed|savetxt)|(joblib|torch\.onnx)\.(dump|export)"
    r"|(torchvision\.utils\.)?save_image"
    r"|.*\.(write_text|write_bytes|savefig|save_pretrained|save_checkpoint|save_state|to_csv|to_parquet|to_pickle|to_json))$"
)
"""What writes a file as a whole, in the place of one that is there."""

_OPENING: Final = frozenset({"open", "io.open", "gzip.open", "bz2.open", "lzma.open", "codecs.open", "tarfile.open"})
"""Functions that take the mode after the name of the file."""

_CONSUMING: Final = frozenset({"next", "anext", "list", "enumerate", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm"})

_PUBLIC: Final = {"posix": "os", "nt": "os", "_io": "io", "_pickle": "pickle", "_socket": "socket"}
"""Modules in C, and the ones by whose name their functions are listed."""

_MOST_NAMES: Final = 100
"""Of one expression; two names that are assigned from each other's attributes have no end of them."""


class Repetition(NamedTuple):
    """Calls of the failing run, each as ``line N: `call` ``, those of other cells with the cell's number.

    ``once`` must not be made a second time and may have been made, ``ahead`` were not come to; ``anew`` write a file as
    a whole, whether they were come to or not.
    """

    once: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    anew: tuple[str, ...] = ()


def not_repeatable(
    program: Program,
    homes: Callable[[str], tuple[str, ...]],
    iterators: Container[str],
    under: Ground,
    ahead: Container[int] = (),
    *,
    off: Container[str] = (),
    is_kept: bool = False,
) -> Repetition:
    """Return what a second run of the failing cell would do a second time.

    Args:
        homes: returns the dotted name by which what a live name stands for is defined: a module, a function, a class.
        iterators: live names of what can be gone through once.
        ahead: ids of the nodes that were not reached.
        off: names of the notebook that are False: what stands under one that nothing else is bound to never runs.
        is_kept: whether every tensor was copied when the run began, so that a write past autograd can be taken back.
    """
    names = _Names(program, homes, iterators, is_kept=is_kept)
    never = _never(program, off)
    reached, followed = _followed(program, names, ahead), _followed(program, names, never)
    behind: list[tuple[int, int, str]] = []
    later: list[tuple[int, int, str]] = []
    anew: list[tuple[int, int, str]] = []
    for scope in followed:
        is_late = scope not in reached or (scope.function is not None and id(scope.body[0]) in ahead)
        effects = [(node, _effects(node, names)) for node in _nodes(scope.body)]
        once = [node for node, found in effects if "once" in found]
        for node in (*once, *_held(_defaults(scope), names)):
            if id(node) not in never:
                (later if is_late or id(node) in ahead else behind).append(_placed(scope, node))
        anew += [_placed(scope, node) for node, found in effects if "anew" in found]
    for scope in under.basis:
        if scope.function is None and scope.cell != program.failing:
            behind += [_placed(scope, node) for node in _held(scope.body, names)]
    tops = {scope.cell for scope in program.running if scope.function is None}
    behind += [(number, *command) for number in sorted(tops) for command in _commands(program, number)]
    return Repetition(once=_told(program, behind), ahead=_told(program, later), anew=_told(program, anew))


def _never(program: Program, off: Container[str]) -> set[int]:
    """Return the ids of the nodes that stand under a switch that is off."""
    scopes = [scope for scope in program.running if scope.file is None]
    nodes = [node for scope in scopes for part in scope.body for node in ast.walk(part)]
    heads = [scope.function.args for scope in scopes if scope.function is not None]
    bound = {part.arg for head in (*heads, *nodes) for part in ast.walk(head) if isinstance(part, ast.arg)}
    switched = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.value) == "False"]
    bound |= stored({*nodes}.difference(*(node.targets for node in switched)))
    found = set[int]()
    for node in nodes:
        if isinstance(node, ast.If):
            test = node.test
            parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
            if any(isinstance(part, ast.Name) and part.id in off and part.id not in bound for part in parts):
                found.update(id(inner) for part in node.body for inner in ast.walk(part))
    return found


def unseen_write(program: Program) -> str | None:
    """Return what of the failing cell writes into a tensor past autograd, which a snapshot does not notice."""
    nodes = (node for scope in program.running for node in _nodes(scope.body))
    return next((short(ast.unparse(node)) for node in nodes if torch_functions.writes_past_autograd(node)), None)


class _Names:
    """What dotted names stand for, by the imports and assignments of all cells and by the live names."""

    def __init__(
        self, program: Program, homes: Callable[[str], tuple[str, ...]], iterators: Container[str], *, is_kept: bool
    ) -> None:
        self.iterators, self.is_kept, self._live = iterators, is_kept, homes
        self.methods = {scope.tail for scope in program.scopes if scope.owner}
        self.own_modules = program.aliases
        self.handles = set(_opened(program.running))
        self.bound: set[str] = set()
        self._homes: dict[str, list[str]] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        for node in (n for scope in program.scopes if scope.function is None for b in scope.body for n in ast.walk(b)):
            for name, home in (*imported(node), *_aliases(node)):
                self._homes.setdefault(name, []).append(home)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.bound.add(node.id)
            elif isinstance(node, ast.arg):
                self.bound.add(node.arg)

    def of(self, dotted: str) -> tuple[str, ...]:
        if dotted not in self._found:
            found = {dotted: None}
            waiting = [dotted]
            while waiting and len(found) < _MOST_NAMES:
                further = [name for name in self._next(waiting.pop()) if name not in found]
                found |= dict.fromkeys(further)
                waiting += further
            self._found[dotted] = tuple(found)
        return self._found[dotted]

    def is_function(self, dotted: str) -> bool:
        """Return whether an imported module, or Python itself, has a function or class of this name, not an error."""
        root, *rest = dotted.split(".")
        if not rest:
            return dotted not in self.bound and hasattr(builtins, dotted)
        value: Any = sys.modules.get(root)
        for part in rest:
            value = getattr_static(value, part, None)
        return callable(value) and not (type(value) is type and issubclass(value, BaseException))

    def _next(self, dotted: str) -> Iterator[str]:
        root, dot, rest = dotted.partition(".")
        homes = [*self._homes.get(root, ()), *self._live(root)]
        yield from (home + dot + rest for home in homes if not f"{dotted}.".startswith(f"{home}."))
        if dot:
            yield from self._homes.get(f".{rest.rpartition('.')[2]}", ())
            yield rest if root == "builtins" else f"{_PUBLIC.get(root, root)}.{rest}"


def _opened(scopes: Iterable[Scope]) -> Iterator[str]:
    for node in (node for scope in scopes for node in _nodes(scope.body)):
        targets: list[ast.expr | None] = []
        if isinstance(node, ast.withitem):
            targets, value = [node.optional_vars], node.context_expr
        elif isinstance(node, ast.Assign):
            targets, value = [*node.targets], node.value
        else:
            continue
        if isinstance(value, ast.Call) and _is_opening(call_name(value)):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _aliases(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield ``(name, dotted name)`` of each plain assignment; of attributes the name is ``.attr``, of whatever."""
    if _is_alias(node) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = f".{target.attr}" if isinstance(target, ast.Attribute) else call_name(target)
            yield name, call_name(node.value)
    elif isinstance(node, ast.ClassDef):
        yield from ((f".{name}", home) for one in node.body for name, home in _aliases(one) if "." not in name)


def _is_alias(node: ast.AST) -> TypeGuard[ast.Assign | ast.AnnAssign]:
    """Return whether an assignment gives something that has a dotted name another one."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_dotted(node.value):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(target, ast.Name | ast.Attribute) for target in targets)


def _is_dotted(node: ast.AST | None) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _followed(program: Program, names: _Names, without: Container[int]) -> list[Scope]:
    """Return what the failing cell runs, with the functions that it calls by another name or hands over."""
    functions: dict[str, list[Scope]] = {}
    for scope in program.scopes:
        if scope.function is not None:
            functions.setdefault(f".{scope.tail}" if scope.owner else scope.tail, []).append(scope)
    waiting = list(program.running)
    done: list[Scope] = []
    while waiting:
        scope = waiting.pop(0)
        if scope not in done:
            done.append(scope)
            used = (name for node in _nodes(scope.body) if id(node) not in without for name in _used(node, names))
            waiting += [function for name in used for function in functions.get(name, ())]
    return done


def _used(node: ast.AST, names: _Names) -> Iterator[str]:
    """Yield the functions that are called, ``.name`` for methods, and those that may be mentioned."""
    if isinstance(node, ast.Call):
        for name in names.of(call_name(node)):
            _, dot, tail = name.rpartition(".")
            yield dot + tail
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in names.bound:
        yield node.id


def _nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield what is run or handed over, in the order of the text.

    Bodies of lambdas and decorators are among it. Annotations, what is caught, the types that ``isinstance`` is asked
    for, the name of what is called, and what a plain assignment gives a second name, are not.
    """
    for node in body:
        yield node
        yield from _nodes(_parts(node))


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, Function):
        return node.decorator_list
    if isinstance(node, ast.ClassDef) or _is_dotted(node):
        return ()
    if isinstance(node, ast.ExceptHandler):
        return node.body
    if _is_alias(node):
        return node.targets if isinstance(node, ast.Assign) else [node.target]
    if isinstance(node, ast.Call):
        args = node.args[:1] if call_name(node) in {"isinstance", "issubclass"} else node.args
        return (*(() if _is_dotted(node.func) else (node.func,)), *args, *node.keywords)
    annotation = getattr(node, "annotation", None)
    return (child for child in ast.iter_child_nodes(node) if child is not annotation)


def _defaults(scope: Scope) -> list[ast.expr]:
    if scope.function is None:
        return []
    args = scope.function.args
    return [value for value in (*args.defaults, *args.kw_defaults) if value is not None]


def _held(body: Iterable[ast.AST], names: _Names) -> Iterator[ast.AST]:
    """Yield what code that was run before keeps for later: functions that it mentions, and calls within lambdas."""
    for node in _nodes(body):
        inner = _nodes([node.body]) if isinstance(node, ast.Lambda) else ()
        yield from (call for call in inner if isinstance(call, ast.Call) and "once" in _effects(call, names))
        if _is_mention(node, names):
            yield node


def _placed(scope: Scope, node: Any) -> tuple[int, int, str]:
    """Return where a node stands, and its text; of a loop its head."""
    return scope.cell, node.lineno, short(ast.unparse(node).partition(":\n")[0])


def _is_mention(node: ast.AST, names: _Names) -> bool:
    """Return whether a function that is listed is handed over as a value."""
    return (
        isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and _is_dotted(node)
        and any(
            (name in _OPENING or _FUNCTIONS.match(name)) and names.is_function(name)
            for name in names.of(call_name(node))
        )
    )


def _effects(node: ast.AST, names: _Names) -> set[str]:
    """Return ``once`` where what a node does must not be done a second time, ``anew`` where it writes a whole file."""
    found = set[str]()
    if isinstance(node, ast.Call):
        found |= _writing(node, names)
        consumes = any(_is_iterator(part, names) for part in node.args[:1])
        found |= {"once"} if consumes and not _CONSUMING.isdisjoint(names.of(call_name(node))) else set()
    iterates = isinstance(node, ast.For | ast.AsyncFor) and _is_iterator(node.iter, names)
    is_unseen = not names.is_kept and torch_functions.writes_past_autograd(node)
    return found | {"once"} if iterates or is_unseen or _is_mention(node, names) else found


def _writing(call: ast.Call, names: _Names) -> set[str]:
    """Return the effects of a call by the name of what is called."""
    written = call_name(call) or ast.unparse(call.func)
    root, _, _ = written.partition(".")
    if written.rpartition(".")[2] in names.methods or root in names.own_modules:
        return set()  # the program defines it: what it does is looked at itself
    found = set[str]()
    into_own = any(isinstance(part, ast.Name) and part.id in names.handles for part in call.args[1:2])
    for name in names.of(written):
        mode, is_function = set(_mode(call, name)), name == written or names.is_function(name)
        if _REWRITING.match(name):
            found.add("once" if "a" in mode else "anew")
        if is_function and _is_opening(name) and mode & set("wax+"):
            found.add("anew" if "w" in mode else "once")
        if _METHODS.match(name) or (
            is_function and _FUNCTIONS.match(name) and not (name.endswith(".dump") and into_own)
        ):
            found.add("once")
    return found


def _told(program: Program, found: list[tuple[int, int, str]]) -> tuple[str, ...]:
    ordered = sorted(set(found), key=lambda item: (item[0] != program.failing, item))
    files = {scope.cell: Path(scope.file).name for scope in program.scopes if scope.file is not None}
    places = {cell: "" if cell == program.failing else f"{files.get(cell, f'cell {cell}')}, " for cell, _, _ in ordered}
    return tuple(f"{places[cell]}line {line}: `{text}`" for cell, line, text in ordered)


def _is_opening(name: str) -> bool:
    return name in _OPENING or name.endswith(".open")


def _mode(call: ast.Call, name: str) -> str:
    at = 1 if name in _OPENING else 0
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    modes += call.args[at : at + 1] if _is_opening(name) else []
    return "".join(str(mode.value) for mode in modes if isinstance(mode, ast.Constant))


def _is_iterator(node: ast.AST, names: _Names) -> bool:
    return isinstance(node, ast.Name) and node.id in names.iterators


def _commands(program: Program, number: int) -> Iterator[tuple[int, str]]:
    for masked, original in program.masked[number].hidden:
        if original.startswith(("!", "%sx", "%system", "%%bash", "%%sh", "%%script", "%%writefile")) or re.match(
            r"[^=]+=\s*!", original
        ):
            yield int(masked.rpartition(" ")[2]), short(original.strip())
