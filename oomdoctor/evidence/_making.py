"""Whether a data set's samples are the same whichever process makes them, as the cells and the objects show.

A worker has random numbers, a state and a number of its own. A sample that draws numbers, that changes what later
samples are made from, or that asks for its worker is another one when workers are fewer. It counts as the same only
where all that makes it is known: data sets of torch and of torchvision, and classes and functions of the cells that
call nothing but what is named here. What is left out may be the same too; nothing is claimed of it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.objects.kinds import Kind, kind_of, members_of, module_of, mro_of, name_of, plain_dict
from oomdoctor.program.definitions import Program, Scope
from oomdoctor.program.state_changes import differs_between_workers

__all__ = ["Makers", "home_of"]


_TRANSFORMS: Final = frozenset(
    {"CenterCrop", "ConvertImageDtype", "Grayscale", "Normalize", "PILToTensor", "Pad", "Resize", "ToDtype", "ToImage"}
    | {"ToPureTensor", "ToTensor"}
)
_IMAGES: Final = frozenset(
    {"CIFAR10", "CIFAR100", "EMNIST", "FashionMNIST", "ImageFolder", "KMNIST", "MNIST", "QMNIST", "STL10", "SVHN"}
)
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
        title = scope.function.name
        if title in self._under_way:
            return None
        self._under_way.add(title)
        found = differs_between_workers(scope.function, self, own)
        self._under_way.discard(title)
        return found

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

    def attribute(self, own: Any, name: str, text: str, *, is_called: bool) -> str | None:
        """Return what speaks against an attribute of the object itself, which is read or called as ``text``."""
        held = plain_dict(own) or {}
        if name in held:
            why = self._held(held[name], is_called=is_called)
            return None if why is None else f"uses `{text}`: {why}"
        found = [members_of(base)[name] for base in mro_of(type(own)) if name in members_of(base)][:1]
        if found and type(found[0]) is FunctionType and is_called:
            return self.method(own, name, True)
        is_value = bool(found) and _is_plain(found[0]) and type(found[0]) is not property
        return None if is_value else f"uses `{text}`, which is not followed"

    def _held(self, value: Any, *, is_called: bool) -> str | None:
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
