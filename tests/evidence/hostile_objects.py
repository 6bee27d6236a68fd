"""Objects that answer whatever they are asked by noting it and raising, while ``armed``; before, they behave."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Ran(BaseException):
    """Raised by what must not run; no border of ours catches it."""


asked: list[str] = []
_armed: list[bool] = []


@contextmanager
def armed() -> Iterator[list[str]]:
    """Note and refuse what the objects are asked inside."""
    asked.clear()
    gc.collect()
    _armed.append(True)
    try:
        yield asked
    finally:
        _armed.clear()


def answer(name: str, plain: Callable[..., Any] | None = None) -> Any:
    """Return a function that notes that it was called; while nothing is noted it does what ``plain`` does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _armed:
            asked.append(name)
            raise Ran(name)
        if plain is None:
            raise AttributeError(name)
        return plain(*args, **kwargs)

    return run


def hostile(cls: type, *names: str) -> None:
    """Have ``cls`` answer the methods ``names`` with a note."""
    for name in names:
        setattr(cls, name, answer(f"{cls.__name__}.{name}", getattr(cls, name, None)))


def hostile_properties(cls: type, *names: str) -> None:
    for name in names:
        setattr(cls, name, property(answer(f"{cls.__name__}.{name}")))


SPECIAL = (
    *("__repr__", "__str__", "__format__", "__eq__", "__ne__", "__hash__", "__bool__", "__len__", "__iter__"),
    *("__contains__", "__getitem__", "__getattr__", "__getattribute__", "__dir__", "__sizeof__", "__reduce_ex__"),
    *("__call__", "__index__", "__int__", "__float__", "__fspath__", "__length_hint__", "__lt__", "__enter__"),
)
CONTAINER = ("__iter__", "__len__", "__getitem__", "__contains__", "__repr__", "__eq__", "__getattribute__", "__bool__")
DICT = (*CONTAINER, "items", "keys", "values", "get", "copy")

# The objects ---------------------------------------------------------------------------------------------------------


def an_object() -> Any:
    class Object:
        def __init__(self) -> None:
            self.inner = torch.ones(8)

    made = Object()
    hostile(Object, *SPECIAL)
    return made


def with_a_class_of_its_own() -> Any:
    class Pretends:
        __class__ = property(answer("Pretends.__class__"))  # type: ignore[assignment]

        def __init__(self) -> None:
            self.inner = torch.ones(8)

    made = Pretends()
    hostile_properties(Pretends, "__doc__", "shape", "device", "grad_fn", "next_functions", "f_locals")
    return made


def with_a_dict_of_its_own() -> Any:
    class Proxy:
        """As the proxies of web frameworks are."""

        __dict__ = property(answer("Proxy.__dict__"))  # type: ignore[assignment]

    return Proxy()


def with_descriptors() -> Any:
    class Descriptor:
        pass

    class Owner:
        __slots__ = ("__dict__", "slot")
        described = Descriptor()

    made = Owner()
    made.slot = torch.ones(8)
    hostile(Descriptor, "__get__", "__set__", "__set_name__", "__repr__", "__eq__", "__hash__")
    return made


def of_a_metaclass(*more: str) -> Any:
    class Meta(type):
        pass

    class Thing(metaclass=Meta):
        def __init__(self) -> None:
            self.inner = torch.ones(8)

    made = Thing()
    hostile(
        Meta, "__instancecheck__", "__subclasscheck__", "__getattribute__", "__repr__", "__call__", "__iter__", "mro"
    )
    hostile(Meta, "__len__", "__bool__", "__contains__", "__getitem__", *more)
    return made


def of_a_metaclass_that_compares() -> Any:
    return of_a_metaclass("__eq__", "__hash__")


def a_class_of_a_metaclass() -> Any:
    return type(of_a_metaclass_that_compares())


def a_tensor() -> Any:
    class Tensor(torch.Tensor):
        __class__ = property(answer("Tensor.__class__"))  # type: ignore[assignment]

    made = torch.Tensor._make_subclass(Tensor, torch.ones(8))
    Tensor.__torch_function__ = classmethod(answer("Tensor.__torch_function__"))
    hostile(
        Tensor, *SPECIAL, "untyped_storage", "storage", "size", "element_size", "numel", "detach", "data_ptr", "dim"
    )
    hostile_properties(
        Tensor, "shape", "dtype", "device", "grad", "grad_fn", "is_leaf", "requires_grad", "data", "nbytes"
    )
    hostile_properties(Tensor, "layout", "is_sparse")
    return made


