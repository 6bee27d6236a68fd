"""Which code changes nothing: cells that show something or bind names, and functions that make samples.

Cells are told by their text alone; what they did to names, tensors, containers and random numbers is for a snapshot to
tell. A worker has random numbers, a state and a number of its own. A function that draws numbers, changes what later
samples are made from, or asks for its worker gives others when workers are fewer. It counts as the same only where all
that it calls is named here or is known of the live objects.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from oomdoctor.program.definitions import Function, short
from oomdoctor.program.magics import mask, parsed
from oomdoctor.program.names import call_name

__all__ = ["LiveMakers", "differs_between_workers", "may_change"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN_BUILTINS: Final = _words(
    "abs all any bool dict divmod enumerate float int isinstance len list max min range round sorted str sum tuple zip"
)
_BUILTINS: Final = _PLAIN_BUILTINS | _words(
    "print type repr dir set issubclass id format help display hasattr callable globals locals hex"
)
_FUNCTIONS: Final = re.compile(
    r"(torch\.(cuda|mps|xpu)\.(empty_cache|synchronize|memory_(allocated|reserved|stats|summary|snapshot)"
    r"|max_memory_(allocated|reserved)|mem_get_info|is_available|device_count|get_device_(name|properties))"
    r"|torch\.(equal|allclose|isclose|is_tensor|isnan|isfinite|isinf|get_default_dtype|is_grad_enabled)"
    r"|gc\.(collect|get_count)|sys\.(getsizeof|getrefcount)|os\.(getpid|getcwd|listdir|cpu_count)|os\.path\.\w+"
    r"|time\.(time|perf_counter|monotonic|sleep|strftime)|psutil\.virtual_memory"
    r"|(np|numpy)\.(array_equal|allclose|shape))"
)
_METHODS: Final = _words(
    "parameters named_parameters buffers named_buffers modules named_modules children state_dict named_children"
    " numel nelement element_size size dim item tolist mean sum std var min max abs norm all any argmax argmin"
    " detach cpu float double long isnan isinf isfinite data_ptr is_contiguous stride storage_offset nbytes keys"
    " values items get format join split strip lower upper startswith endswith head tail describe info count index"
    " memory_footprint get_last_lr total_seconds"
)
"""Methods that change nothing of what they are called on, in torch, Python and pandas alike."""

_MAGIC: Final = re.compile(
    r"!|%(who|who_ls|whos|pwd|lsmagic|debug|tb|xmode|ls|env\s*$|config|matplotlib|load_ext|time\s*$|conda|pip)\b"
    r"|%(oomdoctor|memreport)\b|%%(time|capture)\b|[\w.]+\?|\?"
)
"""IPython's own lines that show something, or do it outside of Python. What a debugger has done shows in the state."""
_TIMED: Final = re.compile(r"%{1,2}(?:timeit|time|memit)\b(?:\s+-\w+(?:\s*\d+)?)*\s*(?P<code>.*)$", re.DOTALL)
_ASSIGNED: Final = re.compile(r"[\w, ]+=\s*!")
_PLAIN: Final = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Pass, ast.FunctionDef, ast.For)
_BRANCHING: Final = (ast.If, ast.Delete, ast.With, ast.Assert, ast.Try)


_SAMPLE_BUILTINS: Final = _PLAIN_BUILTINS | _words("bytes open reversed slice")
_SAMPLE_METHODS: Final = _words(
    "add astype bool clamp clone contiguous convert copy crop dim div double encode endswith expand flatten float"
    " format get half index_select int item items join keys long lower mul narrow numel numpy permute repeat replace"
    " reshape resize select size split squeeze startswith strip sub swapaxes t to tolist transpose type unsqueeze upper"
    " values view"
)
"""Methods that give a new value and round alike however many threads there are: no sums among them."""

_SAMPLE_FUNCTIONS: Final[Mapping[str, frozenset[str]]] = {
    "torch": _words("arange as_tensor cat from_numpy full load ones ones_like stack tensor where zeros zeros_like"),
    "torch.nn.functional": _words("one_hot pad"),
    "numpy": _words(
        "arange array asarray ascontiguousarray clip concatenate expand_dims float32 float64 full int32 int64 load"
        " moveaxis ones ones_like pad squeeze stack transpose uint8 where zeros zeros_like"
    ),
    "PIL.Image": _words("fromarray open"),
    "posixpath": _words("basename dirname exists join splitext"),
    "json": _words("load loads"),
    "math": _words("ceil floor"),
    "torchvision.io": _words("decode_image read_image"),
}


def may_change(source: str) -> str | None:
    """Return what in a cell may change more than the names it binds, None where nothing may."""
    masked = mask(source)
    for _, original in masked.hidden:
        if (timed := _TIMED.match(original)) is not None:
            if (found := may_change(timed["code"])) is not None:
                return found
        elif not _MAGIC.match(original) and not _ASSIGNED.match(original):
            return original
    if (tree := parsed(source)) is None:
        return None  # Python runs nothing of it either
    return next((ast.unparse(node).splitlines()[0] for node in _changing(tree.body)), None)


