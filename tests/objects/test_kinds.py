"""What a class is, told without asking it: each of these notes that it was asked."""

from __future__ import annotations

import gc
import io
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest
import torch

from oomdoctor.objects.kinds import (
    Kind,
    PerType,
    held_by,
    is_plain_key,
    kind_of,
    kinds_of,
    module_of,
    name_of,
    plain_dict,
    qualname_of,
    spelled,
)

asked: list[str] = []


def noting(base: type, *names: str) -> Any:
    """Return a class derived from ``base`` whose methods ``names`` note that they were called, while they do so."""

    def method(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)

        def run(*args: Any) -> Any:
            asked.append(name)
            return plain(*args)

        return run

    return type("Noting", (base,), {name: method(name) for name in names})


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    asked.clear()


def test_a_metaclass_is_asked_nothing() -> None:
    meta = noting(type, "__hash__", "__eq__", "__getattribute__", "__instancecheck__", "__subclasscheck__")
    cls = meta("Thing", (), {"__slots__": ("__dict__",)})
    thing = cls()
    thing.held = 1
    asked.clear()
    assert kind_of(cls) is Kind.OBJECT
    assert kinds_of([thing, thing, [], 1]) == {Kind.OBJECT, Kind.SEQUENCE, Kind.ATOM}
    assert plain_dict(thing) == {"held": 1}
    assert (name_of(cls), qualname_of(cls)) == ("Thing", "Thing")
    assert not is_plain_key(thing)
    assert asked == []
    hash(cls)
    assert asked == ["__hash__"]


def test_names_of_a_class_answer_for_themselves() -> None:
    text = noting(str, "__hash__", "__eq__", "__str__", "__format__")

    class Thing:
        pass

    Thing.__name__, Thing.__qualname__, Thing.__module__ = text("Tensor"), text("a.Tensor"), text("torch")
    asked.clear()
    assert kind_of(Thing) is Kind.OBJECT
    names = name_of(Thing), qualname_of(Thing), module_of(Thing)
    assert names == ("Tensor", "a.Tensor", "torch")
    assert {type(name) for name in names} == {str}
    assert asked == []


@pytest.mark.parametrize(
    ("home", "name"), [("torch", "Tensor"), ("torch.nn.modules.module", "Module"), ("builtins", "list"), ("x", "list")]
)
def test_a_class_that_calls_itself_another_is_not_taken_for_it(home: str, name: str) -> None:
    assert kind_of(type(name, (), {"__module__": home})) is Kind.OBJECT


def test_the_real_ones_are_known() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    loader = torch.utils.data.DataLoader([1, 2])
    found = {
        Kind.TENSOR: (torch.ones(1), model.weight),
        Kind.MODULE: (model,),
        Kind.OPTIMIZER: (optimizer,),
        Kind.SCHEDULER: (torch.optim.lr_scheduler.StepLR(optimizer, 1),),
        Kind.LOADER: (loader,),
        Kind.ITERATOR: (iter(loader), iter([]), (one for one in ()), io.BytesIO()),
        Kind.GENERATOR_STATE: (torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random()),
        Kind.ARRAY: (np.ones(1),),
        Kind.MAPPING: ({}, OrderedDict()),
        Kind.SEQUENCE: ([], deque()),
        Kind.TUPLE: ((), torch.Size()),
        Kind.CALLABLE: (model.forward, partial(print), lambda: None),
        Kind.ATOM: (1, "", None, ..., print, sys),
    }
    for kind, values in found.items():
        assert {kind_of(type(value)) for value in values} == {kind}


@pytest.mark.parametrize("home", [None, 3, property(lambda _: "torch")])
def test_a_module_that_is_no_name_is_none(home: Any) -> None:
    assert module_of(type("Tensor", (), {"__module__": home})) == ""


def test_a_class_without_a_module_has_none() -> None:
    names: dict[str, Any] = {}
    exec("Thing = type('Thing', (), {})", names)  # globals without a name
    assert module_of(names["Thing"]) == ""
    assert kind_of(names["Thing"]) is Kind.OBJECT


def test_a_lookup_by_name_asks_no_key() -> None:
    text, number = noting(str, "__hash__", "__eq__"), noting(int, "__hash__", "__eq__")

    class Thing:
        pass

    thing: Any = Thing()
    vars(thing).update({text("_parameters"): 1, "plain": 2, number(3): 4})
    asked.clear()
    held = plain_dict(thing)
    assert held is not None
    assert held.get("_parameters") == 1
    assert held.get("missing") is None
    assert sorted(held.values()) == [1, 2, 4]
    assert asked == []
    assert vars(thing).get("_parameters") == 1
    assert asked == ["__eq__"]


def test_a_plain_dict_is_given_itself_and_a_derived_one_is_read_past_its_methods() -> None:
    plain = {"a": 1}
    assert spelled(plain) is plain
    derived = noting(dict, "__iter__", "items", "keys", "get", "__getitem__", "__len__")({"a": 1})
    asked.clear()
    assert type(read := spelled(derived)) is dict
    assert read.get("a") == 1
    assert asked == []


def test_members_of_a_class_are_asked_nothing() -> None:
    text = noting(str, "__hash__", "__eq__")
    cls = type("Thing", (), {text("__next__"): 1})
    thing: Any = object.__new__(cls)
    asked.clear()
    assert kind_of(cls) is Kind.OBJECT
    assert plain_dict(thing) == {}
    assert asked == []


def test_what_a_function_holds_is_read_past_its_containers() -> None:
    def function(one: int = 1, *, two: int = 2) -> int:
        return one + two

    assert type(function) is FunctionType
    function.__defaults__ = noting(tuple, "__iter__", "__len__", "__getitem__")([5])
    function.__kwdefaults__ = noting(dict, "__iter__", "values", "items", "__len__")(two=6)
    asked.clear()
    assert [value for _, value in held_by(function)] == [5, 6]
    assert [value for _, value in held_by(partial(function, 7, two=8))] == [function, 7, 8]
    assert asked == []


def test_partials_of_a_class_of_their_own_and_methods_of_what_is_no_function_hold_something() -> None:
    class Part(partial[None]):
        args = property(lambda self: asked.append("args"))  # type: ignore[assignment]

    class Called:
        def __call__(self, *_: object) -> None: ...

    called = Called()
    assert [value for _, value in held_by(Part(print, 7, sep=8))] == [print, 7, 8]
    assert [value for _, value in held_by(MethodType(called, 5))] == [5, called]
    assert asked == []


def test_a_class_defined_anew_is_looked_at_anew() -> None:
    made: list[str] = []
    told = PerType(lambda cls: made.append(name_of(cls)))
    for _ in range(3):
        cls = type("Thing", (), {})
        told(cls)
        told(cls)
        del cls
        gc.collect()
        assert not told.known
    assert made == ["Thing"] * 3