def a_tensor_with_operations_of_its_own() -> Any:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    made = Wrapper(torch.ones(8))
    Wrapper.__torch_dispatch__ = classmethod(answer("Wrapper.__torch_dispatch__"))
    Wrapper.__torch_function__ = classmethod(answer("Wrapper.__torch_function__"))
    hostile(Wrapper, *SPECIAL, "untyped_storage", "size")
    return made


def a_module() -> Any:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.extra = [torch.ones(8)]

    made = Module()
    made._parameters["odd"] = a_tensor()
    hostile_properties(Module, "weight", "device", "training_flag", "dtype")
    hostile(Module, *SPECIAL, "forward", "parameters", "named_parameters", "buffers", "modules", "named_modules")
    hostile(Module, "children", "state_dict", "extra_repr", "_get_name", "train", "eval")
    return made


def an_optimizer() -> Any:
    class Optimizer(torch.optim.SGD):
        pass

    made = Optimizer([nn.Parameter(torch.ones(8))], lr=0.1, momentum=0.9)
    hostile(Optimizer, *SPECIAL, "state_dict", "step", "zero_grad")
    return made


def a_loader() -> Any:
    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.rows = torch.ones(8)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index]

        def __len__(self) -> int:
            return 8

    class Loader(DataLoader[Any]):
        pass

    made = Loader(Data())
    hostile(Data, "__getitem__", "__len__", "__iter__", "__repr__", "__getattr__", "__getattribute__", "__eq__")
    hostile(Loader, "__iter__", "__len__", "__repr__", "__getattribute__", "__eq__", "__hash__")
    return made


def a_dict() -> Any:
    class Dict(dict[str, Any]):
        pass

    made = Dict(inner=torch.ones(8))
    hostile(Dict, *DICT)
    return made


def an_ordered_dict() -> Any:
    class Ordered(OrderedDict[str, Any]):
        pass

    made = Ordered(inner=torch.ones(8))
    hostile(Ordered, *DICT)
    return made


def a_user_dict() -> Any:
    class User(UserDict[str, Any]):
        pass

    made = User(inner=torch.ones(8))
    hostile(User, *DICT)
    return made


def a_list() -> Any:
    class List(list[Any]):
        pass

    made = List([torch.ones(8)])
    hostile(List, *CONTAINER, "copy", "index")
    return made


def a_tuple() -> Any:
    class Tuple(tuple[Any, ...]):
        _fields: ClassVar = ("only",)

    made = Tuple([torch.ones(8)])
    hostile(Tuple, *CONTAINER, "__hash__")
    return made


def a_set() -> Any:
    class Set(set[Any]):
        pass

    made = Set([torch.ones(8)])
    hostile(Set, *CONTAINER, "copy")
    return made


def a_deque() -> Any:
    class Deque(deque[Any]):
        pass

    made = Deque([torch.ones(8)])
    hostile(Deque, *CONTAINER, "copy")
    return made


def _texts() -> Any:
    """Return a class of texts that may be made until ``_arm`` is called with it."""

    class Text(str):
        __slots__ = ()

    return Text


def _numbers() -> Any:
    class Number(int):
        pass

    return Number


def _refuse(*classes: type) -> None:
    for cls in classes:
        hostile(cls, *SPECIAL)
        if issubclass(cls, str):
            hostile(cls, "startswith", "isidentifier", "partition", "replace", "isdigit", "split", "removeprefix")
        elif issubclass(cls, int):
            hostile(cls, "bit_length", "__gt__", "__add__")


def keys() -> Any:
    class Key:
        pass

    text, number = _texts(), _numbers()
    made = {text("a"): torch.ones(8), number(1): torch.ones(8), Key(): torch.ones(8), (text("b"), 1): torch.ones(8)}
    _refuse(text, number, Key)
    return made


def names_of_a_class() -> Any:
    class Named:
        def __init__(self) -> None:
            self.inner = torch.ones(8)

    text = _texts()
    Named.__name__, Named.__qualname__, Named.__module__ = text("Tensor"), text("Tensor"), text("torch")
    made = object.__new__(type(text("Other"), (Named,), {text("__next__"): None, text("held"): torch.ones(8)}))
    made.inner = torch.ones(8)
    _refuse(text)
    return made


def names_of_attributes() -> Any:
    class Owner:
        pass

    made, text, number = Owner(), _texts(), _numbers()
    for name in ("_parameters", "param_groups", "state", "dataset", "other", "f_locals"):
        made.__dict__[text(name)] = torch.ones(8)
    made.__dict__[number(7)] = torch.ones(8)
    _refuse(text, number, Owner)
    return made