def _changing(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield what may change something: what is run, without the bodies of functions that are only defined."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.stmt) and not isinstance(node, (*_PLAIN, *_BRANCHING)):
            yield node
        elif isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                yield node.decorator_list[0]
            waiting += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.Lambda):
            waiting += node.args.defaults
        elif _writes(node) or (isinstance(node, ast.Call) and not _looks(node)):
            yield node
        else:
            waiting += ast.iter_child_nodes(node)


def _writes(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Await | ast.Yield | ast.YieldFrom)


def _looks(call: ast.Call) -> bool:
    name, called = call_name(call), call.func
    if isinstance(called, ast.Name):
        return called.id in _BUILTINS
    if name and _FUNCTIONS.fullmatch(name):
        return True
    if name in ("torch.no_grad", "torch.inference_mode"):
        return True
    return isinstance(called, ast.Attribute) and called.attr in _METHODS and not _draws(name)


def _draws(name: str) -> bool:
    """Return whether a name is of a module whose functions of such names are others."""
    return name.partition(".")[0] in ("os", "shutil", "random", "subprocess")


class LiveMakers(Protocol):
    """What is known of the live objects that a function uses."""

    def named(self, name: str) -> tuple[bool, str | None]:
        """Return whether a global name may be read, and if it is a function of the cells, what speaks against it."""

    def is_function(self, name: str) -> bool:
        """Return whether a global name stands for a function."""

    def module(self, name: str) -> str | None:
        """Return the name of the module that a global name stands for."""

    def attribute(self, own: object, name: str, text: str, *, is_called: bool) -> str | None:
        """Return what speaks against an attribute of the object itself, which is read or called as ``text``."""


def differs_between_workers(function: Function, makers: LiveMakers, own: object) -> str | None:
    """Return why a function may not give the same in every worker, None where it is certain.

    Args:
        own: the object that it is a method of, None for a plain function.
    """
    node = function.node
    if node.decorator_list or not isinstance(node, ast.FunctionDef):
        return f"what `{function.name}` does is not known"
    found = _Reader(makers, node, own).why()
    return None if found is None else f"`{function.name}` {found}"


class _Reader:
    """Reads one function for what it calls, changes and holds."""

    def __init__(self, makers: LiveMakers, function: ast.FunctionDef, own: object) -> None:
        self._makers, self._function, self._own = makers, function, own
        args = function.args
        self._self = args.args[0].arg if own is not None and args.args else None
        stored = (n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
        self._local = {*stored, *(n.arg for n in ast.walk(args) if isinstance(n, ast.arg))}
        self._called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}

    def why(self) -> str | None:
        return next((found for node in ast.walk(self._function) if (found := self._look(node)) is not None), None)

    def _look(self, node: ast.AST) -> str | None:
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                return f"writes to `{short(ast.unparse(node))}`"
            case ast.AugAssign():
                return f"changes `{short(ast.unparse(node.target))}` in place"
            case ast.Global() | ast.Nonlocal() | ast.Yield() | ast.YieldFrom() | ast.Lambda() | ast.ClassDef():
                return f"has `{short(ast.unparse(node))}`, which is not followed"
            case ast.FunctionDef() if node is not self._function:
                return f"defines `{node.name}`, which is not followed"
            case ast.Call():
                return self._call(node)
            case ast.Attribute(value=ast.Name(id=name)) if name == self._self and self._self is not None:
                return self._makers.attribute(
                    self._own, node.attr, ast.unparse(node), is_called=id(node) in self._called
                )
            case ast.Name(id=name) if name not in self._local and not hasattr(builtins, name):
                may, why = self._makers.named(name) if id(node) not in self._called else (True, None)
                return why if may else f"uses `{name}`, which is not followed"
        return None

    def _call(self, node: ast.Call) -> str | None:
        func, text = node.func, call_name(node)
        unknown = f"calls `{short(ast.unparse(func))}`, which may not do the same in every worker"
        if any(keyword.arg == "key" for keyword in node.keywords):
            return unknown  # a function that is called there
        if isinstance(func, ast.Name):
            if func.id in self._local:
                return unknown
            may, why = self._makers.named(func.id)
            if func.id in _SAMPLE_BUILTINS and may:
                return None
            return why if self._makers.is_function(func.id) else unknown
        if not isinstance(func, ast.Attribute):
            return unknown
        root = text.partition(".")[0]
        if root and root not in self._local and (home := self._makers.module(root)) is not None:
            path, _, last = f"{home}{text[len(root) :]}".rpartition(".")
            path = "posixpath" if path == "os.path" else path
            return None if last in _SAMPLE_FUNCTIONS.get(path, ()) else unknown
        if isinstance(func.value, ast.Name) and func.value.id == self._self:
            return None  # looked at as an attribute
        return None if func.attr in _SAMPLE_METHODS else unknown
