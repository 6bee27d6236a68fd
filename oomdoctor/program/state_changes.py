"""Which code changes nothing: cells that show something or bind names.

They are told by their text alone; what they did to names, tensors, containers and random numbers is for a snapshot to
tell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from oomdoctor.program.magics import mask, parsed
from oomdoctor.program.names import call_name


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