def state_of_an_optimizer() -> Any:
    text, number, parameter = _texts(), _numbers(), nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    made = torch.optim.Adam([parameter])
    made.step()
    made.param_groups[0][text("other")] = 1
    made.state[parameter][text("extra")] = torch.ones(8)
    made.state[text("all")] = torch.ones(8)
    made.state[number(3)] = {number(4): torch.ones(8)}
    _refuse(text, number)
    return made


def a_module_object() -> Any:
    class Module(ModuleType):
        pass

    made = Module("made")
    made.inner = torch.ones(8)
    hostile(Module, *SPECIAL)
    return made


def an_exception() -> Any:
    class Error(Exception):
        __class__ = property(answer("Error.__class__"))  # type: ignore[assignment]

    made = Error("held")
    hostile(Error, *SPECIAL, "with_traceback")
    hostile_properties(Error, "__traceback__", "__cause__", "__context__", "args")
    return made


def defaults_of_a_function() -> Any:
    class Tuple(tuple[Any, ...]):
        pass

    class Dict(dict[str, Any]):
        pass

    def made(one: Any = None, *, two: Any = None) -> Any:
        asked.append("function")

    made.__defaults__, made.__kwdefaults__ = Tuple([torch.ones(8)]), Dict(two=torch.ones(8))
    _refuse(Tuple)
    hostile(Dict, *DICT)
    return made


def a_module_with_odd_names() -> Any:
    made, text = a_module(), _texts()
    made._modules[text("part")] = nn.Linear(2, 2)
    made._parameters[text("weights")] = nn.Parameter(torch.ones(8))
    made._buffers[text("k_cache")] = torch.ones(8)
    _refuse(text)
    return made


def a_file_of_odd_names() -> Any:
    made, text = ModuleType("made"), _texts()
    made.__dict__[text("__file__")] = text("/somewhere/made.py")
    made.__dict__["__getattr__"] = answer("__getattr__ of a module")
    made.__dict__["inner"] = torch.ones(8)
    _refuse(text)
    return made


def a_loader_of_odd_numbers() -> Any:
    class Strategy:
        pass

    made, number = DataLoader([1, 2]), _numbers()
    for name in ("num_workers", "prefetch_factor", "batch_size", "pin_memory"):
        made.__dict__[name] = number(1)
    for name in ("sampler", "batch_sampler", "generator", "collate_fn"):
        made.__dict__[name] = Strategy()
    _refuse(number, Strategy)
    return made


def weak_references() -> Any:
    class Target:
        pass

    target = Target()
    _kept.append(target)
    table = weakref.WeakKeyDictionary({target: torch.ones(8)})
    made = [weakref.ref(target, answer("callback")), weakref.WeakValueDictionary(target=target), table]
    hostile(Target, *SPECIAL)
    return made


def a_tensor_that_trains() -> Any:
    class Trained(torch.Tensor):
        pass

    made = torch.ones(8).as_subclass(Trained).requires_grad_()
    made.sum().backward()
    Trained.__torch_function__ = classmethod(answer("Trained.__torch_function__"))
    hostile(Trained, *SPECIAL)
    return made


def a_dead_proxy() -> Any:
    class Target:
        pass

    return weakref.proxy(Target())


def a_living_proxy() -> Any:
    target = an_object()
    _kept.append(target)
    return weakref.proxy(target)


_kept: list[Any] = []


def a_generator() -> Any:
    def numbers() -> Iterator[torch.Tensor]:
        held = torch.ones(8)
        while True:
            if _armed:
                asked.append("generator")
            yield held

    made = numbers()
    next(made)
    return made


def a_property_of_a_function() -> Any:
    def function(default: Any = an_object()) -> Any:  # noqa: B008
        asked.append("function")
        return default

    function.attribute = an_object()
    return function


OBJECTS = (
    *(an_object, with_a_class_of_its_own, with_a_dict_of_its_own, with_descriptors, of_a_metaclass),
    *(a_class_of_a_metaclass, a_tensor, a_tensor_with_operations_of_its_own, a_module, an_optimizer, a_loader),
    *(a_dict, an_ordered_dict, a_user_dict, a_list, a_tuple, a_set, a_deque, keys, a_dead_proxy, a_living_proxy),
    *(of_a_metaclass_that_compares, a_module_with_odd_names, a_file_of_odd_names, a_loader_of_odd_numbers),
    *(a_generator, a_property_of_a_function, names_of_a_class, names_of_attributes, state_of_an_optimizer),
    *(a_module_object, an_exception, defaults_of_a_function, weak_references, a_tensor_that_trains),
)
