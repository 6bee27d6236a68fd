"""Whether a data set's samples are the same whichever process makes them, as the cells and the objects show.

A worker has random numbers, a state and a number of its own. A sample that draws numbers, that changes what later
samples are made from, or that asks for its worker is another one when workers are fewer. It counts as the same only
where all that makes it is known: data sets of torch and of torchvision, and classes and functions of the cells that
call nothing but what is named here. What is left out may be the same too; nothing is claimed of it then.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.objects.kinds import Kind, kind_of, members_of, module_of, mro_of, name_of, plain_dict
from oomdoctor.program.definitions import Program, Scope, short
from oomdoctor.program.names import call_name

__all__ = ["Makers", "home_of"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BUILTINS: Final = _words(
    "abs all any bool bytes dict divmod enumerate float int isinstance len list max min open range reversed round"
    " slice sorted str sum tuple zip"
)
_METHODS: Final = _words(
    "add astype bool clamp clone contiguous convert copy crop dim div double encode endswith expand flatten float"
    " format get half index_select int item items join keys long lower mul narrow numel numpy permute repeat replace"
    " reshape resize select size split squeeze startswith strip sub swapaxes t to tolist transpose type unsqueeze upper"
    " values view"
)
"""Methods that give a new value and round alike however many threads there are: no sums among them."""

_FUNCTIONS: Final[Mapping[str, frozenset[str]]] = {
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
_TRANSFORMS: Final = _words(
    "CenterCrop ConvertImageDtype Grayscale Normalize PILToTensor Pad Resize ToDtype ToImage ToPureTensor ToTensor"
)
_IMAGES: Final = _words("CIFAR10 CIFAR100 EMNIST FashionMNIST ImageFolder KMNIST MNIST QMNIST STL10 SVHN")
"""Source: torchvision/datasets: they draw nothing, and ask ``loader``, ``transform`` and ``target_transform`` alone."""

_PLAIN: Final = (Kind.ATOM, Kind.TENSOR, Kind.ARRAY)
_CONTAINERS: Final = (list, tuple, dict, set)
_DATA: Final = "torch.utils.data."
_LIBRARIES: Final = ("pandas.", "pathlib")


def home_of(cls: type) -> str:
    """Return the module that a class says it is from, empty where it says something else than a name."""
    home: object = module_of(cls)
    return home if type(home) is str else ""


class Makers:
    """What is known of the makers of samples of one program."""

    def __init__(self, program: Program, namespace: Mapping[str, Any]) -> None:
        self._program, self._namespace = program, namespace
        self._under_way: set[str] = set()

    def dataset(self, value: Any) -> str | None:
        """Return why samples of the data set may not be the same in every process, None where it is certain."""
        cls, own = type(value), plain_dict(value) or {}
        home, name = home_of(cls), name_of(cls)
        if _is_plain(value):
            return None
        if home.startswith(_DATA) and name == "TensorDataset":
            return self._all(map(self.dataset, own.get("tensors", ())))
        if home.startswith(_DATA) and name == "Subset":
            return self.dataset(own.get("dataset"))
        if home.startswith(_DATA) and name in {"ConcatDataset", "StackDataset"}:
            parts = own.get("datasets", ())
            return self._all(map(self.dataset, parts.values() if type(parts) is dict else parts))
        if home.startswith("torchvision.datasets.") and name in _IMAGES:
            return self._all(self.call(own.get(key)) for key in ("loader", "transform", "target_transform"))
        return self._all(self.method(value, one, one == "__getitem__") for one in ("__getitem__", "__getitems__"))

    def call(self, value: Any) -> str | None:
        """Return why calling ``value`` may not give the same in every process, None where it is certain."""
        if value is None:
            return None
        if type(value) is FunctionType:
            home, name = str(value.__module__), value.__name__
            scope = self._program.function(name)
            if home.startswith((f"{_DATA}_utils.collate", "torchvision.")):
                return None
            if scope is None or self._namespace.get(name) is not value:
                return f"what `{name}` does is not known"
            return self._body(scope, None)
        home, name = home_of(type(value)), name_of(type(value))
        if home.startswith("torchvision.transforms."):
            parts = (plain_dict(value) or {}).get("transforms")
            if name == "Compose" and type(parts) in (list, tuple):
                return self._all(map(self.call, parts))  # type: ignore[arg-type]
            return None if name in _TRANSFORMS else f"`{name}` may draw random numbers"
        return self.method(value, "__call__", True)

    @staticmethod
    def _all(reasons: Iterable[str | None]) -> str | None:
        return next((why for why in reasons if why is not None), None)

    def method(self, value: Any, name: str, has_to_be: bool) -> str | None:
        """Return why a method of an object of the cells may not give the same in every process."""
        cls = type(value)
        for base in mro_of(cls):
            if name not in members_of(base):
                continue
            title = name_of(base)
            scope = next((s for s in self._program.scopes if s.function and s.function.name == f"{title}.{name}"), None)
            if scope is None or self._namespace.get(title) is not base:
                break
            return self._body(scope, value)
        else:
            if not has_to_be:
                return None
        return f"what `{name_of(cls)}.{name}` does is not known"

    def _body(self, scope: Scope, own: Any) -> str | None:
        assert scope.function is not None
        function, title = scope.function.node, scope.function.name
        if title in self._under_way:
            return None
        if function.decorator_list or not isinstance(function, ast.FunctionDef):
            return f"what `{title}` does is not known"
        self._under_way.add(title)
        found = _Reader(self, function, own).why()
        self._under_way.discard(title)
        return None if found is None else f"`{title}` {found}"

    def named(self, name: str) -> tuple[bool, str | None]:
        """Return whether a global name may be read, and if it is a function of the cells, what speaks against it."""
        value = self._namespace.get(name)
        if type(value) is FunctionType:
            return True, self.call(value)
        return value is None or _is_plain(value) or type(value) in (ModuleType, type), None

    def is_function(self, name: str) -> bool:
        """Whether a global name stands for a function."""
        return type(self._namespace.get(name)) is FunctionType

    def module(self, name: str) -> str | None:
        """Return the name of the module that a global name stands for."""
        value = self._namespace.get(name)
        return value.__name__ if type(value) is ModuleType else None

    def attribute(self, value: Any, *, is_called: bool) -> str | None:
        """Return why what an attribute holds may not give the same in every process when it is read or called."""
        if _is_plain(value) and not is_called:
            return None
        by_call = self.call(value)
        return by_call if is_called or by_call is None else self.dataset(value)


def _is_plain(value: Any) -> bool:
    cls = type(value)
    if cls in _CONTAINERS or kind_of(cls) is Kind.ATOM:
        return True
    home = home_of(cls)
    return home.startswith(_LIBRARIES) or (kind_of(cls) in _PLAIN and home in {"torch", "torch._tensor", "numpy"})


class _Reader:
    """Reads one function for what it calls, changes and holds."""

    def __init__(self, makers: Makers, function: ast.FunctionDef, own: Any) -> None:
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
                return self._attribute(node)
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
            if func.id in _BUILTINS and may:
                return None
            return why if self._makers.is_function(func.id) else unknown
        if not isinstance(func, ast.Attribute):
            return unknown
        root = text.partition(".")[0]
        if root and root not in self._local and (home := self._makers.module(root)) is not None:
            path, _, last = f"{home}{text[len(root) :]}".rpartition(".")
            path = "posixpath" if path == "os.path" else path
            return None if last in _FUNCTIONS.get(path, ()) else unknown
        if isinstance(func.value, ast.Name) and func.value.id == self._self:
            return None  # looked at as an attribute
        return None if func.attr in _METHODS else unknown

    def _attribute(self, node: ast.Attribute) -> str | None:
        """Return what speaks against an attribute of the object itself."""
        held = plain_dict(self._own) or {}
        is_called = id(node) in self._called
        if node.attr in held:
            why = self._makers.attribute(held[node.attr], is_called=is_called)
            return None if why is None else f"uses `{ast.unparse(node)}`: {why}"
        for base in mro_of(type(self._own)):
            if node.attr in members_of(base):
                value = members_of(base)[node.attr]
                if type(value) is FunctionType and is_called:
                    return self._makers.method(self._own, node.attr, True)
                is_value = _is_plain(value) and type(value) is not property
                return None if is_value else f"uses `{ast.unparse(node)}`, which is not followed"
        return f"uses `{ast.unparse(node)}`, which is not followed"
